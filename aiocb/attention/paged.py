"""Pages in torch tensors, shared by the backends that are plain torch: storage, writes, gathers and rows.

Storage of one layer (legend in `attention.base`):

    key   [K, B, S, Dk]      a page = S tokens of one layer; slot = block * S + offset
    value [K, B, S, Dv]      block 0 is the null block: zero, never written, padding of every table

Heads come first so that gathered pages are one [L, D] matrix per head: torch multiplies those five times as fast as
the strided ones that [B, S, K, D] would give (64 rows of 208 keys: 0.8 ms a layer instead of 3.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aiocb.attention.base import Attention, Capabilities, GroupTables, LayerSpec, StepBatch

__all__ = [
    "PagedStorage",
    "Row",
    "RowKeys",
    "RowsMetadata",
    "TorchBackend",
    "additive",
    "alibi_bias",
    "causal_mask",
    "explicit_attention",
    "row_attention",
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
        pages: its visible blocks: a slice where they follow each other, else [P] int64 on the device.
    """

    start: int
    stop: int
    first_query: int
    key_start: int
    length: int
    pages: Tensor | slice


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

    def biased(self, attention: Attention, first_query: int, num_queries: int) -> RowKeys:
        """Add what the layer's slopes, if it has any, make of the distances from these queries."""
        if attention.slopes is None:
            return self
        device = self.key.device
        queries = torch.arange(first_query, first_query + num_queries, device=device)[:, None]
        keys = torch.arange(self.first, self.first + self.key.shape[1], device=device)
        bias = alibi_bias(attention.spec, attention.slopes[:, None, None], queries, keys)
        return self._replace(bias=bias if self.bias is None else bias + self.bias)


@dataclass(slots=True)
class RowsMetadata:
    """What the layers of one group share in a step.

    Attributes:
        batch, tables: where the rows come from.
        alone: indices of the rows that are attended to one by one.
    """

    batch: StepBatch
    tables: GroupTables
    alone: Sequence[int]
    _rows: dict[int, Row] = field(default_factory=dict)
    _masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def row(self, index: int) -> Row:
        """Return a row of the step, made for the first layer that needs it."""
        if index not in self._rows:
            batch, tables = self.batch, self.tables
            blocks = tables.pages[tables.page_starts[index] : tables.page_starts[index + 1]]
            first = int(blocks[0])
            self._rows[index] = Row(
                int(batch.starts[index]),
                int(batch.starts[index + 1]),
                int(batch.computed[index]),
                int(tables.key_starts[index]),
                int(batch.lengths[index]),
                slice(first, first + len(blocks))
                if (np.diff(blocks) == 1).all()
                else torch.from_numpy(blocks.astype(np.int64)).to(batch.device),
            )
        return self._rows[index]

    def all_rows(self) -> list[Row]:
        """Return every row of the step (for layers that need gathered keys)."""
        return [self.row(index) for index in range(self.batch.num_rows)]

    def mask(self, num_queries: int, first_query: int, num_keys: int, first_key: int) -> Tensor:
        """Return the additive causal mask of a part of a chunk, shared by the layers: [num_queries, num_keys]."""
        place = (num_queries, first_query, first_key)
        if place not in self._masks:
            window, batch = self.tables.window, self.batch
            visible = causal_mask(first_query, num_queries, first_key, num_keys, window, batch.device)
            self._masks[place] = additive(visible, batch.dtype)
        return self._masks[place]


def causal_mask(
    first_query: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    window: int | None,
    device: torch.device,
    chunk: int | None = None,
) -> Tensor:
    """True where a query may look: not ahead, and within the window, or its chunk. -> [num_queries, num_keys] bool."""
    queries = torch.arange(first_query, first_query + num_queries, device=device)[:, None]
    keys = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    if chunk is not None:
        mask &= keys // chunk == queries // chunk
    return mask


