"""torch's scaled_dot_product_attention without a dense cross-request mask.

Decode rows are padded into buckets of similar length, the query group is folded into query rows, and the page indices
of a bucket are made once per step for all its layers. On the CPU a bucket is two batched products and an fp32 softmax:
SDPA takes three to five times as long there for so few queries (the error of the logits is the same). Prompt chunks go
through SDPA one sequence after the other. Soft caps and sinks, which SDPA does not know, take the written-out path.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from aiocb.attention.base import Attention, StepBatch
from aiocb.attention.paged import (
    PagedStorage,
    RowKeys,
    RowsMetadata,
    TorchBackend,
    additive,
    explicit_attention,
    head_index,
    make_rows,
)

__all__ = ["SdpaBackend"]

MAX_WASTE = 32
"""Padding pages that a bucket may hold: about what the launches of one more bucket cost (measured)."""


@dataclass(slots=True)
class Bucket:
    """Decode rows of similar length (N rows, P pages, L = P * S keys).

    Attributes:
        size: N.
        rows: their packed tokens, None for "all tokens of the step". [N] int64
        pages: block of each row and page, padded with the null block. [N, P] int64
        mask: additive, None when there is nothing to hide. [N, 1, 1, 1, L]
        stale: row and slot of what lies behind a row's last key in its last page: of whoever had the page before.
            [n], [n]
        only: for a single row: its first block when its blocks follow each other, and the range of its keys.
    """

    size: int
    rows: Tensor | None
    pages: Tensor
    mask: Tensor | None
    stale: tuple[Tensor, Tensor]
    only: tuple[int | None, int, int] | None
    _indices: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _stale: dict[int, Tensor] = field(default_factory=dict)

    def index(self, num_kv_heads: int, num_blocks: int) -> Tensor:
        """Return which pages to take from storage flattened to [K * B, S * D]: [N * K * P]."""
        index = self._indices.get((num_kv_heads, num_blocks))
        if index is None:
            index = head_index(self.pages, num_kv_heads, num_blocks).flatten()
            self._indices[num_kv_heads, num_blocks] = index
        return index

    def clean(self, taken: Tensor) -> None:
        """Zero the stale slots of gathered pages [N, K, L, D]: hidden by the mask, but 0 times NaN is NaN."""
        rows, slots = self.stale
        if not len(rows):
            return
        num_kv_heads, length, head_dim = taken.shape[1:]
        index = self._stale.get(num_kv_heads)
        if index is None:
            first = rows * num_kv_heads * length + slots
            index = self._stale[num_kv_heads] = head_index(first, num_kv_heads, length).flatten()
        taken.view(-1, head_dim).index_fill_(0, index, 0.0)


@dataclass(slots=True)
class SdpaMetadata(RowsMetadata):
    """Prompt chunks in `rows`, decode rows in `buckets`."""

    buckets: tuple[Bucket, ...] = ()


class SdpaBackend(TorchBackend):
    """Bucketed decode, and per-sequence prefill through torch's SDPA."""

    name = "sdpa"

    def __init__(self) -> None:
        self._workspace: dict[str, Tensor] = {}

    def prepare(self, batch: StepBatch, group: int) -> SdpaMetadata:
        """Make rows and buckets of this group; valid for this step only."""
        rows = make_rows(batch, group, batch.num_decodes) if batch.num_decodes < batch.num_rows else []
        return SdpaMetadata(batch, group, batch.groups[group].window, rows, buckets=_buckets(batch, group))

    def attend(self, attention: Attention, storage: PagedStorage, metadata: RowsMetadata) -> Tensor:
        """Attend after `write`: [T, H, Dv]."""
        assert isinstance(metadata, SdpaMetadata)
        if len(metadata.buckets) == 1 and metadata.buckets[0].rows is None:
            return self._attend_bucket(attention, storage, metadata.buckets[0], attention.query)
        out = attention.query.new_empty(*attention.query.shape[:2], attention.value.shape[-1])
        for bucket in metadata.buckets:
            assert bucket.rows is not None
            query = attention.query.index_select(0, bucket.rows)
            out.index_copy_(0, bucket.rows, self._attend_bucket(attention, storage, bucket, query))
        self._attend_rows(attention, storage, metadata, out)
        return out

    def _take(self, name: str, pages: Tensor, bucket: Bucket) -> Tensor:
        """Gather a bucket's pages [K, B, S, D] -> [N, K, L, D]; valid until the next call with this name."""
        num_kv_heads, num_blocks, page_size, head_dim = pages.shape
        if bucket.only is not None:
            first_block, low, high = bucket.only
            if first_block is not None:
                block = first_block * page_size
                return pages.flatten(1, 2)[:, block + low : block + high].unsqueeze(0)
        index = bucket.index(num_kv_heads, num_blocks)
        row = page_size * head_dim
        # One buffer for all layers: a fresh allocation of this size would be mapped and faulted in every time.
        buffer = self._workspace.get(name)
        if buffer is None or buffer.numel() < len(index) * row or buffer.dtype != pages.dtype:
            buffer = torch.empty(len(index) * row * 5 // 4, dtype=pages.dtype, device=pages.device)
            self._workspace[name] = buffer
        taken = buffer[: len(index) * row].view(len(index), row)
        torch.index_select(pages.view(-1, row), 0, index, out=taken)
        keys = taken.view(bucket.size, num_kv_heads, -1, head_dim)
        if bucket.only is not None:
            return keys[:, :, bucket.only[1] : bucket.only[2]]
        bucket.clean(keys)
        return keys

    def _attend_bucket(self, attention: Attention, storage: PagedStorage, bucket: Bucket, query: Tensor) -> Tensor:
        """Attend with one query per row. query [N, H, Dk] -> [N, H, Dv]."""
        k, v = self._take("key", storage.key, bucket), self._take("value", storage.value, bucket)  # [N, K, L, D]
        q = query.reshape(bucket.size, k.shape[1], -1, k.shape[3])  # [N, K, G, Dk]
        spec, sinks = attention.spec, attention.sinks
        if query.device.type != "cpu" and spec.softcap is None and sinks is None:
            mask = None if bucket.mask is None else bucket.mask.squeeze(1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scaling).flatten(1, 2)
        return explicit_attention(spec, q.unsqueeze(-2), k, v, bucket.mask, sinks).squeeze(-2).flatten(1, 2)

    def _attend_part(
        self, attention: Attention, metadata: RowsMetadata, query: Tensor, first: int, keys: RowKeys
    ) -> Tensor:
        if attention.spec.softcap is not None or attention.sinks is not None or keys.bias is not None:
            return super()._attend_part(attention, metadata, query, first, keys)
        num_queries, num_keys, window = len(query), keys.key.shape[1], metadata.window
        is_causal = num_queries > 1 and num_queries == num_keys and (window is None or num_keys <= window)
        mask = None
        if num_queries > 1 and not is_causal:
            mask = metadata.mask(num_queries, first, num_keys, keys.first)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),  # [1, H, n, D]
            keys.key.unsqueeze(0),  # [1, K, l, D]
            keys.value.unsqueeze(0),
            attn_mask=mask,
            is_causal=is_causal,
            scale=attention.spec.scaling,
            enable_gqa=query.shape[1] != keys.key.shape[0],
        )
        return attended[0].transpose(0, 1)


