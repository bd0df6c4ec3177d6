"""The C interface as Python sees it: one `Library`, and a `NativeModel` per loaded model.

Every call releases the GIL. A `NativeModel` belongs to one thread: its parallel regions run on the caller and the
model's own pool.

Shape legend: T tokens of the step, R requests, H query heads, K key/value heads, D head dim, N columns, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiocb.kernels.build import KernelUnavailable, find_or_build
from aiocb.kernels.selection import SelectArguments

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["KernelError", "Library", "ModelConfig", "NativeModel", "StepArguments", "load"]

FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}
LINEARS = {"qkv": 0, "out": 1, "gate_up": 2, "down": 3, "head": 4, "router": 5, "expert_gate_up": 6, "expert_down": 7}
VECTORS = {
    "input": 0,
    "input_bias": 1,
    "post_attention": 2,
    "post_attention_bias": 3,
    "mlp": 4,
    "mlp_bias": 5,
    "post_mlp": 6,
    "post_mlp_bias": 7,
    "q": 8,
    "k": 9,
    "sinks": 10,
    "final": 12,
    "final_bias": 13,
}
STAGES = ("rows", "qkv", "place", "attention", "out", "gate_up", "down", "head")
_LEVELS = ("avx512bf16", "avx512", "avx2", "portable")


class KernelError(RuntimeError):
    """The native code refused a call: a shape, a token id or a block table that would have read out of bounds."""


class ModelConfig(ctypes.Structure):
    """`Config` of model.h, field by field."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
            "format", "activation", "is_gated", "is_layer_norm", "qk_norm", "is_parallel", "rotary_dim",
            "is_interleaved", "num_groups", "num_ropes", "embedding_format", "num_experts", "num_chosen", "expert_size",
            "is_renormalised",
        )),
        *((name, c_float) for name in (
            "norm_eps", "embedding_scale", "residual_scale", "logit_scale", "attention_softcap", "logit_softcap",
        )),
    ]  # fmt: skip


class StepArguments(ctypes.Structure):
    """`StepArgs` of model.h, field by field."""

    _fields_ = [
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_outputs", c_int32),
        ("reserved", c_int32),
        ("token_ids", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("tables", POINTER(c_void_p)),
        ("table_offsets", POINTER(c_void_p)),
        ("output_rows", c_void_p),
        ("logit_slots", c_void_p),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("profile", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "aiocb_level": (c_char_p, [c_char_p]),
    "aiocb_create": (c_void_p, [POINTER(ModelConfig), c_char_p, c_int32, c_void_p]),
    "aiocb_destroy": (None, [c_void_p]),
    "aiocb_error": (c_char_p, [c_void_p]),
    "aiocb_handle_level": (c_char_p, [c_void_p]),
    "aiocb_set_layer": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_float]),
    "aiocb_set_rope": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, c_float]),
    "aiocb_set_vector": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32]),
    "aiocb_set_linear": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, *[c_void_p] * 3],
    ),
    "aiocb_record_inputs": (c_int32, [c_void_p, c_int32, c_int32, c_void_p]),
    "aiocb_set_embedding": (None, [c_void_p, c_void_p]),
    "aiocb_set_group": (c_int32, [c_void_p, c_int32, c_int32, c_int32]),
    "aiocb_copy_block": (c_int32, [c_void_p, c_int32, c_int32, c_int32]),
    "aiocb_move_block": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32]),
    "aiocb_step": (c_int32, [c_void_p, POINTER(StepArguments)]),
    "aiocb_select": (c_int32, [c_void_p, POINTER(SelectArguments)]),
    "aiocb_attention": (c_int32, [c_void_p, POINTER(StepArguments), c_int32, c_void_p, c_void_p]),
    "aiocb_linear": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int32, c_void_p, c_int64]),
    "aiocb_norm": (
        c_int32,
        [c_char_p, c_void_p, c_void_p, c_int32, c_float, c_void_p, c_int32, c_int32, c_int32, c_void_p],
    ),
    "aiocb_activation": (c_int32, [c_char_p, c_int32, c_void_p, c_void_p, c_int32, c_void_p]),
    "aiocb_generic_create": (c_void_p, [c_char_p, c_int32, c_void_p]),
    "aiocb_generic_destroy": (None, [c_void_p]),
    "aiocb_generic_error": (c_char_p, [c_void_p]),
    "aiocb_generic_level": (c_char_p, [c_void_p]),
    "aiocb_generic_clear": (None, [c_void_p]),
    "aiocb_generic_pack": (c_int32, [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p]),
    "aiocb_generic_linear": (c_int32, [c_void_p, c_int32, c_void_p, c_int64, c_int32, c_void_p]),
    "aiocb_attention_write": (c_int32, [c_void_p, c_void_p]),
    "aiocb_attention_run": (c_int32, [c_void_p, c_void_p]),
    "aiocb_bandwidth": (c_double, [c_char_p, c_int32, c_int64]),
    "aiocb_arithmetic": (c_double, [c_char_p, c_int32, c_int32]),
}


