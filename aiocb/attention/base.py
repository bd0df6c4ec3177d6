"""What an attention backend is: a small protocol, its capabilities as data, and what a step tells it.

Legend: T packed tokens, R requests, H query heads, K key/value heads, G = H / K, D head dim (Dk of keys, Dv of
values), B blocks, S page size, P pages of a request, L keys that a request can see.

Packed order: rows with one new token ("decode") come first, so row r < num_decodes is exactly token r; rows with more
new tokens follow, each a contiguous range of tokens.

    tokens   | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |        num_decodes = 3
    starts     0    1    2    3             7       9
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from aiocb.step import first_visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

__all__ = [
    "Alibi",
    "Attention",
    "AttentionBackend",
    "Capabilities",
    "GroupTables",
    "KVFormat",
    "LayerSpec",
    "StepBatch",
]

Alibi = Literal["exact", "rounded"]
"""How a slope m per head biases what a query at q thinks of a key at k.

exact: scores += m * (k - q), after scaling (Bloom, MPT). rounded: products += r(m * r(k)) - r(m * r(q)) before scaling,
where r rounds to bfloat16 (Falcon, which does so in every dtype; what is taken off is the same for all keys, so it
changes nothing but the size of the numbers)."""


class LayerSpec(NamedTuple):
    """One layer's attention as the model asks for it, learned from a dry run.

    Attributes:
        layer: index that the layer gives to the cache.
        num_heads, num_kv_heads: H of the query and K of the stored keys.
        key_dim, value_dim: Dk and Dv of what is stored.
        scaling: factor of the scores.
        window: tokens that a query sees including itself; None is full attention.
        softcap: scores become `softcap * tanh(scores / softcap)`; None is off.
        has_sinks: one learned extra score per head joins the softmax and is dropped.
        chunk: a query sees the keys of its own chunk of so many tokens up to itself (positions from
            `position // chunk * chunk` on); never with a window. None is off.
        alibi: slopes, which come with each call, bias the scores; never with a soft cap. None is off.
        is_gathered: the layer works on what the cache returns (latents, expanded keys): it gets the gathered keys and
            values instead of reading pages in place.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_gathered: bool = False
    chunk: int | None = None
    alibi: Alibi | None = None


class KVFormat(NamedTuple):
    """How keys and values are stored: the one place that knows what they take.

    Attributes:
        name: of the torch dtype.
        bits: of one number.
        scale_bits: of what the numbers of one token and head are multiplied by, keys and values each; 0 without.
    """

    name: str
    bits: int
    scale_bits: int = 0

    @classmethod
    def of(cls, dtype: torch.dtype) -> KVFormat:
        """That of numbers which are kept in `dtype`: as they are, but for integers."""
        scale_bits = 0 if dtype.is_floating_point else 16
        return cls(str(dtype).removeprefix("torch."), 8 * dtype.itemsize, scale_bits)

    def page_bytes(self, spec: LayerSpec, page_size: int) -> int:
        """Bytes of one page of a layer."""
        head_bits = (spec.key_dim + spec.value_dim) * self.bits + 2 * self.scale_bits
        return page_size * spec.num_kv_heads * head_bits // 8


