"""Steps that were recorded for replay, by shape. Worker thread only.

Recorded before traffic and never in the middle of it: a shape that is missing runs as it is. Each recording has its own
numbers, which are written before it is replayed, and its own logits, which the next replay overwrites. Whatever
a step leaves unfilled is padding: rows that lead to the scratch block, each of them with tokens of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aiocb.model.eager.device import Device, Numbers, Recording
from aiocb.model.eager.tables import StepShape

__all__ = ["MAX_GRAPHS", "Graphs", "Padding", "padded_numbers"]

MAX_GRAPHS = 64
"""Recordings that are kept; each holds its part of the common memory."""

MIN_KEYS = 1024
"""Gathered keys of the smallest recording."""

Forward = Callable[[StepShape, Tensor], Tensor]
"""From a shape and its numbers to logits [R, V]."""


class Padding(NamedTuple):
    """How the sizes of steps are rounded up, so that few shapes are left.

    Attributes:
        q_interval: tokens of the smallest step with prompts; larger ones have twice as many, and so on.
        kv_interval: gathered keys; below it, powers of two.
        max_rows: most rows.
        max_tokens: most tokens.
        max_keys: most keys of all rows of a step.
        max_len: most tokens of a row, one of padding included.
        num_groups: of the cache; 0 where no layer gathers its keys.
        has_varlen, has_decode: steps with prompts, and steps without, are recorded at all.
    """

    q_interval: int
    kv_interval: int
    max_rows: int
    max_tokens: int
    max_keys: int
    max_len: int
    num_groups: int
    has_varlen: bool = False
    has_decode: bool = True

    def shapes(self) -> list[StepShape]:
        """What is recorded before traffic: as many rows, tokens and keys as there may be, down from few."""
        keys, shapes = self._keys(), []
        if self.has_varlen:
            tokens = self.q_interval
            while True:
                num_rows = min(max(tokens // 4, 1), self.max_rows + 1)
                shapes += [StepShape(num_rows, tokens, tokens, sizes) for sizes in keys]
                if tokens >= self.max_tokens:
                    break
                tokens *= 2
            shapes = shapes[-MAX_GRAPHS // 2 :]
        if self.has_decode:
            rows = sorted({min(1 << power, self.max_rows) for power in range(self.max_rows.bit_length() + 1)})
            single = self._decode_shapes(rows, keys)
            while len(shapes) + len(single) > MAX_GRAPHS:
                # A few rows of padding cost little beside the weights, which every step reads.
                if len(rows) > 2:
                    rows = sorted(rows[::-2])
                else:
                    keys = keys[::-2][::-1]
                single = self._decode_shapes(rows, keys)
            shapes += single
        return shapes

    def _decode_shapes(self, rows: list[int], keys: list[tuple[int, ...]]) -> list[StepShape]:
        """What rows of one token each may need, of these numbers of rows and keys."""
        return [
            StepShape(count, count, 1, sizes)
            for smaller, sizes in zip([(0,), *keys], keys)
            for count in rows
            if not sizes or max(smaller) < count * self.max_len
        ]

    def _keys(self) -> list[tuple[int, ...]]:
        if not self.num_groups:
            return [()]
        size = min(MIN_KEYS, self.kv_interval)
        sizes = [size]
        while size < self.max_keys:
            size = size * 2 if size * 2 <= self.kv_interval else _round_up(size * 2, self.kv_interval)
            sizes.append(size)
        return [(size,) * self.num_groups for size in sizes]

    def fits(self, shape: StepShape, padded: StepShape) -> bool:
        """True where a step can be padded to a shape, and not to more than twice its work."""
        spare_rows, spare_tokens = padded.num_rows - shape.num_rows, padded.num_tokens - shape.num_tokens
        if (shape.max_queries == 1) != (padded.max_queries == 1) or not 0 <= spare_rows <= spare_tokens:
            return False
        if spare_tokens and not spare_rows:
            return False
        if spare_rows and -(-spare_tokens // spare_rows) > self.max_len:
            return False
        if padded.num_tokens > max(2 * shape.num_tokens, self.q_interval) and padded.max_queries > 1:
            return False
        return all(have >= need + spare_tokens for have, need in zip(padded.num_keys, shape.num_keys, strict=True))


class _Recorded(NamedTuple):
    numbers: Tensor
    logits: Tensor
    recording: Recording


class Graphs:
    """Recorded forward passes, at most `limit` of them.

    Args:
        device: records.
        forward: what is recorded.
        padding: of the shapes.
        scratch_row: of the tables.
        limit: the longest unused makes room for one that is recorded beyond it.
    """

    def __init__(
        self, device: Device, forward: Forward, padding: Padding, scratch_row: int, limit: int = MAX_GRAPHS
    ) -> None:
        self._device = device
        self._forward = forward
        self.padding = padding
        self._scratch_row = scratch_row
        self._limit = limit
        self._recorded: dict[StepShape, _Recorded] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._recorded

    def warm_up(self, shapes: Iterable[StepShape]) -> None:
        """Record shapes, the largest first: what they share of memory is then as large as it has to be.

        Raises:
            RuntimeError: one of them cannot be recorded.
        """
        for shape in sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_keys), reverse=True):
            if shape in self._recorded:
                continue
            nothing = StepShape(0, 0, 1, ())
            numbers = padded_numbers(np.zeros(1, np.int32), nothing, shape, self._scratch_row)
            static = torch.from_numpy(numbers).to(self._device.kind)
            recording, logits = self._device.record(functools.partial(self._forward, shape, static))
            while len(self._recorded) >= self._limit:
                self._recorded.pop(next(iter(self._recorded)))
            self._recorded[shape] = _Recorded(static, logits, recording)

    def padded(self, shape: StepShape) -> StepShape | None:
        """The smallest recorded shape that a step can be padded to; None where there is none."""
        fitting = (known for known in self._recorded if self.padding.fits(shape, known))
        return min(fitting, key=lambda known: (known.num_tokens, known.num_keys), default=None)

    def fill(self, numbers: Numbers, shape: StepShape, padded: StepShape) -> Numbers:
        """Add the padding to the numbers of a step."""
        return padded_numbers(numbers, shape, padded, self._scratch_row)

    def replay(self, shape: StepShape, numbers: Tensor) -> Tensor:
        """Run a step of a recorded shape: logits [R, V], valid until the next replay. [num_numbers] int32."""
        recorded = self._recorded.pop(shape)
        self._recorded[shape] = recorded  # used last
        recorded.numbers.copy_(numbers)
        recorded.recording.replay()
        return recorded.logits


def padded_numbers(numbers: Numbers, shape: StepShape, padded: StepShape, scratch_row: int) -> Numbers:
    """Put a step's numbers into those of a larger shape; the tokens that are too many are shared by the rows that are.

    No row is empty, and rows end where the tokens do: kernels are not to be asked about anything else.
    """
    made = np.zeros(padded.num_numbers, np.int32)
    have, want = shape.num_rows, padded.num_rows
    made[:have] = numbers[:have]
    made[have:want] = scratch_row
    made[want : want + have] = numbers[have : 2 * have]
    starts = made[2 * want : 3 * want + 1]
    starts[: have + 1] = numbers[2 * have : 3 * have + 1]
    if want > have:
        shares = np.linspace(shape.num_tokens, padded.num_tokens, want - have + 1)
        starts[have:] = np.ceil(shares).astype(np.int32)
    made[3 * want + 1 : 3 * want + 1 + shape.num_tokens] = numbers[3 * have + 1 :]
    return made


def _round_up(count: int, interval: int) -> int:
    return -(-count // interval) * interval
