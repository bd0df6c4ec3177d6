"""Fixtures for tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aiocb import kernels


@pytest.fixture(scope="package", autouse=True)
def single_threaded_torch() -> Iterator[None]:
    """They gain nothing from threads, and on a busy machine their barriers cost most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own for all that is kept, with the kernels in it that are built already."""
    built = kernels.load()
    assert not isinstance(built, kernels.KernelUnavailable), built
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / built.path.parent.name).symlink_to(built.path.parent)
    monkeypatch.setenv("AIOCB_CACHE", str(cache))
    return cache
