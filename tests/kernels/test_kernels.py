"""Every kernel against torch, at every instruction-set level of this processor."""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import byref
from typing import Any

import numpy as np
import pytest
import torch

from aiocb.kernels import Library
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.interface import ACTIVATIONS, FORMATS
from tests.kernels.helpers import DTYPES, Rows, native, step_arguments


def _addresses(weight: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    stride = weight.stride(0) * weight.element_size()
    return np.uint64(weight.data_ptr()) + np.arange(weight.shape[0], dtype=np.uint64) * np.uint64(stride)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(64, 32), (100, 96), (210, 50), (70, 2600)])
def test_linear(library: Library, level: str, dtype: str, columns: int, depth: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(columns, depth).to(DTYPES[dtype])
    bias = torch.randn(columns)
    model = native(library, level, dtype)
    model.set_linear(
        0, "out", _addresses(weight), depth, source_format=FORMATS[dtype], weight_format=FORMATS[dtype],
        bias=bias.numpy(),
    )  # fmt: skip
    full = torch.randn(270, depth).to(DTYPES[dtype])
    reference: Any = full.double() @ weight.double().T + bias.double()
    by_rows = []
    for rows in (1, 2, 5, 6, 7, 13, 33, 140, 270):  # the last two are more than are widened at a time
        out = torch.full((rows, columns), math.nan)
        code = library.calls.aiocb_linear(
            model.handle, 0, 1, full.data_ptr(), depth * full.element_size(), rows, out.data_ptr(), columns
        )
        assert code == 0
        by_rows.append(out)
        torch.testing.assert_close(out.double(), reference[:rows], rtol=1e-4, atol=1e-4)
    for out in by_rows:  # the number of rows changes no bit
        assert torch.equal(out, by_rows[-1][: len(out)])
    model.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_change_nothing(library: Library, threads: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 64)
    model = native(library, library.levels()[0], "float32", num_threads=threads)
    model.set_linear(0, "out", _addresses(weight), 64, source_format=0, weight_format=0)
    a, out = torch.randn(9, 64), torch.empty(9, 300)
    for _ in range(20):
        out.fill_(math.nan)
        library.calls.aiocb_linear(model.handle, 0, 1, a.data_ptr(), 256, 9, out.data_ptr(), 300)
        torch.testing.assert_close(out, a @ weight.T, rtol=1e-4, atol=1e-4)
    model.close()


@pytest.mark.parametrize("width", [16, 40, 576])
@pytest.mark.parametrize("is_layer_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(library: Library, level: str, width: int, is_layer_norm: bool, dtype: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, width) * 3 + 1, torch.randn(width), torch.randn(width)
    out = torch.empty(5, width, dtype=DTYPES[dtype])
    kernels = GenericKernels(library, level=level)
    code = library.calls.aiocb_norm(
        kernels.handle, weight.data_ptr(), bias.data_ptr() if is_layer_norm else None, is_layer_norm, 1e-5,
        x.data_ptr(), 5, width, FORMATS[dtype], out.data_ptr(),
    )  # fmt: skip
    assert code == 0
    kernels.close()
    if is_layer_norm:
        expected = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5)
    else:
        expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    tolerance = 2e-6 if dtype == "float32" else 0.005
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(library: Library, level: str, kind: str) -> None:
    gate = torch.cat([torch.linspace(-30, 30, 500), torch.tensor([0.0, -100.0, 100.0])])
    up = torch.randn(len(gate), generator=torch.Generator().manual_seed(0))
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "relu2": lambda x: torch.relu(x) ** 2,
    }
    expected = functions[kind](gate.double())
    kernels = GenericKernels(library, level=level)
    for other, wanted in ((None, expected), (up, expected * up.double())):
        out = torch.empty(len(gate))
        code = library.calls.aiocb_activation(
            kernels.handle, ACTIVATIONS[kind], gate.data_ptr(), None if other is None else other.data_ptr(), len(gate),
            out.data_ptr(),
        )  # fmt: skip
        assert code == 0
        torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=2e-6)
    kernels.close()


