"""Continuous batching for asyncio.

    async with aiocb.Engine.from_pretrained("Qwen/Qwen3-4B") as engine:
        async for chunk in engine.stream("Tell me a story", temperature=0.8, max_new_tokens=256):
            print(chunk.text, end="")

Importing this package is cheap: torch and transformers are imported when an engine is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocb._version import __version__ as __version__
from aiocb.config import Choice as Choice
from aiocb.config import DistributedConfig as DistributedConfig
from aiocb.config import EngineConfig as EngineConfig
from aiocb.errors import AdapterInUse as AdapterInUse
from aiocb.errors import AiocbError as AiocbError
from aiocb.errors import ConfigError as ConfigError
from aiocb.errors import EngineClosed as EngineClosed
from aiocb.errors import EngineDead as EngineDead
from aiocb.errors import EngineError as EngineError
from aiocb.errors import InvalidRequest as InvalidRequest
from aiocb.errors import QueueFull as QueueFull
from aiocb.errors import RequestError as RequestError
from aiocb.errors import RequestFailed as RequestFailed
from aiocb.errors import RequestTimeout as RequestTimeout
from aiocb.options import RequestOptions as RequestOptions
from aiocb.options import SamplingOptions as SamplingOptions
from aiocb.options import StreamOptions as StreamOptions
from aiocb.options import ToolChoice as ToolChoice
from aiocb.outputs import Chunk as Chunk
from aiocb.outputs import Completion as Completion
from aiocb.outputs import FinishReason as FinishReason
from aiocb.outputs import RequestMetrics as RequestMetrics
from aiocb.outputs import TokenLogprobs as TokenLogprobs
from aiocb.outputs import ToolCall as ToolCall
from aiocb.outputs import ToolCallDelta as ToolCallDelta
from aiocb.outputs import Usage as Usage
from aiocb.sampling_params import ModelDefaults as ModelDefaults
from aiocb.sampling_params import SamplingParams as SamplingParams
from aiocb.step import Runner as Runner

if TYPE_CHECKING:
    from aiocb.engine.batch import CompletionIterator as CompletionIterator
    from aiocb.engine.engine import Engine as Engine
    from aiocb.engine.stats import Health as Health
    from aiocb.engine.stats import Stats as Stats
    from aiocb.engine.stream import Stream as Stream

_LAZY = {
    "CompletionIterator": "aiocb.engine.batch",
    "Engine": "aiocb.engine.engine",
    "Health": "aiocb.engine.stats",
    "Stats": "aiocb.engine.stats",
    "Stream": "aiocb.engine.stream",
}

__all__ = [
    "AdapterInUse",
    "AiocbError",
    "Choice",
    "Chunk",
    "Completion",
    "CompletionIterator",
    "ConfigError",
    "DistributedConfig",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "FinishReason",
    "Health",
    "InvalidRequest",
    "ModelDefaults",
    "QueueFull",
    "RequestError",
    "RequestFailed",
    "RequestMetrics",
    "RequestOptions",
    "RequestTimeout",
    "Runner",
    "SamplingOptions",
    "SamplingParams",
    "Stats",
    "Stream",
    "StreamOptions",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
