"""Models that were cut into several GGUF files, `NAME-00001-of-00003.gguf`: put together into one.

Each part is a file of its own with a share of the tensors; the keys are in the first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from aiocb.errors import ConfigError
from aiocb.model.load.gguf_file import GgufFile, TensorInfo, read_gguf

__all__ = ["merge"]

_PIECE = 1 << 22
_ALIGNMENT = 32


def merge(parts: Sequence[Path], target: Path) -> None:
    """Write one file with the keys of the first part and the tensors of all.

    Raises:
        ConfigError: a part is damaged, or has tensors of another.
        OSError: there is no room.
    """
    files = [read_gguf(part) for part in parts]
    first, names = files[0], [name for file in files for name in file.tensors]
    if len(set(names)) != len(names):
        raise ConfigError(f"{parts[0]} and the parts beside it are not of one model: a tensor is in two of them")
    alignment = int(first.values.get("general.alignment", _ALIGNMENT))
    infos, offset = bytearray(), 0
    for name, tensor in (pair for file in files for pair in file.tensors.items()):
        infos += _info(name, tensor, offset)
        offset = _aligned(offset + tensor.end - tensor.offset, alignment)
    with target.open("wb") as whole:
        whole.write(_header(first, len(names)) + infos)
        for file in files:
            with file.path.open("rb") as part:
                for tensor in file.tensors.values():
                    whole.write(bytes(_aligned(whole.tell(), alignment) - whole.tell()))
                    part.seek(tensor.offset)
                    _copy(part, whole, tensor.end - tensor.offset)


def _header(first: GgufFile, num_tensors: int) -> bytes:
    """The beginning of the first part up to its last key, as of a file that is whole."""
    with first.path.open("rb") as file:
        content = bytearray(file.read(first.keys_end))
    struct.pack_into("<Q", content, 8, num_tensors)
    if "split.count" in first.places:
        struct.pack_into("<H", content, first.places["split.count"], 0)
    return bytes(content)


def _info(name: str, tensor: TensorInfo, offset: int) -> bytes:
    raw, shape = name.encode(), tensor.shape[::-1]
    form = f"<Q{len(raw)}sI{len(shape)}QIQ"
    return struct.pack(form, len(raw), raw, len(shape), *shape, int(tensor.kind), offset)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        piece = source.read(min(count, _PIECE))
        if not piece:
            raise ConfigError("a part became shorter while it was read")
        target.write(piece)
        count -= len(piece)
