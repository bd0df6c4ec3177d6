"""Pages as flash kernels want them, and a step as one packed call a layer: what flash-attn and torch's varlen share.

Storage of one layer (legend in `attention.base`):

    key   [B + 1, S, K, Dk]      block 0 is the null block: zero, never written
    value [B + 1, S, K, Dv]      block B is the scratch block: padding rows of a captured step write and read it

A kernel that takes block tables reads the pages in place; for any other the visible keys are gathered into one packed
tensor first. Both are made once per step for all layers of a group, and only by the first layer that needs them.

A row whose first pages fell out of its window begins later: what counts to a kernel is how far a key is from the
*last* one, so positions are shifted to the first visible page and need not be known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aiocb.attention.base import Attention, Capabilities, LayerSpec, StepBatch
from aiocb.attention.paged import RowKeys, additive, causal_mask, row_attention

__all__ = ["HostStep", "KernelCall", "PackedBackend", "PackedKeys", "PackedStorage", "StepKeys"]

HEAD_DIM_MULTIPLE = 8
"""Flash kernels load so many values at once; other head sizes are padded with zeros."""


class PackedStorage(NamedTuple):
    """One layer's pages."""

    key: Tensor  # [B + 1, S, K, Dk]
    value: Tensor  # [B + 1, S, K, Dv]


class KernelCall(NamedTuple):
    """One call over all rows of a step; the causal mask is aligned to each row's last key.

    Attributes:
        query: [T, H, D]
        key, value: [sum of L, K, D], or pages [B + 1, S, K, D] where there is a `table`.
        starts, key_starts: where rows begin in `query` and in packed keys. [R + 1] int32
        lengths: keys of each row. [R] int32
        max_queries, max_keys: bounds of a row.
        scale: factor of the scores.
        window: tokens that a query sees including itself, or None.
        softcap: 0 is off.
        table: blocks of each row. [R, P] int32
        needs_lse: the logarithm of the sum of exponentials is wanted, too.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    starts: Tensor
    key_starts: Tensor
    lengths: Tensor
    max_queries: int
    max_keys: int
    scale: float
    window: int | None
    softcap: float
    table: Tensor | None
    needs_lse: bool

    @property
    def window_size(self) -> tuple[int, int]:
        """Keys to the left and right of a query that it sees, as flash kernels count them; -1 is all."""
        return (-1 if self.window is None else self.window - 1), 0


class PackedKeys(NamedTuple):
    """Where the keys of packed rows are.

    Attributes:
        slots: of each visible key of all rows, one row after the other. [sum of L] int64
    """

    slots: Tensor


class StepKeys(ABC):
    """What the layers of one group share in a step, in tensors on the device.

    Attributes:
        slots: where each token's key goes. [T] int64
        starts, key_starts, lengths, max_queries, max_keys, window: as in `KernelCall`.
        is_own: nothing was in the cache: the step's own keys are all keys.
    """

    slots: Tensor
    starts: Tensor
    key_starts: Tensor
    lengths: Tensor
    max_queries: int
    max_keys: int
    window: int | None
    is_own: bool

    def __init__(self) -> None:
        self._keys: PackedKeys | None = None
        self._table: Tensor | None = None

    @property
    def keys(self) -> PackedKeys:
        """Where the visible keys are, made for the first layer that asks."""
        if self._keys is None:
            self._keys = self._make_keys()
        return self._keys

    @property
    def table(self) -> Tensor:
        """The visible blocks of each row, made for the first layer that asks. [R, P] int32."""
        if self._table is None:
            self._table = self._make_table()
        return self._table

    @abstractmethod
    def _make_keys(self) -> PackedKeys: ...

    @abstractmethod
    def _make_table(self) -> Tensor: ...

    @abstractmethod
    def rows(self) -> list[tuple[slice, slice, int, int]]:
        """Each row's tokens, its keys, the position of its first query, and of its first key.

        Raises:
            NotImplementedError: only the device knows them.
        """


class HostStep(StepKeys):
    """A step that was packed on the host."""

    def __init__(self, batch: StepBatch, group: int) -> None:
        super().__init__()
        tables = self._tables = batch.groups[group]
        self._batch = batch
        self.slots, self.window = tables.slots, tables.window
        visible = batch.lengths - tables.key_starts  # [R]
        self._bounds = np.concatenate([[0], np.cumsum(visible)])
        num_rows = batch.num_rows
        # One small upload: starts, starts of keys, lengths.
        numbers = np.concatenate([batch.starts, self._bounds, visible]).astype(np.int32)
        on_device = torch.from_numpy(numbers).to(batch.device, non_blocking=True)
        self.starts, self.key_starts, self.lengths = torch.split(on_device, [num_rows + 1, num_rows + 1, num_rows])
        self.max_queries, self.max_keys = int(np.diff(batch.starts).max()), int(visible.max())
        self.is_own = not batch.computed.any()

    def _make_keys(self) -> PackedKeys:
        tables, batch, page_size = self._tables, self._batch, self._batch.page_size
        row = np.repeat(np.arange(batch.num_rows), np.diff(self._bounds))
        within = np.arange(self._bounds[-1]) - self._bounds[row]
        pages = tables.pages[tables.page_starts[row] + within // page_size].astype(np.int64)
        return PackedKeys(torch.from_numpy(pages * page_size + within % page_size).to(batch.device, non_blocking=True))

    def _make_table(self) -> Tensor:
        tables = self._tables
        counts = np.diff(tables.page_starts)
        columns = np.arange(counts.max())
        places = np.minimum(tables.page_starts[:-1, None] + columns, len(tables.pages) - 1)
        table = np.where(columns < counts[:, None], tables.pages[places], 0).astype(np.int32)
        return torch.from_numpy(table).to(self._batch.device, non_blocking=True)

    def rows(self) -> list[tuple[slice, slice, int, int]]:
        """Each row's tokens, its keys, the position of its first query, and of its first key."""
        batch, bounds, starts = self._batch, self._bounds.tolist(), self._batch.starts.tolist()
        firsts = zip(batch.computed.tolist(), self._tables.key_starts.tolist(), strict=True)
        return [
            (slice(starts[row], starts[row + 1]), slice(bounds[row], bounds[row + 1]), query, key)
            for row, (query, key) in enumerate(firsts)
        ]


