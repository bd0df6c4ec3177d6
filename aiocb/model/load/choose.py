"""Which files of a repository make the model that was asked for. Pure: it sees names, no files.

Safetensors files go to transformers. A repository that has only GGUF files has one model in many qualities, of which
one is chosen: by its tag, else by the order of `_rank`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from aiocb.errors import ConfigError
from aiocb.model.load.names import HubName

__all__ = ["Chosen", "choose", "label_of", "model_files", "split_of", "tagged", "tags_of"]

_LABEL = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))(?![A-Z0-9_])"
)
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_BESIDES = re.compile(r"(^|[^A-Za-z])(mmproj|imatrix|lora|adapter|vocab|tokenizer)([^A-Za-z]|$)", re.IGNORECASE)
"""GGUF files that are no model by themselves: projectors of images, adapters, statistics, vocabularies."""
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe", ".vocab")
_BITS = ("4", "5", "6", "8", "16", "32", "3", "2", "1")
"""Nearest first: what loses nothing that one would notice, then what loses less and less, and only then more."""
_KINDS = ("K_M", "K_XL", "K_L", "K_S", "K", "1", "0")
_SHOWN = 24


class Chosen(NamedTuple):
    """Files to have.

    Attributes:
        files: paths in the repository; of a GGUF model its parts in order, and nothing else.
        is_gguf: they are one GGUF model.
        reason: why these.
    """

    files: tuple[str, ...]
    is_gguf: bool
    reason: str


def choose(name: HubName, files: Collection[str]) -> Chosen:
    """Choose among the paths of a repository.

    Raises:
        ConfigError: none of them is what the name asks for; the message lists what there is.
    """
    models = _gguf_models(files)
    if name.file is not None:
        return _named(name.file, files)
    if name.tag is not None:
        return _tagged(name.tag, models)
    weights = _weights(files)
    if weights and "config.json" in files:
        return Chosen((*weights, *_others(files)), False, "it has weights that transformers loads")
    if models:
        _, parts = min(models, key=lambda model: (_rank(model[0]), model[1]))
        label = label_of(parts[0])
        why = "the first choice" if label == "Q4_K_M" else f"the nearest to Q4_K_M of {', '.join(tags_of(files))}"
        return _checked(parts, f"no tag was given: {label or parts[0]} is {why}")
    if "adapter_config.json" in files:
        raise ConfigError("it is an adapter for another model: name that model")
    raise ConfigError(
        "it has a model's files neither of transformers (config.json, *.safetensors) nor of llama.cpp (*.gguf)"
    )


def tagged(files: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """What may stand behind the colon, and its files, nearest first.

    That is the quantization, or a path where there is none or where it is not unique.
    """
    models = sorted(_gguf_models(files), key=lambda model: (_rank(model[0]), model[1]))
    labels = [label for label, _ in models]
    return [(label if label and labels.count(label) == 1 else parts[0], parts) for label, parts in models]


def tags_of(files: Iterable[str]) -> list[str]:
    """The tags alone."""
    return [tag for tag, _ in tagged(files)]


def label_of(path: str) -> str:
    """The quantization in a file's name, in capitals; empty when it says none."""
    found = _LABEL.findall(_stem(path).upper())
    return found[-1] if found else ""


def split_of(path: str) -> tuple[str, int, int] | None:
    """What stands before the numbers of a part's name, its number and how many there are; None of a whole file."""
    match = _SPLIT.fullmatch(path.removesuffix(".gguf"))
    return (match[1], int(match[2]), int(match[3])) if match else None


def model_files(files: Iterable[str]) -> list[str]:
    """The GGUF files among them that are models or parts of one."""
    return sorted(path for path in files if path.lower().endswith(".gguf") and not _BESIDES.search(_base(path)))


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    split = split_of(path)
    return _base(split[0] if split else path[: -len(".gguf")])


def _gguf_models(files: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Label and files of each GGUF model."""
    models: dict[str, list[str]] = {}
    for path in model_files(files):
        split = split_of(path)
        models.setdefault(split[0] if split else path, []).append(path)
    return [(label_of(parts[0]), tuple(parts)) for parts in models.values()]


def _rank(label: str) -> tuple[int, int, str]:
    if not label:
        return len(_BITS), 0, ""  # what it says nothing about comes last
    digits = re.search(r"\d+", label)
    bits = _BITS.index(digits[0]) if digits else len(_BITS)
    kind = re.sub(r"^(UD-)?Q\d_", "", label)
    return bits, _KINDS.index(kind) if kind in _KINDS else len(_KINDS), label


def _named(file: str, files: Collection[str]) -> Chosen:
    if not file.lower().endswith(".gguf"):
        raise ConfigError(f"{file} is no GGUF file: name the repository, or one of its GGUF files")
    split = split_of(file)
    parts = (file,) if split is None else tuple(path for path in model_files(files) if _group(path) == split[0])
    if file not in files:
        raise ConfigError(f"it has no file {file}; {_there(files)}")
    return _checked(parts, "the file was named")


def _group(path: str) -> str:
    split = split_of(path)
    return split[0] if split else path


def _tagged(tag: str, models: list[tuple[str, tuple[str, ...]]]) -> Chosen:
    files = [path for _, parts in models for path in parts]
    if not models:
        raise ConfigError(f"it has no GGUF files, of which {tag!r} could be one: leave the tag out")
    wanted = tag.upper()
    by_name = [
        parts for _, parts in models if wanted in (parts[0].upper(), _base(parts[0]).upper(), _stem(parts[0]).upper())
    ]
    for found in (by_name, *([parts for label, parts in models if label == each] for each in (wanted, f"UD-{wanted}"))):
        if len(found) == 1:
            return _checked(found[0], f"the tag {tag} was given")
        if found:
            raise ConfigError(f"several of its files are {tag}: name one of {', '.join(parts[0] for parts in found)}")
    raise ConfigError(f"it has no GGUF file of the tag {tag!r}; {_there(files)}")


def _there(files: Collection[str]) -> str:
    tags = tags_of(files)
    more = f" and {len(tags) - _SHOWN} more" if len(tags) > _SHOWN else ""
    return f"there are {', '.join(tags[:_SHOWN])}{more}" if tags else "it has no GGUF files"


def _checked(parts: tuple[str, ...], reason: str) -> Chosen:
    split = split_of(parts[0])
    if split is not None and [number for part in parts for number in [(split_of(part) or split)[1]]] != list(
        range(1, split[2] + 1)
    ):
        raise ConfigError(f"{parts[0]} is one of {split[2]} parts, and not all of them are there")
    return Chosen(parts, True, reason)


def _weights(files: Collection[str]) -> list[str]:
    """What transformers would read: one file, or all parts; never the same weights in two forms."""
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        if f"{stem}{suffix}" in files:
            return [f"{stem}{suffix}"]
        found = [path for path in files if path.endswith(suffix) and "/" not in path]
        parts = sorted(path for path in found if not path.startswith(("consolidated", "adapter_", "training_args")))
        if parts and f"{stem}{suffix}.index.json" in files:
            return parts
    return []


def _others(files: Collection[str]) -> list[str]:
    """Configuration, tokenizer, templates and code."""
    return sorted(
        path
        for path in files
        if path.endswith(".py")
        or (path.endswith(_SMALL) and "/" not in path)
        or (path.startswith("additional_chat_templates/") and path.endswith(".jinja"))
    )
