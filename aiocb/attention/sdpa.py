"""torch's scaled_dot_product_attention without a dense cross-request mask.

Decode rows are padded into buckets of similar length, the query group is folded into query rows, and the page indices
of a bucket are made once per step for all its layers. On the CPU a bucket is two batched products and an fp32 softmax:
SDPA takes three to five times as long there for so few queries (the error of the logits is the same). Prompt chunks,
and rows that are like no other, go through SDPA one sequence after the other. Soft caps, sinks and slopes, which SDPA
does not know, take the written-out path.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    alibi_bias,
    explicit_attention,
)

__all__ = ["SdpaBackend"]

MAX_WASTE = 32
"""Padding pages that a bucket may hold: about what the launches of one more bucket cost (measured on the CPU)."""

MAX_DEVICE_WASTE = 4096
"""The same on an accelerator, where a launch costs as much as the reading of hundreds of pages, and most rows fit."""


@dataclass(slots=True)
class Bucket:
    """Decode rows of similar length (N rows, P pages, L = P * S keys).

    Attributes:
        size: N.
        rows: their packed tokens, None for "all tokens of the step". [N] int64
        pages: block of each row and page, padded with the null block. [N * P] int64
        mask: additive, None when there is nothing to hide. [1, N, 1, L]
        stale: places in the gathered [N * L] behind a row's last key in its last page: of whoever had the page before.
        queries, first_keys: position of each row's query, and of its first gathered key. [N] int64, on the host
    """

    size: int
    rows: Tensor | None
    pages: Tensor
    mask: Tensor | None
    stale: Tensor
    queries: npt.NDArray[np.int64]
    first_keys: npt.NDArray[np.int64]
    _positions: tuple[Tensor, Tensor] | None = None

    def bias(self, attention: Attention, num_kv_heads: int, num_keys: int) -> Tensor | None:
        """What is added to the scores of a layer: the mask, and what slopes make of distances. [K, N, G, 1, L]."""
        mask = None if self.mask is None else self.mask.unsqueeze(-2)
        if attention.slopes is None:
            return mask
        if self._positions is None:  # the first layer with slopes makes them for all
            device = attention.query.device
            first_keys = torch.from_numpy(self.first_keys).to(device).view(-1, 1, 1, 1)
            queries = torch.from_numpy(self.queries).to(device).view(-1, 1, 1, 1)
            self._positions = queries, first_keys + torch.arange(num_keys, device=device)
        slopes = attention.slopes.view(num_kv_heads, 1, -1, 1, 1)
        bias = alibi_bias(attention.spec, slopes, *self._positions)
        return bias if mask is None else bias + mask


@dataclass(slots=True)
class SdpaMetadata(RowsMetadata):
    """Decode rows in `buckets`, the others `alone`."""

    buckets: tuple[Bucket, ...] = ()


class SdpaBackend(TorchBackend):
    """Bucketed decode, and per-sequence prefill through torch's SDPA."""

    name = "sdpa"

    def __init__(self) -> None:
        self._workspace: dict[str, Tensor] = {}

    def prepare(self, batch: StepBatch, group: int) -> SdpaMetadata:
        """Make the buckets of this group; valid for this step only."""
        tables, num_decodes = batch.groups[group], batch.num_decodes
        max_waste = MAX_WASTE if batch.device.type == "cpu" else MAX_DEVICE_WASTE
        parts = _alike(np.diff(tables.page_starts[: num_decodes + 1]), max_waste) if num_decodes else []
        alone = [*(int(part[0]) for part in parts if len(part) == 1), *range(num_decodes, batch.num_rows)]
        buckets = tuple(_bucket(batch, group, part) for part in parts if len(part) > 1)
        return SdpaMetadata(batch, tables, alone, buckets=buckets)

    def attend(self, attention: Attention, storage: PagedStorage, metadata: RowsMetadata) -> Tensor:
        """Attend after `write`: [T, H, Dv]."""
        assert isinstance(metadata, SdpaMetadata)
        if len(metadata.buckets) == 1 and metadata.buckets[0].rows is None:
            return self._attend_bucket(attention, storage, metadata.buckets[0], attention.query)
        out = super().attend(attention, storage, metadata)
        for bucket in metadata.buckets:
            assert bucket.rows is not None
            query = attention.query.index_select(0, bucket.rows)
            out.index_copy_(0, bucket.rows, self._attend_bucket(attention, storage, bucket, query))
        return out

    def _take(self, name: str, pages: Tensor, bucket: Bucket) -> Tensor:
        """Gather a bucket's pages [K, B, S, D] -> [K, N, L, D]; valid until the next call with this name."""
        num_kv_heads, _, page_size, head_dim = pages.shape
        shape = (num_kv_heads, len(bucket.pages), page_size * head_dim)
        size = shape[0] * shape[1] * shape[2]
        # One buffer for all layers: a fresh allocation of this size would be mapped and faulted in every time.
        buffer = self._workspace.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != pages.dtype:
            buffer = self._workspace[name] = torch.empty(size * 5 // 4, dtype=pages.dtype, device=pages.device)
        taken = buffer[:size].view(shape)
        torch.index_select(pages.flatten(2), 1, bucket.pages, out=taken)
        # They are hidden by the mask, but 0 times NaN is NaN.
        taken.view(num_kv_heads, -1, head_dim).index_fill_(1, bucket.stale, 0.0)
        return taken.view(num_kv_heads, bucket.size, -1, head_dim)

    def _attend_bucket(self, attention: Attention, storage: PagedStorage, bucket: Bucket, query: Tensor) -> Tensor:
        """Attend with one query per row. query [N, H, Dk] -> [N, H, Dv]."""
        k, v = self._take("key", storage.key, bucket), self._take("value", storage.value, bucket)  # [K, N, L, D]
        q = query.view(bucket.size, len(k), -1, k.shape[-1]).transpose(0, 1)  # [K, N, G, Dk]
        spec, sinks = attention.spec, attention.sinks
        if query.device.type != "cpu" and spec.softcap is None and sinks is None and attention.slopes is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=spec.scaling)
        else:
            bias = bucket.bias(attention, len(k), k.shape[2])
            attended = explicit_attention(spec, q.unsqueeze(-2), k, v, bias, sinks).squeeze(-2)
        return attended.transpose(0, 1).flatten(1, 2)

    def _attend_part(
        self, attention: Attention, metadata: RowsMetadata, query: Tensor, first: int, keys: RowKeys
    ) -> Tensor:
        num_queries, num_keys, window = len(query), keys.key.shape[1], metadata.tables.window
        is_slow = num_queries == 1 and query.device.type == "cpu"
        if is_slow or attention.spec.softcap is not None or attention.sinks is not None or keys.bias is not None:
            return super()._attend_part(attention, metadata, query, first, keys)
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


