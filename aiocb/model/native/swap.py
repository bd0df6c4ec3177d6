"""The swap space of the native runner: raw bytes of blocks, which lie in native memory. Worker thread only.

Legend: P places, N native pages of a block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from aiocb.errors import ConfigError
from aiocb.kernels import NativeModel
from aiocb.kernels.interface import PAGE_SIZE
from aiocb.step import BlockSwap, CacheLayout

__all__ = ["NativeSwap"]


class NativeSwap:
    """Places for blocks of a native model.

    Args:
        native: has the cache.
        layout: of the cache, with its places.

    Raises:
        ConfigError: the memory cannot be allocated.
    """

    def __init__(self, native: NativeModel, layout: CacheLayout) -> None:
        self._native = native
        self._num_pages = layout.page_size // PAGE_SIZE
        try:
            # Untouched until it is used. [P, N, bytes]
            self._places = [
                np.empty((count, self._num_pages, group.block_bytes // self._num_pages), np.uint8)
                for group, count in zip(layout.groups, layout.swap_places, strict=True)
            ]
        except MemoryError as error:
            raise ConfigError("the swap space does not fit into memory; lower cpu_offload_space") from error

    def swap_out(self, swaps: Iterable[BlockSwap]) -> None:
        """Copy blocks to places."""
        for group, block, place in swaps:
            for page in range(self._num_pages):
                self._native.read_block(group, block * self._num_pages + page, self._places[group][place, page])

    def swap_in(self, swaps: Iterable[BlockSwap]) -> None:
        """Copy places to blocks."""
        for group, block, place in swaps:
            for page in range(self._num_pages):
                self._native.write_block(group, block * self._num_pages + page, self._places[group][place, page])
