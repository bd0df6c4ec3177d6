"""Every format of weights: what is packed can be read back, and a linear multiplies with exactly that."""

from __future__ import annotations

import pytest
import torch

from aiocb.kernels import KernelError, Library, NativeModel
from aiocb.kernels.formats import FORMATS, INT4, INT8, WeightFormat, WeightSource
from tests.kernels.helpers import DTYPES, Tensor, native
from tests.kernels.test_kernels import _addresses

OUT = 1
# Of the result's size: sums of floats in another order; int8 rounds each row of activations to 1/254 of a group's peak.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-5, "int8": 0.01, "int4": 0.01}
PAIRS = [(dtype, each) for each in FORMATS.values() for dtype in DTYPES if each.is_quantized or each.name == dtype]


def _pack(model: NativeModel, weight: Tensor, weight_format: WeightFormat) -> None:
    source = WeightSource.of(weight.dtype)
    model.set_linear(
        0, "out", _addresses(weight), weight.shape[1], source=source, weight_format=weight_format
    )  # fmt: skip


def _unpack(model: NativeModel, columns: int, depth: int) -> Tensor:
    out = torch.full((columns, depth), float("nan"))
    model.check(model.library.calls.aiocb_unpack(model.handle, 0, OUT, out.data_ptr()))
    return out


def _operands(columns: int, depth: int, dtype: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns + depth)
    weight = torch.randn(columns, depth, generator=generator) * 0.05
    weight[3] = 0.0  # groups without a step
    weight[:, 7] *= 40.0
    return weight.to(DTYPES[dtype]), torch.randn(9, depth, generator=generator).to(DTYPES[dtype])


@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (130, 70), (37, 1540)])
@pytest.mark.parametrize(("dtype", "weight_format"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_a_linear_multiplies_with_what_unpack_returns(
    library: Library, instruction_set: str, dtype: str, weight_format: WeightFormat, columns: int, depth: int
) -> None:
    weight, a = _operands(columns, depth, dtype)
    model = native(library, instruction_set, dtype)
    _pack(model, weight, weight_format)
    unpacked = _unpack(model, columns, depth)
    if weight_format is INT4:
        groups = torch.nn.functional.pad(weight.float(), (0, -depth % 32)).view(columns, -1, 32)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        steps = ((high - low) / 15).clamp_min(1e-30)
        plain = low + ((groups - low) / steps).round() * steps
        errors = torch.nn.functional.pad(unpacked, (0, -depth % 32)).view(columns, -1, 32) - groups
        if depth % 32:  # what is packed behind the end is not seen
            errors[:, -1, depth % 32 :] = 0.0
        # Both ends of the range are not where they have to be: the search finds what serves all weights better.
        assert (errors.square().sum(-1) <= 1.01 * (plain - groups).square().sum(-1) + 1e-9).all()
    elif weight_format.is_quantized:
        groups = torch.nn.functional.pad(weight.float(), (0, -depth % weight_format.group))
        peaks = groups.view(columns, -1, weight_format.group).abs().amax(-1)
        half_steps = peaks / (2 ** (weight_format.bits - 1) - 1) / 2
        # The scale is a bf16 number: a peak may be cut by its rounding, which is 2^-9 of it.
        bound = half_steps.mul(1.01).maximum(peaks * 2**-8)
        errors = (unpacked - weight.float()).abs()
        assert (errors <= bound.repeat_interleave(weight_format.group, 1)[:, :depth]).all()
        assert errors.mean() <= half_steps.mean()
    else:
        assert torch.equal(unpacked, weight.float())
    out = torch.empty(len(a), columns)
    size = a.element_size()
    model.check(
        library.calls.aiocb_linear(model.handle, 0, OUT, a.data_ptr(), depth * size, len(a), out.data_ptr(), columns)
    )
    expected = a.double() @ unpacked.double().T
    assert (out.double() - expected).norm() <= TOLERANCES[weight_format.name] * expected.norm()
    model.close()


def test_a_float_weight_takes_activations_of_its_own_format_only(library: Library) -> None:
    """Each would be read with the other's step, beyond its end."""
    for dtype, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        model = native(library, library.instruction_sets()[0], dtype)
        weight, _ = _operands(64, 128, dtype)
        with pytest.raises(KernelError, match=r"linear 1 has format \d, which does not take activations of format \d"):
            _pack(model, weight, FORMATS[other])
        model.close()


def test_there_is_nothing_to_unpack(library: Library) -> None:
    model = native(library, library.instruction_sets()[0], "float32")
    with pytest.raises(KernelError, match="no linear 1 in layer 0"):
        _unpack(model, 1, 1)
    model.close()


@pytest.mark.parametrize(
    ("name", "columns", "depth", "num_bytes"),
    [
        ("float32", 64, 3, 64 * 12),
        ("bfloat16", 65, 3, 128 * 8),
        ("int8", 64, 32, 64 * 34),
        ("int8", 1, 33, 64 * 68),
        ("int4", 1, 33, 64 * 40),
    ],
)
def test_packed_bytes(name: str, columns: int, depth: int, num_bytes: int) -> None:
    assert FORMATS[name].packed_bytes(columns, depth) == num_bytes


def test_a_dtype_is_held_as_it_is_or_not_at_all() -> None:
    assert WeightFormat.of(torch.bfloat16) is FORMATS["bfloat16"]
    assert WeightFormat.of(torch.int8) is None  # not the format of that name, which has scales
    assert WeightFormat.of(torch.float16) is None
    assert [each for each in FORMATS.values() if each.is_quantized] == [INT8, INT4]
