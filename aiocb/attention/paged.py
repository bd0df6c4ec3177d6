"""Pages in torch tensors, shared by the backends that are plain torch: storage, writes, gathers and rows.

Storage of one layer (legend in `attention.base`):

    key   [K, B, S, Dk]      a page = S tokens of one layer; slot = block * S + offset
    value [K, B, S, Dv]      block 0 is the null block: zero, never written, padding of every table

Heads come first so that gathered pages are one [L, D] matrix per head: torch multiplies those five times as fast as
the strided ones that [B, S, K, D] would give (64 rows of 208 keys: 0.8 ms a layer instead of 3.8).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aiocb.attention.base import Attention, Capabilities, LayerSpec, StepBatch

__all__ = [
    "PagedStorage",
    "Row",
    "RowKeys",
    "RowsMetadata",
    "TorchBackend",
    "additive",
    "causal_mask",
    "explicit_attention",
    "group_heads",
    "make_rows",
]

MAX_SCORES = 1 << 24
"""Scores (queries x keys) of one sequence that are held at once; longer chunks are attended to in parts."""


class PagedStorage(NamedTuple):
    """One layer's pages."""

    key: Tensor  # [K, B, S, Dk]
    value: Tensor  # [K, B, S, Dv]


class Row(NamedTuple):
    """One request's part of a step in one group.

    Attributes:
        start, stop: its packed tokens.
        first_query: absolute position of its first new token.
        key_start: absolute position of the first key of its first page.
        length: absolute position behind its last key.
        pages: its visible blocks, on the device. [P] int64
        first_block: the first of them when they follow each other: a view instead of a gather; else None.
        is_fresh: nothing was in the cache: the step's own keys are all keys.
    """

    start: int
    stop: int
    first_query: int
    key_start: int
    length: int
    pages: Tensor
    first_block: int | None
    is_fresh: bool


class RowKeys(NamedTuple):
    """Keys that some queries of a row see.

    Attributes:
        key, value: [K, l, Dk] and [K, l, Dv]
        first: absolute position of the first.
        bias: added to the scores. [H, n, l] or None
    """

    key: Tensor
    value: Tensor
    first: int
    bias: Tensor | None = None


@dataclass(slots=True)
class RowsMetadata:
    """What the layers of one group share in a step.

    Attributes:
        batch, group: where the rows come from.
        window: of the group.
        rows: the rows that are attended to one by one.
        masks: additive masks that the first layer built for the others, by (queries, first query, first key).
    """

    batch: StepBatch
    group: int
    window: int | None
    rows: list[Row]
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    _all_rows: list[Row] | None = None
    _slots: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def all_rows(self) -> list[Row]:
        """Return every row of the step (for layers that need gathered keys)."""
        if len(self.rows) == self.batch.num_rows:
            return self.rows
        if self._all_rows is None:
            self._all_rows = make_rows(self.batch, self.group)
        return self._all_rows

    def slots(self, num_kv_heads: int, num_slots: int) -> Tensor:
        """Return where new tokens go in storage flattened to [K * B * S, D]: [K * T]."""
        slots = self._slots.get((num_kv_heads, num_slots))
        if slots is None:
            slots = head_index(self.batch.groups[self.group].slots, num_kv_heads, num_slots).flatten()
            self._slots[num_kv_heads, num_slots] = slots
        return slots

    def mask(self, num_queries: int, first_query: int, num_keys: int, first_key: int) -> Tensor:
        """Return the additive causal mask of a part of a chunk: [num_queries, num_keys]."""
        place = (num_queries, first_query, first_key)
        mask = self.masks.get(place)
        if mask is None:
            batch = self.batch
            visible = causal_mask(first_query, num_queries, first_key, num_keys, self.window, batch.device)
            mask = self.masks[place] = additive(visible, batch.dtype)
        return mask