def _buckets(batch: StepBatch, group: int) -> tuple[Bucket, ...]:
    """Sort decode rows by length and cut where the padding would outweigh another launch."""
    num_decodes = batch.num_decodes
    if num_decodes == 0:
        return ()
    counts = np.diff(batch.groups[group].page_starts[: num_decodes + 1])
    order = np.argsort(-counts, kind="stable")
    sizes = counts[order].tolist()
    bounds, waste, widest = [0], 0, sizes[0]
    for index, size in enumerate(sizes):
        waste += widest - size
        if waste > MAX_WASTE:
            bounds.append(index)
            waste, widest = 0, size
    bounds.append(num_decodes)
    if len(bounds) == 2:
        is_all = num_decodes == batch.num_rows
        return (_bucket(batch, group, np.arange(num_decodes), sizes[0], is_all),)
    return tuple(
        _bucket(batch, group, np.sort(order[begin:end]), sizes[begin], False)
        for begin, end in itertools.pairwise(bounds)
    )


def _bucket(batch: StepBatch, group: int, members: npt.NDArray[np.int64], num_pages: int, is_all: bool) -> Bucket:
    """Pad the members' pages to `num_pages`, and hide what a row must not see."""
    tables, device = batch.groups[group], batch.device
    first = tables.page_starts[members]
    columns = np.arange(num_pages)
    is_page = columns < (tables.page_starts[members + 1] - first)[:, None]
    pages = np.where(is_page, tables.pages[np.minimum(first[:, None] + columns, len(tables.pages) - 1)], 0)
    key_starts, lengths = tables.key_starts[members], batch.lengths[members]
    stops = lengths - key_starts  # behind each row's last key, within its padded pages [N]
    lows = np.zeros_like(stops) if tables.window is None else np.maximum(lengths - tables.window - key_starts, 0)
    mask, only = None, None
    places = np.arange(num_pages * batch.page_size)
    page_ends = -(-stops // batch.page_size) * batch.page_size
    stale = np.nonzero((places >= stops[:, None]) & (places < page_ends[:, None]))
    if len(members) == 1:
        first_block = int(pages[0, 0]) if bool((np.diff(pages[0]) == 1).all()) else None
        only = (first_block, int(lows[0]), int(stops[0]))
    elif lows.any() or (stops != num_pages * batch.page_size).any():
        visible = (places >= lows[:, None]) & (places < stops[:, None])
        mask = additive(torch.from_numpy(visible), batch.dtype).to(device).view(len(members), 1, 1, 1, -1)
    rows = None if is_all else torch.from_numpy(members).to(device)
    return Bucket(
        len(members),
        rows,
        torch.from_numpy(pages.astype(np.int64)).to(device),
        mask,
        (torch.from_numpy(stale[0]).to(device), torch.from_numpy(stale[1]).to(device)),
        only,
    )