class Library:
    """The loaded shared library; stateless, shared by all models of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.calls, name)
            function.restype, function.argtypes = result, arguments

    def level(self, name: str | None = None) -> str | None:
        """Return the best instruction-set level of this processor, or `name` if it is supported, else None."""
        found: bytes | None = self.calls.aiocb_level(name.encode() if name else None)
        return found.decode() if found else None

    def levels(self) -> tuple[str, ...]:
        """Return every level that runs on this processor, best first."""
        best = self.level()
        return tuple(sorted((name for name in _LEVELS if self.level(name)), key=lambda name: name != best))

    def bandwidth(self, num_threads: int, *, level: str | None = None, num_bytes: int = 1 << 28) -> float:
        """Measure bytes per second read from memory by all threads together."""
        rate: float = self.calls.aiocb_bandwidth(level.encode() if level else None, num_threads, num_bytes)
        return rate

    def arithmetic(self, num_threads: int, dtype: str, *, level: str | None = None) -> float:
        """Measure operations per second of the largest tile with its operands in the nearest cache."""
        rate: float = self.calls.aiocb_arithmetic(level.encode() if level else None, num_threads, FORMATS[dtype])
        return rate


def _slot(name: str, expert: int) -> int:
    """The C interface's number of a linear."""
    if expert < 0 or (expert and not name.startswith("expert_")):
        raise KernelError(f"there is no expert {expert} of {name!r}")
    return LINEARS[name] + 2 * expert


