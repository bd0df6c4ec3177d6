"""The paged cache of a runner: storage per layer, layers grouped by attention kind, and how many blocks there are.

    page    S tokens of one layer
    block   one page for every layer of a group; what a block table names; unit of ownership and sharing
    group   layers of one attention kind (full, or one window): they share block tables
    cache   all groups; block 0 of each is the null block (zero, never written)

Example: Gemma 3 270M has 3 full layers and 15 with a window of 512. Two groups: a request of 2000 tokens with pages of
16 holds 125 blocks of the first and 33 of the second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from aiocb.attention.base import AttentionBackend, KVFormat, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.step import BlockCopy, CacheGroup, CacheLayout

__all__ = [
    "PagedCache",
    "cache_budget",
    "choose_layout",
    "choose_page_size",
    "format_size",
    "free_memory",
    "group_layers",
]

CPU_REQUESTS = 64
MAX_REQUESTS = 1024
CPU_TOKENS_PER_REQUEST = 1024
CPU_MAX_BYTES = 2 << 30
CPU_MAX_SHARE = 0.25
GPU_SHARE = 0.9
GPU_RESERVE_BYTES = 1 << 30


def group_layers(specs: Iterable[LayerSpec]) -> tuple[tuple[int | None, tuple[LayerSpec, ...]], ...]:
    """Group layers by window, full attention first, in the order of the layers."""
    groups: dict[int | None, list[LayerSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.window, []).append(spec)
    ordered = sorted(groups.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    return tuple((window, tuple(layers)) for window, layers in ordered)


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
    groups = group_layers(specs)
    block_bytes = [sum(kv_format.page_bytes(spec, page_size) for spec in layers) for _, layers in groups]

    def layout(blocks: Iterable[int]) -> CacheLayout:
        return CacheLayout(
            page_size,
            tuple(
                CacheGroup(window, tuple(spec.layer for spec in layers), count + 1, size)
                for (window, layers), count, size in zip(groups, blocks, block_bytes, strict=True)
            ),
        )

    if config.num_blocks is not None:
        size = format_size((config.num_blocks + 1) * sum(block_bytes))
        choice = Choice("num_blocks", str(config.num_blocks), f"configured ({size})")
        return layout([config.num_blocks] * len(groups)), choice

    budget, reason = cache_budget(config, device)
    chunk = config.max_prefill_chunk or config.max_batch_tokens or 512

    def blocks_for(num_tokens: int) -> list[int]:
        num_requests = max(num_tokens // CPU_TOKENS_PER_REQUEST, 1)
        blocks = []
        for window, _ in groups:
            held = num_tokens if window is None else min(num_tokens, num_requests * (window + chunk + 2 * page_size))
            blocks.append(-(-held // page_size))
        return blocks

    def bytes_for(num_tokens: int) -> int:
        return sum((count + 1) * size for count, size in zip(blocks_for(num_tokens), block_bytes, strict=True))

    wanted = max(CPU_REQUESTS * CPU_TOKENS_PER_REQUEST, max_model_len) if device.type == "cpu" else 1 << 40
    if config.max_memory_percent is not None:
        # As much as is allowed, yet no more than a full batch of the longest requests could ever use.
        wanted = MAX_REQUESTS * max_model_len
    num_tokens = wanted
    if bytes_for(num_tokens) > budget:
        low, high = 0, num_tokens
        while high - low > page_size:
            middle = (low + high) // 2
            low, high = (middle, high) if bytes_for(middle) <= budget else (low, middle)
        num_tokens = low // page_size * page_size
    elif device.type == "cpu":
        if wanted == max_model_len and wanted > CPU_REQUESTS * CPU_TOKENS_PER_REQUEST:
            reason = f"room for one request of {max_model_len} tokens"
        else:
            reason = f"room for {CPU_REQUESTS} requests of {CPU_TOKENS_PER_REQUEST} tokens"
    if num_tokens < 2 * page_size:
        raise ConfigError(
            f"the cache has no room: {format_size(budget)} allowed, one block takes {format_size(sum(block_bytes))}; "
            "raise max_memory_percent, set num_blocks, or free memory"
        )
    blocks = blocks_for(num_tokens)
    choice = Choice(
        "num_blocks",
        " + ".join(map(str, blocks)),
        f"{reason}: {num_tokens} tokens, {format_size(bytes_for(num_tokens))}",
    )
    return layout(blocks), choice


def cache_budget(config: EngineConfig, device: torch.device) -> tuple[int, str]:
    """Return the bytes that the cache may take, and the reason."""
    share = config.max_memory_percent
    if device.type == "cpu":
        free = free_memory()
        if share is not None:
            return int(free * share), f"max_memory_percent={share:g} of {format_size(free)} free memory"
        budget = min(CPU_MAX_BYTES, int(free * CPU_MAX_SHARE))
        bound = (
            format_size(CPU_MAX_BYTES)
            if budget == CPU_MAX_BYTES
            else f"{CPU_MAX_SHARE:.0%} of {format_size(free)} free memory"
        )
        return budget, f"bounded by {bound}"
    if device.type != "cuda":
        free = free_memory()
        return int(free * (share or CPU_MAX_SHARE)), f"{share or CPU_MAX_SHARE:.0%} of {format_size(free)} free memory"
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    chosen = GPU_SHARE if share is None else share
    budget = int(free * chosen) - (GPU_RESERVE_BYTES if share is None else 0)
    return max(budget, 0), f"{chosen:.0%} of {format_size(free)} free device memory"


def free_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import psutil
    except ImportError:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (AttributeError, OSError, ValueError):
            return 8 << 30
    return int(psutil.virtual_memory().available)


def format_size(count: int) -> str:
    """Write a number of bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