def _rope(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], the first 2 * len(frequencies) dims rotate."""
    half = len(frequencies)
    angles = positions[:, None].float() * frequencies  # [T, half]
    cosine, sine = angles.cos()[:, None].double(), angles.sin()[:, None].double()
    y = x.clone()
    a, b = x[..., :half], x[..., half : 2 * half]
    y[..., :half], y[..., half : 2 * half] = a * cosine - b * sine, b * cosine + a * sine
    return y


CASES: list[dict[str, Any]] = [
    {"heads": 4, "kv": 2, "dim": 32},
    {"heads": 9, "kv": 3, "dim": 64, "rotary": 64},
    {"heads": 8, "kv": 1, "dim": 80, "rotary": 20, "window": 37},
    {"heads": 4, "kv": 4, "dim": 128, "rotary": 128},
    {"heads": 7, "kv": 1, "dim": 256, "window": 16, "softcap": 5.0},
    {"heads": 6, "kv": 2, "dim": 96, "sinks": True, "scale": 0.3},
    {"heads": 64, "kv": 1, "dim": 48, "window": 130, "sinks": True},
]


def test_layers_of_a_large_cache_lie_apart(library: Library, level: str) -> None:
    """Layers of many blocks are shifted in memory: what is written, read back and copied is as in a small cache."""
    heads, kv, dim, layers = 4, 2, 32, 3
    torch.manual_seed(0)
    inputs = [torch.randn(40, (heads + 2 * kv) * dim) for _ in range(layers)]
    seen = []
    for num_blocks in (64, 2600):
        model = native(library, level, "float32", num_layers=layers)
        model.set_group(0, num_blocks, layers)
        for layer in range(layers):
            model.set_layer(layer, window=0, rope=-1, group=0, group_layer=layer, scale=0.2)
        found: list[Any] = []
        for start, count in ((0, 39), (39, 1)):
            for layer, qkv in enumerate(inputs):
                keep: list[Any] = []
                arguments = step_arguments([Rows([7, 60, 2], start, count)], keep)
                rows, out = qkv[start : start + count].contiguous(), torch.full((count, heads * dim), math.nan)
                model.check(
                    library.calls.aiocb_attention(
                        model.handle, byref(arguments), layer, rows.data_ptr(), out.data_ptr()
                    )
                )
                found.append(out.numpy())
        model.copy_block(0, 60, 61)
        for block in (7, 60, 2, 61):
            data = np.zeros((layers, 2 * 16 * kv * dim * 4), np.uint8)
            model.read_block(0, block, data)
            assert data.any(axis=1).all()
            found.append(data)
        assert (found[-1] == found[-3]).all()
        seen.append(found)
        model.close()
    assert all((small == large).all() for small, large in zip(*seen, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}{v}" for k, v in case.items()))
def test_attention(library: Library, level: str, dtype: str, case: dict[str, Any]) -> None:
    """Rotary embedding, cache write and attention over mixed steps, against a dense reference in float64."""
    heads, kv, dim, window = case["heads"], case["kv"], case["dim"], case.get("window", 0)
    rotary, softcap, scale = case.get("rotary", 0), case.get("softcap", 0.0), case.get("scale", dim**-0.5)
    torch.manual_seed(0)
    model = native(
        library, level, dtype, num_heads=heads, num_kv_heads=kv, head_dim=dim, rotary_dim=rotary,
        num_ropes=int(rotary > 0), attention_softcap=softcap,
    )  # fmt: skip
    model.set_group(0, 64, 1)
    model.set_layer(0, window=window, rope=0 if rotary else -1, group=0, group_layer=0, scale=scale)
    frequencies = 1.0 / 100.0 ** (torch.arange(0, rotary, 2) / max(rotary, 1))
    if rotary:
        model.set_rope(0, frequencies.numpy(), 1.0)
    sinks = torch.randn(heads) if case.get("sinks") else None
    if sinks is not None:
        model.set_vector(0, "sinks", sinks.numpy())

    lengths = (300, 77, 16, 33)
    blocks = (torch.randperm(60) + 1).tolist()
    tables = [[blocks.pop() for _ in range(-(-length // 16))] for length in lengths]
    if sum(map(len, tables)) < len(tables):
        raise AssertionError
    width = (heads + 2 * kv) * dim
    inputs = [torch.randn(length, width) for length in lengths]
    outputs = [torch.empty(length, heads * dim) for length in lengths]
    # Prefill alone, chunks of two sequences with a decode, then decode of all: every boundary is uneven.
    plan = [
        [(0, 0, 150)],
        [(0, 150, 1), (1, 0, 50), (2, 0, 15)],
        [(0, 151, 148), (1, 50, 26), (3, 0, 32)],
        [(0, 299, 1), (1, 76, 1), (2, 15, 1), (3, 32, 1)],
    ]
    for step in plan:
        keep: list[Any] = []
        arguments = step_arguments([Rows(tables[s], start, count) for s, start, count in step], keep)
        qkv = torch.cat([inputs[s][start : start + count] for s, start, count in step])
        out: Any = torch.full((len(qkv), heads * dim), math.nan)
        model.check(library.calls.aiocb_attention(model.handle, byref(arguments), 0, qkv.data_ptr(), out.data_ptr()))
        for (s, start, count), rows in zip(step, out.split([count for _, _, count in step])):
            outputs[s][start : start + count] = rows
    for length, x, out in zip(lengths, inputs, outputs):
        packed: Any = x.double().view(length, heads + 2 * kv, dim)
        q, k, v = packed.split([heads, kv, kv], dim=1)
        positions = torch.arange(length)
        if rotary:
            q, k = (_rope(part, positions, frequencies) for part in (q, k))
        q, k, v = (part.to(DTYPES[dtype]).double().transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(heads // kv, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & ((distance < window) if window else True)
        scores = scores.masked_fill(~visible, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, length, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        expected = (weights @ v).transpose(0, 1).reshape(length, heads * dim)
        tolerance = 2e-5 if dtype == "float32" else 0.02
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    model.close()
