"""Recurrences over packed rows in native code (csrc/recurrence.h): every state is read once and written once.

Token by token in float32: a row's result does not depend on other rows, nor on where it is cut, bit for bit. What the
kernels do not support is plain torch's.

Legend in the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiocb.kernels.formats import FORMATS
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.interface import ACTIVATIONS
from aiocb.kernels.scans import ConvolveCall, DeltaCall, ScanRows, SelectiveChannelsCall, SelectiveHeadsCall
from aiocb.model.eager.recurrence.plain import ConvolutionWeights, TorchScans
from aiocb.model.eager.recurrence.rows import PackedRows

__all__ = ["NativeScans"]

_FORMATS = {torch.float32: FORMATS["float32"].code, torch.bfloat16: FORMATS["bfloat16"].code}
_ACTIVATIONS = {
    None: -1,
    "silu": ACTIVATIONS["silu"],
    "swish": ACTIVATIONS["silu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_pytorch_tanh": ACTIVATIONS["gelu_tanh"],
    "relu": ACTIVATIONS["relu"],
}


class NativeScans:
    """See `recurrence.Scans`.

    Args:
        kernels: threads and scratch.
    """

    name = "native"

    def __init__(self, kernels: GenericKernels) -> None:
        self._kernels = kernels
        self._torch = TorchScans()

    def convolve(
        self, inputs: Tensor, weights: ConvolutionWeights, activation: str | None, state: Tensor, rows: PackedRows
    ) -> Tensor:
        """See `recurrence.Scans`. The channels of the state must lie side by side."""
        code = _FORMATS.get(inputs.dtype)
        if code is None or state.dtype != inputs.dtype or activation not in _ACTIVATIONS or state.stride(1) != 1:
            return self._torch.convolve(inputs, weights, activation, state, rows)
        inputs = _side_by_side(inputs)
        width, channels = weights.taps.shape
        out = torch.empty(inputs.shape, dtype=inputs.dtype)
        size = inputs.element_size()
        self._kernels.convolve(
            _native(rows, state),
            ConvolveCall(
                num_channels=channels,
                width=width,
                format=code,
                activation=_ACTIVATIONS[activation],
                input=inputs.data_ptr(),
                input_stride=inputs.stride(0) * size,
                weight=weights.taps.data_ptr(),
                bias=_address(weights.bias),
                state=state.data_ptr(),
                slot_stride=state.stride(0) * size,
                out=out.data_ptr(),
            ),
        )
        return out

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        is_normed: bool,
    ) -> Tensor:
        """See `recurrence.Scans`."""
        code = _FORMATS.get(value.dtype)
        if code is None or not value.dtype == key.dtype == query.dtype or state.dtype != torch.float32:
            return self._torch.delta_rule(query, key, value, decay, beta, state, rows, is_normed=is_normed)
        query, key, value = _side_by_side(query), _side_by_side(key), _side_by_side(value)
        decay, beta = decay.float().contiguous(), beta.float().contiguous()
        out = torch.empty(value.shape, dtype=value.dtype)
        size = value.element_size()
        self._kernels.delta_rule(
            _native(rows, state),
            DeltaCall(
                num_key_heads=key.shape[1],
                num_heads=value.shape[1],
                key_dim=key.shape[2],
                value_dim=value.shape[2],
                format=code,
                is_by_channel=decay.dim() == 3,
                is_normed=is_normed,
                scale=key.shape[2] ** -0.5,
                query=query.data_ptr(),
                key=key.data_ptr(),
                value=value.data_ptr(),
                query_stride=query.stride(0) * size,
                key_stride=key.stride(0) * size,
                value_stride=value.stride(0) * size,
                decay=decay.data_ptr(),
                beta=beta.data_ptr(),
                state=state.data_ptr(),
                slot_stride=state.stride(0) * 4,
                out=out.data_ptr(),
            ),
        )
        return out

    def selective_heads(
        self,
        inputs: Tensor,
        steps: Tensor,
        rates: Tensor,
        write: Tensor,
        read: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        skip: Tensor | None,
        bias: Tensor | None,
        is_softplus: bool,
        limits: tuple[float, float],
    ) -> Tensor:
        """See `recurrence.Scans`."""
        if state.dtype != torch.float32:
            options: dict[str, Any] = {"skip": skip, "bias": bias, "is_softplus": is_softplus, "limits": limits}
            return self._torch.selective_heads(inputs, steps, rates, write, read, state, rows, **options)
        inputs, steps, write, read = _alike(inputs, steps, write, read)
        fields, _held = _fields(
            {"input": inputs, "steps": steps, "write": write, "read": read},
            {"rates": _floats(rates), "skip": _floats(skip), "bias": _floats(bias)},
        )
        out = torch.empty(inputs.shape, dtype=torch.float32)
        call = SelectiveHeadsCall(
            num_heads=inputs.shape[1],
            num_groups=write.shape[1],
            head_dim=inputs.shape[2],
            state_size=write.shape[2],
            format=_FORMATS[inputs.dtype],
            is_softplus=is_softplus,
            min_step=limits[0],
            max_step=limits[1],
            state=state.data_ptr(),
            slot_stride=state.stride(0) * 4,
            out=out.data_ptr(),
            **fields,
        )
        self._kernels.selective_heads(_native(rows, state), call)
        return out

    def selective_channels(
        self,
        inputs: Tensor,
        steps: Tensor,
        rates: Tensor,
        write: Tensor,
        read: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        skip: Tensor | None,
        bias: Tensor | None,
        is_softplus: bool,
    ) -> Tensor:
        """See `recurrence.Scans`."""
        if state.dtype != torch.float32:
            options: dict[str, Any] = {"skip": skip, "bias": bias, "is_softplus": is_softplus}
            return self._torch.selective_channels(inputs, steps, rates, write, read, state, rows, **options)
        inputs, steps, write, read = _alike(inputs, steps, write, read)
        fields, _held = _fields(
            {"input": inputs, "steps": steps, "write": write, "read": read},
            {"rates": _floats(rates), "skip": _floats(skip), "bias": _floats(bias)},
        )
        out = torch.empty(inputs.shape, dtype=torch.float32)
        call = SelectiveChannelsCall(
            num_channels=inputs.shape[1],
            state_size=write.shape[1],
            format=_FORMATS[inputs.dtype],
            is_softplus=is_softplus,
            state=state.data_ptr(),
            slot_stride=state.stride(0) * 4,
            out=out.data_ptr(),
            **fields,
        )
        self._kernels.selective_channels(_native(rows, state), call)
        return out


def _native(rows: PackedRows, state: Tensor) -> ScanRows:
    return ScanRows(
        num_rows=rows.num_rows,
        num_slots=len(state),
        starts=rows.starts.ctypes.data,
        slots=rows.slots.ctypes.data,
        is_fresh=rows.is_fresh.ctypes.data,
    )


def _alike(*tokens: Tensor) -> list[Tensor]:
    """Give all the same type, one that the kernels have."""
    kinds = {values.dtype for values in tokens}
    if len(kinds) > 1 or not kinds <= _FORMATS.keys():
        tokens = tuple(values.float() for values in tokens)
    return [_side_by_side(values) for values in tokens]


def _side_by_side(tokens: Tensor) -> Tensor:
    """What belongs to one token must be contiguous; the tokens may lie apart."""
    is_dense = tokens.stride(-1) == 1 and (tokens.dim() == 2 or tokens.stride(1) == tokens.shape[2])
    return tokens if is_dense else tokens.contiguous()


def _floats(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().float().contiguous()


def _fields(
    tokens: dict[str, Tensor], parameters: dict[str, Tensor | None]
) -> tuple[dict[str, int], list[Tensor | None]]:
    """Addresses, and strides of what lies token by token; and what has to live until the call is over."""
    fields = {name: values.data_ptr() for name, values in (tokens | parameters).items() if values is not None}
    fields |= {f"{name}_stride": values.stride(0) * values.element_size() for name, values in tokens.items()}
    return fields, [*tokens.values(), *parameters.values()]


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()
