"""Paged attention at every instruction set: against torch, and whatever a freed page was left with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import byref
from typing import Any, cast

import numpy as np
import pytest
import torch

from aiocb.kernels import Library, NativeModel
from aiocb.kernels.formats import FORMATS
from tests.kernels.helpers import DTYPES, Rows, Tensor, native, step_arguments

NUM_BLOCKS = 64
LENGTHS = (300, 77, 16, 33)
STORED = [(dtype, cache) for dtype in DTYPES for cache in (dtype, "int8")]
of_every_format = pytest.mark.parametrize(("dtype", "cache"), STORED, ids=["-".join(pair) for pair in STORED])
# Prefill alone, chunks of two sequences with a decode, then decode of all: every boundary is uneven.
STEPS = [
    [(0, 0, 150)],
    [(0, 150, 1), (1, 0, 50), (2, 0, 15)],
    [(0, 151, 148), (1, 50, 26), (3, 0, 32)],
    [(0, 299, 1), (1, 76, 1), (2, 15, 1), (3, 32, 1)],
]


def _rope(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], the first 2 * len(frequencies) dims rotate."""
    half = len(frequencies)
    angles = positions[:, None].float() * frequencies  # [T, half]
    cosine, sine = angles.cos()[:, None].double(), angles.sin()[:, None].double()
    y = x.clone()
    a, b = x[..., :half], x[..., half : 2 * half]
    y[..., :half], y[..., half : 2 * half] = a * cosine - b * sine, b * cosine + a * sine
    return y


def in_eight_bits(x: Tensor) -> Tensor:
    """What is kept of rows [T, K, D]: bytes times a scale, which is a 127th of the largest, rounded up to bfloat16."""
    x = x.float()
    exact = x.abs().amax(-1, keepdim=True) / 127
    nearest = exact.bfloat16()
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    scale = torch.where(nearest.float() < exact, above, nearest).float()
    return (x * (1 / scale)).round().double() * scale


CASES: list[dict[str, Any]] = [
    {"heads": 4, "kv": 2, "dim": 32},
    {"heads": 9, "kv": 3, "dim": 64, "rotary": 64},
    {"heads": 8, "kv": 1, "dim": 80, "rotary": 20, "window": 37},
    {"heads": 4, "kv": 4, "dim": 128, "rotary": 128},
    {"heads": 7, "kv": 1, "dim": 256, "window": 16, "softcap": 5.0},
    {"heads": 6, "kv": 2, "dim": 96, "sinks": True, "scale": 0.3},
    {"heads": 64, "kv": 1, "dim": 48, "window": 130, "sinks": True},
]


def attend(model: NativeModel, layer: int, sequences: Sequence[Rows], qkv: Tensor, width: int) -> Tensor:
    """Rotation, cache write and attention of one layer."""
    keep: list[Any] = []
    arguments = step_arguments(sequences, keep)
    rows, out = qkv.contiguous(), torch.full((len(qkv), width), math.nan)
    call = model.library.calls.aiocb_attention
    model.check(call(model.handle, byref(arguments), layer, rows.data_ptr(), out.data_ptr()))
    return out


