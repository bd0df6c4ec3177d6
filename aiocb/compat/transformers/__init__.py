"""The continuous-batching interface of transformers, over this package's engine.

A program written for that interface runs after a change of its imports: put `aiocb.compat.transformers` in the place
of `transformers`. Every name that is not here is transformers' own.

    from aiocb.compat.transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B")
    outputs = model.generate_batch(inputs=inputs, generation_config=GenerationConfig(max_new_tokens=64))

For a model that is loaded already there are `enable(model)` and functions that take the model. Importing this package
is cheap: torch and transformers are imported when a name of theirs is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiocb.compat.transformers.results import GenerationOutput as GenerationOutput
from aiocb.compat.transformers.results import RequestStatus as RequestStatus

if TYPE_CHECKING:
    from transformers import AutoConfig as AutoConfig
    from transformers import AutoTokenizer as AutoTokenizer
    from transformers import ContinuousBatchingConfig as ContinuousBatchingConfig
    from transformers import GenerationConfig as GenerationConfig

    from aiocb.compat.transformers.auto import AutoModelForCausalLM as AutoModelForCausalLM
    from aiocb.compat.transformers.entry import (
        continuous_batching_context_manager as continuous_batching_context_manager,
    )
    from aiocb.compat.transformers.entry import (
        destroy_cached_continuous_batching_manager as destroy_cached_continuous_batching_manager,
    )
    from aiocb.compat.transformers.entry import enable as enable
    from aiocb.compat.transformers.entry import generate_batch as generate_batch
    from aiocb.compat.transformers.entry import init_continuous_batching as init_continuous_batching
    from aiocb.compat.transformers.manager import ContinuousBatchingManager as ContinuousBatchingManager
    from aiocb.compat.transformers.manager import RequestQueueFull as RequestQueueFull

_PACKAGE = "aiocb.compat.transformers"
_LAZY = {
    "AutoModelForCausalLM": "auto",
    "ContinuousBatchingManager": "manager",
    "RequestQueueFull": "manager",
    "continuous_batching_context_manager": "entry",
    "destroy_cached_continuous_batching_manager": "entry",
    "enable": "entry",
    "generate_batch": "entry",
    "init_continuous_batching": "entry",
}

__all__ = [
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "GenerationConfig",
    "GenerationOutput",
    "RequestQueueFull",
    "RequestStatus",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "enable",
    "generate_batch",
    "init_continuous_batching",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{_PACKAGE}.{_LAZY[name]}" if name in _LAZY else "transformers"
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
