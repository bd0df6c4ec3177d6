"""Paged attention in native code, for any model on the CPU that attends to plain keys and values.

Storage of one layer is the kernels' page layout (csrc/pages.h), in bf16 or fp32 (step: the 2 or 1 in four bytes):

    pages [B, K, 2, S * D]      K page [D / step][16 tokens][step], V page [16 tokens / step][D][step]

or in int8, with a scale per token and head (csrc/pages.h):

    pages [B, K, 2 * S * (D + 2)]

A row's result depends on the row alone: the softmax runs over fixed chunks of keys from position 0, and no row is cut
over threads. So it is bit-identical alone, in any batch, and chunked at any boundary.

Legend in `attention.base`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from aiocb.attention.base import Attention, Capabilities, KVFormat, LayerSpec, StepBatch
from aiocb.kernels import KernelUnavailable, load
from aiocb.kernels.formats import FORMATS
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.interface import ALIBI, PAGE_SIZE, PagedCall

if TYPE_CHECKING:
    from aiocb.kernels import Library

__all__ = ["CpuBackend"]

_HUGE_PAGE = 2 << 20


@dataclass(slots=True)
class CpuMetadata:
    """What the layers of one group share in a step: the native call, filled in by each layer.

    Attributes:
        call: addresses of the arrays below.
        arrays: keeps them alive.
    """

    call: PagedCall
    arrays: tuple[object, ...]


class CpuBackend:
    """Decode, prefill and mixed steps in one native call per layer.

    Args:
        kernels: threads and scratch; None makes its own.

    Raises:
        ImportError: there are no native kernels here.
    """

    name = "cpu"
    capabilities = Capabilities(
        devices=("cpu",),
        dtypes=("bfloat16", "float32"),
        cache_dtypes=("int8",),
        has_unequal_dims=False,
        has_gathered=False,
        max_head_dim=256,
        head_dim_multiple=16,
        page_sizes=(PAGE_SIZE,),
        has_chunks=True,
        has_alibi=True,
    )

    def __init__(self, kernels: GenericKernels | None = None) -> None:
        if kernels is None:
            library: Library | KernelUnavailable = load()
            if isinstance(library, KernelUnavailable):
                raise ImportError(library.reason)
            kernels = GenericKernels(library, num_threads=torch.get_num_threads(), shares_threads=True)
        self.kernels = kernels

    def allocate(
        self, spec: LayerSpec, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Make the zeroed pages of one layer; resident where they were used."""
        shape: tuple[int, ...] = (num_blocks, spec.num_kv_heads, 2, page_size * spec.key_dim)
        if dtype == torch.int8:
            shape = (*shape[:2], KVFormat.of(dtype).page_bytes(spec, page_size) // spec.num_kv_heads)
        size = math.prod(shape) * dtype.itemsize
        # calloc, unlike torch.zeros, leaves the memory untouched; aligned for whole cache lines and huge pages.
        alignment = _HUGE_PAGE if size >= _HUGE_PAGE else 64
        memory = np.zeros(size + alignment, np.uint8)
        offset = -memory.ctypes.data % alignment
        return torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)

    def block_rows(self, storage: Tensor) -> tuple[Tensor, ...]:
        """The storage: blocks are its rows."""
        return (storage,)

    def copy_block(self, storage: Tensor, source: int, target: int) -> None:
        """Copy one physical block within a layer."""
        storage[target].copy_(storage[source])

    def prepare(self, batch: StepBatch, group: int) -> CpuMetadata:
        """Make the arrays of the native call; valid for this step only."""
        tables = batch.groups[group]
        columns = {
            "starts": batch.computed,
            "lengths": np.diff(batch.starts),
            "pages": tables.pages,
            # Where the block of position 0 would be, if it is not visible.
            "offsets": tables.page_starts[:-1] - tables.key_starts // PAGE_SIZE,
            "num_pages": np.diff(tables.page_starts),
        }
        arrays = {name: np.ascontiguousarray(values, dtype=np.int32) for name, values in columns.items()}
        call = PagedCall(
            num_tokens=int(batch.starts[-1]),
            num_sequences=batch.num_rows,
            format=_format(batch.dtype),
            window=tables.window or 0,
            chunk=tables.chunk or 0,
            slots=tables.slots.data_ptr(),
            **{name: values.ctypes.data for name, values in arrays.items()},
        )
        return CpuMetadata(call, (tables.slots, arrays))

    def write(self, storage: Tensor, metadata: CpuMetadata, key: Tensor, value: Tensor) -> None:
        """Store new keys and values. key and value [T, K, D]."""
        key, value, call = _rows(key), _rows(value), metadata.call
        _set_pages(call, storage)
        call.key, call.key_stride, call.key_head_stride = _place(key)
        call.value, call.value_stride, call.value_head_stride = _place(value)
        self.kernels.write(call)

    def gather(self, storage: Tensor, metadata: CpuMetadata) -> tuple[Tensor, Tensor]:
        """Refuse: layers that need gathered keys are refused at start."""
        raise NotImplementedError("attention 'cpu' reads keys in place")

    def attend(self, attention: Attention, storage: Tensor, metadata: CpuMetadata) -> Tensor:
        """Attend after `write`: [T, H, D]."""
        spec, sinks = attention.spec, attention.sinks
        query, call = _rows(attention.query), metadata.call
        out = torch.empty(query.shape, dtype=query.dtype)
        scores, slopes = _floats(sinks), _floats(attention.slopes)
        _set_pages(call, storage)
        call.num_heads, call.scale, call.softcap = query.shape[1], spec.scaling, spec.softcap or 0.0
        call.query, call.query_stride, call.query_head_stride = _place(query)
        call.sinks = None if scores is None else scores.data_ptr()
        call.slopes, call.alibi = (None, 0) if slopes is None else (slopes.data_ptr(), ALIBI[spec.alibi])
        call.out = out.data_ptr()
        self.kernels.attend(call)
        return out

    def attend_gathered(self, attention: Attention, metadata: CpuMetadata) -> Tensor:
        """Refuse: layers that need gathered keys are refused at start."""
        raise NotImplementedError("attention 'cpu' reads keys in place")


def _floats(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().to(torch.float32).contiguous()


def _set_pages(call: PagedCall, storage: Tensor) -> None:
    num_blocks, num_kv_heads, *_, size = storage.shape
    call.pool, call.num_blocks, call.num_kv_heads = storage.data_ptr(), num_blocks, num_kv_heads
    call.num_heads, call.head_dim = num_kv_heads, size // PAGE_SIZE
    call.cache_format = _format(storage.dtype)
    if storage.dtype == torch.int8:
        call.head_dim = size // (2 * PAGE_SIZE) - KVFormat.of(storage.dtype).scale_bits // 8


def _format(dtype: torch.dtype) -> int:
    return FORMATS[KVFormat.of(dtype).name].code


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """Address, and strides of tokens and heads in bytes."""
    size = tensor.element_size()
    return tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size
