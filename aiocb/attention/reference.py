"""The oracle: every request alone, in fp32, as plainly as it can be written. Slow; made to be compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from aiocb.attention.base import Attention
from aiocb.attention.paged import RowKeys, RowsMetadata, TorchBackend, additive, causal_mask

__all__ = ["ReferenceBackend"]


class ReferenceBackend(TorchBackend):
    """Explicit fp32 attention per sequence."""

    name = "reference"

    def _attend_part(
        self, attention: Attention, metadata: RowsMetadata, query: Tensor, first: int, keys: RowKeys
    ) -> Tensor:
        sinks = None if attention.sinks is None else attention.sinks.float()
        visible = causal_mask(first, len(query), keys.first, keys.key.shape[1], metadata.window, query.device)
        bias = additive(visible, torch.float32)  # also for a single query: nothing is taken for granted here
        if keys.bias is not None:
            bias = bias + keys.bias
        whole = RowKeys(keys.key.float(), keys.value.float(), keys.first, bias.expand(query.shape[1], -1, -1))
        return super()._attend_part(attention._replace(sinks=sinks), metadata, query.float(), first, whole)
