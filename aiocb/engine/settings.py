"""Settings that this version, or this device, cannot obey: refused natively, warned of where others' programs run."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.text.answer.dialect import check_parsers

__all__ = ["refuse_unbuilt", "without_unbuilt"]

logger = logging.getLogger("aiocb")

_UNBUILT = ("per_request_processors",)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def _asked_for(config: EngineConfig) -> list[str]:
    return [name for name in _UNBUILT if getattr(config, name) != _DEFAULTS[name]]


def _of_accelerators(config: EngineConfig, device_type: str | None) -> list[str]:
    return [] if device_type in (None, "cuda") else config.accelerator_settings()


def refuse_unbuilt(config: EngineConfig, device_type: str | None) -> EngineConfig:
    """Return the settings.

    Args:
        config: as given by the user.
        device_type: of the model; None where that is not known yet.

    Raises:
        ConfigError: one of them would have no effect, or names a parser that is not there.
    """
    check_parsers(config.tool_parser, config.reasoning_parser)
    names = _asked_for(config)
    if names:
        wanted = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        raise ConfigError(f"{wanted}: this version cannot obey it; leave it out ({', '.join(names)})")
    names = _of_accelerators(config, device_type)
    if names:
        wanted = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        raise ConfigError(f"{wanted} needs a CUDA device, the model is on {device_type}; leave it out")
    return config


def without_unbuilt(config: EngineConfig, device_type: str | None) -> EngineConfig:
    """Return the settings without those that have no effect, each of which is warned of by name."""
    names = [*_of_accelerators(config, device_type), *_asked_for(config)]
    for name in names:
        logger.warning("%s=%r has no effect here: the program goes on without it", name, getattr(config, name))
    return dataclasses.replace(config, **{name: _DEFAULTS[name] for name in names}) if names else config
