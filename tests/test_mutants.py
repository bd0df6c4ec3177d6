"""One small case of `make mutants`: every deliberate bug still fits the code, and a cheap one is caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "mutants"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_every_patch_applies() -> None:
    assert len(PATCHES) >= 20
    done = run("--apply")
    assert done.returncode == 0, done.stdout
    assert done.stdout == f"{len(PATCHES)} of {len(PATCHES)} patches apply\n"


@pytest.mark.timeout(300)
def test_a_cheap_one_is_caught() -> None:
    done = run("damage-unseen")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 caught" in done.stdout and "tests/test_files.py" in done.stdout
