"""What the native runner was made from, kept beside the converted weights of a GGUF file. Worker thread only.

The first start builds the module of transformers, describes it, packs its weights and compares both. What it read out
of the module is then written down: the numbers of the description, which tensor of the weights file each projection
is, and the small vectors. A later start of the same file, library and processor packs from that and imports no
modelling code: half of a start is importing it.

Everything that decides what the first start read is part of the snapshot's name; so it is found, or made anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import logging
import pickle
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

import aiocb
from aiocb import files
from aiocb.model.request import Material

if TYPE_CHECKING:
    from aiocb.kernels import Library
    from aiocb.model.load.hub import Found
    from aiocb.model.native.families import ModelDescription

__all__ = ["Encoded", "encode", "load", "parity_folder", "save", "snapshot_folder", "stored_weights"]

logger = logging.getLogger("aiocb.model")

_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("model/**/*.py", "model/**/*.json", "kernels/library.py", "sampling_params.py")
_MAKER = "snapshot 3"
_CONTENT, _VECTORS = "material.pickle", "vectors.safetensors"
_KEPT = 8  # per model: other versions, settings and earlier contents of its files


def snapshot_folder(found: Found, library: Library, quantization: str | None) -> Path:
    """Where the snapshot of a model lies, or will."""
    return _folder(found.home.name, library, found.identity, quantization)


def parity_folder(home: Path, library: Library) -> Path:
    """Where the note lies of how a file compared with its dequantised forward; `home` is named by its content."""
    return _folder(home.name, library, "parity")


def _folder(name: str, library: Library, *others: str | None) -> Path:
    """A folder for what this version of everything makes of a model."""
    parts = (
        aiocb.__version__,
        torch.__version__,
        importlib.metadata.version("transformers"),
        _own_sources(),
        library.path.name,
        library.instruction_set(),
        *others,
    )
    digest = hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=10)
    return files.cache_dir() / "native" / f"{name[:80]}-{digest.hexdigest()}"


@functools.cache
def _own_sources() -> str:
    digest = hashlib.blake2b(digest_size=10)
    for pattern in _SOURCES:
        for source in sorted(_PACKAGE.glob(pattern)):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def stored_weights(model: Any, paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of a module that lie in the files as they are: not those that were cast, fused or tied on the way."""
    from safetensors import safe_open

    state = model.state_dict()
    kept = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in state.keys() & set(file.keys()):
                if _is_equal(state[name], file.get_tensor(name)):
                    kept[name] = state[name]
    return kept


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (each.detach().reshape(-1).view(torch.uint8).numpy() for each in (one, other))
    return np.array_equal(first, second)  # 30 times as fast as torch.equal in bfloat16


class Encoded(NamedTuple):
    """What was pickled, and the vectors in it that are not in the weights file."""

    content: bytes
    vectors: dict[str, Tensor]


def encode(value: object, weights: Mapping[str, Tensor]) -> Encoded | None:
    """Pickle a value whose tensors have names in `weights` (of `stored_weights`, not freed); None when one has none.

    Small ones are written beside it. A pickle runs what it names; so does the library that lies in the same cache.
    """
    names = {(tensor.data_ptr(), tuple(tensor.shape), tensor.stride()): name for name, tensor in weights.items()}
    vectors: dict[str, Tensor] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            if not isinstance(obj, Tensor):
                return None
            name = names.get((obj.data_ptr(), tuple(obj.shape), obj.stride()))
            if name is None:
                if obj.dim() > 1:
                    raise LookupError("a matrix that is no tensor of the weights file")
                name = f"vector {len(vectors)}"
                vectors[name] = obj.detach().clone()  # a file of tensors takes none that share memory
            return name

    content = io.BytesIO()
    try:
        Pickler(content).dump(value)
    except LookupError:
        return None
    return Encoded(content.getvalue(), vectors)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: str) -> Tensor:
        return self._tensors[pid]


def save(material: Material, description: ModelDescription, library: Library, quantization: str | None) -> None:
    """Leave a snapshot of a module that lies in files, before its memory is taken; remove the oldest of many.

    A start that has succeeded does not fail for it: the next one only takes longer.
    """
    found = material.found
    if found is None:
        return
    folder = snapshot_folder(found, library, quantization)
    kept = material._replace(
        module=None,
        description=description,
        tokenizer=None if material.tokenizer is None else type(material.tokenizer),
        choices=tuple(choice for choice in material.choices if choice.name != "max_model_len"),
        found=None,
    )
    try:
        encoded = encode(kept, stored_weights(material.module, found.weights))
        if encoded is not None:
            _write(folder, encoded)
    except Exception:
        logger.debug("no snapshot can be written to %s", folder, exc_info=True)


def _write(folder: Path, encoded: Encoded) -> None:
    from safetensors.torch import save_file

    with files.locked(folder), files.make_folder(folder, _MAKER) as scratch:
        save_file(encoded.vectors, scratch / _VECTORS)
        (scratch / _CONTENT).write_bytes(encoded.content)
    siblings = sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/"), key=lambda path: path.stat().st_mtime)
    for old in siblings[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, found: Found) -> Material | None:
    """Read a snapshot; None when there is none, or none that can be used."""
    from safetensors.torch import load_file

    try:
        flaw = files.flaw(folder, _MAKER)
        if flaw is not None:
            if flaw:
                logger.warning("the snapshot %s is made again: %s", folder, flaw)
            return None
        tensors = {
            name: tensor for path in (folder / _VECTORS, *found.weights) for name, tensor in load_file(path).items()
        }
        with (folder / _CONTENT).open("rb") as file:
            kept: Material = _Unpickler(file, tensors).load()
        tokenizer = None if kept.tokenizer is None else kept.tokenizer.from_pretrained(found.home)
        return kept._replace(tokenizer=tokenizer, found=found)
    except Exception:
        # The whole way says what is wrong, or goes on without it.
        logger.debug("the snapshot %s cannot be used", folder, exc_info=True)
        return None
