"""Which torch.compile a configuration asks for: per path, explicit settings first, then the level. Worker thread only.

Attention and the cache are called by Python in the middle of a model: dynamo breaks its graph there and compiles what
lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError

__all__ = ["LEVELS", "compile_options", "compiled"]

LEVELS: Mapping[int, Mapping[str, Any]] = {
    1: {"mode": "default", "dynamic": True},
    2: {"mode": "max-autotune-no-cudagraphs", "dynamic": True},
    3: {"mode": "max-autotune-no-cudagraphs", "dynamic": False},
}
"""Of `default_compile_level`. They are for steps without prompts: those with prompts have too many shapes."""

_FIELDS = ("fullgraph", "dynamic", "backend", "mode", "options")


def compile_options(config: EngineConfig) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What steps with prompts, and steps without, are compiled with; None is not at all.

    Raises:
        ConfigError: a setting has fields that transformers' `CompileConfig` has not.
    """
    varlen = _options("varlen_compile_config", config.varlen_compile_config)
    decode = _options("decode_compile_config", config.decode_compile_config)
    if decode is None and config.default_compile_level:
        decode = dict(LEVELS[config.default_compile_level])
    return varlen, decode


def _options(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    given = dict(value) if isinstance(value, Mapping) else dict(value.to_dict())
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"{name} has no {', '.join(unknown)}; its fields are {', '.join(_FIELDS)}")
    given = {field: setting for field, setting in given.items() if setting is not None}
    if "options" in given:  # torch takes one of the two
        given.pop("mode", None)
    return given


def compiled(model: Any, options: Mapping[str, Any], compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a module; the work is done by its first calls, which may fail."""
    made: Callable[..., Any] = compiler(model, **options)
    return made
