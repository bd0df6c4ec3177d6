"""Where a manager's settings come from, and where a manager that is kept for the next session lives."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from aiocb.config import EngineConfig
from aiocb.engine.settings import refuse_unbuilt, without_unbuilt

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from aiocb.compat.transformers.manager import ContinuousBatchingManager

__all__ = ["engine_config", "keep_on_model", "kept_manager"]

_ATTRIBUTE = "_aiocb_manager"
_TORCH_BACKENDS = {"eager": "eager", "paged|eager": "eager", "sdpa": "sdpa"}


def engine_config(
    model: Any,
    generation_config: GenerationConfig | None,
    config: ContinuousBatchingConfig | EngineConfig | None,
) -> EngineConfig:
    """The engine's settings from whatever the caller passed; nothing of it is changed.

    Of transformers' settings, those that this version cannot obey are warned of by name; in an `EngineConfig` they are
    refused. With `auto_switch_to_flash=False` the attention that the model was loaded with is kept.

    Raises:
        ConfigError: a value is out of its range, or cannot be obeyed.
    """
    if config is None:
        held = generation_config or getattr(model, "generation_config", None)
        config = getattr(held, "continuous_batching_config", None)
        if config is None:
            return EngineConfig()
        warnings.warn(
            "continuous_batching_config on a GenerationConfig is deprecated: pass it as an argument of its own",
            FutureWarning,
            stacklevel=3,
        )
    device_type = str(model.device.type) if hasattr(model, "device") else None
    if isinstance(config, EngineConfig):
        return refuse_unbuilt(config, device_type)
    attention = None
    if not config.auto_switch_to_flash:
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        attention = _TORCH_BACKENDS.get(implementation or "")
    return without_unbuilt(EngineConfig.from_transformers(config, attention=attention), device_type)


class _Place:
    """An attribute of the model that copies and pickles as an empty one: a copy of a model has no manager, and neither
    has a forked process, where the manager's thread is not.
    """

    def __init__(self, manager: ContinuousBatchingManager | None = None) -> None:
        self.manager = manager
        self.process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Place, ()


def kept_manager(model: Any) -> ContinuousBatchingManager | None:
    """The manager that `keep_for_next_session` has left on a model."""
    place = getattr(model, _ATTRIBUTE, None)
    return place.manager if isinstance(place, _Place) and place.process == os.getpid() else None


def keep_on_model(model: Any, manager: ContinuousBatchingManager | None) -> None:
    """Leave a manager on its model, or take it away. A runner of one's own has no model to leave it on."""
    if manager is not None and model is not None:
        setattr(model, _ATTRIBUTE, _Place(manager))
    elif hasattr(model, _ATTRIBUTE):
        delattr(model, _ATTRIBUTE)
