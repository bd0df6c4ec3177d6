"""What becomes of each key of a GGUF file: honoured, known to be harmless, or refused by name.

`gguf_keys.json` is the table. transformers reads a third of the keys and drops the others in silence, so after it has
made a configuration, every key that names one of its values is compared with it and put right.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from aiocb.errors import ConfigError
from aiocb.model.load.gguf_file import GgufFile
from aiocb.model.load.gguf_tokenizer import special_ids

__all__ = ["amend_config", "check_keys", "frequency_factors", "generation_values", "is_unused"]


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("gguf_keys.json").read_text(encoding="utf-8"))
    return table


def check_keys(file: GgufFile) -> None:
    """Refuse keys that say something this cannot do; those of the configuration are left to `amend_config`.

    Raises:
        ConfigError: naming the key.
    """
    table = _table()
    for key, value in file.values.items():
        general = _general(file, key)
        if _matches(general, table["honoured"]) or key in table["sampling"] or _is_config(file, general):
            continue
        if general in table["neutral"]:
            penalty = file.values.get("general.sampling.penalty_repeat", 1.0)
            is_idle = general == "general.sampling.penalty_last_n" and _is_same(float(penalty), 1.0)
            if value not in table["neutral"][general] and not is_idle:
                raise _refusal(file, key, table["advice"].get(general))
        elif _matches(general, table["refused"]) and not _matches(general, table["harmless"]):
            raise _refusal(file, key)


def amend_config(config: Any, file: GgufFile) -> None:
    """Give a configuration that transformers made of the file all that the file says.

    Raises:
        ConfigError: naming a key that the architecture has no place for.
    """
    for name, attributes in _table()["config"].items():
        value = file.said(name)
        if value is not None and not _is_by_transformers(file, name):
            _set(config, file, name, attributes, value)
    for name, token in special_ids(file).items():
        setattr(config, name, token)
    _set_windows(config, file)
    if not _is_by_transformers(file, "rope.freq_base"):
        _set_rope(config, file)
    wide = _table()["query_scale_of_width"].get(file.architecture)
    if wide is not None:
        # No key says it: the largest of a family scales queries by the width per head, the others by the head's size.
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if file.said("block_count") in wide else _head_dim(config)
    scale = file.said("attention.scale")
    scaled_size = getattr(config, "query_pre_attn_scalar", None) or _head_dim(config)
    if scale and not math.isclose(scale, scaled_size**-0.5, rel_tol=1e-5):
        raise _refusal(file, f"{file.architecture}.attention.scale")


def generation_values(file: GgufFile) -> dict[str, Any]:
    """What the file says about generating, in the words of transformers' generation config."""
    values = {name: _rounded(file.values[key]) for key, name in _table()["sampling"].items() if key in file.values}
    if values.get("temperature") == 0:
        # transformers takes neither that, nor the others beside greedy decoding.
        values = {"do_sample": False} | {name: values[name] for name in values if name == "repetition_penalty"}
    elif values.keys() - {"repetition_penalty"}:
        values["do_sample"] = True
    return {**values, **special_ids(file)}


def frequency_factors(file: GgufFile) -> list[float] | None:
    """What each rotary frequency is divided by (files of Llama 3.1 carry it as a tensor)."""
    name = "rope_freqs.weight"
    return file.vector(name) if name in file.tensors and not is_unused(file, name) else None


def is_unused(file: GgufFile, tensor: str) -> bool:
    """Whether the tensor is known to play no part in generating text."""
    return _matches(tensor, _table()["unused_tensors"].get(file.architecture, ()))


def _general(file: GgufFile, key: str) -> str:
    prefix = f"{file.architecture}."
    return "{arch}." + key.removeprefix(prefix) if key.startswith(prefix) else key


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_config(file: GgufFile, general: str) -> bool:
    name = general.removeprefix("{arch}.")
    return name != general and (name in _table()["config"] or _is_by_transformers(file, name))


def _is_by_transformers(file: GgufFile, name: str) -> bool:
    return _matches(name, _table()["by_transformers"].get(file.architecture, ()))


def _refusal(file: GgufFile, key: str, advice: str | None = None) -> ConfigError:
    value = file.values.get(key)
    shown = str(value) if len(str(value)) < 60 else f"{str(value)[:57]}..."
    return ConfigError(
        f"{file.path} says {key} = {shown}, which is not supported here"
        + (f": {advice}" if advice else " and would be answered with other text. Name the original model instead")
    )


def _set(config: Any, file: GgufFile, name: str, attributes: Sequence[str], value: Any) -> None:
    """Put one value where the configuration has it; a name after `+` is made when there is none."""
    key = f"{file.architecture}.{name}"
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise _refusal(file, key)
        value = value[0]
    found = next((each for each in attributes if hasattr(config, each)), None)
    found = found or next((each[1:] for each in attributes if each.startswith("+")), None)
    if found is None:
        neutral = [_size(config, each) for each in _table()["neutral"].get("{arch}." + name, ())]
        if not any(_is_same(value, each) for each in neutral):
            raise _refusal(file, key)
    elif not _is_same(value, getattr(config, found, None)):
        if file.architecture in _table()["compare_only"]:
            raise _refusal(file, key)
        setattr(config, found, value)


