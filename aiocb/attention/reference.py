"""The oracle: every request alone, in fp32, as plainly as it can be written. Slow; made to be compared with."""

from __future__ import annotations

from torch import Tensor

from aiocb.attention.base import LayerSpec
from aiocb.attention.paged import RowsMetadata, TorchBackend, additive, causal_mask, explicit_attention, group_heads

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
        q = group_heads(query.float(), key.shape[0])
        visible = causal_mask(first_query, query.shape[0], first_key, key.shape[1], metadata.window, query.device)
        mask = additive(visible, q.dtype)
        own_sinks = None if sinks is None else sinks.float()
        attended = explicit_attention(spec, q, key.float(), value.float(), mask, own_sinks)
        out.copy_(attended.flatten(0, 1).transpose(0, 1))
