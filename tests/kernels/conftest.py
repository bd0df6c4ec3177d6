from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aiocb.kernels import KernelUnavailable, Library, load


@pytest.fixture(scope="session")
def library() -> Library:
    loaded = load(every_instruction_set=True)
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
    """Run a test that takes `instruction_set` once per instruction set of this processor."""
    if "instruction_set" in metafunc.fixturenames:
        loaded = load(every_instruction_set=True)
        names = ("none",) if isinstance(loaded, KernelUnavailable) else loaded.instruction_sets()
        metafunc.parametrize("instruction_set", names)
