"""`transformers.generation`, with this package's names first."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import aiocb.compat.transformers as ours

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig as ContinuousBatchingConfig
    from transformers import GenerationConfig as GenerationConfig

    from aiocb.compat.transformers.manager import ContinuousBatchingManager as ContinuousBatchingManager

__all__ = ["ContinuousBatchingConfig", "ContinuousBatchingManager", "GenerationConfig"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ours.__all__:
        return getattr(ours, name)
    return getattr(importlib.import_module("transformers.generation"), name)
