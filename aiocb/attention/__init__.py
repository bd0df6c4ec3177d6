"""Attention backends by name. The registry imports a backend only when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from aiocb.errors import ConfigError

if TYPE_CHECKING:
    from aiocb.attention.base import AttentionBackend

__all__ = ["BACKENDS", "create_backend"]

BACKENDS: dict[str, str] = {
    "reference": "aiocb.attention.reference:ReferenceBackend",
    "cpu": "aiocb.attention.cpu:CpuBackend",
    "sdpa": "aiocb.attention.sdpa:SdpaBackend",
    "eager": "aiocb.attention.paged:TorchBackend",
    "flash_attention_2": "aiocb.attention.flash:FlashAttention2",
    "flash_attention_3": "aiocb.attention.flash:FlashAttention3",
    "varlen": "aiocb.attention.varlen:VarlenBackend",
}
"""Name to `module:class`; the class is built without arguments."""


def create_backend(name: str) -> AttentionBackend:
    """Build the attention backend called `name`; transformers' names of paged ones (`paged|sdpa`) are known, too.

    Raises:
        ConfigError: the name is unknown, or what the backend needs is not installed.
    """
    plain = name.removeprefix("paged|")
    if plain not in BACKENDS:
        raise ConfigError(f"attention {name!r} is unknown; choose one of {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[plain].partition(":")
    try:
        backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        raise ConfigError(f"attention {name!r} cannot be used here: {error}") from error
    return backend
