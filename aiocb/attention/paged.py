"""Pages in torch tensors, shared by the backends that are plain torch: storage, writes, gathers and rows.

Storage of one layer (legend in `attention.base`):

    key   [B, S, K, Dk]      a page = S tokens of one layer; slot = block * S + offset
    value [B, S, K, Dv]      block 0 is the null block: zero, never written, padding of every table
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aiocb.attention.base import Capabilities, LayerSpec, StepBatch

__all__ = ["MAX_SCORES", "PagedStorage", "Row", "RowsMetadata", "TorchBackend", "causal_mask"]

MAX_SCORES = 1 << 24
"""Scores (queries x keys) of one sequence that are held at once; longer chunks are attended to in parts."""


class PagedStorage(NamedTuple):
    """One layer's pages."""

    key: Tensor  # [B, S, K, Dk]
    value: Tensor  # [B, S, K, Dv]


class Row(NamedTuple):
    """One request's part of a step in one group.

    Attributes:
        start, stop: its packed tokens.
        first_query: absolute position of its first new token.
        key_start: absolute position of the first key of its first page.
        length: absolute position behind its last key.
        pages: its visible blocks, on the device. [P] int64
        is_fresh: nothing was in the cache: the step's own keys are all keys.
    """

    start: int
    stop: int
    first_query: int
    key_start: int
    length: int
    pages: Tensor
    is_fresh: bool


@dataclass(slots=True)
class RowsMetadata:
    """What the layers of one group share in a step.

    Attributes:
        batch, group: where the rows come from.
        window: of the group.
        rows: the rows that are attended to one by one.
        masks: what the first layer built for the others.
    """

    batch: StepBatch
    group: int
    window: int | None
    rows: list[Row]
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _all_rows: list[Row] | None = None

    def all_rows(self) -> list[Row]:
        """Return every row of the step (for layers that need gathered keys)."""
        if len(self.rows) == self.batch.num_rows:
            return self.rows
        if self._all_rows is None:
            self._all_rows = make_rows(self.batch, self.group)
        return self._all_rows


def make_rows(batch: StepBatch, group: int, first: int = 0) -> list[Row]:
    """Build the rows from index `first` on."""
    tables = batch.groups[group]
    pages = torch.from_numpy(tables.pages.astype(np.int64)).to(batch.device)
    starts, bounds = batch.starts.tolist(), tables.page_starts.tolist()
    computed, lengths, key_starts = batch.computed.tolist(), batch.lengths.tolist(), tables.key_starts.tolist()
    return [
        Row(
            starts[r],
            starts[r + 1],
            computed[r],
            key_starts[r],
            lengths[r],
            pages[bounds[r] : bounds[r + 1]],
            computed[r] == 0,
        )
        for r in range(first, batch.num_rows)
    ]


