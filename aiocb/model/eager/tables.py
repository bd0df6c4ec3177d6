"""Block tables and last tokens of open requests on the device, and what attention needs of a step, computed there.

    tables   [rows + 1, P] per cache group     row = `Record.row`: stays where it is while the request is open
    tokens   [rows + 1]                        what was sampled last, by row: the next step takes it from here

A step sends where its rows are and how far they have come; from that, everything else follows on the device, with
tensors whose shapes are known beforehand. So the same code can be recorded and replayed. The last row is nobody's: it
belongs to the padding of such a step, and leads to the scratch block, which nobody's table names.

Legend: R rows of the step, T packed tokens, P blocks of a table, L visible keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aiocb.attention.packed import PackedKeys, StepKeys
from aiocb.step import NULL_BLOCK, CacheLayout

__all__ = ["DeviceStep", "DeviceTables", "Rows", "StepShape"]


class StepShape(NamedTuple):
    """All sizes of a step: what is recorded for one shape can be replayed for any step of that shape.

    Attributes:
        num_rows: R.
        num_tokens: T.
        max_queries: bound of a row's tokens.
        num_keys: per group, at least the L of all rows; empty where no layer gathers its keys.
    """

    num_rows: int
    num_tokens: int
    max_queries: int
    num_keys: tuple[int, ...]

    @property
    def num_numbers(self) -> int:
        """How many integers describe such a step: rows, computed, starts, ids."""
        return 3 * self.num_rows + 1 + self.num_tokens


class Rows(NamedTuple):
    """A step on the device, unpacked from its numbers.

    Attributes:
        rows: of the tables. [R] int64
        computed: tokens of each row whose keys are in the cache. [R] int64
        starts: row r's tokens are `starts[r] : starts[r + 1]`. [R + 1] int64
        row_of_token: [T] int64
        positions: absolute. [T] int64
        ids: [T] int64, none of which is a placeholder
    """

    rows: Tensor
    computed: Tensor
    starts: Tensor
    row_of_token: Tensor
    positions: Tensor
    ids: Tensor


class DeviceTables:
    """What stays on the device from step to step.

    Args:
        layout: of the cache.
        num_rows: most requests that are open at once.
        max_blocks: P.
        device: where they are.
    """

    def __init__(self, layout: CacheLayout, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.page_size = layout.page_size
        self.windows = [group.window for group in layout.groups]
        self.num_rows = num_rows
        self.max_blocks = max_blocks
        self.tables = [
            torch.full((num_rows + 1, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device) for _ in layout.groups
        ]
        for table, group in zip(self.tables, layout.groups, strict=True):
            table[num_rows] = group.num_blocks  # behind those of the layout: the scratch block
        self.tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def update(self, numbers: Tensor) -> None:
        """Write blocks into the tables: rows, columns, then the blocks of each group. [(2 + groups) * U] int32."""
        rows, columns, *blocks = numbers.view(2 + len(self.tables), -1)
        places = rows.long(), columns.long()
        for table, new in zip(self.tables, blocks, strict=True):
            table.index_put_(places, new)

    def unpack(self, shape: StepShape, numbers: Tensor) -> Rows:
        """Read a step from its numbers; an id below 0 is the row's last token. [num_numbers] int32."""
        sizes = [shape.num_rows, shape.num_rows, shape.num_rows + 1, shape.num_tokens]
        rows, computed, starts, ids = torch.split(numbers.long(), sizes)
        if shape.max_queries == 1:  # as many tokens as rows
            row_of_token = torch.arange(shape.num_tokens, device=numbers.device)
            positions = computed
        else:
            places = torch.arange(shape.num_tokens, device=numbers.device)
            row_of_token = torch.searchsorted(starts[1:], places, right=True)
            positions = computed[row_of_token] + places - starts[row_of_token]
        ids = torch.where(ids < 0, self.tokens[rows[row_of_token]], ids)
        return Rows(rows, computed, starts, row_of_token, positions, ids)


class DeviceStep(StepKeys):
    """One group's part of a step, computed on the device."""

    def __init__(self, tables: DeviceTables, group: int, step: Rows, shape: StepShape) -> None:
        super().__init__()
        page_size, window = tables.page_size, tables.windows[group]
        self._page_size, self._num_rows = page_size, shape.num_rows
        self._num_keys = shape.num_keys[group] if shape.num_keys else 0
        self._blocks = tables.tables[group].index_select(0, step.rows)  # [R, P]
        self.window, self.is_own = window, False
        # No request is longer than a table; the padding of a recorded step is not either (see `graphs`).
        places = step.row_of_token * tables.max_blocks + step.positions // page_size
        block = self._blocks.view(-1).index_select(0, places).long()
        self.slots = block * page_size + step.positions % page_size
        lengths = step.computed + step.starts.diff()  # [R]
        self._first_blocks: Tensor | None = None
        if window is not None:
            self._first_blocks = (step.computed - window + 1).clamp_min(0) // page_size
            lengths = lengths - self._first_blocks * page_size
        self.starts, self.lengths = step.starts.int(), lengths.int()
        self.key_starts = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0, dtype=torch.int32)])
        self.max_queries, self.max_keys = shape.max_queries, tables.max_blocks * page_size

    def _make_table(self) -> Tensor:
        if self._first_blocks is None:
            return self._blocks
        # What lies before the window may be another's by now: rows begin with their first visible block.
        num_columns = self._blocks.shape[1]
        columns = torch.arange(num_columns, device=self._blocks.device) + self._first_blocks[:, None]
        return self._blocks.gather(1, columns.clamp_max(num_columns - 1))

    def _make_keys(self) -> PackedKeys:
        places = torch.arange(self._num_keys, device=self._blocks.device)
        row = torch.searchsorted(self.key_starts[1:].long(), places, right=True).clamp_max(self._num_rows - 1)
        within = places - self.key_starts[row]
        table = self.table
        column = (within // self._page_size).clamp_max(table.shape[1] - 1)
        block = table.view(-1).index_select(0, row * table.shape[1] + column).long()
        slots = block * self._page_size + within % self._page_size
        # The padding behind the last key reads the null block.
        return PackedKeys(torch.where(places < self.key_starts[-1], slots, 0))

    def rows(self) -> list[tuple[slice, slice, int, int]]:
        """Refuse: only the device knows them.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a bias per request needs the step on the host")
