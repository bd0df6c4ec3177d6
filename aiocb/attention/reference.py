"""The oracle: every request alone, in fp32, as plainly as it can be written. Slow; made to be compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from aiocb.attention.base import Attention
from aiocb.attention.paged import RowKeys, RowsMetadata, TorchBackend, additive, causal_mask, row_attention

__all__ = ["ReferenceBackend"]


class ReferenceBackend(TorchBackend):
    """Explicit fp32 attention per sequence."""

    name = "reference"

    def _attend_part(
        self, attention: Attention, metadata: RowsMetadata, query: Tensor, first: int, keys: RowKeys
    ) -> Tensor:
        tables, num_keys = metadata.tables, keys.key.shape[1]
        visible = causal_mask(first, len(query), keys.first, num_keys, tables.window, query.device, tables.chunk)
        mask = additive(visible, torch.float32)  # also for a single query: nothing is taken for granted here
        sinks = None if attention.sinks is None else attention.sinks.float()
        whole = keys._replace(key=keys.key.float(), value=keys.value.float())
        return row_attention(attention.spec, query.float(), whole, mask, sinks)
