"""The C interface as Python sees it: one `Library`, a `NativeHandle` per set of threads, a `NativeModel` per model.

Every call releases the GIL. A handle belongs to one thread at a time: its parallel regions run on the caller and the
handle's own pool, and a call is refused while another one is going on.

Shape legend: T tokens of the step, R requests, H query heads, K key/value heads, D head dim, N columns, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiocb.kernels.build import PACKAGED_DIR, KernelUnavailable, announce, find_or_build, find_packaged
from aiocb.kernels.formats import WeightFormat, WeightSource
from aiocb.kernels.interface import (
    ERROR_BYTES,
    ERRORS,
    INSTRUCTION_SETS,
    LINEARS,
    NO_MEMORY,
    SIGNATURES,
    TYPES,
    VECTORS,
    ModelConfig,
    StepArguments,
    expected_layout,
)
from aiocb.kernels.selection import SelectArguments

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["KernelError", "Library", "NativeHandle", "NativeModel", "load"]


class KernelError(RuntimeError):
    """The native code refused a call: a shape, a token id or a block table that would have read out of bounds, or no
    memory or thread for it.

    Attributes:
        is_out_of_memory: there was no memory for it.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.is_out_of_memory = code == NO_MEMORY


class Library:
    """The loaded shared library; stateless, shared by all models of the process.

    Attributes:
        path: its file.
        origin: "packaged" or "compiled here".

    Raises:
        OSError, AttributeError: a file that is no such library.
        KernelError: a library that was built for another version of this file.
    """

    def __init__(self, path: Path, origin: str = "compiled here") -> None:
        self.path = path
        self.origin = origin
        self.calls = ctypes.CDLL(str(path))
        self._check_layout()
        for name, signature in SIGNATURES.items():
            result, arguments = signature.split()
            function = getattr(self.calls, name)
            function.restype, function.argtypes = TYPES[result], [TYPES[kind] for kind in arguments]

    def __repr__(self) -> str:
        return f"<Library {self.path.name} [{', '.join(self.instruction_sets())}]>"

    def _check_layout(self) -> None:
        entry = self.calls.aiocb_layout
        entry.restype, entry.argtypes = c_char_p, [c_int32, c_void_p]
        value, found = c_int64(), dict[str, int]()
        while name := entry(len(found), ctypes.byref(value)):
            found[name.decode()] = value.value
        expected = expected_layout()
        for name in expected.keys() | found.keys():
            if expected.get(name) != found.get(name):
                message = f"{self.path} is not of this version: {name} is {found.get(name)}, not {expected.get(name)}"
                raise KernelError(message)

    def instruction_set(self, name: str | None = None) -> str | None:
        """Return the best instruction set of this processor, or `name` if it is supported, else None."""
        found: bytes | None = self.calls.aiocb_instruction_set(name.encode() if name else None)
        return found.decode() if found else None

    def instruction_sets(self) -> tuple[str, ...]:
        """Return every instruction set that runs on this processor, best first."""
        best = self.instruction_set()
        return tuple(
            sorted((name for name in INSTRUCTION_SETS if self.instruction_set(name)), key=lambda name: name != best)
        )


class NativeHandle:
    """Threads, memory and the last refusal's text; what `NativeModel` and `GenericKernels` are.

    Args:
        library: the loaded library.
        create: makes the native handle, with the address for an error's text as its last argument.
        arguments: the ones before it.

    Raises:
        KernelError: a shape that the kernels do not support, an unknown instruction set, or no memory or thread.
    """

    def __init__(self, library: Library, create: Any, *arguments: Any) -> None:
        self.library = library
        self._calls = library.calls
        error = ctypes.create_string_buffer(ERROR_BYTES)
        self._handle: int | None = create(*arguments, error)
        if not self._handle:
            raise KernelError(f"no native kernels: {error.value.decode()}")

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
    def instruction_set(self) -> str:
        """The instruction set in use."""
        name: bytes = self._calls.aiocb_handle_instruction_set(self.handle)
        return name.decode()

    def check(self, code: int) -> None:
        """Raise what a call's result stands for.

        Raises:
            KernelError: it is an error's code.
        """
        if code:
            message: bytes = self._calls.aiocb_error(self.handle)
            raise KernelError(ERRORS.get(code) or message.decode(), code)

    def close(self) -> None:
        """Free everything and join the threads. Idempotent; in a forked child, which has no threads to join, too.

        Raises:
            KernelError: another thread is in a call; nothing was freed.
        """
        if self._handle:
            self.check(self._calls.aiocb_destroy(self._handle))
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _slot(name: str, expert: int) -> int:
    """The C interface's number of a linear."""
    if expert < 0 or (expert and not name.startswith("expert_")):
        raise KernelError(f"there is no expert {expert} of {name!r}")
    return LINEARS[name] + 2 * expert


