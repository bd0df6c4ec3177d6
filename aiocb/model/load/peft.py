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
_REFUSED = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "target_parameters",
    "trainable_token_indices", "lora_bias", "use_qalora", "alora_invocation_tokens", "arrow_config", "fan_in_fan_out",
)  # fmt: skip
"""Settings that change what is computed. Those of where the weights were to go do not count: the file says where."""


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
    refused = [name for name in _REFUSED if settings.get(name)]
    refused += [f"bias={settings['bias']!r}"] if settings.get("bias", "none") != "none" else []
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
