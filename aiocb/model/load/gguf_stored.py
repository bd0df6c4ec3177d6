"""GGUF files as they are: mapped, described, and packed from their own blocks; nothing large is converted or kept.

A module of the file's configuration is built without memory. Its small vectors are read; each matrix stands for the
rows of a tensor in the file, in the order that the module wants them. What this cannot do with certainty is a reason
to convert the file as `gguf.GgufModel` does.

The tokenizer and the configuration, which take seconds to make, are kept in a small folder beside the others.

Shape legend: N rows of a matrix.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aiocb import files
from aiocb.errors import ConfigError
from aiocb.kernels.formats import SOURCES
from aiocb.model.load.gguf import GgufModel, Progress
from aiocb.model.load.gguf_convert import read_config, set_frequencies, stray_tensors, watched, write_small
from aiocb.model.load.gguf_file import GgufFile, TensorInfo, read_gguf
from aiocb.model.load.gguf_keys import check_keys
from aiocb.model.load.problems import explained
from aiocb.model.native.rows import WeightRows, rows_at, tensor_rows

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["StoredModel", "Unstorable", "open_stored"]

_MAKER = "small files 1"


class Unstorable(Exception):
    """The file has to be converted; says why."""


class _Stored(NamedTuple):
    """A matrix of the module: a tensor of the file, and the order of its rows (None: as they are)."""

    file: GgufFile
    info: TensorInfo
    order: npt.NDArray[np.int64] | None


class StoredModel:
    """A file's model: a module without memory, and where its matrices lie.

    Attributes:
        module: its vectors are real, its matrices are on the meta device.
        folder: with its configuration and its tokenizer.
        kinds: how many tensors of each type of ggml's the matrices have.
        is_quantized: some of them are no floats.
    """

    def __init__(self, module: Any, folder: Path, matrices: Mapping[str, _Stored]) -> None:
        self.module = module
        self.folder = folder
        self._maps = {matrix.file.path: _Mapped(matrix.file.path) for matrix in matrices.values()}
        # Without memory, all tensors have the address 0; what is a view of which is seen by their storages.
        self._matrices = {_storage(module.get_parameter(name)): matrix for name, matrix in matrices.items()}
        kinds = [matrix.info.kind.name for matrix in matrices.values()]
        self.kinds = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        self.is_quantized = any(kind not in ("F32", "F16", "BF16") for kind in kinds)

    def find_rows(self, weight: Tensor) -> WeightRows:
        """Where the rows of a matrix of the module lie, or of a slice of one along its rows; see `FindRows`.

        Raises:
            LookupError: it is none.
        """
        if not weight.is_meta:
            return tensor_rows(weight)
        matrix, first = self._matrix(weight)
        source = SOURCES.get(matrix.info.kind.name)
        count = len(weight)
        if source is None:  # of another type: by way of floats
            values = self._values(matrix, first, count)
            return WeightRows(rows_at(values.ctypes.data, count, values.strides[0]), SOURCES["F32"], values)
        mapped = self._maps[matrix.file.path]
        order = np.arange(first, first + count) if matrix.order is None else matrix.order[first : first + count]
        stride = source.row_bytes(matrix.info.shape[-1])
        start = np.uint64(mapped.address + matrix.info.offset)
        return WeightRows(start + order.astype(np.uint64) * np.uint64(stride), source, mapped)

    def values(self, weight: Tensor) -> Tensor:
        """The numbers of a matrix, or of a slice of one along its rows, as gguf's own code reads them.

        Raises:
            LookupError: it is none of the module.
        """
        if not weight.is_meta:
            return weight.detach().float()
        matrix, first = self._matrix(weight)
        return torch.from_numpy(self._values(matrix, first, len(weight)))

    def forget_pages(self) -> None:
        """Give the file's pages back: what was packed is not read there again, and the rest is when it is needed."""
        for mapped in self._maps.values():
            mapped.forget()

    def _matrix(self, weight: Tensor) -> tuple[_Stored, int]:
        """The tensor of the file that a matrix is a part of, and its first row there."""
        matrix = self._matrices.get(_storage(weight))
        if matrix is None or weight.dim() != 2 or weight.stride() != (matrix.info.shape[1], 1):
            raise LookupError("a matrix that is no tensor of the file")
        return matrix, weight.storage_offset() // weight.stride(0)

    def _values(self, matrix: _Stored, first: int, count: int) -> npt.NDArray[np.float32]:
        from gguf import dequantize

        raw = self._maps[matrix.file.path].array(matrix.info)
        rows = raw[first : first + count] if matrix.order is None else raw[matrix.order[first : first + count]]
        return np.array(dequantize(rows, matrix.info.kind), np.float32)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Mapped:
    """A file in memory, read where it is touched."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def array(self, info: TensorInfo) -> npt.NDArray[Any]:
        """The raw rows of a tensor: bytes, or numbers where they are floats."""
        raw = self._bytes[info.offset : info.end]
        if info.kind.name in ("F32", "F16"):
            return raw.view(np.float32 if info.kind.name == "F32" else np.float16).reshape(info.shape)
        return raw.reshape(*info.shape[:-1], -1)

    def forget(self) -> None:
        """Let the system take the pages back."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_stored(model: GgufModel, progress: Progress) -> StoredModel:
    """Map a file and describe what is in it.

    Raises:
        Unstorable: it has to be converted.
        ConfigError: it is damaged, or says something that cannot be honoured; the message names it.
    """
    parts = [read_gguf(part) for part in model.parts]
    file, tensors = parts[0], {name: (part, info) for part in parts for name, info in part.tensors.items()}
    if sum(len(part.tensors) for part in parts) != len(tensors):
        raise ConfigError(f"{file.path} and the parts beside it are not of one model: a tensor is in two of them")
    folder = model.folder.with_name(f"{model.folder.name.rpartition('-')[0]}-small")
    with explained(f"keep the tokenizer of {file.path} in {folder.parent} (AIOCB_CACHE names another)"):
        if files.flaw(folder, _MAKER) is not None:
            with files.locked(folder):
                if files.flaw(folder, _MAKER) is not None:
                    _make_small(folder, file, progress)
    progress("load", 0.0)
    return _described(file, tensors, folder)