def make_rows(batch: StepBatch, group: int, first: int = 0) -> list[Row]:
    """Build the rows from index `first` on."""
    tables = batch.groups[group]
    bounds = tables.page_starts.tolist()
    offset = bounds[first]
    pages = torch.from_numpy(tables.pages[offset:].astype(np.int64)).to(batch.device)
    starts, key_starts = batch.starts.tolist(), tables.key_starts.tolist()
    computed, lengths = batch.computed.tolist(), batch.lengths.tolist()
    rows = []
    for r in range(first, batch.num_rows):
        blocks = tables.pages[bounds[r] : bounds[r + 1]]
        first_block = int(blocks[0]) if bool((np.diff(blocks) == 1).all()) else None
        own_pages = pages[bounds[r] - offset : bounds[r + 1] - offset]
        is_fresh = computed[r] == 0
        rows.append(
            Row(starts[r], starts[r + 1], computed[r], key_starts[r], lengths[r], own_pages, first_block, is_fresh)
        )
    return rows


def head_index(index: Tensor, num_kv_heads: int, stride: int) -> Tensor:
    """Repeat an index for every head of storage whose heads lie `stride` apart: [..., n] -> [..., K, n]."""
    heads = torch.arange(num_kv_heads, device=index.device) * stride
    return index.unsqueeze(-2) + heads.unsqueeze(-1)