def _size(config: Any, neutral: Any) -> Any:
    """A neutral value; some are named, as they depend on the model."""
    if neutral == "{heads}":
        return config.num_attention_heads
    return _head_dim(config) if neutral == "{head_dim}" else neutral


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, (int, float)):
        return math.isclose(value, other, rel_tol=1e-5)  # a file has single precision
    return bool(value == other)


def _rounded(value: Any) -> Any:
    """A number as it was written before it was stored in single precision."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _set_windows(config: Any, file: GgufFile) -> None:
    types = getattr(config, "layer_types", None)
    recurrent = file.said("attention.recurrent_layers")
    if recurrent is not None and [bool(each) for each in recurrent] != [
        kind == "linear_attention" for kind in types or ()
    ]:
        raise _refusal(file, f"{file.architecture}.attention.recurrent_layers")
    window = file.said("attention.sliding_window")
    key = f"{file.architecture}.attention.sliding_window"
    if not window:
        if file.architecture == "llama" and hasattr(config, "sliding_window"):
            config.sliding_window = None  # transformers takes some of these for Mistral, whose default has one
        return
    if not hasattr(config, "sliding_window"):
        raise _refusal(file, key)
    config.sliding_window = window
    pattern = file.said("attention.sliding_window_pattern")
    if pattern is None:
        slides = [kind == "sliding_attention" for kind in types or ()]
    elif isinstance(pattern, list):
        slides = [bool(each) for each in pattern[: config.num_hidden_layers]]
    else:  # one full layer after `pattern - 1` that slide; 0: all slide
        slides = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(config.num_hidden_layers)]
    if types is not None:
        if not any(slides):
            raise _refusal(file, key)  # a window in none of its layers
        config.layer_types = ["sliding_attention" if each else "full_attention" for each in slides]
    elif not all(slides):
        raise _refusal(file, f"{key}_pattern")


def _set_rope(config: Any, file: GgufFile) -> None:
    parameters = getattr(config, "rope_parameters", None)
    scaling = _scaling(config, file)
    base = _rounded(file.said("rope.freq_base", 10000.0))
    if parameters is None:
        if scaling:
            raise _refusal(file, f"{file.architecture}.rope.scaling.type")
    elif "full_attention" in parameters:
        full, sliding = dict(parameters["full_attention"]), dict(parameters["sliding_attention"])
        full["rope_theta"] = base
        sliding["rope_theta"] = _rounded(file.said("rope.freq_base_swa", sliding["rope_theta"]))
        config.rope_parameters = {**parameters, "full_attention": {**full, **scaling}, "sliding_attention": sliding}
    else:
        if file.said("rope.freq_base_swa", base) != base:
            raise _refusal(file, f"{file.architecture}.rope.freq_base_swa")
        kept = ("truncate",) if scaling.get("rope_type") == parameters.get("rope_type") else ()
        share = file.said("rope.dimension_count", _head_dim(config)) / _head_dim(config)
        if not _is_by_transformers(file, "rope.dimension_count") and share != parameters.get(
            "partial_rotary_factor", 1
        ):
            parameters = {**parameters, "partial_rotary_factor": share}
        names = ("partial_rotary_factor", *kept)
        config.rope_parameters = {
            "rope_type": "default",
            "rope_theta": base,
            **{name: parameters[name] for name in names if name in parameters},
            **scaling,
        }


def _scaling(config: Any, file: GgufFile) -> dict[str, Any]:
    """The rotary scaling, in transformers' words; empty when there is none."""
    key = f"{file.architecture}.rope.scaling.type"
    kind = file.said("rope.scaling.type", "linear")
    if _LONG_FACTORS["long_factor"] in file.tensors:
        kind = "longrope"  # what Phi 3's files have, with and without saying so
    factor = float(_rounded(file.said("rope.scaling.factor", file.said("rope.scale_linear", 0.0))) or 1.0)
    magnitude = float(_rounded(file.said("rope.scaling.attn_factor", 1.0)))
    original = file.said("rope.scaling.original_context_length", file.said("context_length"))
    if kind == "longrope":
        return {
            "rope_type": kind,
            "factor": file.said("context_length", original) / original,
            "original_max_position_embeddings": original,
            **_long_factors(config, file, original),
            **({"attention_factor": magnitude} if magnitude != 1.0 else {}),
        }
    if kind == "yarn" and factor != 1.0:
        return {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": magnitude * (1.0 + 0.1 * math.log(factor)),
            "beta_fast": float(file.said("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(file.said("rope.scaling.yarn_beta_slow", 1.0)),
        }
    if magnitude != 1.0 or kind not in ("none", "linear", "yarn"):
        raise _refusal(file, key if magnitude == 1.0 else key.replace("type", "attn_factor"))
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else {}


_LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def _long_factors(config: Any, file: GgufFile, original: int) -> dict[str, list[float]]:
    if not all(name in file.tensors for name in _LONG_FACTORS.values()):
        raise _refusal(file, f"{file.architecture}.rope.scaling.type", "its factors are not in the file")
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original
    return {key: file.vector(name) for key, name in _LONG_FACTORS.items()}
