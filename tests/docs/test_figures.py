"""The figures of the documentation are drawn by code that still runs, and are those that the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_figures_are_drawn_and_shown(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "figures", tmp_path], check=True, timeout=120)
    drawn = {path.name for path in tmp_path.iterdir()}
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert drawn == set(re.findall(r"\(figures/(\w+\.svg)\)", page))
    assert drawn == {path.name for path in (ROOT / "docs" / "figures").iterdir()}