def causal_mask(
    first_query: int, num_queries: int, first_key: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """True where a query may look: not ahead, and within the window. -> [num_queries, num_keys] bool."""
    queries = torch.arange(first_query, first_query + num_queries, device=device)[:, None]
    keys = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is true, else minus infinity."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


class TorchBackend:
    """Base of the plain torch backends: they differ in how they attend."""

    name = "torch"
    capabilities = Capabilities(devices=("cpu", "cuda", "mps", "xpu"))

    def allocate(
        self, spec: LayerSpec, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> PagedStorage:
        """Make the zeroed pages of one layer (on the CPU the memory is touched when it is first used)."""
        shape = (spec.num_kv_heads, num_blocks, page_size)
        return PagedStorage(
            torch.zeros(*shape, spec.key_dim, dtype=dtype, device=device),
            torch.zeros(*shape, spec.value_dim, dtype=dtype, device=device),
        )

    def copy_block(self, storage: PagedStorage, source: int, target: int) -> None:
        """Copy one physical block within a layer."""
        storage.key[:, target].copy_(storage.key[:, source])
        storage.value[:, target].copy_(storage.value[:, source])

    def prepare(self, batch: StepBatch, group: int) -> Any:
        """Make the rows of this group; valid for this step only."""
        return RowsMetadata(batch, group, batch.groups[group].window, make_rows(batch, group))

    def write(self, storage: PagedStorage, metadata: RowsMetadata, key: Tensor, value: Tensor) -> None:
        """Store new keys and values. key [T, K, Dk], value [T, K, Dv]."""
        num_kv_heads, num_blocks, page_size, _ = storage.key.shape
        slots = metadata.slots(num_kv_heads, num_blocks * page_size)
        for pages, new in ((storage.key, key), (storage.value, value)):
            pages.flatten(0, 2).index_copy_(0, slots, new.transpose(0, 1).reshape(-1, new.shape[-1]))

    def gather(self, storage: PagedStorage, metadata: RowsMetadata) -> tuple[Tensor, Tensor]:
        """Return the visible keys and values of all rows, concatenated: [K, sum of L, Dk], [K, sum of L, Dv]."""
        rows = [self._row_keys(storage, row) for row in metadata.all_rows()]
        return torch.cat([row.key for row in rows], 1), torch.cat([row.value for row in rows], 1)

    def attend(self, attention: Attention, storage: PagedStorage, metadata: RowsMetadata) -> Tensor:
        """Attend after `write`, one row after the other: [T, H, Dv]."""
        out = _empty_like_values(attention)
        self._attend_rows(attention, storage, metadata, out)
        return out

    def attend_gathered(self, attention: Attention, metadata: RowsMetadata) -> Tensor:
        """Attend over gathered keys, one row after the other: [T, H, Dv]."""
        out, offset = _empty_like_values(attention), 0
        for row in metadata.all_rows():
            own = slice(offset, offset + row.length - row.key_start)
            bias = None if attention.bias is None else attention.bias[:, row.start : row.stop, own]
            keys = RowKeys(attention.key[:, own], attention.value[:, own], row.key_start, bias)
            self._attend_row(attention, metadata, row, keys, out)
            offset = own.stop
        return out

    def _row_keys(self, storage: PagedStorage, row: Row) -> RowKeys:
        """Gather one row's visible keys and values."""
        count = row.length - row.key_start
        if row.first_block is not None:
            blocks = slice(row.first_block, row.first_block + len(row.pages))
            key, value = storage.key[:, blocks], storage.value[:, blocks]
        else:
            key, value = storage.key.index_select(1, row.pages), storage.value.index_select(1, row.pages)
        # What lies behind the last key is of whoever had the page before.
        return RowKeys(key.flatten(1, 2)[:, :count], value.flatten(1, 2)[:, :count], row.key_start)

    def _attend_rows(self, attention: Attention, storage: PagedStorage, metadata: RowsMetadata, out: Tensor) -> None:
        """Fill the rows' parts of `out`, one row after the other."""
        for row in metadata.rows:
            if row.is_fresh:
                own = slice(row.start, row.stop)
                keys = RowKeys(attention.key[own].transpose(0, 1), attention.value[own].transpose(0, 1), 0)
            else:
                keys = self._row_keys(storage, row)
            self._attend_row(attention, metadata, row, keys, out)

    def _attend_row(self, attention: Attention, metadata: RowsMetadata, row: Row, keys: RowKeys, out: Tensor) -> None:
        """Attend with one row's queries to its keys and fill its part of `out`, in parts if it is long."""
        num_queries = row.stop - row.start
        step = max(1, min(num_queries, MAX_SCORES // max(keys.key.shape[1], 1)))
        for begin in range(0, num_queries, step):
            end = min(begin + step, num_queries)
            first = row.first_query + begin
            low = keys.first if metadata.window is None else max(keys.first, first - metadata.window + 1)
            seen = slice(low - keys.first, row.first_query + end - keys.first)
            bias = None if keys.bias is None else keys.bias[:, begin:end, seen]
            part = RowKeys(keys.key[:, seen], keys.value[:, seen], low, bias)
            queries = slice(row.start + begin, row.start + end)
            out[queries] = self._attend_part(attention, metadata, attention.query[queries], first, part)

    def _attend_part(
        self, attention: Attention, metadata: RowsMetadata, query: Tensor, first: int, keys: RowKeys
    ) -> Tensor:
        """Attend with some queries of a row [n, H, Dk], the first at this position: [n, H, Dv].

        The keys end at the last query, and begin no earlier than the first query sees.
        """
        q = group_heads(query, keys.key.shape[0])
        mask = metadata.mask(len(query), first, keys.key.shape[1], keys.first) if len(query) > 1 else None
        if keys.bias is not None:
            bias = keys.bias.reshape(*q.shape[:3], -1)
            mask = bias if mask is None else bias + mask
        attended = explicit_attention(attention.spec, q, keys.key, keys.value, mask, attention.sinks)
        return attended.flatten(0, 1).transpose(0, 1)


def _empty_like_values(attention: Attention) -> Tensor:
    return attention.query.new_empty(*attention.query.shape[:2], attention.value.shape[-1])


def group_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """Put the query heads that share keys side by side: [n, H, D] -> [K, G, n, D]."""
    num_queries, num_heads, head_dim = query.shape
    return query.transpose(0, 1).reshape(num_kv_heads, num_heads // num_kv_heads, num_queries, head_dim)


def explicit_attention(
    spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out, softmax in fp32; scaling, soft cap, mask and sinks in the order of the models.

    Args:
        spec: scaling and softcap are taken from it.
        query: [..., K, G, n, D]
        key: [..., K, l, D]
        value: [..., K, l, Dv]
        mask: additive, broadcastable to [..., K, G, n, l]; None lets everything through.
        sinks: [H] or None.

    Returns:
        [..., K, G, n, Dv]
    """
    lead, (num_groups, num_queries) = query.shape[:-3], query.shape[-3:-1]
    folded = query.flatten(-3, -2)  # [..., K, G * n, D]: the query heads of a group share their keys
    scores = torch.matmul(folded, key.transpose(-1, -2)) * spec.scaling
    scores = scores.view(*lead, num_groups, num_queries, -1)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        columns = sinks.to(scores.dtype).view(-1, num_groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, columns], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights = weights.to(value.dtype).flatten(-3, -2)
    return torch.matmul(weights, value).view(*lead, num_groups, num_queries, -1)
