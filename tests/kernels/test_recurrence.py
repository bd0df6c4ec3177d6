"""Native recurrences on every instruction set: against plain torch, alone and in a batch, in bf16, out of bounds."""

from __future__ import annotations

import itertools

import pytest
import torch

from aiocb.kernels import KernelError, Library
from aiocb.kernels.generic import GenericKernels
from aiocb.model.eager.recurrence import TorchScans
from aiocb.model.eager.recurrence.native import NativeScans
from tests.model.recurrences import CASES, FRESH, NUM_SLOTS, SLOTS, packed_rows

TOLERANCE = 2e-4


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_the_same_alone_and_in_a_batch(library: Library, instruction_set: str, name: str) -> None:
    outs = []
    for num_threads in (1, 3):
        kernels = GenericKernels(library, num_threads=num_threads, instruction_set=instruction_set)
        scans, case, rows = NativeScans(kernels), CASES[name](), packed_rows()
        state = case.state.clone()
        out = case.run(scans, state, rows)
        outs.append(out)
        for (first, last), slot, is_fresh in zip(itertools.pairwise(rows.starts), SLOTS, FRESH, strict=True):
            alone = case.state.clone()
            row = packed_rows((last - first,), (slot,), (is_fresh,))
            assert torch.equal(case.run(scans, alone, row, torch.arange(first, last)), out[first:last])
            assert torch.equal(alone[slot], state[slot])
        kernels.close()
    assert torch.equal(outs[0], outs[1])
    expected_state = case.state.clone()
    torch.testing.assert_close(out, case.run(TorchScans(), expected_state, rows), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(state, expected_state, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["convolution", "wide convolution", "delta", "delta by channel", "mamba 2", "mamba 1"])
def test_bf16_is_that_of_its_values_in_fp32(library: Library, instruction_set: str, name: str) -> None:
    kernels = GenericKernels(library, instruction_set=instruction_set)
    case, rows = CASES[name](), packed_rows()
    # What is float32 in a bf16 model: decays and beta of the delta rule, and states but those of convolutions.
    kinds = [torch.float32 if "delta" in name and index > 2 else torch.bfloat16 for index in range(len(case.inputs))]
    rounded = tuple(x.to(kind) for x, kind in zip(case.inputs, kinds, strict=True))
    state = case.state.bfloat16() if "convolution" in name else case.state.clone()
    expected_state = state.float().clone()
    expected = case.ours(TorchScans(), *(x.float() for x in rounded), state=expected_state, rows=rows)
    out = case.ours(NativeScans(kernels), *rounded, state=state, rows=rows)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(state.float(), expected_state, rtol=TOLERANCE, atol=TOLERANCE)
    kernels.close()


@pytest.mark.parametrize("slot", [0, NUM_SLOTS, -1])
def test_a_slot_that_is_none_is_refused(library: Library, slot: int) -> None:
    kernels = GenericKernels(library)
    case = CASES["convolution"]()
    state = case.state.clone()
    with pytest.raises(KernelError, match="slot"):
        case.run(NativeScans(kernels), state, packed_rows((1,), (slot,), (False,)), torch.arange(1))
    assert torch.equal(state, case.state)
    kernels.close()


def test_heads_that_do_not_fit_each_other_are_refused(library: Library) -> None:
    kernels = GenericKernels(library)
    rows, one = packed_rows((1,), (1,), (False,)), torch.zeros(1, 3, 4)
    with pytest.raises(KernelError, match="3 heads of 4 over 2 of 4"):
        NativeScans(kernels).delta_rule(
            one[:, :2], one[:, :2], one, one[..., 0], one[..., 0], torch.zeros(2, 3, 4, 4), rows, is_normed=True
        )
    kernels.close()
