"""Turning a GGUF file into a folder that transformers could have written, with nothing of the file dropped.

transformers builds the module; it passes over keys and tensors that it does not know without a word, so what it made
is compared with what the file says on the way.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from aiocb.errors import ConfigError
from aiocb.model.load.gguf_file import GgufFile, read_gguf
from aiocb.model.load.gguf_keys import amend_config, check_keys, frequency_factors, generation_values, is_unused
from aiocb.model.load.gguf_tokenizer import build_tokenizer, wrong_sample

__all__ = ["convert"]

_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def convert(
    path: Path, folder: Path, weights_name: str, dtype: torch.dtype, progress: Callable[[str, float], None]
) -> None:
    """Dequantise the file at `path` into `folder`, its tensors into the file of that name there.

    Raises:
        ConfigError: it is damaged, or says something that cannot be honoured; the message names it.
        MemoryError, OSError: the machine has no room for it.
    """
    file = read_gguf(path)
    needed, free = file.num_weights * dtype.itemsize, shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{path} takes {needed / 2**30:.1f} GiB as {dtype}, and {folder.parent} has {free / 2**30:.1f} GiB left: "
            "make room, or set AIOCB_CACHE to a folder on another disk"
        )
    try:
        check_keys(file)
        build_tokenizer(file).save_pretrained(folder)
        progress("convert", 0.2)
        model = _dequantised(file, dtype)
    except (ConfigError, MemoryError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"cannot convert {path}: {type(error).__name__}: {error}") from error
    progress("convert", 0.9)
    _write(model, file, folder, weights_name)


def _dequantised(file: GgufFile, dtype: torch.dtype) -> Any:
    """Let transformers make the module, of a configuration that says all the file says; nothing is dropped."""
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    options: dict[str, Any] = {"gguf_file": file.path.name}
    auto: Any = AutoModelForCausalLM
    with _watched() as names:
        config = AutoConfig.from_pretrained(str(file.path.parent), **options)
        amend_config(config, file)
        model, report = auto.from_pretrained(
            str(file.path.parent),
            config=config,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **options,
        )
    missing = set(report["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", None) or ())
    if missing:
        raise ConfigError(f"{file.path} has no weights for {_some(missing)} of {type(model).__name__}")
    unread = set(report["unexpected_keys"])
    if names:
        unread = {name for name in file.tensors if name not in names and name.removesuffix(".weight") not in names}
    unread = {name for name in unread - _FACTORS if not is_unused(file, name)}
    if unread:
        raise ConfigError(
            f"{file.path} has tensors that {type(model).__name__} has no place for: {_some(unread)}. "
            "Its answers would be wrong without them; name the original model instead"
        )
    _set_frequencies(model, file)
    return model


@contextlib.contextmanager
def _watched() -> Iterator[Mapping[str, str]]:
    """Inside, transformers draws no progress bar, and does not read the file twice and its tables 400 times.

    Yields which tensors of the file it has names for, filled as it goes; empty where it reports unused ones itself.
    One model is made at a time (see `hub.load`), so nobody else meets what is replaced here.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as module

    names: dict[str, str] = {}
    conversion: Any = module
    tools: Any = gguf
    find_names = getattr(conversion, "get_gguf_hf_weights_map", None)

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = find_names(*args, **kwargs) if find_names is not None else {}
        names.update(found)  # it calls itself for parts of the module first, and for the whole last
        return found

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (conversion, "tqdm", lambda tensors, **_: tensors),
            (conversion, "get_gguf_hf_weights_map", noted),
            (tools, "get_tensor_name_map", functools.cache(tools.get_tensor_name_map)),
            (tools, "GGUFReader", functools.cache(tools.GGUFReader)),
        ):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield names


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _set_frequencies(model: Any, file: GgufFile) -> None:
    """Check the rotary frequencies against the file, and divide them by its factors."""
    rotaries = [module for module in model.modules() if "inv_freq" in module._buffers]
    factors = frequency_factors(file)
    if factors is not None and not rotaries:
        raise ConfigError(f"{file.path}: {type(model).__name__} has no place for the tensor rope_freqs.weight")
    for rotary in rotaries:
        size = len(rotary.inv_freq)
        dims = file.said("rope.dimension_count", 2 * size)
        if dims != 2 * size or len(factors or range(size)) != size:
            raise ConfigError(
                f"{file.path}: {type(model).__name__} rotates {2 * size} dimensions, rope.dimension_count is {dims} "
                f"and rope_freqs.weight has {len(factors or ())} factors"
            )
        if factors is not None:
            rotary.inv_freq = rotary.inv_freq / torch.tensor(factors, dtype=torch.float32)


def _write(model: Any, file: GgufFile, scratch: Path, weights_name: str) -> None:
    """Write the module's configuration and weights, and see that the tokenizer does what its kind must do."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(scratch)
    model.generation_config.update(**generation_values(file))
    model.generation_config.save_pretrained(scratch)
    wrong = wrong_sample(AutoTokenizer.from_pretrained(scratch), file)
    if wrong is not None:
        raise ConfigError(f"{file.path}: the tokenizer that was made of it does not fit its kind: {wrong}")
    seen: set[int] = set()
    weights = {}
    # What is no part of a state dict too: a file may change it. Tied weights are stored once and tied after loading.
    for name, tensor in (model.state_dict() | dict(model.named_buffers())).items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        weights[name] = tensor.contiguous()
    save_file(weights, scratch / weights_name)