def _make_small(folder: Path, file: GgufFile, progress: Progress) -> None:
    check_keys(file)
    progress("convert", 0.0)
    with files.make_folder(folder, _MAKER) as scratch:
        write_small(file, read_config(file), scratch)
    progress("convert", 1.0)


def _described(file: GgufFile, tensors: Mapping[str, tuple[GgufFile, TensorInfo]], folder: Path) -> StoredModel:
    import transformers
    from transformers import AutoConfig, GenerationConfig

    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(folder)
    architecture: Any = getattr(transformers, said["architectures"][0])
    with torch.device("meta"):
        module: Any = architecture._from_config(config, dtype=torch.float32)
    module.requires_grad_(False)
    module.eval()
    module.generation_config = GenerationConfig.from_pretrained(folder)
    _make_buffers(module, config)
    set_frequencies(module, file)
    processor, names = _conversion(file, module)
    stray = stray_tensors(file, tensors, names)
    if stray:
        raise Unstorable(f"{type(module).__name__} has no place for {', '.join(sorted(stray)[:3])}")
    matrices: dict[str, _Stored] = {}
    for name, (part, info) in tensors.items():
        target = names.get(name)
        if target is None:
            continue
        if len(info.shape) == 1:
            _set_vector(module, target, processor.process(_vector(part, name), name).weights)
        elif len(info.shape) == 2:
            wanted = tuple(module.get_parameter(target).shape)
            if wanted != info.shape:
                raise Unstorable(f"{name} has the shape {info.shape}, its place {wanted}")
            matrices[target] = _Stored(part, info, _order(processor, name, info.shape[0]))
        else:
            raise Unstorable(f"{name} has {len(info.shape)} dimensions")
    return _checked(StoredModel(module, folder, matrices), set(matrices))


def _conversion(file: GgufFile, module: Any) -> tuple[Any, dict[str, str]]:
    """What transformers does to the tensors of such a file, and where it puts them."""
    from transformers import modeling_gguf_pytorch_utils

    ways: Any = modeling_gguf_pytorch_utils
    if not all(hasattr(ways, name) for name in ("TENSOR_PROCESSORS", "TensorProcessor", "get_gguf_hf_weights_map")):
        raise Unstorable("this version of transformers reads such files in a way that is not known here")
    processor = ways.TENSOR_PROCESSORS.get(file.architecture, ways.TensorProcessor)(config=module.config.to_dict())
    with watched():
        return processor, dict(ways.get_gguf_hf_weights_map(module, processor))


def _checked(stored: StoredModel, matrices: set[str]) -> StoredModel:
    """See that nothing of the module is without its numbers."""
    tied = set(getattr(stored.module, "all_tied_weights_keys", None) or ())
    for name, tensor in (*stored.module.named_parameters(), *stored.module.named_buffers()):
        if tensor.is_meta and name not in matrices and name not in tied:
            raise Unstorable(f"{name} has no tensor of its own in the file")
    return stored


def _make_buffers(module: Any, config: Any) -> None:
    """Compute what no file holds: rotary frequencies and the scale of an embedding."""
    for name, part in list(module.named_modules()):
        names = [each for each, buffer in part._buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        if hasattr(part, "inv_freq") or any(each.endswith("inv_freq") for each in names):
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, type(part)(config))
        elif names == ["embed_scale"] and hasattr(part, "scalar_embed_scale"):
            part.embed_scale = torch.tensor(part.scalar_embed_scale)
        else:
            raise Unstorable(f"{name} has the buffers {', '.join(names)}")


def _vector(file: GgufFile, name: str) -> npt.NDArray[np.float32]:
    from gguf import dequantize

    info = file.tensors[name]
    with file.path.open("rb") as raw:
        raw.seek(info.offset)
        data = np.frombuffer(raw.read(info.end - info.offset), np.uint8)
    kind = {"F32": np.float32, "F16": np.float16}.get(info.kind.name)
    return np.array(dequantize(data if kind is None else data.view(kind), info.kind), np.float32)


def _set_vector(module: Any, name: str, values: npt.NDArray[np.float32]) -> None:
    owner, _, attribute = name.rpartition(".")
    wanted = module.get_parameter(name)
    if tuple(wanted.shape) != values.shape:
        raise Unstorable(f"{name} has the shape {tuple(wanted.shape)}, in the file {values.shape}")
    parameter = torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(values)), requires_grad=False)
    setattr(module.get_submodule(owner), attribute, parameter)


def _order(processor: Any, name: str, count: int) -> npt.NDArray[np.int64] | None:
    """What the conversion does to the rows of a tensor, seen by doing it to their numbers; None: it leaves them."""
    numbers = np.arange(count, dtype=np.float64)[:, None]  # [N, 1]
    try:
        result = processor.process(weights=numbers.copy(), name=name, tensor_key_mapping={}, parsed_parameters={})
        moved = np.asarray(result.weights)
    except Exception as error:
        raise Unstorable(f"{name} is changed on the way ({type(error).__name__})") from error
    if moved.shape != numbers.shape or result.name != name or not np.array_equal(np.sort(moved, 0), numbers):
        raise Unstorable(f"{name} is changed on the way")
    order: npt.NDArray[np.int64] = moved[:, 0].astype(np.int64)
    return None if np.array_equal(order, np.arange(count)) else order
