"""Recurrences over packed rows against transformers' own functions, one request at a time and token by token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from aiocb.kernels import KernelUnavailable, load
from aiocb.kernels.generic import GenericKernels
from aiocb.model.eager.recurrence import Scans, TorchScans
from aiocb.model.eager.recurrence.native import NativeScans

from .recurrences import CASES, FRESH, NUM_SLOTS, SLOTS, packed_rows

TOLERANCE = 2e-4


@pytest.fixture(params=["torch", "native"])
def scans(request: pytest.FixtureRequest) -> Iterator[Scans]:
    if request.param == "torch":
        yield TorchScans()
        return
    library = load()
    assert not isinstance(library, KernelUnavailable), library.reason
    kernels = GenericKernels(library, num_threads=2)
    yield NativeScans(kernels)
    kernels.close()


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_are_those_of_each_request_alone(scans: Scans, name: str) -> None:
    case, rows = CASES[name](), packed_rows()
    state = case.state.clone()
    state[9] = float("nan")  # of a row that begins: whatever is in its slot
    out = case.run(scans, state, rows)
    for (first, last), slot, is_fresh in zip(itertools.pairwise(rows.starts), SLOTS, FRESH, strict=True):
        expected, after = case.own(*(x[first:last] for x in case.inputs), before=None if is_fresh else case.state[slot])
        torch.testing.assert_close(out[first:last].reshape(expected.shape), expected, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(state[slot], after, rtol=TOLERANCE, atol=TOLERANCE)
    for slot in set(range(NUM_SLOTS)) - set(SLOTS):
        assert torch.equal(state[slot], case.state[slot])


@pytest.mark.parametrize("name", CASES)
def test_tokens_one_by_one_give_what_chunks_give(scans: Scans, name: str) -> None:
    if name == "mamba 2 with limits":
        name = "mamba 2"  # the limits hold in chunks only
    case = CASES[name]()
    tokens = torch.arange(90)
    whole, pieces = case.state.clone(), case.state.clone()
    expected = case.run(scans, whole, packed_rows((90,), (5,), (True,)), tokens)
    out, done = [], 0
    for length in (33, 1, 1, 16, 39):
        part = tokens[done : done + length]
        out.append(case.run(scans, pieces, packed_rows((length,), (5,), (done == 0,)), part))
        done += length
    allowed = 0.0 if scans.name == "native" else TOLERANCE
    torch.testing.assert_close(torch.cat(out), expected, rtol=allowed, atol=allowed)
    torch.testing.assert_close(pieces[5], whole[5], rtol=allowed, atol=allowed)


def test_rows_of_one_token_must_come_first() -> None:
    with pytest.raises(ValueError, match="come first"):
        packed_rows((2, 1), (1, 2), (True, True))


@pytest.mark.parametrize("name", CASES)
def test_the_default_type_of_torch_does_not_matter(scans: Scans, name: str) -> None:
    case, rows = CASES[name](), packed_rows()
    expected, state = case.state.clone(), case.state.clone()
    out = case.run(scans, expected, rows)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of the whole process: whoever loads another model may set it any moment
    try:
        found = case.run(scans, state, rows)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == out.dtype
    assert torch.equal(found, out) and torch.equal(state, expected)
