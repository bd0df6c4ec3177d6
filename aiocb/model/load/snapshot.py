"""What the native runner was made from, kept beside the converted weights of a GGUF file. Worker thread only.

The first start builds the module of transformers, describes it, packs its weights and compares both. What it read out
of the module is then written down: the numbers of the description, which tensor of the weights file each projection
is, and the small vectors. A later start of the same file, library and processor packs from that and imports no
modelling code: half of a start is importing it.

Everything that decides what the first start read is part of the snapshot's name; so it is found, or made anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import aiocb
from aiocb.model.native.families import Experts, LayerDescription, ModelDescription, Projection
from aiocb.sampling_params import ModelDefaults

if TYPE_CHECKING:
    from aiocb.kernels import Library

__all__ = ["Encoded", "Snapshot", "encode", "load", "save", "snapshot_path"]

logger = logging.getLogger("aiocb.model")

_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("model/**/*.py", "kernels/library.py", "sampling_params.py")


class Snapshot(NamedTuple):
    """What a start needs of a model that has been started before.

    Attributes:
        description: its tensors are views of the mapped weights file.
        defaults: what the model says about itself.
        length_reason: where `defaults.max_model_len` comes from.
        tokenizer: None when there is none.
        parity: what the comparison with the module's own forward gave when the snapshot was made.
    """

    description: ModelDescription
    defaults: ModelDefaults
    length_reason: str
    tokenizer: Any
    parity: str


def snapshot_path(folder: Path, library: Library, quantization: str | None) -> Path:
    """Where the snapshot of a folder of converted weights lies (without a suffix)."""
    transformers = importlib.metadata.version("transformers")
    digest = hashlib.blake2b(digest_size=10)
    for part in (
        aiocb.__version__,
        torch.__version__,
        transformers,
        _own_sources(),
        library.path.name,
        library.level(),
    ):
        digest.update(f"{part}\n".encode())
    return folder / f"native-{quantization or 'plain'}-{digest.hexdigest()}"


@functools.cache
def _own_sources() -> str:
    digest = hashlib.blake2b(digest_size=10)
    for pattern in _SOURCES:
        for source in sorted(_PACKAGE.glob(pattern)):
            digest.update(source.read_bytes())
    return digest.hexdigest()


class Encoded(NamedTuple):
    """A description as it can be written: values, and the vectors that are not in the weights file."""

    values: dict[str, Any]
    vectors: dict[str, Tensor]


def encode(description: ModelDescription, weights: Mapping[str, Tensor]) -> Encoded | None:
    """Write a description down in names of `weights` (a state dict, before it is freed); None when that cannot be."""
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


def save(
    path: Path, encoded: Encoded, defaults: ModelDefaults, length_reason: str, tokenizer: Any, parity: str
) -> None:
    """Write a snapshot.

    Raises:
        Exception: the disk is full or read-only, or a value cannot be written.
    """
    from safetensors.torch import save_file

    kind = type(tokenizer)
    values = {
        "description": encoded.values,
        "defaults": {
            "vocab_size": defaults.vocab_size,
            "max_model_len": defaults.max_model_len,
            "eos_token_ids": list(defaults.eos_token_ids),
            "generation": dict(defaults.generation),
        },
        "length_reason": length_reason,
        "tokenizer": None if tokenizer is None else [kind.__module__, kind.__qualname__],
        "parity": parity,
    }
    text = json.dumps(values)
    with tempfile.TemporaryDirectory(prefix=".native-", dir=path.parent) as folder:
        scratch = Path(folder)
        save_file(encoded.vectors, scratch / "vectors")
        (scratch / "values").write_text(text, encoding="utf-8")
        (scratch / "vectors").replace(path.with_suffix(".safetensors"))
        (scratch / "values").replace(path.with_suffix(".json"))  # last: a snapshot is there when this file is


def load(path: Path, weights_file: Path) -> Snapshot | None:
    """Read a snapshot; None when there is none, or none that can be used."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        values = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        vectors = load_file(path.with_suffix(".safetensors"))
        description = _decoded(values["description"], load_file(weights_file), vectors)
        defaults = values["defaults"]
        defaults["eos_token_ids"] = tuple(defaults["eos_token_ids"])
        tokenizer = None
        if values["tokenizer"] is not None:
            module, name = values["tokenizer"]
            kind: Any = getattr(importlib.import_module(module), name)
            tokenizer = kind.from_pretrained(path.parent)
        return Snapshot(description, ModelDefaults(**defaults), values["length_reason"], tokenizer, values["parity"])
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, SafetensorError):
        # Damaged: the whole start makes it anew.
        with contextlib.suppress(OSError):
            path.with_suffix(".json").unlink(missing_ok=True)
        return None
    except Exception:
        logger.debug("the snapshot %s cannot be used", path, exc_info=True)
        return None
