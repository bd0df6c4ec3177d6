"""From the entries of a plan to what the model and the attention backend need: one packed row of tokens and its tables.

Legend: T packed tokens, R requests, N logit rows, S page size. The packed order puts entries with one new token first
(see `attention.base`); logit rows come out in the order of the plan's entries.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aiocb.attention.base import GroupTables, StepBatch
from aiocb.model.eager.recurrence import PackedRows
from aiocb.model.eager.rotary import Lengths
from aiocb.records import Record
from aiocb.step import CacheLayout, LengthSwitch, StepEntry, first_visible

__all__ = ["PackedStep", "pack"]

_INT = np.int64


class PackedStep(NamedTuple):
    """One step, packed.

    Attributes:
        input_ids: [1, T] int64
        positions: absolute, [1, T] int64
        logit_rows: packed tokens whose logits are needed, in the order of the plan. [N] int64
        batch: what attention needs.
        state_slots: of each row, in the packed order; empty where there are no states. [R]
        lengths: for which length each token is rotated, where that makes a difference (see `rotary`).
        order: the entry of each row.
    """

    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    batch: StepBatch
    state_slots: tuple[int, ...] = ()
    lengths: Lengths | None = None
    order: tuple[int, ...] = ()

    @property
    def rows(self) -> PackedRows:
        """Which tokens go on from which states."""
        batch = self.batch
        return PackedRows(batch.starts, np.array(self.state_slots), batch.computed == 0, batch.device)


def pack(
    entries: Sequence[StepEntry],
    records: Sequence[Record],
    layout: CacheLayout,
    device: torch.device,
    dtype: torch.dtype,
) -> PackedStep:
    """Pack the entries of a plan and the records of their requests."""
    order = [index for index, entry in enumerate(entries) if entry.num_new_tokens == 1]
    num_decodes = len(order)
    if layout.states is not None:
        # What goes on first, what begins with one token behind it; slots that follow each other need not be gathered.
        order.sort(key=lambda index: (entries[index].num_computed_tokens == 0, records[index].state_slot))
    if num_decodes != len(entries):
        order += [index for index, entry in enumerate(entries) if entry.num_new_tokens != 1]
    rows = [entries[index] for index in order]
    owners = [records[index] for index in order]

    page_size = layout.page_size
    computed = np.array([entry.num_computed_tokens for entry in rows], dtype=_INT)
    new = np.array([entry.num_new_tokens for entry in rows], dtype=_INT)
    lengths, starts = computed + new, _bounds(new)

    ids = array("q")
    for entry, record in zip(rows, owners, strict=True):
        first = entry.num_computed_tokens
        ids.extend(record.tokens[first : first + entry.num_new_tokens])

    # Position of packed token t of row r: computed[r] + t - starts[r].
    row_of_token = np.repeat(np.arange(len(rows)), new)
    positions = np.arange(starts[-1], dtype=_INT) + (computed - starts[:-1])[row_of_token]

    last_pages = -(-lengths // page_size)
    groups = []
    for index, group in enumerate(layout.groups):
        first_pages = first_visible(computed, group.window, group.chunk) // page_size
        visible = zip(owners, first_pages.tolist(), last_pages.tolist(), strict=True)
        tables = [record.tables[index][first:last] for record, first, last in visible]
        pages = np.frombuffer(array("i", chain.from_iterable(tables)), dtype=np.int32)
        page_starts = _bounds(last_pages - first_pages)
        if len(pages) != page_starts[-1]:
            raise ValueError("a block table is shorter than the tokens that it has to hold")
        place = positions // page_size + (page_starts[:-1] - first_pages)[row_of_token]
        slots = torch.from_numpy(pages[place].astype(_INT) * page_size + positions % page_size).to(device)
        groups.append(GroupTables(group.window, slots, pages, page_starts, first_pages * page_size, group.chunk))
    return PackedStep(
        torch.from_numpy(np.frombuffer(ids, dtype=_INT).copy()).to(device).unsqueeze(0),
        torch.from_numpy(positions).to(device).unsqueeze(0),
        torch.from_numpy(_logit_rows(entries, order, starts)).to(device),
        StepBatch(num_decodes, starts, computed, lengths, tuple(groups), page_size, device, dtype),
        () if layout.states is None else tuple(record.state_slot for record in owners),
        None if layout.switch is None else _rotated_lengths(layout.switch, owners, row_of_token, positions),
        tuple(order),
    )


def _rotated_lengths(
    switch: LengthSwitch,
    owners: Sequence[Record],
    row_of_token: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> Lengths:
    known = [record.num_opened if switch.is_recomputed else record.num_prompt_tokens for record in owners]
    of_tokens = np.maximum(np.array(known, dtype=_INT)[row_of_token], positions + 1)
    return Lengths(of_tokens, int(of_tokens.max()))


def _bounds(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each of some parts begins, and where the last one ends."""
    bounds = np.zeros(len(counts) + 1, dtype=_INT)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _logit_rows(entries: Sequence[StepEntry], order: list[int], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Packed index of every row whose logits are needed, in the order of the entries."""
    counts = np.array([entry.num_logits for entry in entries], dtype=_INT)
    stops = np.empty(len(order), dtype=_INT)  # behind each entry's last packed token
    stops[order] = starts[1:]
    first = np.repeat(stops - counts - (np.cumsum(counts) - counts), counts)
    return first + np.arange(len(first), dtype=_INT)