class NativeModel(NativeHandle):
    """Weights, cache and thread pool of one model in native memory.

    Args:
        library: the loaded library.
        config: shapes and constants; copied.
        num_threads: threads of a step, the caller included.
        instruction_set: instruction set, None for the best of this processor.

    Raises:
        KernelError: shapes that the kernels do not support, an unknown instruction set, or no memory or thread.
    """

    def __init__(
        self, library: Library, config: ModelConfig, *, num_threads: int = 1, instruction_set: str | None = None
    ) -> None:
        self.config = config
        self._keep: list[Any] = []  # what native code borrows: the embedding's memory
        name = instruction_set.encode() if instruction_set else None
        super().__init__(library, library.calls.aiocb_create, ctypes.byref(config), name, num_threads)

    def set_layer(self, layer: int, *, window: int, rope: int, group: int, group_layer: int, scale: float) -> None:
        """Describe one layer: window 0 is full attention, rope -1 is none."""
        self.check(self._calls.aiocb_set_layer(self.handle, layer, window, rope, group, group_layer, scale))

    def set_rope(self, rope: int, inverse_frequencies: npt.NDArray[np.float32], scaling: float) -> None:
        """Set one rotary table, [rotary_dim / 2]; `scaling` multiplies cosine and sine."""
        data = inverse_frequencies
        self.check(self._calls.aiocb_set_rope(self.handle, rope, data.ctypes.data, len(data), scaling))

    def set_vector(self, layer: int, name: str, values: npt.NDArray[np.float32]) -> None:
        """Copy a norm's weight or bias, or the sinks."""
        self.check(self._calls.aiocb_set_vector(self.handle, layer, VECTORS[name], values.ctypes.data, values.size))

    def set_linear(
        self,
        layer: int,
        name: str,
        rows: npt.NDArray[np.uint64],
        depth: int,
        *,
        source: WeightSource | npt.NDArray[np.int32],
        weight_format: WeightFormat,
        expert: int = 0,
        bias: npt.NDArray[np.float32] | None = None,
        input_scales: npt.NDArray[np.float32] | None = None,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Pack a weight given by the address of the source row of every packed column (0: a zero column).

        `source` is what they are stored as, all or each (its code, [N]); they are read during the call only. `bias` is
        [N] in packed order. A format that quantises multiplies the weight by `input_scales` [depth] before, and weighs
        its errors by `importance` [depth]. `expert` counts for the names that begin with it.

        Raises:
            KernelError: a shape that the model's configuration does not have.
        """
        import numpy as np

        sources = np.full(len(rows), source.code, np.int32) if isinstance(source, WeightSource) else source
        self.check(
            self._calls.aiocb_set_linear(
                self.handle,
                layer,
                _slot(name, expert),
                rows.ctypes.data,
                len(rows),
                depth,
                sources.ctypes.data,
                weight_format.code,
                bias.ctypes.data if bias is not None else None,
                input_scales.ctypes.data if input_scales is not None else None,
                importance.ctypes.data if importance is not None else None,
            )
        )

    def record_inputs(self, layer: int, name: str, squares: npt.NDArray[np.float32] | None) -> None:
        """Add the squares of all inputs of a linear that quantises them to `squares` [depth] from now on; None ends it.

        The `gate_up` of a layer with experts is that of all of them.
        """
        address = squares.ctypes.data if squares is not None else None
        self.check(self._calls.aiocb_record_inputs(self.handle, layer, LINEARS[name], address))

    def set_embedding(self, address: int, source: WeightSource, owner: object) -> None:
        """Borrow the embedding's row-major memory; `owner` is kept alive with the model, or until the next call.

        Raises:
            KernelError: its rows are no whole blocks of the source.
        """
        self.check(self._calls.aiocb_set_embedding(self.handle, address, source.code))
        self._keep = [owner]

    def set_group(self, group: int, num_blocks: int, num_layers: int) -> None:
        """Reserve the zeroed cache of one group (resident only where it was written).

        Raises:
            KernelError: no memory for it; the group is as it was.
        """
        self.check(self._calls.aiocb_set_group(self.handle, group, num_blocks, num_layers))

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block in every layer of its group."""
        self.check(self._calls.aiocb_copy_block(self.handle, group, source, target))

    def read_block(self, group: int, block: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy a block's raw bytes out, layer by layer; `out` holds `CacheGroup.block_bytes`."""
        self.check(self._calls.aiocb_move_block(self.handle, group, block, out.ctypes.data, 0))

    def write_block(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Put back what `read_block` gave."""
        self.check(self._calls.aiocb_move_block(self.handle, group, block, data.ctypes.data, 1))

    def step(self, arguments: StepArguments) -> None:
        """Run one step; the GIL is free until it returns.

        Raises:
            KernelError: an id, a row or a block out of bounds, or no memory; no row's tables were changed.
        """
        self.check(self._calls.aiocb_step(self.handle, ctypes.byref(arguments)))

    def reset_rows(self) -> None:
        """Forget the block tables of all rows."""
        self.check(self._calls.aiocb_reset_rows(self.handle))

    def select(self, arguments: SelectArguments) -> None:
        """Choose tokens or look up log-probabilities; rows are shared among the model's threads, the GIL is free.

        Raises:
            KernelError: a shape that cannot be.
        """
        self.check(self._calls.aiocb_select(self.handle, ctypes.byref(arguments)))

    def close(self) -> None:
        """Free everything, and let go of what was borrowed."""
        super().close()
        self._keep.clear()


def load(*, every_instruction_set: bool = False) -> Library | KernelUnavailable:
    """Load the native library: the packaged one, which has every instruction set, else a compiled one.

    That is built on first use (some seconds, announced on stderr); see `find_or_build`.
    """
    packaged = _load_packaged(PACKAGED_DIR)
    if packaged is not None:
        return packaged
    path = find_or_build(every_instruction_set=every_instruction_set)
    return path if isinstance(path, KernelUnavailable) else _open(path, "compiled here")


@functools.cache  # what is wrong with it is said once; the file of a package does not change
def _load_packaged(folder: Path) -> Library | None:
    found = find_packaged(folder)
    library = _open(found, "packaged") if isinstance(found, Path) else found
    if isinstance(library, KernelUnavailable):
        announce(f"the native kernels of the package are not used: {library.reason}")
        return None
    return library


def _open(path: Path, origin: str) -> Library | KernelUnavailable:
    try:
        library = Library(path, origin)
    except (OSError, AttributeError, KernelError) as error:
        return KernelUnavailable(f"the native library cannot be loaded: {error}")
    if library.instruction_set() is None:
        return KernelUnavailable(f"{path} holds no instruction set that this processor runs")
    return library
