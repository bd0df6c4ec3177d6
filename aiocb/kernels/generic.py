"""Single native operators over torch's memory, for models that are run operator by operator.

Two pools on the same cores wait for each other's spinning threads, so there are two ways beside torch. Own threads,
with torch held to one (`model.runner`): they sleep soon, which costs least on a busy machine. Or torch's, the threads
of its OpenMP runtime (GNU's, the usual one), for models whose heavy operators are partly torch's.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

from aiocb.kernels.library import KernelError, Library

__all__ = ["GenericKernels", "PagedCall"]


class PagedCall(ctypes.Structure):
    """`PagedCall` of model.h, field by field; strides are in bytes."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_tokens", "num_sequences", "num_heads", "num_kv_heads", "head_dim", "format", "num_blocks", "window",
        )),
        ("scale", c_float),
        ("softcap", c_float),
        *((name, c_void_p) for name in ("pool", "query", "key", "value")),
        *((name, c_int64) for name in (
            "query_stride", "query_head_stride", "key_stride", "key_head_stride", "value_stride", "value_head_stride",
        )),
        *((name, c_void_p) for name in (
            "slots", "starts", "lengths", "pages", "offsets", "num_pages", "sinks", "out",
        )),
    ]  # fmt: skip


class _Team(ctypes.Structure):
    """`Team` of pool.h."""

    _fields_ = [("parallel", c_void_p), ("thread", c_void_p), ("size", c_void_p)]


class GenericKernels:
    """Threads, packed linears and scratch of one runner. Belongs to the thread that uses it.

    Args:
        library: the loaded library.
        num_threads: threads of a call, the caller included.
        shares_threads: run on torch's threads, where they can be found.
        level: instruction-set level, None for the best of this processor.

    Raises:
        KernelError: an unknown level.
    """

    def __init__(
        self, library: Library, *, num_threads: int = 1, shares_threads: bool = False, level: str | None = None
    ) -> None:
        self._calls = library.calls
        team = _find_team() if shares_threads else None
        self.num_threads = num_threads
        self.threads = "torch's" if team is not None else "own"
        self._handle: int | None = self._calls.aiocb_generic_create(
            level.encode() if level else None, num_threads, ctypes.byref(team) if team is not None else None
        )
        if not self._handle:
            raise KernelError(f"no instruction-set level {level!r} on this processor")
        # Bound once: a step makes hundreds of these calls.
        self.call_linear = self._calls.aiocb_generic_linear
        self._write = self._calls.aiocb_attention_write
        self._run = self._calls.aiocb_attention_run

    @property
    def handle(self) -> int:
        """The native handle.

        Raises:
            KernelError: it is closed.
        """
        if not self._handle:
            raise KernelError("the native kernels are closed")
        return self._handle

    @property
    def level(self) -> str:
        """The instruction-set level in use."""
        name: bytes = self._calls.aiocb_generic_level(self.handle)
        return name.decode()

    def write(self, call: PagedCall) -> None:
        """Store new keys and values in their pages.

        Raises:
            KernelError: a slot outside of the pages, or heads that the kernels do not support; nothing was written.
        """
        if self._write(self.handle, ctypes.byref(call)):
            raise KernelError(self.error())

    def attend(self, call: PagedCall) -> None:
        """Attend to the pages.

        Raises:
            KernelError: a block outside of the pages, or heads that the kernels do not support; nothing was read.
        """
        if self._run(self.handle, ctypes.byref(call)):
            raise KernelError(self.error())

    def pack(self, weight: int, stride: int, columns: int, depth: int, weight_format: int, bias: int | None) -> int:
        """Pack a weight [columns, depth] at an address, rows `stride` bytes apart; return its index.

        Raises:
            KernelError: an odd depth in bf16, or no memory.
        """
        index: int = self._calls.aiocb_generic_pack(self.handle, weight, stride, columns, depth, weight_format, bias)
        if index < 0:
            raise KernelError(f"a weight of {columns} x {depth} cannot be packed")
        return index

    def clear(self) -> None:
        """Forget all packed weights."""
        self._calls.aiocb_generic_clear(self.handle)

    def error(self) -> str:
        """The last error's message."""
        message: bytes = self._calls.aiocb_generic_error(self.handle)
        return message.decode()

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._handle:
            self._calls.aiocb_generic_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _find_team() -> _Team | None:
    """Return the entry points of the GNU OpenMP runtime that torch has loaded, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            paths = {line.split()[-1] for line in lines if "libgomp" in line}
    except OSError:
        return None
    if len(paths) != 1:  # two runtimes: which one is torch's cannot be told from here
        return None
    try:
        library: Any = ctypes.CDLL(paths.pop())
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        return _Team(*(ctypes.cast(getattr(library, name), c_void_p).value for name in names))
    except (OSError, AttributeError):
        return None