class NativeModel:
    """Weights, cache and thread pool of one model in native memory.

    Args:
        library: the loaded library.
        config: shapes and constants; copied.
        num_threads: threads of a step, the caller included.
        cores: one core per thread to bind to, or None to leave placement to the system.
        level: instruction-set level, None for the best of this processor.

    Raises:
        KernelError: shapes that the kernels do not support, or an unknown level.
    """

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        *,
        num_threads: int = 1,
        cores: Sequence[int] | None = None,
        level: str | None = None,
    ) -> None:
        self.library = library
        self.config = config
        self._calls = library.calls
        bound = (c_int32 * num_threads)(*cores) if cores is not None else None
        self._handle: int | None = self._calls.aiocb_create(
            ctypes.byref(config), level.encode() if level else None, num_threads, bound
        )
        if not self._handle:
            raise KernelError("the kernels do not support this shape (heads, head dim) or this level")
        self._keep: list[Any] = []  # what native code borrows: the embedding's memory

    @property
    def handle(self) -> int:
        """The native handle.

        Raises:
            KernelError: the model is closed.
        """
        if not self._handle:
            raise KernelError("the native model is closed")
        return self._handle

    @property
    def level(self) -> str:
        """The instruction-set level in use."""
        name: bytes = self._calls.aiocb_handle_level(self.handle)
        return name.decode()

    def _check(self, code: int) -> None:
        if code:
            message: bytes = self._calls.aiocb_error(self.handle)
            raise KernelError(message.decode() or f"native error {code}")

    def set_layer(self, layer: int, *, window: int, rope: int, group: int, group_layer: int, scale: float) -> None:
        """Describe one layer: window 0 is full attention, rope -1 is none."""
        self._check(self._calls.aiocb_set_layer(self.handle, layer, window, rope, group, group_layer, scale))

    def set_rope(self, rope: int, inverse_frequencies: npt.NDArray[np.float32], scaling: float) -> None:
        """Set one rotary table, [rotary_dim / 2]; `scaling` multiplies cosine and sine."""
        data = inverse_frequencies
        self._check(self._calls.aiocb_set_rope(self.handle, rope, data.ctypes.data, len(data), scaling))

    def set_vector(self, layer: int, name: str, values: npt.NDArray[np.float32]) -> None:
        """Copy a norm's weight or bias, or the sinks."""
        self._check(self._calls.aiocb_set_vector(self.handle, layer, VECTORS[name], values.ctypes.data, values.size))

    def set_linear(
        self,
        layer: int,
        name: str,
        rows: npt.NDArray[np.uint64],
        depth: int,
        *,
        source_format: int,
        weight_format: int,
        expert: int = 0,
        bias: npt.NDArray[np.float32] | None = None,
        input_scales: npt.NDArray[np.float32] | None = None,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Pack a weight given by the address of the source row of every packed column (0: a zero column).

        The sources are read during the call only. `bias` is [N] in packed order. For int8, the weight is multiplied by
        `input_scales` [depth] before it is quantised, and `importance` [depth] weighs its errors. `expert` counts for
        the names that begin with it.

        Raises:
            KernelError: a shape that the model's configuration does not have.
        """
        self._check(
            self._calls.aiocb_set_linear(
                self.handle,
                layer,
                _slot(name, expert),
                rows.ctypes.data,
                len(rows),
                depth,
                source_format,
                weight_format,
                bias.ctypes.data if bias is not None else None,
                input_scales.ctypes.data if input_scales is not None else None,
                importance.ctypes.data if importance is not None else None,
            )
        )

    def record_inputs(self, layer: int, name: str, squares: npt.NDArray[np.float32] | None) -> None:
        """Add the squares of all inputs of an int8 linear to `squares` [depth] from now on; None ends it.

        The `gate_up` of a layer with experts is that of all of them.
        """
        address = squares.ctypes.data if squares is not None else None
        self._check(self._calls.aiocb_record_inputs(self.handle, layer, LINEARS[name], address))

    def set_embedding(self, address: int, owner: object) -> None:
        """Borrow the embedding's row-major memory; `owner` is kept alive with the model, or until the next call."""
        self._keep = [owner]
        self._calls.aiocb_set_embedding(self.handle, address)

    def set_group(self, group: int, num_blocks: int, num_layers: int) -> None:
        """Reserve the zeroed cache of one group (resident only where it was written)."""
        self._check(self._calls.aiocb_set_group(self.handle, group, num_blocks, num_layers))

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block in every layer of its group."""
        self._check(self._calls.aiocb_copy_block(self.handle, group, source, target))

    def read_block(self, group: int, block: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy a block's raw bytes out, layer by layer; `out` holds `CacheGroup.block_bytes`."""
        self._check(self._calls.aiocb_move_block(self.handle, group, block, out.ctypes.data, 0))

    def write_block(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Put back what `read_block` gave."""
        self._check(self._calls.aiocb_move_block(self.handle, group, block, data.ctypes.data, 1))

    def step(self, arguments: StepArguments) -> None:
        """Run one step; the GIL is free until it returns.

        Raises:
            KernelError: an id, a row or a block out of bounds; nothing was written.
        """
        self._check(self._calls.aiocb_step(self.handle, ctypes.byref(arguments)))

    def select(self, arguments: SelectArguments) -> None:
        """Choose tokens or look up log-probabilities; rows are shared among the model's threads, the GIL is free.

        Raises:
            KernelError: a shape that cannot be.
        """
        self._check(self._calls.aiocb_select(self.handle, ctypes.byref(arguments)))

    def close(self) -> None:
        """Free everything and join the threads. Idempotent."""
        if self._handle:
            self._calls.aiocb_destroy(self._handle)
            self._handle = None
            self._keep.clear()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def load(*, every_level: bool = False) -> Library | KernelUnavailable:
    """Load the native library, building it on first use (some seconds, announced on stderr); see `find_or_build`."""
    path = find_or_build(every_level=every_level)
    if isinstance(path, KernelUnavailable):
        return path
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:
        return KernelUnavailable(f"the native library cannot be loaded: {error}")
    if library.level() is None:
        return KernelUnavailable(f"{path} holds no instruction-set level that this processor runs")
    return library
