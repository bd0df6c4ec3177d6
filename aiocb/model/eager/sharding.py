"""What transformers makes of several processes: its configuration, its plan for a model, and its mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from aiocb.config import DistributedConfig, EngineConfig
from aiocb.errors import ConfigError, show_value
from aiocb.model.eager.view import text_config
from aiocb.model.request import ModelRequest

__all__ = ["asked_of_one", "check_heads", "for_several", "spread_over", "tensor_parallel_group"]

_OTHER_SIZES = ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size")
_CONFIG_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code", "subfolder")


def spread_over(given: Any) -> Any:
    """Return transformers' configuration for what was given: ours, its own, or a dictionary of its fields.

    Raises:
        ConfigError: this is neither, or asks for another kind of parallelism than that of tensors.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig as Theirs
    except ImportError as error:
        raise ConfigError("several processes need a transformers that has DistributedConfig: upgrade it") from error
    if isinstance(given, DistributedConfig):
        size = given.tp_size or int(os.environ.get("WORLD_SIZE", "1"))
        plan = dict(given.tp_plan) if isinstance(given.tp_plan, Mapping) else given.tp_plan
        return Theirs(tp_size=size, tp_plan=plan)
    try:
        theirs = Theirs.from_dict(dict(given)) if isinstance(given, Mapping) else given
    except (TypeError, ValueError) as error:
        raise ConfigError(f"distributed_config={show_value(given)}: {error}") from error
    if not isinstance(theirs, Theirs):
        raise ConfigError(f"distributed_config must be a DistributedConfig, not {show_value(given)}")
    for name in _OTHER_SIZES:
        if (getattr(theirs, name, None) or 1) > 1:
            raise ConfigError(f"{name}={getattr(theirs, name)} is not supported: processes share layers here (tp_size)")
    return theirs


def asked_of_one(config: EngineConfig) -> list[str]:
    """The settings that several processes cannot obey."""
    asked = {"native": config.native is True, "attention": config.attention == "cpu"}
    return [*(name for name, is_asked in asked.items() if is_asked), *config.accelerator_settings()]


def for_several(config: EngineConfig, *, drop: bool = False) -> EngineConfig:
    """Return the settings for one of several processes: what only one can do is left out, and attention is torch's own
    unless another one is named.

    Args:
        config: the settings.
        drop: leave out also what was asked for.

    Raises:
        ConfigError: it was asked for.
    """
    names = asked_of_one(config)
    if names and not drop:
        wanted = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        raise ConfigError(f"{wanted}: works in one process only; leave it out, or do not spread the model over several")
    defaults = EngineConfig()
    changes = {name: getattr(defaults, name) for name in names}
    # Others are tried at start by the runner of an accelerator, which is that of one process.
    attention = "sdpa" if config.attention in (None, "cpu") else config.attention
    return dataclasses.replace(config, **changes | {"native": False, "attention": attention})


def tensor_parallel_group(model: Any) -> list[int]:
    """Return the numbers of the processes that a model is spread over; fewer than two where it is not.

    Raises:
        ConfigError: it is spread in another way than by its tensors.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return []
    names = mesh.mesh_dim_names
    for name in names or ():
        if name != "tp" and mesh[name].size() > 1:
            raise ConfigError(f"the model is spread over a mesh with {name!r}: only tensor parallelism can be served")
    if names is not None:
        if "tp" not in names:
            return []
        mesh = mesh["tp"]
    return list(dist.get_process_group_ranks(mesh.get_group()))


def check_heads(request: ModelRequest, size: int, plan: Any) -> None:
    """Refuse to share out heads of keys and values that are too few, or do not come out even.

    Raises:
        ConfigError: naming the sizes that would do.
    """
    model = request.model
    if model is not None:
        config, rules = text_config(model), dict(model.tp_plan or {})
    else:
        config = _config_of(request)
        if config is None:
            return
        rules = dict(getattr(config, "base_model_tp_plan", None) or {})
    if isinstance(plan, Mapping):
        rules |= plan
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    is_shared_out = any(name.endswith(("k_proj", "v_proj")) and rules[name] == "colwise" for name in rules)
    if not is_shared_out or not heads:
        return
    counts = {heads} if isinstance(heads, int) else set(heads)
    if any(count % size for count in counts):
        least = min(counts)
        sizes = [number for number in range(2, least + 1) if not any(count % number for count in counts)]
        raise ConfigError(
            f"tp_size={size} does not divide the model's {' and '.join(map(str, sorted(counts)))} heads of keys and "
            f"values; use {' or '.join(map(str, sizes)) or 'one process'}"
        )


def _config_of(request: ModelRequest) -> Any:
    """The decoder's configuration, or None where it cannot be read: loading says why."""
    from transformers import AutoConfig

    options = {name: request.options[name] for name in _CONFIG_OPTIONS if name in request.options}
    try:
        return AutoConfig.from_pretrained(request.name, **options).get_text_config(decoder=True)
    except Exception:
        return None
