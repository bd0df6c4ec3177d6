"""Explicit softmax in the model's own dtype: honours everything (sinks, soft caps, windows, unequal head sizes)."""

from __future__ import annotations

from torch import Tensor

from aiocb.attention.base import LayerSpec
from aiocb.attention.paged import RowsMetadata, TorchBackend, causal_mask, explicit_attention

__all__ = ["EagerBackend"]


class EagerBackend(TorchBackend):
    """Explicit attention per sequence, the query group folded into rows."""

    name = "eager"

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
        q = query.transpose(0, 1).unflatten(0, (-1, num_groups))  # [K, G, n, D]
        mask = None
        if num_queries > 1:
            place = (first_query, first_key)
            mask = metadata.masks.get(place)
            if mask is None or mask.shape != (num_queries, num_keys):
                mask = causal_mask(first_query, num_queries, first_key, num_keys, metadata.window, query.device)
                metadata.masks[place] = mask
        attended = explicit_attention(spec, q, key.transpose(0, 1), value.transpose(0, 1), mask, sinks)
        out.copy_(attended.flatten(0, 1).transpose(0, 1))
