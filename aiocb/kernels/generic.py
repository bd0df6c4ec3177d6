"""Single native operators over torch's memory, for models that are run operator by operator.

Two pools on the same cores wait for each other's spinning threads, so there are two ways beside torch. Own threads,
with torch held to one (`model.runner`): they sleep soon, which costs least on a busy machine. Or torch's, the threads
of its OpenMP runtime (GNU's, the usual one), for models whose heavy operators are partly torch's.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int32, c_void_p
from typing import Any

from aiocb.kernels.formats import WeightFormat
from aiocb.kernels.interface import PagedCall, Team
from aiocb.kernels.library import Library, NativeHandle
from aiocb.kernels.scans import ConvolveCall, DeltaCall, ScanRows, SelectiveChannelsCall, SelectiveHeadsCall

__all__ = ["GenericKernels"]


class GenericKernels(NativeHandle):
    """Threads, packed linears and scratch of one runner. Belongs to the thread that uses it.

    Args:
        library: the loaded library.
        num_threads: threads of a call, the caller included.
        shares_threads: run on torch's threads, where they can be found.
        instruction_set: instruction set, None for the best of this processor.

    Raises:
        KernelError: an unknown instruction set, or a thread that cannot be started.
    """

    def __init__(
        self,
        library: Library,
        *,
        num_threads: int = 1,
        shares_threads: bool = False,
        instruction_set: str | None = None,
    ) -> None:
        team = _find_team() if shares_threads else None
        self.threads = "torch's" if team is not None else "own"
        super().__init__(
            library,
            library.calls.aiocb_generic_create,
            instruction_set.encode() if instruction_set else None,
            num_threads,
            ctypes.byref(team) if team is not None else None,
        )
        # Bound once: a step makes hundreds of these calls.
        self.call_linear = self._calls.aiocb_generic_linear
        self._write = self._calls.aiocb_attention_write
        self._run = self._calls.aiocb_attention_run
        self._convolve = self._calls.aiocb_convolve
        self._delta_rule = self._calls.aiocb_delta_rule
        self._selective_heads = self._calls.aiocb_selective_heads
        self._selective_channels = self._calls.aiocb_selective_channels

    def write(self, call: PagedCall) -> None:
        """Store new keys and values in their pages.

        Raises:
            KernelError: a slot outside of the pages, or heads that the kernels do not support; nothing was written.
        """
        self.check(self._write(self.handle, ctypes.byref(call)))

    def attend(self, call: PagedCall) -> None:
        """Attend to the pages.

        Raises:
            KernelError: a block outside of the pages, or heads that the kernels do not support; nothing was read.
        """
        self.check(self._run(self.handle, ctypes.byref(call)))

    def convolve(self, rows: ScanRows, call: ConvolveCall) -> None:
        """Convolve packed rows with the inputs before them; their slots then hold the last inputs.

        Raises:
            KernelError: a slot or a shape that would read out of bounds; nothing was written.
        """
        self.check(self._convolve(self.handle, ctypes.byref(rows), ctypes.byref(call)))

    def delta_rule(self, rows: ScanRows, call: DeltaCall) -> None:
        """Run the gated delta rule over packed rows, and leave the states in their slots.

        Raises:
            KernelError: as `convolve`.
        """
        self.check(self._delta_rule(self.handle, ctypes.byref(rows), ctypes.byref(call)))

    def selective_heads(self, rows: ScanRows, call: SelectiveHeadsCall) -> None:
        """Run the scan of Mamba 2 over packed rows, and leave the states in their slots.

        Raises:
            KernelError: as `convolve`.
        """
        self.check(self._selective_heads(self.handle, ctypes.byref(rows), ctypes.byref(call)))

    def selective_channels(self, rows: ScanRows, call: SelectiveChannelsCall) -> None:
        """Run the scan of Mamba 1 over packed rows, and leave the states in their slots.

        Raises:
            KernelError: as `convolve`.
        """
        self.check(self._selective_channels(self.handle, ctypes.byref(rows), ctypes.byref(call)))

    def pack(
        self, weight: int, stride: int, columns: int, depth: int, weight_format: WeightFormat, bias: int | None
    ) -> int:
        """Pack a weight [columns, depth] at an address, rows `stride` bytes apart; return its index.

        Raises:
            KernelError: an odd depth in bf16, or no memory.
        """
        index = c_int32()
        self.check(
            self._calls.aiocb_generic_pack(
                self.handle, weight, stride, columns, depth, weight_format.code, bias, ctypes.byref(index)
            )
        )
        return index.value

    def clear(self) -> None:
        """Forget all packed weights."""
        self.check(self._calls.aiocb_generic_clear(self.handle))

    def bandwidth(self, num_bytes: int = 1 << 28) -> float:
        """Measure bytes per second read from memory by all threads together."""
        rate = c_double()
        self.check(self._calls.aiocb_bandwidth(self.handle, num_bytes, ctypes.byref(rate)))
        return rate.value

    def arithmetic(self, weight_format: WeightFormat) -> float:
        """Measure operations per second of the largest tile with its operands in the nearest cache."""
        rate = c_double()
        self.check(self._calls.aiocb_arithmetic(self.handle, weight_format.code, ctypes.byref(rate)))
        return rate.value


def _find_team() -> Team | None:
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
        return Team(*(ctypes.cast(getattr(library, name), c_void_p).value for name in names))
    except (OSError, AttributeError):
        return None
