"""Every kernel against torch, at every instruction set of this processor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aiocb.kernels import Library
from aiocb.kernels.formats import FLOAT32, FORMATS, WeightSource
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.interface import ACTIVATIONS
from tests.kernels.helpers import DTYPES, native


def _addresses(weight: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    stride = weight.stride(0) * weight.element_size()
    return np.uint64(weight.data_ptr()) + np.arange(weight.shape[0], dtype=np.uint64) * np.uint64(stride)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(64, 32), (100, 96), (210, 50), (70, 2600)])
def test_linear(library: Library, instruction_set: str, dtype: str, columns: int, depth: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(columns, depth).to(DTYPES[dtype])
    bias = torch.randn(columns)
    model = native(library, instruction_set, dtype)
    model.set_linear(
        0, "out", _addresses(weight), depth, source=WeightSource.of(dtype), weight_format=FORMATS[dtype],
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
    model = native(library, library.instruction_sets()[0], "float32", num_threads=threads)
    model.set_linear(0, "out", _addresses(weight), 64, source=WeightSource.of("float32"), weight_format=FLOAT32)
    a, out = torch.randn(9, 64), torch.empty(9, 300)
    for _ in range(20):
        out.fill_(math.nan)
        library.calls.aiocb_linear(model.handle, 0, 1, a.data_ptr(), 256, 9, out.data_ptr(), 300)
        torch.testing.assert_close(out, a @ weight.T, rtol=1e-4, atol=1e-4)
    model.close()


@pytest.mark.parametrize("width", [16, 40, 576])
@pytest.mark.parametrize("is_layer_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(library: Library, instruction_set: str, width: int, is_layer_norm: bool, dtype: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, width) * 3 + 1, torch.randn(width), torch.randn(width)
    out = torch.empty(5, width, dtype=DTYPES[dtype])
    kernels = GenericKernels(library, instruction_set=instruction_set)
    code = library.calls.aiocb_norm(
        kernels.handle, weight.data_ptr(), bias.data_ptr() if is_layer_norm else None, is_layer_norm, 1e-5,
        x.data_ptr(), 5, width, FORMATS[dtype].code, out.data_ptr(),
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
def test_activation(library: Library, instruction_set: str, kind: str) -> None:
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
    kernels = GenericKernels(library, instruction_set=instruction_set)
    for other, wanted in ((None, expected), (up, expected * up.double())):
        out = torch.empty(len(gate))
        code = library.calls.aiocb_activation(
            kernels.handle, ACTIVATIONS[kind], gate.data_ptr(), None if other is None else other.data_ptr(), len(gate),
            out.data_ptr(),
        )  # fmt: skip
        assert code == 0
        torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=2e-6)
    kernels.close()
