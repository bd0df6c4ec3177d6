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

__all__ = ["convert", "read_config", "set_frequencies", "stray_tensors", "watched", "write_small"]

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


def read_config(file: GgufFile) -> Any:
    """The configuration of a causal language model that says all the file says.

    Raises:
        ConfigError: transformers has none of that kind, or it has no place for something.
    """
    from transformers import AutoConfig

    options: dict[str, Any] = {"gguf_file": file.path.name}
    try:
        with watched():
            config = AutoConfig.from_pretrained(str(file.path.parent), **options)
            amend_config(config, file)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot read {file.path}: {type(error).__name__}: {error}") from error
    return config


def stray_tensors(file: GgufFile, tensors: Collection[str], names: Collection[str]) -> set[str]:
    """Tensors that a module has no place for and that count: not those of `names`, which it has."""
    strays = {name for name in tensors if name not in names and name.removesuffix(".weight") not in names}
    return {name for name in strays - _FACTORS if not is_unused(file, name)}


def write_small(file: GgufFile, config: Any, folder: Path) -> None:
    """Write configuration, generation defaults and tokenizer into a folder, as transformers has them.

    Raises:
        ConfigError: the tokenizer is of a kind that is not known, or does not do what its kind must do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    auto: Any = AutoModelForCausalLM
    config.architectures = [auto._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    generation: Any = GenerationConfig.from_model_config(config)
    generation.update(**generation_values(file))
    generation.save_pretrained(folder)
    build_tokenizer(file).save_pretrained(folder)
    wrong = wrong_sample(AutoTokenizer.from_pretrained(folder), file)
    if wrong is not None:
        raise ConfigError(f"{file.path}: the tokenizer that was made of it does not fit its kind: {wrong}")


def _dequantised(file: GgufFile, dtype: torch.dtype) -> Any:
    """Let transformers make the module, of a configuration that says all the file says; nothing is dropped."""
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    options: dict[str, Any] = {"gguf_file": file.path.name}
    auto: Any = AutoModelForCausalLM
    with watched() as names:
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
    unread = stray_tensors(file, file.tensors if names else report["unexpected_keys"], names)
    if unread:
        raise ConfigError(
            f"{file.path} has tensors that {type(model).__name__} has no place for: {_some(unread)}. "
            "Its answers would be wrong without them; name the original model instead"
        )
    set_frequencies(model, file)
    return model


@contextlib.contextmanager
def watched() -> Iterator[Mapping[str, str]]:
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


def set_frequencies(model: Any, file: GgufFile) -> None:
    """Check the rotary frequencies against the file, and divide them by its factors.

    Raises:
        ConfigError: they are not those of the file.
    """
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
