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
import importlib
import importlib.metadata
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import aiocb
from aiocb import files
from aiocb.config import Choice
from aiocb.model.native.families import Experts, LayerDescription, ModelDescription, Projection
from aiocb.model.request import Material
from aiocb.sampling_params import ModelDefaults

if TYPE_CHECKING:
    from aiocb.kernels import Library
    from aiocb.model.load.hub import Found

__all__ = ["Encoded", "encode", "load", "save", "snapshot_folder", "stored_weights"]

logger = logging.getLogger("aiocb.model")

_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("model/**/*.py", "model/**/*.json", "kernels/library.py", "sampling_params.py")
_MAKER = "snapshot 2"
_KEPT = 8  # per model: other versions, settings and earlier contents of its files


def snapshot_folder(found: Found, library: Library, quantization: str | None) -> Path:
    """Where the snapshot of a model lies, or will."""
    digest = hashlib.blake2b(digest_size=10)
    for part in (
        aiocb.__version__,
        torch.__version__,
        importlib.metadata.version("transformers"),
        _own_sources(),
        library.path.name,
        library.instruction_set(),
        found.identity,
        quantization,
    ):
        digest.update(f"{part}\n".encode())
    return files.cache_dir() / "native" / f"{found.home.name[:80]}-{digest.hexdigest()}"


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
    """A description as it can be written: values, and the vectors that are not in the weights file."""

    values: dict[str, Any]
    vectors: dict[str, Tensor]


def encode(description: ModelDescription, weights: Mapping[str, Tensor]) -> Encoded | None:
    """Write a description down in names of `weights` (of `stored_weights`, not freed); None when that cannot be."""
    names = {(tensor.data_ptr(), tuple(tensor.shape), tensor.stride()): name for name, tensor in weights.items()}
    vectors: dict[str, Tensor] = {}

    def encoded(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = names.get((value.data_ptr(), tuple(value.shape), value.stride()))
            if name is not None:
                return {"weight": name}
            if value.dim() > 1:
                raise LookupError("a matrix that is no tensor of the weights file")
            key = str(len(vectors))
            vectors[key] = value.detach().clone()  # a file of tensors takes none that share memory
            return {"vector": key}
        if hasattr(value, "_asdict"):
            return {type(value).__name__: encoded(value._asdict())}
        if isinstance(value, dict):
            return {key: encoded(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return {"tuple": [encoded(item) for item in value]}
        if isinstance(value, list):
            return [encoded(item) for item in value]
        return value

    try:
        return Encoded(encoded(description), vectors)
    except LookupError:
        return None


def _decoded(value: Any, weights: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, weights, vectors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == "weight":
            return weights[item]
        if key == "vector":
            return vectors[item]
        if key == "tuple":
            return tuple(_decoded(item, weights, vectors))
        kinds = (ModelDescription, LayerDescription, Projection, Experts)
        kind: Any = next((kind for kind in kinds if kind.__name__ == key), None)
        if kind is not None:
            return kind(**_decoded(item, weights, vectors))
    return {key: _decoded(item, weights, vectors) for key, item in value.items()}


def save(material: Material, description: ModelDescription, library: Library, quantization: str | None) -> None:
    """Leave a snapshot of a module that lies in files, before its memory is taken; remove the oldest of many.

    A start that has succeeded does not fail for it: the next one only takes longer.
    """
    found = material.found
    if found is None:
        return
    folder = snapshot_folder(found, library, quantization)
    try:
        encoded = encode(description, stored_weights(material.module, found.weights))
        if encoded is not None:
            _write(folder, encoded, material)
    except Exception:
        logger.debug("no snapshot can be written to %s", folder, exc_info=True)


def _write(folder: Path, encoded: Encoded, material: Material) -> None:
    from safetensors.torch import save_file

    kind, defaults = type(material.tokenizer), material.defaults
    values = {
        "description": encoded.values,
        "defaults": {
            "vocab_size": defaults.vocab_size,
            "max_model_len": defaults.max_model_len,
            "eos_token_ids": list(defaults.eos_token_ids),
            "generation": dict(defaults.generation),
        },
        "length_reason": material.length_reason,
        "tokenizer": None if material.tokenizer is None else [kind.__module__, kind.__qualname__],
        "choices": [list(choice) for choice in material.choices if choice.name != "max_model_len"],
        "parity": material.parity,
    }
    text = json.dumps(values)
    with files.locked(folder), files.make_folder(folder, _MAKER) as scratch:
        save_file(encoded.vectors, scratch / "vectors.safetensors")
        (scratch / "values.json").write_text(text, encoding="utf-8")
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
        values = json.loads((folder / "values.json").read_text(encoding="utf-8"))
        vectors = load_file(folder / "vectors.safetensors")
        weights = {name: tensor for path in found.weights for name, tensor in load_file(path).items()}
        description = _decoded(values["description"], weights, vectors)
        defaults = values["defaults"]
        defaults["eos_token_ids"] = tuple(defaults["eos_token_ids"])
        tokenizer = None
        if values["tokenizer"] is not None:
            module, name = values["tokenizer"]
            kind: Any = getattr(importlib.import_module(module), name)
            tokenizer = kind.from_pretrained(found.home)
        choices = tuple(Choice(*each) for each in values["choices"])
        return Material(
            ModelDefaults(**defaults),
            values["length_reason"],
            description=description,
            parity=values["parity"],
            tokenizer=tokenizer,
            choices=choices,
            found=found,
        )
    except Exception:
        # The whole way says what is wrong, or goes on without it.
        logger.debug("the snapshot %s cannot be used", folder, exc_info=True)
        return None
