"""The swap space of a runner: memory of the host for what preempted requests have computed. Worker thread only.

    group 0     block ─► place     every tensor of every layer: row `block` of it ─► row `place` of its buffer
    group 1     ...
    states      slot ─► place

Copies are queued in order with the step's own work, so that a block may be overwritten by the step that has copied it
out. From an accelerator they go to pinned memory, and the host does not wait for them.

Legend: P places, n blocks of one move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError, EngineError
from aiocb.model.kv import format_size, free_memory
from aiocb.model.memory import is_out_of_memory
from aiocb.step import BlockSwap, CacheLayout

__all__ = ["SwapBuffer", "choose_swap"]

logger = logging.getLogger("aiocb")

_GIB = 1 << 30


def choose_swap(layout: CacheLayout, config: EngineConfig, *, is_on_host: bool) -> tuple[CacheLayout, Choice]:
    """Decide how many places there are: as many of each kind as its share of the cache.

    Args:
        layout: of the cache, whose memory has not been touched yet.
        config: how much memory may be taken.
        is_on_host: the cache takes from the same memory.

    Raises:
        ConfigError: not one block of each kind would have a place.
    """
    wanted, name = config.cpu_offload_space, "cpu_offload_space"
    if wanted == 0.0:
        return layout, Choice(name, "off", "as configured: what is preempted is recomputed")
    counts = [group.num_blocks - 1 for group in layout.groups]
    sizes = [group.block_bytes for group in layout.groups]
    if layout.states is not None:
        counts.append(layout.states.num_slots - 1)
        sizes.append(layout.states.slot_bytes)
    cache_bytes = sum(count * size for count, size in zip(counts, sizes, strict=True))
    available = max(free_memory() - is_on_host * cache_bytes, 0)
    threshold = config.cpu_offload_space_safety_threshold
    most = int(available * threshold)
    bound = f"{threshold:.0%} of {format_size(available)} of memory that is left"
    if wanted is None:
        budget, reason = most, bound
    else:
        budget, reason = int(wanted * _GIB), "configured"
        if budget > most:
            budget, reason = most, f"{wanted:g} GiB were asked for, cut to {bound}"
            logger.warning("cpu_offload_space: %s (see cpu_offload_space_safety_threshold)", reason)
    places = tuple(count * budget // cache_bytes for count in counts)
    if not all(places):
        raise ConfigError(
            f"cpu_offload_space has no room: {format_size(budget)} ({reason}), of which {format_size(cache_bytes)} of "
            f"cache would get {places} places; raise it to {format_size(cache_bytes // min(counts) + 1)} at least, or "
            "set it to 0.0"
        )
    value = f"{format_size(budget)}, {' + '.join(map(str, places))} blocks"
    return layout._replace(swap_places=places), Choice(name, value, reason)


class SwapBuffer:
    """Places for the rows of tensors.

    Args:
        tensors: per group, those that have a row for every block; views are written through.
        num_places: per group.

    Raises:
        ConfigError: the memory cannot be allocated.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], num_places: Sequence[int]) -> None:
        try:
            self._pairs = [
                [(rows, _places(rows, count)) for rows in group]
                for group, count in zip(tensors, num_places, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"the swap space does not fit into memory; lower cpu_offload_space ({error})") from error

    @torch.inference_mode()
    def swap_out(self, swaps: Iterable[BlockSwap]) -> None:
        """Copy blocks to places.

        Raises:
            EngineError: there is no memory for it. Whoever has asked relies on the copies: it is not to be tried again.
        """
        self._move(swaps, _gather, lambda rows, buffer, at: buffer[at.place].copy_(rows[at.block], non_blocking=True))

    @torch.inference_mode()
    def swap_in(self, swaps: Iterable[BlockSwap]) -> None:
        """Copy places to blocks.

        Raises:
            EngineError: as for `swap_out`.
        """
        self._move(swaps, _scatter, lambda rows, buffer, at: rows[at.block].copy_(buffer[at.place], non_blocking=True))

    def _move(
        self,
        swaps: Iterable[BlockSwap],
        move_all: Callable[[Tensor, Tensor, Sequence[BlockSwap]], None],
        move_one: Callable[[Tensor, Tensor, BlockSwap], Any],
    ) -> None:
        """Move all blocks at once, or one by one where memory is short: a swap counts, whatever becomes of its step."""
        for group, moves in _by_group(swaps):
            for rows, buffer in self._pairs[group]:
                try:
                    if not _has_memory(move_all, rows, buffer, moves):
                        for move in moves:
                            move_one(rows, buffer, move)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    raise EngineError(
                        "there is no memory to move one block of the cache: lower num_blocks or max_memory_percent, or "
                        f"set cpu_offload_space to 0.0 ({error})"
                    ) from error

    def close(self) -> None:
        """Free the memory."""
        self._pairs = []


def _gather(rows: Tensor, buffer: Tensor, moves: Sequence[BlockSwap]) -> None:
    blocks = torch.tensor([move.block for move in moves], device=rows.device)
    gathered = rows.index_select(0, blocks)  # [n, ...]
    for start, places in _runs(moves):
        buffer[places.start : places.stop].copy_(gathered[start : start + len(places)], non_blocking=True)


def _scatter(rows: Tensor, buffer: Tensor, moves: Sequence[BlockSwap]) -> None:
    blocks = torch.tensor([move.block for move in moves], device=rows.device)
    gathered = torch.empty(len(moves), *rows.shape[1:], dtype=rows.dtype, device=rows.device)  # [n, ...]
    for start, places in _runs(moves):
        gathered[start : start + len(places)].copy_(buffer[places.start : places.stop], non_blocking=True)
    rows.index_copy_(0, blocks, gathered)


def _has_memory(call: Callable[..., None], *args: Any) -> bool:
    try:
        call(*args)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _places(rows: Tensor, count: int) -> Tensor:
    """Memory of the host for so many rows; untouched until it is used, unless it has to be pinned."""
    return torch.empty(count, *rows.shape[1:], dtype=rows.dtype, pin_memory=rows.is_cuda)


def _by_group(swaps: Iterable[BlockSwap]) -> Iterator[tuple[int, list[BlockSwap]]]:
    """The swaps of each group, in the order of their places."""
    ordered = sorted(swaps, key=lambda swap: (swap.group, swap.place))
    return ((group, list(moves)) for group, moves in groupby(ordered, key=lambda swap: swap.group))


def _runs(moves: Sequence[BlockSwap]) -> Iterator[tuple[int, range]]:
    """Where runs of consecutive places begin, and the places: each is one copy."""
    start = 0
    for at in range(1, len(moves) + 1):
        if at == len(moves) or moves[at].place != moves[at - 1].place + 1:
            yield start, range(moves[start].place, moves[at - 1].place + 1)
            start = at
