"""Settings that this version knows by name and cannot obey: refused natively, warned of where others' programs run."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError

__all__ = ["refuse_unbuilt", "without_unbuilt"]

logger = logging.getLogger("aiocb")

_UNBUILT = (
    "use_cuda_graph",
    "q_padding_interval_size",
    "kv_padding_interval_size",
    "use_async_batching",
    "default_compile_level",
    "varlen_compile_config",
    "decode_compile_config",
    "max_blocks_per_request",
    "cpu_group_timeout",
    "per_request_processors",
)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def _asked_for(config: EngineConfig) -> list[str]:
    return [name for name in _UNBUILT if getattr(config, name) != _DEFAULTS[name]]


def refuse_unbuilt(config: EngineConfig) -> EngineConfig:
    """Return the settings.

    Raises:
        ConfigError: one of them would have no effect.
    """
    names = _asked_for(config)
    if names:
        wanted = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        raise ConfigError(f"{wanted}: this version cannot obey it; leave it out ({', '.join(names)})")
    return config


def without_unbuilt(config: EngineConfig) -> EngineConfig:
    """Return the settings without those that have no effect, each of which is warned of by name."""
    names = _asked_for(config)
    for name in names:
        logger.warning("%s=%r has no effect here: the program goes on without it", name, getattr(config, name))
    return dataclasses.replace(config, **{name: _DEFAULTS[name] for name in names}) if names else config
