"""Reading what a GGUF file says: its keys and the names of its tensors, without touching the tensors' data.

`gguf.GGUFReader` makes one numpy array per string, two to nine seconds for the vocabularies in use; this reader takes
a tenth of one. Whatever the file says about lengths is checked before it is believed.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from aiocb.errors import ConfigError

__all__ = ["GgufFile", "TensorInfo", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_MAX_DIMS = 8


class TensorInfo(NamedTuple):
    """Where a tensor lies in the file; its shape has the slowest dimension first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def end(self) -> int:
        """Where its data ends in the file."""
        per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.offset + math.prod(self.shape) // per_block * block_bytes


class GgufFile(NamedTuple):
    """What a file says.

    Attributes:
        path: the file.
        values: every key with its value; arrays are lists.
        tensors: by name.
        places: where in the file the value of each key begins.
        keys_end: where the last one ends.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, int] = MappingProxyType({})
    keys_end: int = 0

    @property
    def architecture(self) -> str:
        """The model's kind in llama.cpp's words, which is also the prefix of its keys."""
        return str(self.values["general.architecture"])

    @property
    def num_weights(self) -> int:
        """Numbers in all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def said(self, name: str, default: Any = None) -> Any:
        """The value of one of the architecture's own keys."""
        return self.values.get(f"{self.architecture}.{name}", default)

    def vector(self, name: str) -> list[float]:
        """The numbers of a small tensor that is stored plainly.

        Raises:
            ConfigError: it is stored in another way.
        """
        tensor = self.tensors[name]
        if tensor.kind is not GGMLQuantizationType.F32:
            raise ConfigError(f"{self.path}: the tensor {name} is stored as {tensor.kind.name}, not as F32")
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            return [float(each) for each in np.fromfile(file, np.float32, math.prod(tensor.shape))]


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self._position = position

    def take(self, form: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{form[1:]}"
        values = struct.unpack_from(form, self._data, self._position)
        self._position += struct.calcsize(form)
        return values

    def number(self, form: str) -> Any:
        return self.take(form)[0]

    def text(self) -> str:
        length = self.number("<Q")
        raw = self._data[self._position : self._position + length]
        if len(raw) != length:
            raise struct.error("a string passes the end")
        self._position += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise struct.error(f"a value of the unknown type {kind}")
        item, count = self.take("<I")[0], self.take("<Q")[0]
        if item in _SCALARS:
            return list(self.take(_SCALARS[item], count))
        if count > len(self._data):
            raise struct.error("an array passes the end")
        return [self.value(item) for _ in range(count)]

    @property
    def position(self) -> int:
        return self._position

    def aligned(self, alignment: int) -> int:
        return -(-self._position // alignment) * alignment


def read_gguf(path: Path) -> GgufFile:
    """Read keys and tensor names.

    Raises:
        ConfigError: it is no GGUF file, of a version that is not known, or shorter than it says.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged or cut short ({type(error).__name__}: {error}); download it again"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data, len(_MAGIC))
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise ConfigError(
            f"{path} is of GGUF version {version} (or of the other byte order); this reads {_VERSIONS}: "
            "convert it with a current llama.cpp"
        )
    num_tensors, num_keys = cursor.take("<Q", 2)
    values, places = {}, {}
    for _ in range(num_keys):
        key, kind = cursor.text(), cursor.number("<I")
        places[key] = cursor.position
        values[key] = cursor.value(kind)
    keys_end = cursor.position
    if not isinstance(values.get("general.architecture"), str):
        raise ConfigError(f"{path} does not say its general.architecture, so it is no model that can be loaded")
    tensors = {}
    for _ in range(num_tensors):
        name = cursor.text()
        num_dims = cursor.number("<I")
        if num_dims > _MAX_DIMS:
            raise struct.error(f"{name} has {num_dims} dimensions")
        shape = cursor.take("<Q", num_dims)[::-1]  # stored fastest dimension first
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        tensors[name] = TensorInfo(shape, GGMLQuantizationType(kind), offset)
    start = cursor.aligned(int(values.get("general.alignment", 32)))
    tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors.items()}
    end = max((tensor.end for tensor in tensors.values()), default=0)
    if len(data) < end:
        raise ConfigError(f"{path} is cut short: {len(data)} bytes of {end}; download it again")
    return GgufFile(path, values, tensors, places, keys_end)
