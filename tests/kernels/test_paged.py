"""Paged attention over torch tensors at every instruction set: against the reference, whatever a query may see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aiocb.attention.base import Attention, GroupTables, LayerSpec, StepBatch, first_visible
from aiocb.attention.cpu import CpuBackend
from aiocb.attention.reference import ReferenceBackend
from aiocb.attention.sdpa import SdpaBackend
from aiocb.kernels import KernelError, Library
from aiocb.kernels.generic import GenericKernels

PAGE = 16
NUM_BLOCKS = 64
LENGTHS = (300, 77, 16, 33)
# Each step is (sequence, first new token, new tokens): prefill, chunks beside a decode, a chunk, decodes.
STEPS: list[list[tuple[int, int, int]]] = [
    [(0, 0, 150)],
    [(0, 150, 1), (1, 0, 50), (2, 0, 15)],
    [(0, 151, 148), (1, 50, 26), (3, 0, 32)],
    [(0, 299, 1), (1, 76, 1), (2, 15, 1), (3, 32, 1)],
]
SPECS = {
    "full": LayerSpec(0, 4, 2, 32, 32, 0.2),
    "window": LayerSpec(0, 4, 2, 32, 32, 0.2, window=37),
    "chunk": LayerSpec(0, 4, 2, 32, 32, 0.2, chunk=64),
    "chunk-odd-sinks": LayerSpec(0, 6, 2, 48, 48, 0.2, has_sinks=True, chunk=37),
    "chunk-softcap": LayerSpec(0, 4, 1, 32, 32, 0.5, softcap=3.0, chunk=130),
    "alibi": LayerSpec(0, 4, 4, 32, 32, 0.2, alibi="exact"),
    "alibi-shared-keys": LayerSpec(0, 14, 2, 32, 32, 0.2, alibi="exact"),
    "alibi-rounded": LayerSpec(0, 7, 1, 64, 64, 0.125, alibi="rounded"),
    "alibi-window": LayerSpec(0, 4, 2, 32, 32, 0.2, window=50, alibi="exact"),
}


class Step(NamedTuple):
    rows: list[tuple[int, int, int]]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Case:
    """Four sequences, computed step by step over scattered blocks."""

    def __init__(self, spec: LayerSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        generator = torch.Generator().manual_seed(0)
        blocks = (torch.randperm(60, generator=generator) + 1).tolist()
        self.tables = [[blocks.pop() for _ in range(-(-length // PAGE))] for length in LENGTHS]
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.steps = [
            Step(
                rows,
                *(
                    torch.randn(sum(count for *_, count in rows), num, spec.key_dim, generator=generator).to(dtype)
                    for num in heads
                ),
            )
            for rows in STEPS
        ]
        self.sinks = torch.randn(spec.num_heads, generator=generator).to(dtype) if spec.has_sinks else None
        # No powers of two: those hide what is rounded.
        slopes = 0.71 ** torch.arange(1.0, spec.num_heads + 1)
        self.slopes = slopes.bfloat16().float() if spec.alibi else None

    def run(self, backend: Any, fill: float = 0.0) -> list[torch.Tensor]:
        """Return each step's result, [T, H, D]."""
        storage = backend.allocate(self.spec, NUM_BLOCKS, PAGE, self.dtype, torch.device("cpu"))
        for pages in storage if isinstance(storage, tuple) else (storage,):
            pages.fill_(fill)
        outputs = []
        for step in self.steps:
            metadata = backend.prepare(self._batch(step.rows), 0)
            backend.write(storage, metadata, step.key, step.value)
            attention = Attention(self.spec, step.query, step.key, step.value, self.sinks, None, self.slopes)
            outputs.append(backend.attend(attention, storage, metadata))
        return outputs

    def _batch(self, rows: Sequence[tuple[int, int, int]]) -> StepBatch:
        window, chunk = self.spec.window, self.spec.chunk
        computed, new = (np.array([row[place] for row in rows]) for place in (1, 2))
        first = first_visible(computed, window, chunk) // PAGE
        pages = [
            self.tables[sequence][low : -(-(start + count) // PAGE)]
            for (sequence, start, count), low in zip(rows, first)
        ]
        slots = [
            self.tables[sequence][at // PAGE] * PAGE + at % PAGE
            for sequence, start, count in rows
            for at in range(start, start + count)
        ]
        bounds = np.concatenate([[0], np.cumsum([len(table) for table in pages])])
        tables = GroupTables(
            window, torch.tensor(slots), np.array(sum(pages, []), np.int32), bounds, first * PAGE, chunk
        )
        starts = np.concatenate([[0], np.cumsum(new)])
        decodes = next((index for index, row in enumerate(rows) if row[2] > 1), len(rows))
        return StepBatch(decodes, starts, computed, computed + new, (tables,), PAGE, torch.device("cpu"), self.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
class TestAgainstTheReference:
    def compare(self, case: Case, outputs: list[torch.Tensor]) -> None:
        tolerance = 2e-5 if case.dtype == torch.float32 else 0.03
        for expected, out in zip(case.run(ReferenceBackend()), outputs, strict=True):
            torch.testing.assert_close(out.float(), expected.float(), rtol=tolerance, atol=tolerance)

    def test_native(self, library: Library, instruction_set: str, name: str, dtype: torch.dtype) -> None:
        case = Case(SPECS[name], dtype)
        backend = CpuBackend(GenericKernels(library, num_threads=2, instruction_set=instruction_set))
        clean = case.run(backend)
        self.compare(case, clean)
        for stale in (math.nan, math.inf):  # what freed pages hold
            assert all(torch.equal(a, b) for a, b in zip(clean, case.run(backend, stale), strict=True))
        backend.kernels.close()

    def test_sdpa(self, name: str, dtype: torch.dtype) -> None:
        case = Case(SPECS[name], dtype)
        self.compare(case, case.run(SdpaBackend()))


def test_the_reference_sees_what_it_should() -> None:
    """Written out once more, without pages and rows: the whole of the longest sequence in fp64."""
    for name, spec in SPECS.items():
        case = Case(spec, torch.float32)
        outputs = case.run(ReferenceBackend())
        parts = [
            (step, slice(at, at + count), out)
            for step, out in zip(case.steps, outputs)
            for at, (sequence, _, count) in zip(np.cumsum([0, *(row[2] for row in step.rows)]), step.rows)
            if sequence == 0
        ]
        query, key, value = (
            torch.cat([getattr(step, field)[own] for step, own, _ in parts]).double().transpose(0, 1)
            for field in ("query", "key", "value")
        )
        key, value = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 0) for x in (key, value))
        scores = query @ key.transpose(1, 2) * spec.scaling
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        at = torch.arange(LENGTHS[0])
        if case.slopes is not None and spec.alibi == "exact":
            scores += case.slopes.double()[:, None, None] * (at - at[:, None])
        elif case.slopes is not None:
            scores += (case.slopes.bfloat16()[:, None] * at)[:, None].double() * spec.scaling
        visible = at <= at[:, None]
        if spec.window:
            visible &= at > at[:, None] - spec.window
        if spec.chunk:
            visible &= at // spec.chunk == at[:, None] // spec.chunk
        scores = scores.masked_fill(~visible, -math.inf)
        if case.sinks is not None:
            scores = torch.cat([scores, case.sinks.double()[:, None, None].expand(-1, len(at), 1)], -1)
        expected = (scores.softmax(-1)[..., : len(at)] @ value).transpose(0, 1)
        found = torch.cat([out[own] for _, own, out in parts])
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=name)


def test_rows_do_not_see_the_batch(library: Library, instruction_set: str) -> None:
    """Each token by itself gives what it gives in any step, to the last bit."""
    for name in ("chunk-odd-sinks", "alibi-shared-keys", "alibi-rounded"):
        case = Case(SPECS[name], torch.float32)
        backend = CpuBackend(GenericKernels(library, num_threads=2, instruction_set=instruction_set))
        outputs = case.run(backend)
        alone: list[Step] = []
        for step in case.steps:
            at = 0
            for sequence, start, count in step.rows:
                for token in range(count):
                    own = slice(at + token, at + token + 1)
                    alone.append(Step([(sequence, start + token, 1)], step.query[own], step.key[own], step.value[own]))
                at += count
        case.steps = alone
        assert torch.equal(torch.cat(case.run(backend)), torch.cat(outputs))
        backend.kernels.close()


def test_slopes_have_to_be_there(library: Library) -> None:
    case = Case(SPECS["alibi"], torch.float32)
    backend = CpuBackend(GenericKernels(library))
    case.slopes = None
    case.run(backend)  # none are given: none are added, as with sinks
    storage = backend.allocate(case.spec, NUM_BLOCKS, PAGE, case.dtype, torch.device("cpu"))
    step = case.steps[0]
    metadata = backend.prepare(case._batch(step.rows), 0)
    backend.write(storage, metadata, step.key, step.value)
    for wrong in ({"alibi": 1}, {"alibi": 3}, {"chunk": -1}):
        for field, number in wrong.items():
            setattr(metadata.call, field, number)
        with pytest.raises(KernelError, match="chunk"):
            backend.kernels.attend(metadata.call)
    backend.kernels.close()


def test_what_a_backend_cannot_do_is_refused() -> None:
    plain = CpuBackend.capabilities._replace(has_chunks=False, has_alibi=False)
    for name, reason in (("chunk", "chunks of 64"), ("alibi", "ALiBi")):
        refusal = plain.refusal([SPECS[name]], "cpu", "float32", PAGE)
        assert refusal is not None and reason in refusal
        assert CpuBackend.capabilities.refusal([SPECS[name]], "cpu", "float32", PAGE) is None
    both = SPECS["alibi"]._replace(softcap=3.0)
    assert "soft cap" in str(CpuBackend.capabilities.refusal([both], "cpu", "float32", PAGE))
