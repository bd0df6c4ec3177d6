from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aiocb.kernels import KernelUnavailable, Library, load


@pytest.fixture(scope="session")
def library() -> Library:
    loaded = load(every_level=True)
    if isinstance(loaded, KernelUnavailable):
        pytest.skip(loaded.reason)
    return loaded


@pytest.fixture(autouse=True, scope="package")
def _one_torch_thread() -> Iterator[None]:
    """Torch's idle OpenMP threads spin, and tiny models gain nothing from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `level` once per instruction-set level of this processor."""
    if "level" in metafunc.fixturenames:
        loaded = load(every_level=True)
        levels = ("none",) if isinstance(loaded, KernelUnavailable) else loaded.levels()
        metafunc.parametrize("level", levels)