class PackedBackend(ABC):
    """One kernel call per layer for whatever is in the step.

    Attributes:
        page_multiple: a page size that the kernel reads in place is a multiple of it; None is never.
    """

    name: str
    capabilities: Capabilities
    page_multiple: int | None = None

    @abstractmethod
    def call(self, call: KernelCall) -> tuple[Tensor, Tensor | None]:
        """Run the kernel: [T, H, D], and where asked for the log-sum-exp of each score row, [H, T] float32."""

    def allocate(
        self, spec: LayerSpec, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> PackedStorage:
        """Make the zeroed pages of one layer, and one more."""
        shape = (num_blocks + 1, page_size, spec.num_kv_heads)
        return PackedStorage(
            torch.zeros(*shape, spec.key_dim, dtype=dtype, device=device),
            torch.zeros(*shape, spec.value_dim, dtype=dtype, device=device),
        )

    def block_rows(self, storage: PackedStorage) -> tuple[Tensor, ...]:
        """Keys and values: blocks are their rows."""
        return tuple(storage)

    def copy_block(self, storage: PackedStorage, source: int, target: int) -> None:
        """Copy one physical block within a layer."""
        for pages in storage:
            pages[target].copy_(pages[source])

    def prepare(self, batch: StepBatch, group: int) -> StepKeys:
        """Make what all layers of a group share in this step; valid for this step only."""
        return HostStep(batch, group)

    def write(self, storage: PackedStorage, metadata: StepKeys, key: Tensor, value: Tensor) -> None:
        """Store new keys and values. key [T, K, Dk], value [T, K, Dv]."""
        for pages, new in zip(storage, (key, value), strict=True):
            pages.flatten(0, 1).index_copy_(0, metadata.slots, new)

    def gather(self, storage: PackedStorage, metadata: StepKeys) -> tuple[Tensor, Tensor]:
        """Return the visible keys and values of all rows, concatenated: [K, sum of L, Dk], [K, sum of L, Dv]."""
        key, value = (_taken(pages, metadata) for pages in storage)
        return key.transpose(0, 1), value.transpose(0, 1)

    def reads_in_place(self, spec: LayerSpec, page_size: int) -> bool:
        """True where the kernel takes block tables for this layer."""
        multiple = self.page_multiple
        if multiple is None or page_size % multiple:
            return False
        return spec.key_dim == spec.value_dim and spec.key_dim % HEAD_DIM_MULTIPLE == 0

    def attend(self, attention: Attention, storage: PackedStorage, metadata: StepKeys) -> Tensor:
        """Attend after `write`: [T, H, Dv]."""
        if metadata.is_own:
            return self._attend(attention, attention.key, attention.value, metadata, None)
        if self.reads_in_place(attention.spec, storage.key.shape[1]):
            return self._attend(attention, storage.key, storage.value, metadata, metadata.table)
        key, value = (_taken(pages, metadata) for pages in storage)
        return self._attend(attention, key, value, metadata, None)

    def attend_gathered(self, attention: Attention, metadata: StepKeys) -> Tensor:
        """Attend over gathered keys: [T, H, Dv]."""
        if attention.bias is not None:
            return _attend_biased(attention, metadata)
        key, value = attention.key.transpose(0, 1), attention.value.transpose(0, 1)
        return self._attend(attention, key, value, metadata, None)

    def _attend(
        self, attention: Attention, key: Tensor, value: Tensor, metadata: StepKeys, table: Tensor | None
    ) -> Tensor:
        spec, sinks = attention.spec, attention.sinks
        head_dim = -(-max(spec.key_dim, spec.value_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
        out, lse = self.call(
            KernelCall(
                _widened(attention.query, head_dim),
                _widened(key, head_dim),
                _widened(value, head_dim),
                metadata.starts,
                metadata.key_starts,
                metadata.lengths,
                metadata.max_queries,
                metadata.max_keys,
                spec.scaling,
                metadata.window,
                spec.softcap or 0.0,
                table,
                sinks is not None,
            )
        )
        if sinks is not None:
            assert lse is not None
            # One more score in the softmax takes its share of every weight: what is left of them is their sum.
            left = torch.sigmoid(lse.transpose(0, 1) - sinks.float())  # [T, H]
            out = (out.float() * left.unsqueeze(-1)).to(out.dtype)
        return out[..., : spec.value_dim]


def _taken(pages: Tensor, metadata: StepKeys) -> Tensor:
    return pages.flatten(0, 1).index_select(0, metadata.keys.slots)


def _widened(tensor: Tensor, head_dim: int) -> Tensor:
    """Pad heads with zeros, and see to it that the values of a head lie side by side."""
    missing = head_dim - tensor.shape[-1]
    if missing:
        return F.pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _attend_biased(attention: Attention, metadata: StepKeys) -> Tensor:
    """Attend row by row, written out: no kernel takes a bias."""
    out: list[Any] = []
    assert attention.bias is not None
    for tokens, keys, first_query, first_key in metadata.rows():
        query, bias = attention.query[tokens], attention.bias[:, tokens, keys]
        own = RowKeys(attention.key[:, keys], attention.value[:, keys], first_key, bias)
        count, num_keys = len(query), keys.stop - keys.start
        visible = causal_mask(first_query, count, first_key, num_keys, metadata.window, query.device)
        mask = additive(visible, query.dtype)
        out.append(row_attention(attention.spec, query, own, mask, attention.sinks))
    return torch.cat(out)
