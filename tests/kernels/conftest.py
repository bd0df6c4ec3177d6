from __future__ import annotations

import pytest

from aiocb.kernels import KernelUnavailable, Library, load


@pytest.fixture(scope="session")
def library() -> Library:
    loaded = load()
    if isinstance(loaded, KernelUnavailable):
        pytest.skip(loaded.reason)
    return loaded


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `level` once per instruction-set level of this processor."""
    if "level" in metafunc.fixturenames:
        loaded = load()
        levels = ("none",) if isinstance(loaded, KernelUnavailable) else loaded.levels()
        metafunc.parametrize("level", levels)
