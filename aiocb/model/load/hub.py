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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.model.load import download, gguf
from aiocb.model.load.download import Located
from aiocb.model.load.gguf import Progress
from aiocb.model.load.problems import explained, reason

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from aiocb.model.load.gguf_stored import StoredModel, Unstorable

__all__ = [
    "Found",
    "LoadedFile",
    "LoadedModel",
    "Located",
    "Progress",
    "find",
    "find_file",
    "load",
    "load_stored",
    "locate",
    "quiet",
    "unused_by_files",
]

logger = logging.getLogger("aiocb.model")

_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
_TOKENIZER_OPTIONS = (*_HUB_OPTIONS, "trust_remote_code")
# Where and how other files than a GGUF file are found and read: it needs none of it, but the same call may name either.
_OTHER_FILES = {
    *(*_TOKENIZER_OPTIONS, "force_download", "proxies", "variant", "code_revision", "subfolder"),
    *("use_safetensors", "weights_only", "low_cpu_mem_usage"),
}
_PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")  # of a device_map, that name no device
_SMALL = 1 << 20
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "spiece*", "*.tiktoken", "tekken*")
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


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
        choices: what was decided on the way, with reasons.
        found: where it came from when that can be found again.
    """

    model: PreTrainedModel
    tokenizer: Any
    choices: tuple[Choice, ...]
    found: Found | None


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
        name_or_path: `smollm2`, `gemma3-270m`, a `.gguf` file, a folder, or a name on the hub (see `names.py`).
        dtype: a torch dtype, its name, or `"auto"`: as stored (for a GGUF file: bfloat16).
        device: a torch device; None takes a CUDA device when there is one, else the CPU.
        progress: called with a stage (`download`, `import`, `convert`, `load`) and the fraction of it that is done.
        kwargs: passed to `from_pretrained` (`revision`, `trust_remote_code`, `device_map`, ...).

    Raises:
        ConfigError: it cannot be found, read or converted; the message says what to do.
    """
    report: Progress = progress or (lambda stage, fraction: None)
    report("import", 0.0)
    name, kwargs, origin_choices = locate(name_or_path, dtype, device, kwargs, report)
    with _loading, quiet():
        import transformers  # noqa: F401

        report("import", 1.0)
        chosen_dtype = _parse_dtype(dtype)
        chosen_device, device_choice = _choose_device(device, kwargs)
        file = _find_gguf(name, chosen_dtype)
        why = "as stored" if file is None else "dequantised"
        if file is not None:
            unused = unused_by_files(kwargs)
            if unused:
                raise ConfigError(
                    f"{name} is a GGUF file here, for which transformers' options do nothing: {', '.join(unused)}. "
                    "Leave them out, or name a model that transformers loads"
                )
            model, tokenizer = file.load(report)
            found: Found | None = _found(file)
            origin = f"the installed package {gguf.PACKAGES[name].pip}" if name in gguf.PACKAGES else "a GGUF file"
            choices: tuple[Choice, ...] = (Choice("weights", str(file.parts[0]), f"{origin}, dequantised once"),)
        else:
            report("load", 0.0)
            found = None if kwargs else _find_folder(name, chosen_dtype)
            model, tokenizer, choices = _from_pretrained(name, chosen_dtype, kwargs)
            report("load", 1.0)
        dtype_choice = Choice("dtype", _name_of(model.dtype), why if chosen_dtype is None else "asked for")
        if chosen_device is not None:
            with explained(f"put the model on {chosen_device}"):
                model.to(chosen_device)  # type: ignore[arg-type]
        model.train(False)
    weights, *others = choices
    return LoadedModel(model, tokenizer, (*origin_choices, weights, dtype_choice, device_choice, *others), found)


def locate(
    name_or_path: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    options: Mapping[str, Any],
    progress: Progress,
) -> Located:
    """Bring a model onto this machine, see `download.locate`; settings that cannot work are refused before.

    Raises:
        ConfigError: it cannot be had, or dtype or device are none.
    """
    _parse_dtype(dtype)
    _choose_device(device, options)
    return download.locate(str(name_or_path), options, progress)


def find(name_or_path: str, dtype: str | torch.dtype | None, device: str | torch.device | None) -> Found | None:
    """Find the weights that a name stands for without loading them; None when they must be loaded, or not for the CPU.

    Raises:
        ConfigError: the file does not exist, or dtype or device are none.
    """
    chosen_dtype = _parse_dtype(dtype)
    chosen_device, _ = _choose_device(device, {})
    if chosen_device is None or chosen_device.type != "cpu":
        return None
    file = _find_gguf(str(name_or_path), chosen_dtype)
    if file is None:
        return _find_folder(str(name_or_path), chosen_dtype)
    return _found(file) if file.flaw() is None else None


def unused_by_files(options: Mapping[str, Any]) -> list[str]:
    """Options of transformers' that do nothing for a GGUF file; not those that only say how other files are found."""
    return sorted(key for key, value in options.items() if value is not None and key not in _OTHER_FILES)


class LoadedFile(NamedTuple):
    """A GGUF file that is used as it is."""

    stored: StoredModel
    tokenizer: Any
    choices: tuple[Choice, ...]


