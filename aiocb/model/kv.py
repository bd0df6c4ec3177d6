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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiocb.attention.base import AttentionBackend, KVFormat, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.sizes import CPU_REQUESTS, MAX_REQUESTS, expected_length, expected_tokens
from aiocb.step import BlockCopy, CacheGroup, CacheLayout

__all__ = ["PagedCache", "choose_cache_dtype", "choose_layout", "choose_page_size", "format_size", "free_memory"]

CPU_TOKENS_PER_REQUEST = 1024
CPU_MAX_BYTES = 2 << 30
CPU_MAX_SHARE = 0.25
GPU_SHARE = 0.9
LENDING = ("cuda", "xpu")
"""Devices with a memory of their own, whose allocator counts what it has lent."""


class PagedCache:
    """Storage of all layers.

    Args:
        layout: that the cache manager obeys.
        dtype: what keys and values are stored in.

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


def choose_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> tuple[torch.dtype, Choice]:
    """What keys and values are stored in: as configured, else as the model has them."""
    name = "kv_cache_dtype"
    if config.kv_cache_dtype == "int8":
        return torch.int8, Choice(name, "int8", "configured; a scale for every token and head")
    return dtype, Choice(name, KVFormat.of(dtype).name, "the model's own")


class Budget(NamedTuple):
    """The bytes that the cache may take.

    Attributes:
        num_bytes: of all groups together.
        reason: where they come from, in short.
        arithmetic: how they were computed.
    """

    num_bytes: int
    reason: str
    arithmetic: str


def choose_layout(
    kv_format: KVFormat,
    specs: Iterable[LayerSpec],
    page_size: int,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
    reserved: Mapping[str, int] | None = None,
    free: int | None = None,
) -> tuple[CacheLayout, Choice]:
    """Decide the blocks of each group; the null block comes on top of those that requests can have.

    Args:
        kv_format, specs, page_size: what is stored, and in which pages.
        config: blocks, shares and hints are taken from it.
        max_model_len: most tokens of a request.
        device: whose memory it is.
        reserved: bytes that something else is going to take of the same memory, by what that is.
        free: bytes of memory that can be had; None asks the device.

    Raises:
        ConfigError: not even one token of one request would fit.
    """
    ordered = sorted(specs, key=lambda spec: (spec.window or 0, spec.chunk or 0))  # full attention first
    kinds = groupby(ordered, key=lambda spec: (spec.window, spec.chunk))
    groups = [(*kind, tuple(layers)) for kind, layers in kinds]
    block_bytes = [sum(kv_format.page_bytes(spec, page_size) for spec in layers) for *_, layers in groups]
    chunk = config.max_prefill_chunk or config.max_batch_tokens or 512
    length = expected_length(config, max_model_len) or CPU_TOKENS_PER_REQUEST

    def blocks_for(num_pages: int) -> list[int]:
        num_tokens = num_pages * page_size
        num_requests = max(num_tokens // length, 1)
        held = (
            min(num_tokens, num_requests * (reach + chunk + 2 * page_size)) if reach else num_tokens
            for reach in (window or chunk_size for window, chunk_size, _ in groups)
        )
        return [-(-tokens // page_size) for tokens in held]

    def bytes_of(blocks: Sequence[int]) -> int:
        return sum((count + 1) * size for count, size in zip(blocks, block_bytes, strict=True))

    if config.num_blocks is not None:
        blocks = [config.num_blocks] * len(groups)
        choice = Choice("num_blocks", str(config.num_blocks), f"configured ({format_size(bytes_of(blocks))})")
    else:
        budget = _budget(config, device, reserved or {}, free_memory(device) if free is None else free)
        wanted, room = _wanted(config, max_model_len, page_size, device)
        most = -(-wanted // page_size)
        num_pages = (
            bisect.bisect_right(range(most + 1), budget.num_bytes, key=lambda pages: bytes_of(blocks_for(pages))) - 1
        )
        if num_pages < 1:
            raise ConfigError(
                f"the cache has no room for one token of one request: {budget.arithmetic} leaves "
                f"{format_size(budget.num_bytes)}; the least is {format_size(bytes_of([1] * len(groups)))}: one block "
                f"of {page_size} tokens for every layer and one that stays empty. Raise max_memory_percent, lower "
                "max_batch_tokens or page_size, set num_blocks, or free memory"
            )
        blocks = blocks_for(num_pages)
        size = f"{num_pages * page_size} tokens, {format_size(bytes_of(blocks))}"
        reason = room if num_pages == most else budget.reason
        choice = Choice("num_blocks", " + ".join(map(str, blocks)), f"{reason}: {size}")
    return CacheLayout(
        page_size,
        tuple(
            CacheGroup(window, tuple(spec.layer for spec in layers), count + 1, size, chunk_size)
            for (window, chunk_size, layers), count, size in zip(groups, blocks, block_bytes, strict=True)
        ),
    ), choice


def _wanted(config: EngineConfig, max_model_len: int, page_size: int, device: torch.device) -> tuple[int, str]:
    """Return the tokens that there should be room for, and whose they are."""
    if config.max_memory_percent is not None:
        # As much as is allowed, yet no more than a full batch of the longest requests could ever use.
        return MAX_REQUESTS * max_model_len, f"room for {MAX_REQUESTS} requests of {max_model_len} tokens"
    if device.type != "cpu":
        return 1 << 40, "room for everything"
    requests, length = CPU_REQUESTS, expected_length(config, max_model_len)
    if length is None:
        length = CPU_TOKENS_PER_REQUEST
        wanted = requests * length
    else:
        requests = config.max_requests_per_batch or CPU_REQUESTS
        wanted = expected_tokens(config, requests, length, page_size)
    if max_model_len > wanted:
        return max_model_len, f"room for one request of {max_model_len} tokens"
    return wanted, f"room for {requests} requests of {length} tokens"


def _budget(config: EngineConfig, device: torch.device, reserved: Mapping[str, int], free: int) -> Budget:
    """Return the bytes that the cache may take: a share of what is free, without what others are going to take."""
    is_lent = device.type in LENDING
    share = config.max_memory_percent or (GPU_SHARE if is_lent else CPU_MAX_SHARE)
    reason = f"{share:.0%} of {format_size(free)} free {'device ' if is_lent else ''}memory"
    if config.max_memory_percent is not None:
        reason = f"max_memory_percent={share:g}, {reason}"
    parts = "".join(f", less {format_size(size)} for {name}" for name, size in reserved.items() if size)
    count = int(free * share) - sum(reserved.values())
    arithmetic = f"{share:g} of {format_size(free)} free memory{parts}"
    if device.type == "cpu" and config.max_memory_percent is None and count > CPU_MAX_BYTES:
        return Budget(CPU_MAX_BYTES, f"bounded by {format_size(CPU_MAX_BYTES)}", arithmetic)
    return Budget(max(count, 0), f"bounded by {reason}{parts}", arithmetic)


def free_memory(device: torch.device | None = None) -> int:
    """Bytes of memory that can be had without swapping; where that is not known, half of what there is.

    Args:
        device: one with a memory of its own; None, or any other, is the computer's.
    """
    if device is not None and device.type in LENDING:
        module = torch.get_device_module(device)
        module.empty_cache()
        return int(module.mem_get_info(device)[0])
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