def _alike(num_pages: npt.NDArray[np.int64], max_waste: int) -> list[npt.NDArray[np.int64]]:
    """Sort decode rows by length and cut where the padding would outweigh another launch; indices of each part."""
    order = np.argsort(-num_pages, kind="stable")
    widest, waste, cuts = int(num_pages[order[0]]), 0, []
    for index, size in enumerate(num_pages[order].tolist()):
        waste += widest - size
        if waste > max_waste:
            cuts.append(index)
            widest, waste = size, 0
    return [np.sort(part) for part in np.split(order, cuts)]


def _bucket(batch: StepBatch, group: int, members: npt.NDArray[np.int64]) -> Bucket:
    """Pad the members' pages to as many as the longest has, and hide what a row must not see."""
    tables, device, page_size = batch.groups[group], batch.device, batch.page_size
    first = tables.page_starts[members]
    counts = tables.page_starts[members + 1] - first
    columns = np.arange(counts.max())
    pages = np.where(
        columns < counts[:, None], tables.pages[np.minimum(first[:, None] + columns, len(tables.pages) - 1)], 0
    )
    places = np.arange(len(columns) * page_size)
    key_starts, lengths = tables.key_starts[members], batch.lengths[members]
    stops = lengths - key_starts  # behind each row's last key, within its padded pages [N]
    is_key = places < stops[:, None]
    visible = is_key & (places >= (tables.first_visible(lengths - 1) - key_starts)[:, None])
    stale = np.flatnonzero(~is_key & (places < (counts * page_size)[:, None]))
    mask = None
    if not visible.all():
        mask = additive(torch.from_numpy(visible), batch.dtype).to(device).view(1, len(members), 1, -1)
    return Bucket(
        len(members),
        None if len(members) == batch.num_rows else torch.from_numpy(members).to(device),
        torch.from_numpy(pages.astype(np.int64)).flatten().to(device),
        mask,
        torch.from_numpy(stale).to(device),
        lengths - 1,
        key_starts,
    )
