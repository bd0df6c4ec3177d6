"""The check for machines with a GPU runs without one, so that it is no surprise where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu-check"


@pytest.mark.slow
def test_all_of_it_runs_on_the_cpu() -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = done.stdout[done.stdout.index("CPU, torch") :].splitlines()[1:]
    names = [line.split("  ")[0] for line in table]
    assert names[:5] == ["equality llama", "ways llama", "equality gemma3", "ways gemma3", "cancellation"]
    assert names[-3:] == ["throughput transformers", "ratio", "profile of a step"]
    assert all(" ok " in line for line in table), table
