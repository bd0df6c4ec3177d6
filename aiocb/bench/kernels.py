"""Each native kernel against torch and against its floor.

The floor of a kernel is the larger of two times: its bytes over the measured bus, its operations over the measured
arithmetic rate. Weights and cache are cold: the kernels cycle through more memory than the last-level cache holds.

Shape legend: M rows, N columns, K depth, R sequences, L context, H query heads, D head dim.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from ctypes import byref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aiocb.errors import ConfigError
from aiocb.kernels import KernelUnavailable, Library, NativeModel, load
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.interface import FORMATS, INT8_GROUP, PAGE_SIZE, ModelConfig, StepArguments
from aiocb.kernels.threads import default_num_threads

__all__ = ["run"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_COLD_BYTES = 96 << 20
_HEADS, _KV_HEADS, _DIM = 9, 3, 64


def run(*, num_threads: int | None = None, repeats: int = 7, quick: bool = False) -> list[dict[str, Any]]:
    """Measure and return one row per kernel and shape.

    Every row holds `kernel`, `dtype`, `shape`, `native_ms`, `torch_ms` (None where torch has nothing comparable),
    `floor_ms`, `of_floor` (floor over native: 1 is perfect), and `bound` (`memory` or `arithmetic`).

    Args:
        num_threads: None is one per physical core; torch gets the same.
        repeats: passes, of which the median counts; native and torch alternate.
        quick: one shape of each kernel.

    Raises:
        ConfigError: there are no native kernels here.
    """
    library = load()
    if isinstance(library, KernelUnavailable):
        raise ConfigError(f"there are no native kernels here: {library.reason}")
    threads = num_threads or default_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bare = GenericKernels(library, num_threads=threads)
        bus = bare.bandwidth()
        # All of them now: once torch has run, its threads spin for a while and take half of what is measured.
        rates = {dtype: bare.arithmetic(dtype) for dtype in (*_DTYPES, "int8")}
        bare.close()
        rows: list[dict[str, Any]] = []
        for dtype in _DTYPES:
            floors = _Floors(bus, rates[dtype])
            rows += [
                _linear(library, dtype, threads, m, 3072, 576, floors, repeats)
                for m in ((8,) if quick else (1, 8, 64, 512))
            ]
            rows += [
                _decode(library, dtype, threads, 32, context, floors, repeats)
                for context in ((512,) if quick else (512, 200))
            ]
        floors = _Floors(bus, rates["int8"])
        rows += [
            _linear(library, "bfloat16", threads, m, 3072, 576, floors, repeats, weights_as="int8")
            for m in ((8,) if quick else (1, 8, 64, 512))
        ]
        return rows
    finally:
        torch.set_num_threads(before)


class _Floors:
    def __init__(self, bus: float, rate: float) -> None:
        self.bus, self.rate = bus, rate

    def of(self, num_bytes: float, operations: float) -> tuple[float, str]:
        memory, arithmetic = num_bytes / self.bus, operations / self.rate
        return max(memory, arithmetic), "memory" if memory > arithmetic else "arithmetic"


def _alternate(native: Callable[[int], None], other: Callable[[int], None], repeats: int) -> tuple[float, float]:
    """Median seconds of both, alternating, so that a slow spell of the machine hits both."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(repeats + 1):
        for side, function in enumerate((native, other)):
            time.sleep(0.02)  # torch's OpenMP threads spin for a while after a region, on the cores of the next side
            started = time.perf_counter()
            function(index)
            if index:
                times[side].append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def _row(kernel: str, dtype: str, shape: str, seconds: tuple[float, float], floor: tuple[float, str]) -> dict[str, Any]:
    native, other = seconds
    return {
        "kernel": kernel,
        "dtype": dtype,
        "shape": shape,
        "native_ms": round(native * 1e3, 4),
        "torch_ms": round(other * 1e3, 4),
        "floor_ms": round(floor[0] * 1e3, 4),
        "of_floor": round(floor[0] / native, 3),
        "bound": floor[1],
    }


def _model(library: Library, dtype: str, threads: int, layers: int) -> NativeModel:
    config = ModelConfig(
        num_layers=layers, hidden_size=576, num_heads=_HEADS, num_kv_heads=_KV_HEADS, head_dim=_DIM,
        intermediate_size=1536, vocab_size=64, format=FORMATS[dtype], num_groups=1,
        norm_eps=1e-5, embedding_scale=1.0, residual_scale=1.0, logit_scale=1.0,
    )  # fmt: skip
    return NativeModel(library, config, num_threads=threads)


