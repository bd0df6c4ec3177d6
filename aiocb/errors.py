"""Every exception that aiocb raises, in one tree.

::

    AiocbError
    ├── ConfigError (ValueError)          the engine's own settings cannot work
    ├── RequestError                      one request ended; the others are not affected
    │   ├── InvalidRequest (ValueError)   refused before admission
    │   ├── QueueFull                     the bounded waiting queue has no room
    │   ├── RequestTimeout (TimeoutError) a deadline of the request has passed
    │   └── RequestFailed                 something inside this request raised
    └── EngineError
        ├── AdapterInUse                  requests run with an adapter that is to be unloaded
        ├── EngineClosed                  the engine is not running (not entered, or closed)
        └── EngineDead                    the worker thread has stopped; the cause is chained
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from aiocb.outputs import Completion

__all__ = [
    "AdapterInUse",
    "AiocbError",
    "ConfigError",
    "EngineClosed",
    "EngineDead",
    "EngineError",
    "InvalidRequest",
    "QueueFull",
    "RequestError",
    "RequestFailed",
    "RequestTimeout",
    "explain",
    "show_value",
]

_MAX_SHOWN = 100


class AiocbError(Exception):
    """Base of all exceptions of this package."""


class ConfigError(AiocbError, ValueError):
    """A setting of the engine cannot work; the message says which and what to do."""


class RequestError(AiocbError):
    """One request has ended with an error; no other request is affected.

    Attributes:
        partial: what an awaited request (`generate`) had produced before, one `Completion` per sample.
    """

    partial: Sequence[Completion] = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        # So that FastAPI takes a `Completion` as a return annotation: any object, written as its message.
        return {"type": "any", "serialization": {"type": "to-string", "when_used": "json-unless-none"}}


class InvalidRequest(RequestError, ValueError):
    """The request was refused before admission; the message says why and what to do."""


class QueueFull(RequestError):
    """The waiting queue is full (`EngineConfig.max_queue_size`) and the request chose not to wait."""


class RequestTimeout(RequestError, TimeoutError):
    """A deadline of the request has passed.

    Attributes:
        stage: `"queue"` when the request never ran, `"run"` when it was cut while running.
    """

    def __init__(self, message: str, stage: Literal["queue", "run"] = "run") -> None:
        super().__init__(message)
        self.stage: Literal["queue", "run"] = stage


class RequestFailed(RequestError):
    """Something inside this request raised (a processor, its logits); the cause is chained."""


def explain(error: BaseException) -> str:
    """Write an exception in one line, also one whose own text cannot be had."""
    try:
        text = str(error)
    except BaseException as failure:  # users' exceptions are users' code
        text = f"its text cannot be had ({type(failure).__name__})"
    return f"{type(error).__name__}: {text}"


class EngineError(AiocbError):
    """The engine, not a request, is the cause."""


class AdapterInUse(EngineError):
    """Requests run with an adapter that was to be unloaded, or replaced by another one; nothing has changed."""


class EngineClosed(EngineError):
    """The engine is not running: it has not been entered, is draining, or has been closed."""


class EngineDead(EngineError):
    """The engine's worker thread has stopped because a step raised; the cause is chained."""


def show_value(value: object) -> str:
    """A user's value for a message: short, and never raising (numbers of 5000 digits, broken `__repr__`)."""
    if isinstance(value, (str, bytes, bytearray)):
        value = value[: _MAX_SHOWN + 1]
    try:
        if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > _MAX_SHOWN:
            return f"a {type(value).__name__} of {len(value)} elements"
        text = repr(value)
    except Exception:  # a user's class, or a structure deeper than the interpreter can print
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
