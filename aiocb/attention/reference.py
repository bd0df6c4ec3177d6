"""The oracle: every request alone, in fp32, as plainly as it can be written. Slow; made to be compared with."""

from __future__ import annotations

from torch import Tensor

from aiocb.attention.base import LayerSpec
from aiocb.attention.paged import RowsMetadata, TorchBackend, causal_mask, explicit_attention

__all__ = ["ReferenceBackend"]


class ReferenceBackend(TorchBackend):
    """Explicit fp32 attention per sequence."""

    name = "reference"

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
        num_groups = query.shape[1] // key.shape[1]
        q = query.float().transpose(0, 1).unflatten(0, (-1, num_groups))  # [K, G, n, D]
        k, v = key.float().transpose(0, 1), value.float().transpose(0, 1)  # [K, l, D]
        mask = causal_mask(first_query, q.shape[2], first_key, k.shape[1], metadata.window, q.device)
        attended = explicit_attention(spec, q, k, v, mask, None if sinks is None else sinks.float())
        out.copy_(attended.flatten(0, 1).transpose(0, 1))
