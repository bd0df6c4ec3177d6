"""torch's scaled_dot_product_attention without a dense cross-request mask.

Decode rows are padded into buckets of similar length, the query group is folded into query rows (measured: 1.5 ms a
layer where `enable_gqa` takes 8.2), and the page indices of a bucket are made once per step for all its layers.
Prompt chunks are attended to one sequence after the other. Soft caps and sinks, which SDPA does not know, take the
explicit path over the same buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aiocb.attention.base import LayerSpec, StepBatch
from aiocb.attention.paged import (
    PagedStorage,
    RowsMetadata,
    TorchBackend,
    causal_mask,
    explicit_attention,
    make_rows,
)

__all__ = ["SdpaBackend"]

MAX_WASTE = 48
"""Padding pages that a bucket may hold: about what the launches of one more bucket cost (measured)."""


@dataclass(slots=True)
class Bucket:
    """Decode rows of similar length.

    Attributes:
        rows: their packed tokens, None for "all of them in order". [N] int64
        pages: block of each row and page, padded with the null block. [N * P] int64
        contiguous: first block when there is one row whose blocks follow each other: a view instead of a gather.
        num_keys: keys to use, P * S when rows differ.
        mask: additive, None when there is no padding. [N, 1, 1, P * S]
    """

    size: int
    num_pages: int
    num_keys: int
    first_key: int
    rows: Tensor | None
    pages: Tensor
    contiguous: int | None
    mask: Tensor | None


@dataclass(slots=True)
class SdpaMetadata(RowsMetadata):
    """Prompt chunks in `rows`, decode rows in `buckets`."""

    buckets: tuple[Bucket, ...] = ()


class SdpaBackend(TorchBackend):
    """Bucketed decode and per-sequence prefill through torch's SDPA."""

    name = "sdpa"

    def __init__(self) -> None:
        self._workspace: dict[tuple[str, torch.dtype], Tensor] = {}

    def prepare(self, batch: StepBatch, group: int) -> SdpaMetadata:
        """Make rows and buckets of this group; valid for this step only."""
        rows = make_rows(batch, group, batch.num_decodes)
        return SdpaMetadata(batch, group, batch.groups[group].window, rows, buckets=_buckets(batch, group))

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
        """Attend after `write`. query [T, H, Dk], key and value as given to `write`, sinks [H] -> [T, H, Dv]."""
        assert isinstance(metadata, SdpaMetadata)
        if not metadata.rows and len(metadata.buckets) == 1 and metadata.buckets[0].rows is None:
            return self._attend_bucket(spec, storage, metadata.buckets[0], query, sinks)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        for bucket in metadata.buckets:
            if bucket.rows is None:
                out[: bucket.size] = self._attend_bucket(spec, storage, bucket, query[: bucket.size], sinks)
            else:
                attended = self._attend_bucket(spec, storage, bucket, query.index_select(0, bucket.rows), sinks)
                out.index_copy_(0, bucket.rows, attended)
        for row in metadata.rows:
            if row.is_fresh:
                k, v, first_key = key[row.start : row.stop], value[row.start : row.stop], 0
            else:
                count = row.length - row.key_start
                k = self._take("key", storage.key, row.pages)[:count]
                v = self._take("value", storage.value, row.pages)[:count]
                first_key = row.key_start
            self.attend_row(spec, metadata, row, query, k, v, first_key, sinks, out)
        return out

    def _take(self, name: str, pages: Tensor, blocks: Tensor) -> Tensor:
        # One buffer for all layers: a fresh allocation of this size would be mapped and faulted in every time.
        size = blocks.shape[0] * pages[0].numel()
        buffer = self._workspace.get((name, pages.dtype))
        if buffer is None or buffer.numel() < size or buffer.device != pages.device:
            buffer = torch.empty(size + size // 4, dtype=pages.dtype, device=pages.device)
            self._workspace[name, pages.dtype] = buffer
        out = buffer[:size].view(blocks.shape[0], *pages.shape[1:])
        torch.index_select(pages, 0, blocks, out=out)
        return out.flatten(0, 1)

    def _attend_bucket(
        self, spec: LayerSpec, storage: PagedStorage, bucket: Bucket, query: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with one query per row. query [N, H, D] -> [N, H, Dv]."""
        size, num_kv_heads = bucket.size, spec.num_kv_heads
        if bucket.contiguous is not None:
            blocks = slice(bucket.contiguous, bucket.contiguous + bucket.num_pages)
            k, v = storage.key[blocks].flatten(0, 1), storage.value[blocks].flatten(0, 1)
        else:
            k, v = self._take("key", storage.key, bucket.pages), self._take("value", storage.value, bucket.pages)
        k = k.view(size, -1, num_kv_heads, spec.key_dim)  # [N, L, K, Dk]
        v = v.view(size, -1, num_kv_heads, spec.value_dim)  # [N, L, K, Dv]
        if bucket.mask is None:
            k, v = k[:, bucket.first_key : bucket.num_keys], v[:, bucket.first_key : bucket.num_keys]
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [N, K, L, D]
        q = query.view(size, num_kv_heads, -1, spec.key_dim)  # [N, K, G, Dk]
        if spec.softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=spec.scaling)
        else:
            visible = None if bucket.mask is None else (bucket.mask == 0).unsqueeze(1)
            out = explicit_attention(spec, q.unsqueeze(-2), k, v, visible, sinks).squeeze(-2)
        return out.flatten(1, 2)

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
        num_queries, num_keys = query.shape[0], key.shape[0]
        num_groups = query.shape[1] // key.shape[1]
        is_plain = spec.softcap is None and sinks is None
        window = metadata.window
        mask = None
        is_causal = is_plain and num_queries == num_keys and (window is None or num_keys <= window)
        if num_queries > 1 and not is_causal:
            place = (first_query, first_key)
            mask = metadata.masks.get(place)
            if mask is None or mask.shape != (num_queries, num_keys):
                mask = causal_mask(first_query, num_queries, first_key, num_keys, window, query.device)
                if is_plain:
                    mask = _additive(mask, query.dtype)
                metadata.masks[place] = mask
        if is_plain:
            q = query.transpose(0, 1).unsqueeze(0)  # [1, H, n, D]
            k, v = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)  # [1, K, l, D]
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=spec.scaling, enable_gqa=num_groups > 1
            )
            out.copy_(attended[0].transpose(0, 1))
        else:
            q = query.transpose(0, 1).unflatten(0, (-1, num_groups))  # [K, G, n, D]
            attended = explicit_attention(spec, q, key.transpose(0, 1), value.transpose(0, 1), mask, sinks)
            out.copy_(attended.flatten(0, 1).transpose(0, 1))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _buckets(batch: StepBatch, group: int) -> tuple[Bucket, ...]:
    """Sort decode rows by length and cut where the padding would outweigh another launch."""
    num_decodes = batch.num_decodes
    if num_decodes == 0:
        return ()
    tables, page_size = batch.groups[group], batch.page_size
    counts = np.diff(tables.page_starts[: num_decodes + 1])
    order = np.argsort(-counts, kind="stable")
    sizes = counts[order].tolist()
    bounds, waste, widest = [0], 0, sizes[0]
    for index, size in enumerate(sizes):
        waste += widest - size
        if waste > MAX_WASTE:
            bounds.append(index)
            waste, widest = 0, size
    bounds.append(num_decodes)
    return tuple(
        _bucket(batch, group, np.sort(order[begin:end]), sizes[begin], page_size, end - begin == num_decodes)
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
    )


def _bucket(
    batch: StepBatch, group: int, members: np.ndarray, num_pages: int, page_size: int, is_all: bool
) -> Bucket:
    tables, device = batch.groups[group], batch.device
    first = tables.page_starts[members]
    counts = tables.page_starts[members + 1] - first
    columns = np.arange(num_pages)
    is_page = columns < counts[:, None]
    pages = np.where(is_page, tables.pages[np.minimum(first[:, None] + columns, len(tables.pages) - 1)], 0)
    key_starts, lengths = tables.key_starts[members], batch.lengths[members]
    stops = lengths - key_starts  # [N] index behind the last visible key within the padded pages
    lows = np.zeros_like(stops) if tables.window is None else np.maximum(lengths - tables.window - key_starts, 0)
    low, stop = int(lows.max()), int(stops.min())
    contiguous = None
    if len(members) == 1 and (np.diff(pages[0]) == 1).all():
        contiguous = int(pages[0, 0])
    mask = None
    if lows.min() != low or stops.max() != stop:
        places = np.arange(num_pages * page_size)
        visible = (places >= lows[:, None]) & (places < stops[:, None])
        additive = _additive(torch.from_numpy(visible), batch.dtype)
        mask = additive.to(device).view(len(members), 1, 1, -1)
    return Bucket(
        size=len(members),
        num_pages=num_pages,
        num_keys=stop,
        first_key=low,
        rows=None if is_all else torch.from_numpy(members).to(device),
        pages=torch.from_numpy(pages.astype(np.int64).ravel()).to(device),
        contiguous=contiguous,
        mask=mask,
    )
