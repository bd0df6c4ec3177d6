"""OpenTelemetry spans of requests: `Tracer`. Off unless the program has set up a tracer provider.

```
event loop: begin() keeps the caller's span ─► worker: end() puts times into a queue ─► thread: spans are made
```

A request's span has three children: `queue`, `prefill` and `decode`. They are made of the times that the engine keeps
anyway, when the request has ended, in a thread of their own: neither step nor loop waits for an exporter. Attributes
follow the semantic conventions for generative AI where these have a name.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError

if TYPE_CHECKING:
    from aiocb.engine.slot import End
    from aiocb.sampling_params import SamplingParams
    from aiocb.scheduler.request import Request

__all__ = ["Trace", "Tracer"]

logger = logging.getLogger("aiocb.tracing")

_MAX_WAITING = 10_000
"""Ended requests whose spans are still to be made; more are dropped, with a warning."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """Times of one request, in the core's clock, and what its span says."""

    context: Any
    submitted_at: float
    first_scheduled_at: float | None
    first_token_at: float | None
    ended_at: float
    epoch: float
    attributes: dict[str, Any]
    error: str | None


class Trace:
    """What one stream has to remember for its spans."""

    __slots__ = ("_context", "_label", "_sampling", "_tracer")

    def __init__(self, tracer: Tracer, context: Any, label: str, sampling: SamplingParams) -> None:
        self._tracer = tracer
        self._context = context
        self._label = label
        self._sampling = sampling

    def end(self, request: Request, end: End, now: float) -> None:
        """Note that a request of the stream has ended. Worker thread; never raises, never waits."""
        sampling = self._sampling
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._tracer.model_name,
            "gen_ai.response.finish_reasons": [end.finish_reason],
            "gen_ai.response.id": self._label,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "aiocb.num_cached_tokens": request.num_cached_tokens,
            "aiocb.num_preemptions": request.num_preemptions,
            "aiocb.index": request.index,
        }
        self._tracer.put(
            _Ended(
                self._context,
                now if request.submitted_at is None else request.submitted_at,
                request.first_scheduled_at,
                request.first_token_at,
                now,
                time.time() - time.monotonic(),
                {key: value for key, value in attributes.items() if value is not None},
                None if end.error is None else f"{type(end.error).__name__}",
            )
        )


class Tracer:
    """Makes spans of requests that have ended.

    Args:
        model_name: an attribute of every span.
        trace, context: modules of the OpenTelemetry API.
    """

    def __init__(self, model_name: str, trace: Any, context: Any) -> None:
        self.model_name = model_name
        self._trace = trace
        self._context = context
        self._otel = trace.get_tracer("aiocb")
        self._ended: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_dropped = 0

    @classmethod
    def detect(cls, config: EngineConfig, model_name: str) -> Tracer | None:
        """A tracer where the program has set up OpenTelemetry, and None where it has not.

        Raises:
            ConfigError: `tracing=True`, and the API package is missing.
        """
        if config.tracing is False or (config.tracing is None and "opentelemetry.trace" not in sys.modules):
            return None
        try:
            from opentelemetry import context, trace
        except ImportError:
            raise ConfigError("tracing=True needs opentelemetry-api: pip install 'aiocb[otel]'") from None
        provider = trace.get_tracer_provider()
        if config.tracing is None and isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
            return None
        return cls(model_name, trace, context)

    def begin(self, label: str, sampling: SamplingParams) -> Trace:
        """Keep the caller's span as the parent of those to come. Event loop."""
        return Trace(self, self._context.get_current(), label, sampling)

    def put(self, ended: _Ended) -> None:
        """Have the spans of a request made."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aiocb tracer", daemon=True)
            self._thread.start()
        if self._ended.qsize() < _MAX_WAITING:
            self._ended.put(ended)
        elif not self._num_dropped:
            self._num_dropped = 1
            logger.warning("spans are dropped: the exporter is slower than the requests that end")

    def close(self) -> None:
        """Make the spans that wait, and end the thread."""
        if self._thread is not None:
            self._ended.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            try:
                self._make(ended)
            except Exception:  # an exporter is users' code
                logger.exception("a span could not be made")

    def _make(self, ended: _Ended) -> None:
        trace = self._trace

        def at(seconds: float) -> int:
            return int((ended.epoch + seconds) * 1e9)

        span = self._otel.start_span(
            "aiocb.request", ended.context, kind=trace.SpanKind.INTERNAL, attributes=ended.attributes,
            start_time=at(ended.submitted_at),
        )  # fmt: skip
        if ended.error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, ended.error))
            span.set_attribute("error.type", ended.error)
        inner = trace.set_span_in_context(span, ended.context)
        points = [ended.submitted_at, ended.first_scheduled_at, ended.first_token_at, ended.ended_at]
        for name, start, stop in zip(("queue", "prefill", "decode"), points, points[1:]):
            if start is not None:
                child = self._otel.start_span(f"aiocb.{name}", inner, start_time=at(start))
                child.end(at(ended.ended_at if stop is None else stop))
        span.end(at(ended.ended_at))