class Case:
    """One of `CASES`: a model of one layer, and packed q, k and v of four sequences, [T, H + 2 K, D]."""

    def __init__(self, library: Library, instruction_set: str, dtype: str, cache: str, case: dict[str, Any]) -> None:
        self.heads, self.kv, self.dim, self.window = case["heads"], case["kv"], case["dim"], case.get("window", 0)
        self.softcap, self.scale = case.get("softcap", 0.0), case.get("scale", self.dim**-0.5)
        rotary = case.get("rotary", 0)
        torch.manual_seed(0)
        self.model = native(
            library, instruction_set, dtype, num_heads=self.heads, num_kv_heads=self.kv, head_dim=self.dim,
            rotary_dim=rotary, num_ropes=int(rotary > 0), attention_softcap=self.softcap,
            cache_format=FORMATS[cache].code,
        )  # fmt: skip
        rope = 0 if rotary else -1
        self.model.set_group(0, NUM_BLOCKS, 1)
        self.model.set_layer(0, window=self.window, rope=rope, group=0, group_layer=0, scale=self.scale)
        self.frequencies = 1.0 / 100.0 ** (torch.arange(0, rotary, 2) / max(rotary, 1))
        if rotary:
            self.model.set_rope(0, self.frequencies.numpy(), 1.0)
        self.sinks = torch.randn(self.heads) if case.get("sinks") else None
        if self.sinks is not None:
            self.model.set_vector(0, "sinks", self.sinks.numpy())
        self.inputs = [torch.randn(length, self.heads + 2 * self.kv, self.dim) for length in LENGTHS]
        blocks = (torch.randperm(60) + 1).tolist()
        self.tables = [[blocks.pop() for _ in range(-(-length // 16))] for length in LENGTHS]
        self.dtype, self.is_int8 = DTYPES[dtype], cache == "int8"

    def fill(self, value: float) -> None:
        """Leave `value` in every page."""
        count = self.kv * 16 * (self.dim + 2 if self.is_int8 else 2 * self.dim)
        dtype = torch.bfloat16 if self.is_int8 else self.dtype  # of the scales; the rest is any bytes
        page = torch.full((count,), value, dtype=dtype).view(torch.uint8).numpy()
        for block in range(1, NUM_BLOCKS):
            self.model.write_block(0, block, page)

    def run(self, inputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run all steps; [T, H * D] of each sequence."""
        width, inputs = self.heads * self.dim, inputs or self.inputs
        outputs = [torch.empty(length, width) for length in LENGTHS]
        for step in STEPS:
            rows = [Rows(self.tables[s], start, count) for s, start, count in step]
            qkv = torch.cat([inputs[s][start : start + count] for s, start, count in step])
            out: Any = attend(self.model, 0, rows, qkv, width)
            for (s, start, count), part in zip(step, out.split([count for _, _, count in step])):
                outputs[s][start : start + count] = part
        return outputs

    def expected(self, x: Tensor) -> Tensor:
        """A dense reference in float64."""
        length, packed = len(x), cast("Any", x.double())
        q, k, v = packed.split([self.heads, self.kv, self.kv], dim=1)
        positions = torch.arange(length)
        if len(self.frequencies):
            q, k = (_rope(part, positions, self.frequencies) for part in (q, k))
        q = q.to(self.dtype).double()
        k, v = (in_eight_bits(part) if self.is_int8 else part.to(self.dtype).double() for part in (k, v))
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(self.heads // self.kv, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & ((distance < self.window) if self.window else True)
        scores = scores.masked_fill(~visible, -math.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(self.heads, length, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        result: Tensor = (weights @ v).transpose(0, 1).reshape(length, self.heads * self.dim)
        return result


of_every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}{v}" for k, v in case.items()))


@of_every_format
@of_every_case
def test_attention(library: Library, instruction_set: str, dtype: str, cache: str, case: dict[str, Any]) -> None:
    """Rotary embedding, cache write and attention over mixed steps."""
    one = Case(library, instruction_set, dtype, cache, case)
    # In eight bits, a number between two bytes may go either way after another rotation.
    tolerance = {"float32": 2e-5, "int8": 2e-3}[cache] if dtype == "float32" else 0.02
    for x, out in zip(one.inputs, one.run(), strict=True):
        torch.testing.assert_close(out.double(), one.expected(x), rtol=tolerance, atol=tolerance)
    one.model.close()


@of_every_format
@of_every_case
def test_what_freed_pages_hold_harms_nobody(
    library: Library, instruction_set: str, dtype: str, cache: str, case: dict[str, Any]
) -> None:
    one = Case(library, instruction_set, dtype, cache, case)
    clean = one.run()
    for value in (math.nan, math.inf, -math.inf):
        one.fill(value)
        assert all(torch.equal(a, b) for a, b in zip(clean, one.run(), strict=True)), value
    one.model.close()


@pytest.mark.parametrize("part", ["key", "value"])
@of_every_format
@of_every_case
def test_one_tokens_nan_reaches_those_who_see_it(
    library: Library, instruction_set: str, dtype: str, cache: str, case: dict[str, Any], part: str
) -> None:
    """Not the tokens before it in the same page and the same chunk, not those whose window is past it; all others."""
    one = Case(library, instruction_set, dtype, cache, case)
    clean = one.run()
    inputs, at = [x.clone() for x in one.inputs], 170
    first = one.heads + (one.kv if part == "value" else 0)
    inputs[0][at, first : first + one.kv] = math.nan
    found = one.run(inputs)
    last = at + one.window if one.window else LENGTHS[0]
    assert found[0][at:last].isnan().all()
    for rows in (slice(0, at), slice(last, None)):
        assert torch.equal(found[0][rows], clean[0][rows])
    assert all(torch.equal(a, b) for a, b in zip(clean[1:], found[1:], strict=True))
    one.model.close()


def test_layers_of_a_large_cache_lie_apart(library: Library, instruction_set: str) -> None:
    """Layers of many blocks are shifted in memory: what is written, read back and copied is as in a small cache."""
    heads, kv, dim, layers = 4, 2, 32, 3
    torch.manual_seed(0)
    inputs = [torch.randn(40, (heads + 2 * kv) * dim) for _ in range(layers)]
    seen = []
    for num_blocks in (64, 2600):
        model = native(library, instruction_set, "float32", num_layers=layers)
        model.set_group(0, num_blocks, layers)
        for layer in range(layers):
            model.set_layer(layer, window=0, rope=-1, group=0, group_layer=layer, scale=0.2)
        found: list[Any] = []
        for start, count in ((0, 39), (39, 1)):
            for layer, qkv in enumerate(inputs):
                out = attend(model, layer, [Rows([7, 60, 2], start, count)], qkv[start : start + count], heads * dim)
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
