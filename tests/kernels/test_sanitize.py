"""One small case of `make sanitize`: a few kernels under the address sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sanitize"


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env=os.environ | environment
    )


def test_smoke() -> None:
    done = _run("address", "--smoke")
    if done.returncode == 77:
        assert "g++ has no runtime for -fsanitize=address" in done.stdout
    else:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "smoke" in done.stdout


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_a_compiler_without_sanitizers_is_said(kind: str, tmp_path: Path) -> None:
    done = _run(kind, PATH=str(tmp_path))
    assert done.returncode == 77
    assert f"g++ has no runtime for -fsanitize={kind}" in done.stdout
