"""What weights are packed from, against the Python package of the format's authors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize

from aiocb.kernels import KernelError, Library
from aiocb.kernels.formats import FORMATS, SOURCES, WeightSource
from aiocb.kernels.interface import LINEARS
from tests.kernels.helpers import native

COLUMNS, DEPTH = 70, 512
BLOCKS = [name for name, source in SOURCES.items() if source.weights > 1]


def _blocks(source: WeightSource, columns: int = COLUMNS, depth: int = DEPTH) -> np.ndarray:
    """Rows of blocks, every bit of which is arbitrary but for the scales, which are finite numbers."""
    generator = np.random.default_rng(source.code)
    kind = GGMLQuantizationType[source.name]
    rows = generator.integers(0, 256, (columns, depth // source.weights, source.bytes), np.uint8)
    halves = generator.uniform(0.0005, 0.01, (columns, depth // source.weights, 2)).astype(np.float16)
    places = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "IQ4_NL": [0], "Q6_K": [208]}.get(source.name, [0, 2])
    for number, place in enumerate(places):
        rows[:, :, place : place + 2] = halves[:, :, number : number + 1].view(np.uint8)
    assert GGML_QUANT_SIZES[kind] == (source.weights, source.bytes)
    return rows.reshape(columns, -1)


def _unpacked(library: Library, name: str, rows: np.ndarray, depth: int, target: str, dtype: str) -> np.ndarray:
    model = native(library, library.instruction_sets()[0], dtype)
    addresses = np.uint64(rows.ctypes.data) + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
    model.set_linear(0, "out", addresses, depth, source=SOURCES[name], weight_format=FORMATS[target])
    out = np.full((len(rows), depth), np.nan, np.float32)
    model.check(library.calls.aiocb_unpack(model.handle, 0, LINEARS["out"], out.ctypes.data))
    model.close()
    return out


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_read_as_their_authors_read_them(library: Library, name: str) -> None:
    rows = _blocks(SOURCES[name])
    expected = dequantize(rows, GGMLQuantizationType[name])
    np.testing.assert_allclose(_unpacked(library, name, rows, DEPTH, "float32", "float32"), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bits_stay_as_they_are(library: Library, name: str) -> None:
    """Only scales and offsets are rounded, to half precision."""
    rows = _blocks(SOURCES[name])
    expected = dequantize(rows, GGMLQuantizationType[name])
    actual = _unpacked(library, name, rows, DEPTH, "int4", "bfloat16")
    groups = np.abs(expected).reshape(COLUMNS, -1, 32).max(-1, keepdims=True)
    assert (np.abs(actual - expected).reshape(COLUMNS, -1, 32) <= groups * 2.0**-9).all()


@pytest.mark.parametrize("name", ["Q5_0", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "F16"])
def test_more_bits_become_eight(library: Library, name: str) -> None:
    rows = np.random.default_rng(3).normal(0, 0.02, (COLUMNS, DEPTH)).astype(np.float16).view(np.uint8)
    if name != "F16":
        rows = _blocks(SOURCES[name])
    expected = dequantize(rows, GGMLQuantizationType[name])
    actual = _unpacked(library, name, rows, DEPTH, "int8", "bfloat16")
    peaks = np.abs(expected).reshape(COLUMNS, -1, 32).max(-1, keepdims=True)
    assert (np.abs(actual - expected).reshape(COLUMNS, -1, 32) <= peaks * (0.5 / 127 + 2.0**-9) * 1.01).all()


def test_halves_are_read_exactly(library: Library) -> None:
    """Every number of the format: normal, subnormal, zeros."""
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)].reshape(-1, 32)[:, :]
    rows = np.ascontiguousarray(values.reshape(62, -1))
    actual = _unpacked(library, "F16", rows, rows.shape[1], "float32", "float32")
    np.testing.assert_array_equal(actual, rows.astype(np.float32))


def test_an_embedding_is_read_from_its_blocks(library: Library) -> None:
    quantized = quantize(np.random.default_rng(5).normal(0, 1, (64, 64)).astype(np.float32), GGMLQuantizationType.Q8_0)
    model = native(library, library.instruction_sets()[0], "bfloat16")
    model.set_embedding(quantized.ctypes.data, SOURCES["Q8_0"], quantized)
    with pytest.raises(KernelError, match="rows of 64 in blocks of 256"):
        model.set_embedding(quantized.ctypes.data, SOURCES["Q6_K"], quantized)
    model.close()


def test_a_depth_is_whole_blocks(library: Library) -> None:
    rows = np.zeros((64, 144), np.uint8)
    with pytest.raises(KernelError, match="linear 1 of depth 64 in blocks of 256"):
        _unpacked(library, "Q4_K", rows, 64, "int4", "bfloat16")


def test_a_dtype_has_a_source_of_its_own() -> None:
    assert WeightSource.of(torch.float16) is SOURCES["F16"]
    assert SOURCES["Q6_K"].row_bytes(512) == 420
