"""Where a manager's settings come from, and where a manager that is kept for the next session lives."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

from aiocb.config import EngineConfig
from aiocb.engine.settings import refuse_unbuilt, without_unbuilt
from aiocb.model.sizes import MAX_REQUESTS

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from aiocb.compat.transformers.manager import ContinuousBatchingManager

__all__ = ["engine_config", "keep_on_model", "kept_manager", "with_hints"]

logger = logging.getLogger("aiocb")

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
    if not getattr(config, "disable_nccl_graph_mixing", True):
        logger.warning("disable_nccl_graph_mixing=False has no effect here: no graph is captured with communication")
    attention = None
    if not config.auto_switch_to_flash:
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        attention = _TORCH_BACKENDS.get(implementation or "")
    settings = without_unbuilt(EngineConfig.from_transformers(config, attention=attention), device_type)
    if getattr(model, "_device_mesh", None) is None:
        return settings
    from aiocb.model.eager.sharding import asked_of_one, for_several

    for name in asked_of_one(settings):
        logger.warning("%s=%r has no effect on a model in several processes", name, getattr(settings, name))
    return for_several(settings, drop=True)


def with_hints(config: EngineConfig, hints: Any) -> EngineConfig:
    """The settings, where they are left open, with what a `WorkloadHints` says; 0 says nothing.

    Raises:
        ConfigError: a hint is no number.
    """
    if hints is None:
        return config
    changes: dict[str, Any] = {}
    if config.max_requests_per_batch is None and hints.num_requests:
        changes["max_requests_per_batch"] = min(hints.num_requests, MAX_REQUESTS)
    lengths = {name: getattr(hints, name) for name in ("max_prompt_length", "max_generated_length")}
    if config.max_prompt_length is None and any(lengths.values()):
        if all(lengths.values()):
            changes |= lengths
        else:
            logger.warning("of the workload hints max_prompt_length and max_generated_length count together only")
    return dataclasses.replace(config, **changes) if changes else config


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