def _linear(
    library: Library,
    dtype: str,
    threads: int,
    m: int,
    n: int,
    k: int,
    floors: _Floors,
    repeats: int,
    weights_as: str | None = None,
) -> dict[str, Any]:
    """Weights of another format than the activations (int8) are compared with torch in the activations' format."""
    size = _DTYPES[dtype].itemsize
    weights_as = weights_as or dtype
    weight_size = 1 + 2 / INT8_GROUP if weights_as == "int8" else size  # with the scales
    layers = max(2, int(_COLD_BYTES / (n * k * weight_size)))
    model = _model(library, dtype, threads, layers)
    weights = [(torch.randn(n, k) * 0.05).to(_DTYPES[dtype]) for _ in range(layers)]
    for layer, weight in enumerate(weights):
        addresses = np.uint64(weight.data_ptr()) + np.arange(n, dtype=np.uint64) * np.uint64(k * size)
        model.set_linear(
            layer, "gate_up", addresses, k, source_format=FORMATS[dtype], weight_format=FORMATS[weights_as]
        )
    a, out = torch.randn(m, k).to(_DTYPES[dtype]), torch.empty(m, n)

    def native(_: int) -> None:
        for layer in range(layers):
            library.calls.aiocb_linear(model.handle, layer, 2, a.data_ptr(), k * size, m, out.data_ptr(), n)

    def other(_: int) -> None:
        for weight in weights:
            torch.nn.functional.linear(a, weight)

    seconds = _alternate(native, other, repeats)
    model.close()
    floor = floors.of(n * k * weight_size, 2.0 * m * n * k)
    return _row("linear", weights_as, f"M={m} N={n} K={k}", (seconds[0] / layers, seconds[1] / layers), floor)


def _decode(
    library: Library, dtype: str, threads: int, requests: int, context: int, floors: _Floors, repeats: int
) -> dict[str, Any]:
    """One new token each: rotation, cache write and attention of one layer, against SDPA on gathered keys."""
    size = _DTYPES[dtype].itemsize
    pages = -(-context // PAGE_SIZE)
    layer_bytes = requests * context * 2 * _KV_HEADS * _DIM * size
    layers = max(2, _COLD_BYTES // layer_bytes)
    model = _model(library, dtype, threads, layers)
    model.set_group(0, requests * pages + 1, layers)
    for layer in range(layers):
        model.set_layer(layer, window=0, rope=-1, group=0, group_layer=layer, scale=_DIM**-0.5)
    blocks = (torch.randperm(requests * pages) + 1).tolist()
    arrays = {
        "token_ids": array("i", [0] * requests), "rows": array("i", range(requests)),
        "starts": array("i", [context - 1] * requests), "lengths": array("i", [1] * requests),
        "block_starts": array("i", [0] * requests), "block_counts": array("i", [pages] * requests),
        "new_blocks": array("i", blocks),
    }  # fmt: skip
    arguments = StepArguments(
        num_tokens=requests, num_sequences=requests, num_new_blocks=len(blocks),
        **{name: values.buffer_info()[0] for name, values in arrays.items()},
    )  # fmt: skip
    qkv = torch.randn(requests, (_HEADS + 2 * _KV_HEADS) * _DIM)
    for block in range(1, requests * pages + 1):  # resident, as a cache in use is
        model.write_block(0, block, np.zeros(2 * PAGE_SIZE * _KV_HEADS * _DIM * size * layers, np.uint8))
    group = _HEADS // _KV_HEADS
    keys = [torch.randn(requests, _KV_HEADS, context, _DIM).to(_DTYPES[dtype]) for _ in range(layers)]
    # The group's heads as rows of one query: what torch does best in decode.
    query: Tensor = torch.randn(requests, _KV_HEADS, group, _DIM).to(_DTYPES[dtype])

    def native(_: int) -> None:
        for layer in range(layers):
            library.calls.aiocb_attention(model.handle, byref(arguments), layer, qkv.data_ptr(), None)

    def other(_: int) -> None:
        for layer in range(layers):
            key, value = keys[layer], keys[(layer + 1) % layers]
            torch.nn.functional.scaled_dot_product_attention(query, key, value)

    seconds = _alternate(native, other, repeats)
    model.close()
    floor = floors.of(layer_bytes, 4.0 * requests * context * _HEADS * _DIM)
    return _row(
        "decode",
        dtype,
        f"R={requests} L={context} H={_HEADS}/{_KV_HEADS} D={_DIM}",
        (seconds[0] / layers, seconds[1] / layers),
        floor,
    )