class Capabilities(NamedTuple):
    """What a backend can do; whatever it cannot is refused at start, never dropped.

    Attributes:
        devices: torch device types, empty for any.
        dtypes: names of torch dtypes (`"bfloat16"`), empty for any.
        cache_dtypes: names of those in which keys and values can be stored besides the one that they come in.
        has_unequal_dims: Dk and Dv may differ.
        has_gathered: layers that work on what the cache returns can be served.
        max_head_dim: largest D, None for any.
        head_dim_multiple: D must be a multiple of it.
        page_sizes: allowed page sizes, empty for any.
        has_chunks, has_alibi: layers with a chunk, or with slopes, can be served.
        has_softcap: layers with a soft cap can be served.
        preferred_page_size: where it reads pages of a certain size in place, None for any.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cache_dtypes: tuple[str, ...] = ()
    has_unequal_dims: bool = True
    has_gathered: bool = True
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    page_sizes: tuple[int, ...] = ()
    has_chunks: bool = False
    has_alibi: bool = False
    has_softcap: bool = True
    preferred_page_size: int | None = None

    def refusal(
        self,
        specs: Iterable[LayerSpec],
        device: str,
        dtype: str,
        page_size: int | None,
        cache_dtype: str | None = None,
    ) -> str | None:
        """Say why layers cannot run here on pages of a size (None is any), or None when they can.

        What is stored is of `cache_dtype`; None is that of queries, keys and values.
        """
        if cache_dtype not in (None, *self.cache_dtypes):
            return f"it stores keys and values as the model has them, not in {cache_dtype}"
        if self.page_sizes and page_size not in (None, *self.page_sizes):
            return f"it works on pages of {', '.join(map(str, self.page_sizes))} tokens, not {page_size}"
        if self.devices and device not in self.devices:
            return f"it runs on {', '.join(self.devices)}, not on {device}"
        if self.dtypes and dtype not in self.dtypes:
            return f"it computes in {', '.join(self.dtypes)}, not in {dtype}"
        for spec in specs:
            head_dim = max(spec.key_dim, spec.value_dim)
            if spec.is_gathered and not self.has_gathered:
                return f"layer {spec.layer} works on gathered keys and values"
            if spec.chunk is not None and not self.has_chunks:
                return f"layer {spec.layer} attends in chunks of {spec.chunk}"
            if spec.alibi is not None and not self.has_alibi:
                return f"layer {spec.layer} biases its scores by the distance of the keys (ALiBi)"
            if spec.alibi is not None and spec.softcap is not None:
                return f"layer {spec.layer} has both slopes (ALiBi) and a soft cap: which comes first is not defined"
            if spec.softcap is not None and not self.has_softcap:
                return f"layer {spec.layer} has a soft cap"
            if spec.key_dim != spec.value_dim and not self.has_unequal_dims:
                return f"layer {spec.layer} has keys of {spec.key_dim} and values of {spec.value_dim}"
            if self.max_head_dim is not None and head_dim > self.max_head_dim:
                return f"layer {spec.layer} has heads of {head_dim} > {self.max_head_dim}"
            if spec.key_dim % self.head_dim_multiple or spec.value_dim % self.head_dim_multiple:
                return f"layer {spec.layer} has heads of {spec.key_dim}, not a multiple of {self.head_dim_multiple}"
        return None


@dataclass(slots=True)
class GroupTables:
    """One cache group's part of a step: where new keys go, and which pages each row can see.

    Attributes:
        window, chunk: of the group's layers.
        slots: `block * page_size + offset` of each packed token. [T] int64, on the device.
        pages: visible physical blocks of all rows, one row after the other. int32.
        page_starts: row r's pages are `pages[page_starts[r] : page_starts[r + 1]]`. [R + 1]
        key_starts: absolute position of the first token of each row's first visible page. [R]
    """

    window: int | None
    slots: Tensor
    pages: npt.NDArray[np.int32]
    page_starts: npt.NDArray[np.int64]
    key_starts: npt.NDArray[np.int64]
    chunk: int | None = None

    def first_visible(self, queries: Any) -> Any:
        """Position of the oldest key that a query sees. queries: a position, or an array of them."""
        return first_visible(queries, self.window, self.chunk)


@dataclass(slots=True)
class StepBatch:
    """The packed rows of a step, as attention sees them (host arrays; only slots live on the device).

    Attributes:
        num_decodes: rows with one new token; they come first.
        starts: row r's tokens are `starts[r] : starts[r + 1]`. [R + 1]
        computed: tokens of each row whose keys were in the cache before the step. [R]
        lengths: computed plus new. [R]
        groups: per cache group.
        page_size: tokens per page.
        device, dtype: of queries, keys and values.
    """

    num_decodes: int
    starts: npt.NDArray[np.int64]
    computed: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    groups: tuple[GroupTables, ...]
    page_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.computed)


class Attention(NamedTuple):
    """What one layer attends with in a step.

    Attributes:
        spec: of the layer.
        query: [T, H, Dk]
        key, value: as given to `write`: [T, K, Dk], [T, K, Dv]; or gathered: [K, sum of L, Dk], [K, sum of L, Dv].
        sinks: [H] or None.
        bias: added to the scores of each row's own keys, where they are gathered. [H, T, sum of L] or None.
        slopes: of the layer's `alibi`. [H] float32, or None without.
    """

    spec: LayerSpec
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None


class AttentionBackend(Protocol):
    """Writes keys and values into pages and attends to them.

    One instance serves one runner. `prepare` is called once per step and group, its result is handed to every layer
    of the group. Storage is opaque to everyone but the backend.
    """

    name: str
    capabilities: Capabilities

    def allocate(
        self, spec: LayerSpec, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Make the zeroed storage of one layer (stale pages must be finite: 0 x NaN is NaN).

        `dtype` is that of queries, keys and values, or one of the backend's `cache_dtypes`.
        """

    def block_rows(self, storage: Any) -> tuple[Tensor, ...]:
        """Views of the storage of one layer with one row for each block, [B, ...]; writing to them writes to it."""

    def copy_block(self, storage: Any, source: int, target: int) -> None:
        """Copy one physical block within a layer."""

    def prepare(self, batch: StepBatch, group: int) -> Any:
        """Make what all layers of a group share in this step; valid for this step only."""

    def write(self, storage: Any, metadata: Any, key: Tensor, value: Tensor) -> None:
        """Store new keys and values. key [T, K, Dk], value [T, K, Dv]."""

    def gather(self, storage: Any, metadata: Any) -> tuple[Tensor, Tensor]:
        """Return the visible keys and values of all rows, concatenated: [K, sum of L, Dk], [K, sum of L, Dv]."""

    def attend(self, attention: Attention, storage: Any, metadata: Any) -> Tensor:
        """Attend after `write`: [T, H, Dv]."""

    def attend_gathered(self, attention: Attention, metadata: Any) -> Tensor:
        """Attend over gathered keys: [T, H, Dv]."""