def find_file(name_or_path: str, dtype: str | torch.dtype | None, device: Any) -> gguf.GgufModel | None:
    """The GGUF file that a name stands for, if it is to be used as it is: on the CPU, and no dtype was asked for.

    The packaged models stand for those of the hub, which are in bfloat16.

    Raises:
        ConfigError: the file does not exist, or dtype or device are none.
    """
    chosen_device, _ = _choose_device(device, {})
    if _parse_dtype(dtype) is not None or chosen_device is None or chosen_device.type != "cpu":
        return None
    return None if gguf.find_package(name_or_path) else _find_gguf(str(name_or_path), None)


def load_stored(file: gguf.GgufModel, progress: Progress | None) -> LoadedFile | Unstorable:
    """Map a GGUF file and load its tokenizer; or say why it has to be converted.

    Raises:
        ConfigError: it is damaged, or says something that cannot be honoured; the message names it.
    """
    from transformers import AutoTokenizer

    from aiocb.model.load.gguf_stored import Unstorable, open_stored

    report: Progress = progress or (lambda stage, fraction: None)
    with _loading, quiet():
        try:
            stored = open_stored(file, report)
        except Unstorable as reason:
            return reason
        tokenizer = AutoTokenizer.from_pretrained(stored.folder)
    report("load", 1.0)
    kinds = ", ".join(f"{count} {kind}" for kind, count in stored.kinds.items())
    weights = Choice("weights", str(file.parts[0]), f"a GGUF file as it is: {kinds}")
    dtype = Choice("dtype", "as stored", "weights in the file's own types, activations and cache in bfloat16")
    _, device = _choose_device("cpu", {})
    return LoadedFile(stored, tokenizer, (weights, dtype, device))


def _found(file: gguf.GgufModel) -> Found:
    return Found((file.folder / gguf.WEIGHTS,), file.folder, file.folder.name)


def _picked(kwargs: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: kwargs[name] for name in names if name in kwargs}


def _find_gguf(name: str, dtype: torch.dtype | None) -> gguf.GgufModel | None:
    import torch

    parts, path = gguf.find_package(name), Path(name).expanduser()
    if not parts and not path.is_file():
        if name.endswith(".gguf"):
            raise ConfigError(f"{name} does not exist")
        return None
    return gguf.GgufModel.of(parts or gguf.split_parts(path), dtype or torch.bfloat16)


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


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    import torch

    if dtype is None or dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.")
    parsed = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise ConfigError(
            f"dtype {dtype!r} is not a floating-point type; use 'auto', 'bfloat16', 'float16' or 'float32'"
        )
    return parsed


def _choose_device(device: Any, kwargs: Mapping[str, Any]) -> tuple[torch.device | None, Choice]:
    import torch

    if kwargs.get("distributed_config") is not None:
        return None, Choice("device", "one per process", "the model is spread over several")
    device_map = kwargs.get("device_map")
    if device_map is not None:
        for place in device_map.values() if isinstance(device_map, dict) else (device_map,):
            if place not in _PLACEMENTS:
                _checked_device(place)
        return None, Choice("device", str(device_map), "device_map was given")
    if device is not None and device != "auto":
        return _checked_device(device), Choice("device", str(device), "asked for")
    if torch.cuda.is_available():
        return torch.device("cuda"), Choice("device", "cuda", "a CUDA device is there")
    return torch.device("cpu"), Choice("device", "cpu", "no CUDA device")


def _checked_device(device: Any) -> torch.device:
    """A device that this torch can compute on here: a name says nothing about that, so it is tried."""
    import torch

    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except Exception as error:  # each backend has its own for being absent
        raise ConfigError(
            f"device {device!r} cannot be used with this torch ({torch.__version__}) on this machine: leave device "
            f"out or pass 'cpu', or install a torch that is built for it and its driver ({reason(error)})"
        ) from error
    return chosen


def _from_pretrained(
    name: str, dtype: torch.dtype | None, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, Any, tuple[Choice, ...]]:
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto" if dtype is None else dtype, **kwargs
        )
    except Exception as error:
        why = reason(error)
        files = sorted(path.name for path in Path(name).glob("*.gguf"))
        if files:
            why = f"it has no config.json; name one of its GGUF files: {', '.join(files[:3])}"
        elif name.startswith((".", "/", "~")) and not Path(name).is_dir():
            why = "there is no such folder"
        raise ConfigError(f"cannot load {name!r}: {why}") from error
    tokenizer, choice = _load_tokenizer(name, kwargs)
    weights = Choice("weights", name, "loaded by transformers")
    return model, tokenizer, (weights,) if choice is None else (weights, choice)


def _load_tokenizer(repository: str, kwargs: dict[str, Any]) -> tuple[Any, Choice | None]:
    """The tokenizer, or None and the line that says why: a model without one is served with token ids."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(repository, **_picked(kwargs, _TOKENIZER_OPTIONS)), None
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
    with contextlib.ExitStack() as stack:
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        from transformers.utils import logging

        bars: Any = logging
        if bars.is_progress_bar_enabled():
            bars.disable_progress_bar()
            stack.callback(bars.enable_progress_bar)
        yield
