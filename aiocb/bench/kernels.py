"""Each native kernel against torch and against its floor.

The floor of a kernel is the larger of two times: its bytes over the measured bus, its operations over the measured
arithmetic rate. Weights and cache are cold: the kernels cycle through more memory than the last-level cache holds.

Shape legend: M rows, N columns, K depth, R sequences, L context, H query heads, D head dim.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from aiocb.bench.figures import Row, alternate
from aiocb.errors import ConfigError
from aiocb.kernels import KernelUnavailable, Library, NativeModel, load
from aiocb.kernels.formats import FORMATS, INT8, WeightSource
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.interface import PAGE_SIZE, ModelConfig, StepArguments
from aiocb.kernels.threads import default_num_threads

__all__ = ["run"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_COLD_BYTES = 96 << 20
_HEADS, _KV_HEADS, _DIM = 9, 3, 64


def run(*, num_threads: int | None = None, repeats: int = 7, quick: bool = False) -> list[Row]:
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
    num_threads = num_threads or default_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        bench = _Bench(library, num_threads, repeats)
        rows, contexts = ((8,), (512,)) if quick else ((1, 8, 64, 512), (512, 200))
        return [
            *(bench.linear(m, dtype, dtype) for dtype in _DTYPES for m in rows),
            *(bench.linear(m, "bfloat16", INT8.name) for m in rows),
            *(bench.decode(32, context, dtype) for dtype in _DTYPES for context in contexts),
        ]
    finally:
        torch.set_num_threads(before)


class _Bench:
    """Both sides of every comparison, and what this machine can do at best."""

    def __init__(self, library: Library, num_threads: int, repeats: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._repeats = repeats
        bare = GenericKernels(library, num_threads=num_threads)
        self._bus = bare.bandwidth()
        # All of them now: once torch has run, its threads spin for a while and take half of what is measured.
        self._rates = {name: bare.arithmetic(weight_format) for name, weight_format in FORMATS.items()}
        bare.close()

    def linear(self, m: int, dtype: str, weights_as: str, n: int = 3072, k: int = 576) -> Row:
        """Weights of another format than the activations (int8) are compared with torch in the activations' format."""
        size = _DTYPES[dtype].itemsize
        weight_bytes = FORMATS[weights_as].packed_bytes(n, k)
        layers = max(2, _COLD_BYTES // weight_bytes)
        model = self._model(dtype, layers)
        weights = [(torch.randn(n, k) * 0.05).to(_DTYPES[dtype]) for _ in range(layers)]
        for layer, weight in enumerate(weights):
            addresses = np.uint64(weight.data_ptr()) + np.arange(n, dtype=np.uint64) * np.uint64(k * size)
            model.set_linear(
                layer, "gate_up", addresses, k, source=WeightSource.of(dtype), weight_format=FORMATS[weights_as]
            )
        a, out = torch.randn(m, k).to(_DTYPES[dtype]), torch.empty(m, n)
        call = self._library.calls.aiocb_linear

        def native(layer: int) -> None:
            call(model.handle, layer, 2, a.data_ptr(), k * size, m, out.data_ptr(), n)

        def other(layer: int) -> None:
            torch.nn.functional.linear(a, weights[layer])

        seconds = self._seconds(model, native, other, layers)
        return self._row("linear", weights_as, f"M={m} N={n} K={k}", seconds, weight_bytes, 2.0 * m * n * k)

    def decode(self, requests: int, context: int, dtype: str) -> Row:
        """One new token each: rotation, cache write and attention of one layer, against SDPA on gathered keys."""
        size = _DTYPES[dtype].itemsize
        pages = -(-context // PAGE_SIZE)
        layer_bytes = requests * context * 2 * _KV_HEADS * _DIM * size
        layers = max(2, _COLD_BYTES // layer_bytes)
        model = self._model(dtype, layers)
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
        keys = [torch.randn(requests, _KV_HEADS, context, _DIM).to(_DTYPES[dtype]) for _ in range(layers)]
        # The group's heads as rows of one query: what torch does best in decode.
        query: Tensor = torch.randn(requests, _KV_HEADS, _HEADS // _KV_HEADS, _DIM).to(_DTYPES[dtype])
        call = self._library.calls.aiocb_attention

        def native(layer: int) -> None:
            call(model.handle, byref(arguments), layer, qkv.data_ptr(), None)

        def other(layer: int) -> None:
            key, value = keys[layer], keys[(layer + 1) % layers]
            torch.nn.functional.scaled_dot_product_attention(query, key, value)

        seconds = self._seconds(model, native, other, layers)
        shape = f"R={requests} L={context} H={_HEADS}/{_KV_HEADS} D={_DIM}"
        return self._row("decode", dtype, shape, seconds, layer_bytes, 4.0 * requests * context * _HEADS * _DIM)

    def _model(self, dtype: str, layers: int) -> NativeModel:
        config = ModelConfig(
            num_layers=layers, hidden_size=576, num_heads=_HEADS, num_kv_heads=_KV_HEADS, head_dim=_DIM,
            intermediate_size=1536, vocab_size=64, format=FORMATS[dtype].code, num_groups=1,
            norm_eps=1e-5, embedding_scale=1.0, residual_scale=1.0, logit_scale=1.0,
        )  # fmt: skip
        return NativeModel(self._library, config, num_threads=self._num_threads)

    def _seconds(
        self, model: NativeModel, native: Callable[[int], None], other: Callable[[int], None], layers: int
    ) -> list[float]:
        """Median seconds of a layer, native and other; the model has then done its work."""

        def run(side: Callable[[int], None]) -> None:
            for layer in range(layers):
                side(layer)

        # torch's OpenMP threads spin for a while after a region, on the cores of the next side.
        seconds = alternate((native, other), lambda _: time.sleep(0.02), run, self._repeats)
        model.close()
        return [each / layers for each in seconds]

    def _row(
        self, kernel: str, dtype: str, shape: str, seconds: Sequence[float], num_bytes: float, operations: float
    ) -> Row:
        native, other = seconds
        floor, bound = max((num_bytes / self._bus, "memory"), (operations / self._rates[dtype], "arithmetic"))
        times = {"native_ms": native, "torch_ms": other, "floor_ms": floor}
        return {
            "kernel": kernel,
            "dtype": dtype,
            "shape": shape,
            **{name: round(value * 1e3, 4) for name, value in times.items()},
            "of_floor": round(floor / native, 3),
            "bound": bound,
        }
