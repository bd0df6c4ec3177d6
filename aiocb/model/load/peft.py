"""Reads a LoRA adapter as PEFT writes it: `adapter_config.json` beside `adapter_model.safetensors`. Any thread.

What would change the result and is not applied is refused by its name: an adapter that is applied in part answers, and
answers wrongly.

Legend: R rank, N columns (out_features), K depth (in_features).
"""

from __future__ import annotations

import json
import math
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from aiocb.errors import ConfigError, explain, show_value

__all__ = ["LoraWeights", "read_adapter"]

_PREFIX = "base_model.model."
_MOST_CONFIG_BYTES = 1 << 20
_KNOWN = frozenset((
    "r", "lora_alpha", "use_rslora", "peft_type", "bias", "init_lora_weights",
    # Where the weights were to go (the file says where they are), what trained them, and how they are written.
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode",
    "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "ensure_weight_tying", "qalora_group_size",
))  # fmt: skip
"""Settings that are honoured, and those that change nothing of what is computed. Others are refused where they are set:
they ask for something that would not be applied."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights as they were."""


class LoraWeights(NamedTuple):
    """An adapter.

    Attributes:
        key: digest of all that makes a difference to the output: two adapters of one key are one.
        scaling: factor of every product.
        pairs: by the name of a module, A [R, K] and B [N, R], in float32.
    """

    key: str
    scaling: float
    pairs: dict[str, tuple[Tensor, Tensor]]


def read_adapter(path: str) -> LoraWeights:
    """Read an adapter's folder.

    Raises:
        ConfigError: there is none, it is damaged, or it asks for something that would not be applied.
    """
    folder = Path(path)
    settings = _settings(folder)
    rank = _positive(settings, "r", path)
    if not rank.is_integer():
        raise ConfigError(f"adapter {path!r}: r={rank:g} in adapter_config.json must be a whole number")
    alpha = _positive(settings, "lora_alpha", path)
    scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return _weights(path, _tensors(folder), int(rank), scaling)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    try:
        if file.stat().st_size > _MOST_CONFIG_BYTES:
            raise ConfigError(f"{file} has more than {_MOST_CONFIG_BYTES} bytes: it is no adapter's configuration")
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} cannot be read ({explain(error)}): name a folder that PEFT has saved") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise ConfigError(f"adapter {str(folder)!r} is of type {kind!r}; only LORA can be loaded")
    refused = [name for name, value in settings.items() if value and name not in _KNOWN]
    refused += [f"bias={settings['bias']!r}"] if settings.get("bias", "none") != "none" else []
    if settings.get("init_lora_weights") not in _PLAIN_STARTS:
        refused.append(f"init_lora_weights={settings['init_lora_weights']!r} (it changes the model's own weights)")
    if refused:
        raise ConfigError(
            f"adapter {str(folder)!r} uses {', '.join(refused)}, which is not applied per request: merge it into the "
            "model, or train it without"
        )
    return settings


def _positive(settings: dict[str, Any], name: str, path: str) -> float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"adapter {path!r}: {name} must be a number above 0, not {show_value(value)}")
    return float(value)


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / "adapter_model.safetensors"
    try:
        return load_tensors(file.read_bytes())
    except (OSError, SafetensorError) as error:
        hint = ": save it with safe_serialization=True" if (folder / "adapter_model.bin").exists() else ""
        raise ConfigError(f"{file} cannot be read ({explain(error)}){hint}") from error


def _weights(path: str, tensors: dict[str, Tensor], rank: int, scaling: float) -> LoraWeights:
    halves: dict[str, dict[str, Tensor]] = {}
    digest = blake2b(repr(scaling).encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        module, _, kind = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if not name.startswith(_PREFIX) or kind not in ("lora_A", "lora_B"):
            raise ConfigError(f"adapter {path!r}: {name} cannot be applied; only lora_A and lora_B of linears can")
        if tensor.dim() != 2 or tensor.shape[kind == "lora_B"] != rank or not tensor.is_floating_point():
            raise ConfigError(f"adapter {path!r}: {name} is {tensor.dtype} {tuple(tensor.shape)}, not of rank {rank}")
        values = tensor.float().contiguous()
        if not bool(values.isfinite().all()):
            raise ConfigError(f"adapter {path!r}: {name} has values that are not finite")
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.numpy().tobytes())
        halves.setdefault(module, {})[kind] = values
    torn = [module for module, pair in halves.items() if len(pair) != 2]
    if torn or not halves:
        raise ConfigError(f"adapter {path!r} is not whole: {', '.join(torn[:5]) or 'it'} lacks lora_A or lora_B")
    pairs = {module: (pair["lora_A"], pair["lora_B"]) for module, pair in halves.items()}
    return LoraWeights(digest.hexdigest(), scaling, pairs)
