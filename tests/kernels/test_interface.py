"""Both sides of the C interface agree, or nothing is called; weights that are missing or do not fit are refused."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from aiocb.kernels import KernelError, KernelUnavailable, Library, interface, load
from aiocb.kernels.formats import BFLOAT16, FLOAT32, FORMATS, INT8, WeightSource
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.selection import SelectArguments
from tests.kernels.helpers import Rows, native, step_arguments
from tests.kernels.test_kernels import _addresses


class _Grown(ctypes.Structure):
    _fields_ = [*interface.StepArguments._fields_[:-1], ("more", ctypes.c_int64), interface.StepArguments._fields_[-1]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("StepArguments", _Grown, r"StepArgs"),
        ("PAGE_SIZE", 32, "page_size is 16, not 32"),
        ("FORMATS", {**FORMATS, "int8": INT8._replace(code=3)}, "format.int8 is 2, not 3"),
        ("FORMATS", {**FORMATS, "int8": INT8._replace(group=64)}, "format.int8.group is 32, not 64"),
        ("FORMATS", {**FORMATS, "int8": INT8._replace(activations="bfloat16")}, "format.int8.operand is 2, not 1"),
        ("FORMATS", {**FORMATS, "int2": INT8}, r"format.int2(\.\w+)? is None, not \d+"),
        ("ACTIVATIONS", {"silu": 0}, "activation"),
        ("ERRORS", {8: "", 11: ""}, "error.forked is 9, not 11"),
    ],
)
def test_a_library_of_another_version_is_not_used(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(interface, name, value)
    with pytest.raises(KernelError, match=message):
        Library(library.path)
    result = load(every_instruction_set=True)
    assert isinstance(result, KernelUnavailable)
    assert "is not of this version" in result.reason


def test_a_step_without_all_weights_is_refused(library: Library) -> None:
    model = native(library, library.instruction_sets()[0], "float32", intermediate_size=65)
    model.set_group(0, 4, 1)
    keep: list[Any] = []
    step = step_arguments([Rows([1], 0, 2)], keep)
    shapes = {"qkv": (256, 64), "out": (64, 128), "down": (64, 64), "gate_up": (64, 64)}
    weight = torch.zeros(256, 128)

    def pack(name: str, columns: int, depth: int) -> None:
        rows = _addresses(weight)[:columns]
        model.set_linear(0, name, rows, depth, source=WeightSource.of("float32"), weight_format=FLOAT32)

    for slot, (name, (columns, depth)) in zip((0, 1, 3, 2), shapes.items(), strict=True):
        with pytest.raises(KernelError, match=f"layer 0: linear {slot} is 0 x 0"):
            model.step(step)
        for wrong in ((columns, depth - 8), (columns - 1, depth)):
            if (name, wrong) in (("gate_up", (63, 64)), ("down", (64, 56))):
                continue  # layers may differ in the width of their MLPs, and a part of a panel is filled up
            pack(name, *wrong)
            with pytest.raises(KernelError, match=f"layer 0: linear {slot} is"):
                model.step(step)
        pack(name, columns, depth)
    model.set_linear(0, "down", _addresses(weight)[:64], 65, source=WeightSource.of("float32"), weight_format=FLOAT32)
    with pytest.raises(KernelError, match="64 columns make less than the 65 inputs of linear 3"):
        model.step(step)
    pack("down", 64, 64)
    with pytest.raises(KernelError, match="layer -1: linear 4 is 0 x 0, the step needs 64 x 64"):
        model.step(step)
    model.set_linear(-1, "head", _addresses(weight)[:64], 64, source=WeightSource.of("float32"), weight_format=FLOAT32)
    with pytest.raises(KernelError, match="embedding"):
        model.step(step)
    table = torch.zeros(64, 64)
    model.set_embedding(table.data_ptr(), WeightSource.of("float32"), table)
    model.step(step)
    model.set_layer(0, window=0, rope=-1, group=0, group_layer=1, scale=1.0)
    with pytest.raises(KernelError, match="layer 0 is number 1 of group 0, which has 1"):
        model.step(step)
    model.close()


def test_vectors_have_one_length(library: Library) -> None:
    model = native(library, library.instruction_sets()[0], "float32", qk_norm=2)
    for name, count in (("input", 64), ("q", 128), ("k", 64), ("sinks", 4), ("final_bias", 64)):
        model.set_vector(0, name, np.zeros(count, np.float32))
        with pytest.raises(KernelError, match=f"has {count} values, not {count + 1}"):
            model.set_vector(0, name, np.zeros(count + 1, np.float32))
    model.close()


def test_what_is_too_large_leaves_what_was_there(library: Library) -> None:
    """A pack and a cache that no memory is left for: refused with the figure, and everything is as it was."""
    model = native(library, library.instruction_sets()[0], "float32", vocab_size=64)
    weight, a, out = torch.randn(70, 96), torch.randn(3, 96), torch.empty(3, 70)

    def multiply() -> torch.Tensor:
        code = library.calls.aiocb_linear(model.handle, 0, 1, a.data_ptr(), 96 * 4, 3, out.data_ptr(), 70)
        model.check(code)
        return out.clone()

    model.set_linear(0, "out", _addresses(weight), 96, source=WeightSource.of("float32"), weight_format=FLOAT32)
    before = multiply()
    rows = np.zeros(1 << 20, np.uint64)
    with pytest.raises(KernelError, match=r"no memory for \d{15,} bytes"):
        model.set_linear(0, "out", rows, (1 << 31) - 64, source=WeightSource.of("float32"), weight_format=FLOAT32)
    assert torch.equal(multiply(), before)
    model.set_group(0, 4, 1)
    with pytest.raises(KernelError, match=r"no memory for \d{15,} bytes"):
        model.set_group(0, (1 << 31) - 1, 1 << 10)
    model.copy_block(0, 3, 1)
    with pytest.raises(KernelError, match="no block 4 in group 0"):
        model.copy_block(0, 4, 1)
    model.close()


def test_a_selection_that_finds_no_memory_leaves_the_steps_theirs(library: Library, instruction_set: str) -> None:
    """Both work in the same scratch."""
    model = native(library, instruction_set, "bfloat16")
    weight, a = torch.randn(70, 2600).bfloat16(), torch.randn(40, 2600).bfloat16()
    results = []
    model.set_linear(0, "out", _addresses(weight), 2600, source=WeightSource.of("bfloat16"), weight_format=BFLOAT16)
    for _ in range(2):
        out = torch.empty(40, 70)
        model.check(library.calls.aiocb_linear(model.handle, 0, 1, a.data_ptr(), 5200, 40, out.data_ptr(), 70))
        results.append(out)
        with pytest.raises(KernelError, match=r"no memory for \d{15,} bytes"):
            model.select(SelectArguments(vocab=1 << 45))
    assert torch.equal(*results)
    model.close()


def test_generic_linears_that_are_refused(library: Library) -> None:
    """An odd depth in pairs; rows that would have to be quantised; a format that there is not."""
    kernels = GenericKernels(library)
    weight = torch.zeros(4, 7, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="4 x 7 in format 1 cannot be packed"):
        kernels.pack(weight.data_ptr(), 14, 4, 7, BFLOAT16, None)
    with pytest.raises(KernelError, match="4 x 6 in format 2 cannot be packed"):
        kernels.pack(weight.data_ptr(), 14, 4, 6, INT8, None)
    with pytest.raises(KernelError, match="there is no format 77"):
        kernels.pack(weight.data_ptr(), 14, 4, 6, INT8._replace(code=77), None)
    assert kernels.pack(weight.data_ptr(), 14, 4, 6, BFLOAT16, None) == 0
    kernels.clear()
    kernels.close()
    kernels.close()
    with pytest.raises(KernelError, match="closed"):
        kernels.clear()


def test_measured_rates(library: Library) -> None:
    kernels = GenericKernels(library, num_threads=2)
    assert kernels.bandwidth(1 << 20) > 0
    assert all(kernels.arithmetic(weight_format) > 0 for weight_format in FORMATS.values())
    with pytest.raises(KernelError, match=r"no memory for \d+ bytes"):
        kernels.bandwidth(1 << 50)
    kernels.close()