def causal_mask(
    first_query: int, num_queries: int, first_key: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """True where a query may look: not ahead, and within the window. -> [num_queries, num_keys] bool"""
    queries = torch.arange(first_query, first_query + num_queries, device=device)[:, None]
    keys = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask


class TorchBackend:
    """Base of the plain torch backends: they differ in how they attend."""

    name = "torch"
    capabilities = Capabilities(devices=("cpu", "cuda", "mps", "xpu"))

    def block_bytes(self, spec: LayerSpec, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of this layer."""
        return page_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * dtype.itemsize

    def allocate(
        self, spec: LayerSpec, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> PagedStorage:
        """Make the zeroed pages of one layer (on the CPU the memory is touched when it is first used)."""
        shape = (num_blocks, page_size, spec.num_kv_heads)
        return PagedStorage(
            torch.zeros(*shape, spec.key_dim, dtype=dtype, device=device),
            torch.zeros(*shape, spec.value_dim, dtype=dtype, device=device),
        )

    def copy_block(self, storage: PagedStorage, source: int, target: int) -> None:
        """Copy one physical block within a layer."""
        storage.key[target].copy_(storage.key[source])
        storage.value[target].copy_(storage.value[source])

    def write(self, storage: PagedStorage, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new keys and values. key [T, K, Dk], value [T, K, Dv], slots [T]."""
        storage.key.flatten(0, 1).index_copy_(0, slots, key)
        storage.value.flatten(0, 1).index_copy_(0, slots, value)

    def prepare(self, batch: StepBatch, group: int) -> Any:
        """Make the rows of this group; valid for this step only."""
        return RowsMetadata(batch, group, batch.groups[group].window, make_rows(batch, group))

    def gather(self, storage: PagedStorage, metadata: RowsMetadata) -> tuple[Tensor, Tensor]:
        """Return the visible keys and values of all rows, concatenated: [sum of L, K, Dk], [sum of L, K, Dv]."""
        keys, values = [], []
        for row in metadata.all_rows():
            key, value = row_pages(storage, row)
            keys.append(key)
            values.append(value)
        return torch.cat(keys), torch.cat(values)

    def attend(
        self,
        spec: LayerSpec,
        storage: PagedStorage,
        metadata: RowsMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend after `write`, one row after the other. query [T, H, Dk] -> [T, H, Dv]."""
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        for row in metadata.rows:
            if row.is_fresh:
                k, v, first_key = key[row.start : row.stop], value[row.start : row.stop], 0
            else:
                (k, v), first_key = row_pages(storage, row), row.key_start
            self.attend_row(spec, metadata, row, query, k, v, first_key, sinks, out)
        return out

    def attend_gathered(
        self, spec: LayerSpec, metadata: RowsMetadata, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend over gathered keys. query [T, H, D], key [sum of L, K, D], value [sum of L, K, Dv] -> [T, H, Dv]."""
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        offset = 0
        for row in metadata.all_rows():
            count = row.length - row.key_start
            k, v = key[offset : offset + count], value[offset : offset + count]
            self.attend_row(spec, metadata, row, query, k, v, row.key_start, sinks, out)
            offset += count
        return out

    def attend_row(
        self,
        spec: LayerSpec,
        metadata: RowsMetadata,
        row: Row,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first_key: int,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """Attend with one row's queries to its keys [L, K, D] and fill its part of `out`, in parts if it is long."""
        num_queries, num_keys = row.stop - row.start, key.shape[0]
        step = max(1, min(num_queries, MAX_SCORES // max(num_keys, 1)))
        for begin in range(0, num_queries, step):
            end = min(begin + step, num_queries)
            position = row.first_query + begin
            low = first_key
            if metadata.window is not None:
                low = max(low, position - metadata.window + 1)
            high = row.first_query + end
            k, v = key[low - first_key : high - first_key], value[low - first_key : high - first_key]
            part = slice(row.start + begin, row.start + end)
            self._attend_part(spec, metadata, query[part], k, v, position, low, sinks, out[part])

    def _attend_part(
        self,
        spec: LayerSpec,
        metadata: RowsMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first_query: int,
        first_key: int,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """Fill out [n, H, Dv] from query [n, H, D], key [l, K, D], value [l, K, Dv]; keys end at the last query."""
        raise NotImplementedError


def row_pages(storage: PagedStorage, row: Row) -> tuple[Tensor, Tensor]:
    """Gather one row's visible keys and values: [L, K, Dk], [L, K, Dv]."""
    count = row.length - row.key_start
    key = storage.key.index_select(0, row.pages).flatten(0, 1)[:count]
    value = storage.value.index_select(0, row.pages).flatten(0, 1)[:count]
    return key, value


def explicit_attention(
    spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out, softmax in fp32; scaling, soft cap, mask and sinks in the order of the models.

    Args:
        spec: scaling and softcap are taken from it.
        query: [..., K, G, n, D]
        key: [..., K, l, D]
        value: [..., K, l, Dv]
        mask: bool, broadcastable to [..., K, G, n, l]; None lets everything through.
        sinks: [H] or None.

    Returns:
        [..., K, G, n, Dv]
    """
    num_groups, num_queries = query.shape[-3], query.shape[-2]
    folded = query.flatten(-3, -2)  # [..., K, G * n, D]: the query heads of a group share their keys
    scores = torch.matmul(folded, key.transpose(-1, -2)).unflatten(-2, (num_groups, num_queries)) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        columns = sinks.to(scores.dtype).view(-1, num_groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, columns], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights = weights.to(value.dtype).flatten(-3, -2)
    return torch.matmul(weights, value).unflatten(-2, (num_groups, num_queries))
