"""Which packed tokens belong to which request, where their states are, and how rows of any length are scanned at once.

A row goes on from the state in its slot, or from zeros where it is fresh, and leaves its new state there. Rows with one
token come first (see `attention.base`).

For scans in plain torch, rows are cut into chunks of one size, the last one of each filled up. The longest row first,
chunks are numbered level by level, so that level i is one slice of all chunks, of the first rows only:

    row 0   a0 a1 a2        order of the chunks:  a0 b0 c0 | a1 b1 | a2
    row 1   b0 b1           rows per level:       3, 2, 1
    row 2   c0

Legend: T packed tokens, R rows, N chunks, L tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Chunks", "PackedRows"]

_Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]


class Chunks(NamedTuple):
    """Rows of more than one token, cut.

    Attributes:
        tokens: of each chunk; T where it is filled up. [N, L]
        kept: which of the chunks' N * L tokens are not filled up, and which packed tokens these are.
        levels: the slice of the chunks, and how many rows there are, level by level.
        rows: the longest first. [rows of more than one token]
    """

    tokens: Tensor
    kept: tuple[Tensor, Tensor]
    levels: tuple[tuple[slice, int], ...]
    rows: Tensor

    def gather(self, values: Tensor) -> Tensor:
        """Take the chunks' tokens of values [T, ...], zeros where they are filled up: [N, L, ...]."""
        return torch.cat([values, values.new_zeros(1, *values.shape[1:])])[self.tokens]

    def scatter(self, chunks: Tensor, out: Tensor) -> None:
        """Put the chunks' tokens [N, L, ...] where they belong in `out` [T, ...]."""
        places, tokens = self.kept
        out.index_copy_(0, tokens, chunks.flatten(0, 1).index_select(0, places).to(out.dtype))


class PackedRows:
    """The rows of one step.

    Args:
        starts: first token of each row, and the end of the last one. [R + 1]
        slots: of their states. [R]
        is_fresh: rows that begin. [R]
        device: of the states.
    """

    def __init__(self, starts: _Ints, slots: _Ints, is_fresh: npt.NDArray[np.bool_], device: torch.device) -> None:
        self.starts = np.ascontiguousarray(starts, dtype=np.int32)
        self.slots = np.ascontiguousarray(slots, dtype=np.int32)
        self.is_fresh = np.ascontiguousarray(is_fresh, dtype=np.int32)
        self.device = device
        self.num_rows, self.num_tokens = len(self.slots), int(self.starts[-1])
        lengths = np.diff(self.starts)
        self.num_single = int((lengths == 1).sum())
        if not (lengths[: self.num_single] == 1).all():
            raise ValueError("rows of one token must come first")
        self.slot_ids = torch.from_numpy(self.slots.astype(np.int64)).to(device)
        self._begins = torch.from_numpy(self.is_fresh != 0).to(device)
        self._chunks: dict[int, Chunks] = {}
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}

    def states(self, storage: Tensor, first: int, last: int) -> Tensor:
        """Return the states of some rows [rows, ...] in float32: a copy, zeros where they begin."""
        states = storage.index_select(0, self.slot_ids[first:last]).float()
        begins = self._begins[first:last].view(-1, *[1] * (states.dim() - 1))
        return states.masked_fill_(begins, 0.0)

    def store(self, storage: Tensor, first: int, last: int, states: Tensor) -> None:
        """Put the states of some rows into their slots."""
        storage.index_copy_(0, self.slot_ids[first:last], states.to(storage.dtype))

    def steps_on(self) -> Tensor:
        """Tell which tokens [T] are the only one of a row that goes on."""
        found = torch.zeros(self.num_tokens, dtype=torch.bool, device=self.device)
        found[: self.num_single] = ~self._begins[: self.num_single]
        return found

    def chunks(self, length: int) -> Chunks:
        """Cut the rows of more than one token into chunks of `length`."""
        if length not in self._chunks:
            self._chunks[length] = self._cut(length)
        return self._chunks[length]

    def _cut(self, length: int) -> Chunks:
        starts = self.starts[self.num_single :].astype(np.int64)
        lengths = np.diff(starts)
        order = np.argsort(-lengths, kind="stable")
        counts = -(-lengths[order] // length)
        tokens, levels, begin = [], [], 0
        for level in range(int(counts[0]) if len(counts) else 0):
            rows = order[: int((counts > level).sum())]
            places = level * length + np.arange(length)  # within the row
            taken = starts[rows, None] + places
            tokens.append(np.where(places < lengths[rows, None], taken, self.num_tokens))
            levels.append((slice(begin, begin + len(rows)), len(rows)))
            begin += len(rows)
        table = np.concatenate(tokens) if tokens else np.zeros((0, length), dtype=np.int64)
        kept = np.flatnonzero(table < self.num_tokens)
        return Chunks(
            torch.from_numpy(table).to(self.device),
            (torch.from_numpy(kept).to(self.device), torch.from_numpy(table.reshape(-1)[kept]).to(self.device)),
            tuple(levels),
            torch.from_numpy(order + self.num_single).to(self.device),
        )

    def windows(self, width: int) -> tuple[Tensor, Tensor]:
        """Where each token's window of the last `width` inputs lies, and each row's last one.

        Returns:
            Indices [T, width] and [R, width] into: `width` old inputs of each row, and the new inputs behind all these.
        """
        if width not in self._windows:
            rows = np.repeat(np.arange(self.num_rows), np.diff(self.starts))
            tokens = np.arange(self.num_tokens)
            last = self.starts[1:].astype(np.int64) - 1
            taps = np.arange(1 - width, 1)
            pair = tuple(
                torch.from_numpy(self._places(at[:, None] + taps, of[:, None], width)).to(self.device)
                for at, of in ((tokens, rows), (last, np.arange(self.num_rows)))
            )
            self._windows[width] = pair[0], pair[1]
        return self._windows[width]

    def _places(self, tokens: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
        starts = self.starts[:-1].astype(np.int64)[rows]
        old = rows * width + width + (tokens - starts)
        return np.where(tokens < starts, old, self.num_rows * width + tokens)