def alibi_bias(spec: LayerSpec, slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What is added to the scores (see `Alibi`), in fp32; all are broadcast against each other."""
    if spec.alibi == "exact":
        return slopes * (keys - queries)
    near, far = ((slopes * at.bfloat16().float()).bfloat16().float() for at in (keys, queries))
    return (near - far) * spec.scaling


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is true, else minus infinity."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


class TorchBackend:
    """Explicit softmax in the model's own dtype, one sequence after the other: honours everything.

    The other plain torch backends differ from it in how they attend.
    """

    name = "eager"
    capabilities = Capabilities(has_chunks=True, has_alibi=True)

    def allocate(
        self, spec: LayerSpec, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> PagedStorage:
        """Make the zeroed pages of one layer (on the CPU the memory is touched when it is first used)."""
        shape = (spec.num_kv_heads, num_blocks, page_size)
        return PagedStorage(
            torch.zeros(*shape, spec.key_dim, dtype=dtype, device=device),
            torch.zeros(*shape, spec.value_dim, dtype=dtype, device=device),
        )

    def block_rows(self, storage: PagedStorage) -> tuple[Tensor, ...]:
        """Views of keys and values by block, [B, K, S, D]."""
        return tuple(pages.transpose(0, 1) for pages in storage)

    def copy_block(self, storage: PagedStorage, source: int, target: int) -> None:
        """Copy one physical block within a layer."""
        for pages in storage:
            pages[:, target].copy_(pages[:, source])

    def prepare(self, batch: StepBatch, group: int) -> RowsMetadata:
        """Make what the layers of this group share; valid for this step only."""
        return RowsMetadata(batch, batch.groups[group], range(batch.num_rows))

    def write(self, storage: PagedStorage, metadata: RowsMetadata, key: Tensor, value: Tensor) -> None:
        """Store new keys and values. key [T, K, Dk], value [T, K, Dv]."""
        for pages, new in zip(storage, (key, value), strict=True):
            pages.flatten(1, 2).index_copy_(1, metadata.tables.slots, new.transpose(0, 1))

    def gather(self, storage: PagedStorage, metadata: RowsMetadata) -> tuple[Tensor, Tensor]:
        """Return the visible keys and values of all rows, concatenated: [K, sum of L, Dk], [K, sum of L, Dv]."""
        rows = [_row_keys(storage, row) for row in metadata.all_rows()]
        return torch.cat([row.key for row in rows], 1), torch.cat([row.value for row in rows], 1)

    def attend(self, attention: Attention, storage: PagedStorage, metadata: RowsMetadata) -> Tensor:
        """Attend after `write`: [T, H, Dv]."""
        out = _empty_like_values(attention)
        for index in metadata.alone:
            row = metadata.row(index)
            if row.first_query == 0:  # nothing was in the cache: the step's own keys are all keys
                own = slice(row.start, row.stop)
                keys = RowKeys(attention.key[own].transpose(0, 1), attention.value[own].transpose(0, 1), 0)
            else:
                keys = _row_keys(storage, row)
            self._attend_row(attention, metadata, row, keys, out)
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

    def _attend_row(self, attention: Attention, metadata: RowsMetadata, row: Row, keys: RowKeys, out: Tensor) -> None:
        """Attend with one row's queries to its keys and fill its part of `out`, in parts if it is long.

        The queries of a part are of one chunk: it has no keys that only some of them see.
        """
        num_queries, tables = row.stop - row.start, metadata.tables
        step = max(1, min(num_queries, MAX_SCORES // max(keys.key.shape[1], 1)))
        end = 0
        while end < num_queries:
            begin, end = end, min(end + step, num_queries)
            first = row.first_query + begin
            if tables.chunk is not None:
                end = min(end, begin + tables.chunk - first % tables.chunk)
            low = max(keys.first, tables.first_visible(first))
            seen = slice(low - keys.first, row.first_query + end - keys.first)
            bias = None if keys.bias is None else keys.bias[:, begin:end, seen]
            part = RowKeys(keys.key[:, seen], keys.value[:, seen], low, bias).biased(attention, first, end - begin)
            queries = slice(row.start + begin, row.start + end)
            out[queries] = self._attend_part(attention, metadata, attention.query[queries], first, part)

    def _attend_part(
        self, attention: Attention, metadata: RowsMetadata, query: Tensor, first: int, keys: RowKeys
    ) -> Tensor:
        """Attend with some queries of a row [n, H, Dk], the first at this position: [n, H, Dv].

        The keys end at the last query, and begin no earlier than the first query sees.
        """
        mask = metadata.mask(len(query), first, keys.key.shape[1], keys.first) if len(query) > 1 else None
        return row_attention(attention.spec, query, keys, mask, attention.sinks)


def _row_keys(storage: PagedStorage, row: Row) -> RowKeys:
    """Gather one row's visible keys and values."""
    count = row.length - row.key_start
    if isinstance(row.pages, slice):
        key, value = (pages[:, row.pages] for pages in storage)
    else:
        key, value = (pages.index_select(1, row.pages) for pages in storage)
    # What lies behind the last key is of whoever had the page before.
    return RowKeys(key.flatten(1, 2)[:, :count], value.flatten(1, 2)[:, :count], row.key_start)


def _empty_like_values(attention: Attention) -> Tensor:
    return attention.query.new_empty(*attention.query.shape[:2], attention.value.shape[-1])


def row_attention(spec: LayerSpec, query: Tensor, keys: RowKeys, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Attend written out, for one request.

    Args:
        spec: scaling and softcap are taken from it.
        query: [n, H, Dk]
        keys: that it sees, with the bias.
        mask: additive, [n, l]; None lets everything through.
        sinks: [H] or None.

    Returns:
        [n, H, Dv]
    """
    num_kv_heads, num_queries, head_dim = len(keys.key), len(query), query.shape[-1]
    q = query.transpose(0, 1).reshape(num_kv_heads, -1, num_queries, head_dim)  # heads that share keys side by side
    if keys.bias is not None:
        bias = keys.bias.reshape(num_kv_heads, -1, num_queries, keys.key.shape[1])
        mask = bias if mask is None else bias + mask
    return explicit_attention(spec, q, keys.key, keys.value, mask, sinks).flatten(0, 1).transpose(0, 1)


def explicit_attention(
    spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out, softmax in fp32; scaling, soft cap, mask and sinks in the order of the models.

    Args:
        spec: scaling and softcap are taken from it.
        query: [K, ..., G, n, D]
        key: [K, ..., l, D]
        value: [K, ..., l, Dv]
        mask: additive, broadcastable to [K, ..., G, n, l]; None lets everything through.
        sinks: [H] or None.

    Returns:
        [K, ..., G, n, Dv]
    """
    rows = query.shape[:-1]
    folded = query.flatten(-3, -2)  # [K, ..., G * n, D]: the query heads of a group share their keys
    scores = (torch.matmul(folded, key.transpose(-1, -2)) * spec.scaling).view(*rows, -1)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        heads = sinks.to(scores.dtype).view(len(query), *(1,) * (query.dim() - 4), -1, 1, 1)
        scores = torch.cat([scores, heads.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.to(value.dtype).flatten(-3, -2)
    return torch.matmul(weights, value).view(*rows, -1)
