"""Importing is cheap, the public names exist, and imports go one way."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import aiocb

PACKAGE = Path(aiocb.__file__).parent
HEAVY = ("torch", "transformers", "numpy", "tokenizers")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a statement imports, in an interpreter of its own."""
    code = f"import sys\n{statement}\nprint(' '.join(name for name in sys.modules if '.' not in name))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import aiocb",
        "import aiocb; aiocb.Engine, aiocb.Stream, aiocb.Stats, aiocb.Health",
        "import aiocb.testing",
        "import aiocb.testing.simulator",
        "import aiocb.scheduler, aiocb.cache, aiocb.step, aiocb.config, aiocb.errors",
    ],
)
def test_imports_without_the_heavy_ones(statement: str) -> None:
    assert not loaded_by(statement).intersection(HEAVY)


def test_a_fake_engine_without_a_tokenizer_needs_no_torch() -> None:
    program = """
import asyncio
from aiocb.testing import fake_engine
async def main():
    async with fake_engine(tokenizer=False) as engine:
        assert len((await engine.generate([1], max_new_tokens=5)).token_ids) == 5
asyncio.run(main())
"""
    assert not loaded_by(program).intersection(HEAVY)


def test_every_public_name_is_there() -> None:
    for name in aiocb.__all__:
        assert getattr(aiocb, name) is not None
    assert set(aiocb.__all__) <= set(dir(aiocb))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = aiocb.no_such_name


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_imports_go_one_way() -> None:
    """The contracts of import-linter, as written in pyproject.toml."""
    root = PACKAGE.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("needs the source tree")
    assert tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("needs import-linter")
    result = subprocess.run([lint], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
