"""Arguments of the native recurrences: the structures of csrc/scans.h, field by field; strides are in bytes.

Legend in csrc/scans.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

__all__ = ["ConvolveCall", "DeltaCall", "ScanRows", "SelectiveChannelsCall", "SelectiveHeadsCall"]


class ScanRows(ctypes.Structure):
    """`ScanRows`: arrays of int32 that live as long as the call."""

    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "num_slots")),
        *((name, c_void_p) for name in ("starts", "slots", "is_fresh")),
    ]  # fmt: skip


class ConvolveCall(ctypes.Structure):
    """`ConvolveCall`: state and output have the type of the input."""

    _fields_ = [
        *((name, c_int32) for name in ("num_channels", "width", "format", "activation")),
        ("input", c_void_p),
        ("input_stride", c_int64),
        *((name, c_void_p) for name in ("weight", "bias", "state")),
        ("slot_stride", c_int64),
        ("out", c_void_p),
    ]


class DeltaCall(ctypes.Structure):
    """`DeltaCall`: query, key, value and output have one type; the rest is float32."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_key_heads", "num_heads", "key_dim", "value_dim", "format", "is_by_channel", "is_normed",
        )),
        ("scale", c_float),
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_void_p) for name in ("decay", "beta", "state")),
        ("slot_stride", c_int64),
        ("out", c_void_p),
    ]  # fmt: skip


class SelectiveHeadsCall(ctypes.Structure):
    """`SelectiveHeadsCall`: input, steps, write and read have one type; the rest is float32."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_heads", "num_groups", "head_dim", "state_size", "format", "is_softplus",
        )),
        ("min_step", c_float),
        ("max_step", c_float),
        *((name, c_void_p) for name in ("input", "steps", "write", "read")),
        *((name, c_int64) for name in ("input_stride", "steps_stride", "write_stride", "read_stride")),
        *((name, c_void_p) for name in ("rates", "skip", "bias", "state")),
        ("slot_stride", c_int64),
        ("out", c_void_p),
    ]  # fmt: skip


class SelectiveChannelsCall(ctypes.Structure):
    """`SelectiveChannelsCall`: types as in `SelectiveHeadsCall`."""

    _fields_ = [
        *((name, c_int32) for name in ("num_channels", "state_size", "format", "is_softplus")),
        *((name, c_void_p) for name in ("input", "steps", "write", "read")),
        *((name, c_int64) for name in ("input_stride", "steps_stride", "write_stride", "read_stride")),
        *((name, c_void_p) for name in ("rates", "skip", "bias", "state")),
        ("slot_stride", c_int64),
        ("out", c_void_p),
    ]
