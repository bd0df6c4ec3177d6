"""The paged cache of a runner: storage per layer, layers grouped by attention kind, and how many blocks there are.

    page    S tokens of one layer
    block   one page for every layer of a group; what a block table names; unit of ownership and sharing
    group   layers of one attention kind (full, one window, or one chunk): they share block tables
    cache   all groups; block 0 of each is the null block (zero, never written)

Example: Gemma 3 270M has 3 full layers and 15 with a window of 512. Two groups: a request of 2000 tokens with pages of
16 holds 125 blocks of the first and 33 of the second.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiocb.attention.base import AttentionBackend, KVFormat, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.step import BlockCopy, CacheGroup, CacheLayout

__all__ = ["PagedCache", "choose_layout", "choose_page_size", "format_size", "free_memory"]

CPU_REQUESTS = 64
MAX_REQUESTS = 1024
CPU_TOKENS_PER_REQUEST = 1024
CPU_MAX_BYTES = 2 << 30
CPU_MAX_SHARE = 0.25
GPU_SHARE = 0.9
GPU_RESERVE_BYTES = 1 << 30


class PagedCache:
    """Storage of all layers.

    Args:
        layout: that the cache manager obeys.

    Raises:
        ConfigError: the memory cannot be allocated.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Mapping[int, LayerSpec],
        layout: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self.layout = layout
        self.group_of_layer = {layer: index for index, group in enumerate(layout.groups) for layer in group.layers}
        try:
            self.storage: dict[int, Any] = {
                layer: backend.allocate(specs[layer], group.num_blocks, layout.page_size, dtype, device)
                for group in layout.groups
                for layer in group.layers
            }
        except (RuntimeError, MemoryError) as error:
            size = sum(group.num_blocks * group.block_bytes for group in layout.groups)
            raise ConfigError(
                f"the cache of {format_size(size)} does not fit into memory; lower num_blocks or max_memory_percent"
            ) from error

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, in order (copy on write)."""
        for copy in copies:
            for layer in self.layout.groups[copy.group].layers:
                self._backend.copy_block(self.storage[layer], copy.source, copy.target)

    def block_rows(self) -> list[list[Tensor]]:
        """Per group, views of all its layers' storage with one row for each block."""
        return [
            [rows for layer in group.layers for rows in self._backend.block_rows(self.storage[layer])]
            for group in self.layout.groups
        ]

    def close(self) -> None:
        """Free the storage."""
        self.storage = {}


def choose_page_size(config: EngineConfig, default: int, whose: str) -> tuple[int, Choice]:
    """The configured page size, else the default of whoever reads the pages."""
    page_size = config.page_size or default
    return page_size, Choice("page_size", str(page_size), "configured" if config.page_size else f"what {whose} prefers")


def choose_layout(
    kv_format: KVFormat,
    specs: Iterable[LayerSpec],
    page_size: int,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
) -> tuple[CacheLayout, Choice]:
    """Decide the blocks of each group; the null block comes on top of those that requests can have.

    Raises:
        ConfigError: not even one short request would fit.
    """
    ordered = sorted(specs, key=lambda spec: (spec.window or 0, spec.chunk or 0))  # full attention first
    kinds = groupby(ordered, key=lambda spec: (spec.window, spec.chunk))
    groups = [(*kind, tuple(layers)) for kind, layers in kinds]
    block_bytes = [sum(kv_format.page_bytes(spec, page_size) for spec in layers) for *_, layers in groups]
    chunk = config.max_prefill_chunk or config.max_batch_tokens or 512

    def blocks_for(num_pages: int) -> list[int]:
        num_tokens = num_pages * page_size
        num_requests = max(num_tokens // CPU_TOKENS_PER_REQUEST, 1)
        held = (
            num_tokens if window is None else min(num_tokens, num_requests * (window + chunk + 2 * page_size))
            for window, *_ in groups
        )
        return [-(-tokens // page_size) for tokens in held]

    def bytes_of(blocks: Sequence[int]) -> int:
        return sum((count + 1) * size for count, size in zip(blocks, block_bytes, strict=True))

    if config.num_blocks is not None:
        blocks = [config.num_blocks] * len(groups)
        choice = Choice("num_blocks", str(config.num_blocks), f"configured ({format_size(bytes_of(blocks))})")
    else:
        budget, bound = _budget(config, device)
        wanted, room = _wanted(config, max_model_len, device)
        most = -(-wanted // page_size)
        num_pages = bisect.bisect_right(range(most + 1), budget, key=lambda pages: bytes_of(blocks_for(pages))) - 1
        if num_pages < 2:
            raise ConfigError(
                f"the cache has no room: {format_size(budget)} allowed, one block takes "
                f"{format_size(sum(block_bytes))}; raise max_memory_percent, set num_blocks, or free memory"
            )
        blocks = blocks_for(num_pages)
        size = f"{num_pages * page_size} tokens, {format_size(bytes_of(blocks))}"
        choice = Choice("num_blocks", " + ".join(map(str, blocks)), f"{room if num_pages == most else bound}: {size}")
    return CacheLayout(
        page_size,
        tuple(
            CacheGroup(window, tuple(spec.layer for spec in layers), count + 1, size, chunk_size)
            for (window, chunk_size, layers), count, size in zip(groups, blocks, block_bytes, strict=True)
        ),
    ), choice


def _wanted(config: EngineConfig, max_model_len: int, device: torch.device) -> tuple[int, str]:
    """Return the tokens that there should be room for, and whose they are."""
    if config.max_memory_percent is not None:
        # As much as is allowed, yet no more than a full batch of the longest requests could ever use.
        return MAX_REQUESTS * max_model_len, f"room for {MAX_REQUESTS} requests of {max_model_len} tokens"
    if device.type != "cpu":
        return 1 << 40, "room for everything"
    if max_model_len > CPU_REQUESTS * CPU_TOKENS_PER_REQUEST:
        return max_model_len, f"room for one request of {max_model_len} tokens"
    return CPU_REQUESTS * CPU_TOKENS_PER_REQUEST, f"room for {CPU_REQUESTS} requests of {CPU_TOKENS_PER_REQUEST} tokens"


def _budget(config: EngineConfig, device: torch.device) -> tuple[int, str]:
    """Return the bytes that the cache may take, and the reason."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else free_memory()
    of = f"of {format_size(free)} free {'device ' if is_cuda else ''}memory"
    if config.max_memory_percent is not None:
        return int(free * config.max_memory_percent), f"max_memory_percent={config.max_memory_percent:g} {of}"
    if is_cuda:
        return max(int(free * GPU_SHARE) - GPU_RESERVE_BYTES, 0), f"{GPU_SHARE:.0%} {of}"
    budget = int(free * CPU_MAX_SHARE)
    if device.type == "cpu" and budget > CPU_MAX_BYTES:
        return CPU_MAX_BYTES, f"bounded by {format_size(CPU_MAX_BYTES)}"
    return budget, f"bounded by {CPU_MAX_SHARE:.0%} {of}"


def free_memory() -> int:
    """Bytes of memory that can be had without swapping; where that is not known, half of what there is."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return 8 << 30


def format_size(count: int) -> str:
    """Write a number of bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
