"""Spans of requests: times, parents, failures; nothing where nobody wants them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aiocb
from aiocb.engine.tracing import Tracer
from aiocb.testing import FakeRunner, byte_tokenizer, fake_engine


class Spans:
    """A provider of this test, and what it has got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, exporter: SpanExporter | None = None) -> None:
        self.exporter = exporter or InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: self.provider)
        monkeypatch.setattr(trace, "get_tracer", lambda name: self.provider.get_tracer(name))

    @property
    def all(self) -> list[ReadableSpan]:
        assert isinstance(self.exporter, InMemorySpanExporter)
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]


async def test_a_request_is_a_span_with_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans(monkeypatch)
    async with fake_engine(reply="abc") as engine:
        with spans.provider.get_tracer("app").start_as_current_span("outer") as outer:
            completion = await engine.generate("Hi", temperature=0.5, seed=1, request_id="mine")
    (request,) = spans.named("aiocb.request")
    attributes: Any = request.attributes
    assert request.parent is not None and request.parent.span_id == outer.get_span_context().span_id
    assert attributes["gen_ai.usage.output_tokens"] == completion.usage.num_output_tokens
    assert attributes["gen_ai.usage.input_tokens"] == completion.usage.num_prompt_tokens
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.response.id"] == "mine"
    assert attributes["gen_ai.request.temperature"] == 0.5
    parts = [spans.named(f"aiocb.{name}")[0] for name in ("queue", "prefill", "decode")]
    times = [(part.start_time or 0, part.end_time or 0) for part in parts]
    assert times[0][0] == request.start_time
    assert times[0][1] == times[1][0] and times[1][1] == times[2][0]
    assert times[2][1] == request.end_time
    assert {part.parent.span_id for part in parts if part.parent} == {request.context.span_id}


async def test_failures_and_cancels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans(monkeypatch)
    runner = FakeRunner(fail=lambda step, record: ValueError("no") if step == 3 else None)
    async with fake_engine(runner=runner, tokenizer=byte_tokenizer()) as engine:
        with pytest.raises(aiocb.RequestFailed):
            await engine.generate("Hi", max_new_tokens=10)
        async with engine.stream("Hi", max_new_tokens=100) as stream:
            await anext(stream)
    failed, cancelled = spans.named("aiocb.request")
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "RequestFailed"
    assert (cancelled.attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)


class Broken(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        raise RuntimeError("no room")


async def test_a_broken_exporter_harms_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans(monkeypatch)
    monkeypatch.setattr(spans.provider, "get_tracer", lambda name: (_ for _ in ()).throw(RuntimeError("no")))
    monkeypatch.setattr(Tracer, "_make", lambda self, ended: (_ for _ in ()).throw(RuntimeError("no")))
    monkeypatch.setattr(trace, "get_tracer", lambda name: None)
    async with fake_engine(reply="abc") as engine:
        completions = await asyncio.gather(*(engine.generate("Hi") for _ in range(5)))
    assert {completion.text for completion in completions} == {"abc"}


async def test_nothing_is_made_where_no_provider_is_set_up() -> None:
    assert Tracer.detect(aiocb.EngineConfig(), "m") is None
    async with fake_engine(reply="abc") as engine:
        assert engine._lives.session is not None and engine._lives.session.tracer is None
        await engine.generate("Hi")


async def test_it_is_switched_by_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    Spans(monkeypatch)
    assert Tracer.detect(aiocb.EngineConfig(), "m") is not None
    assert Tracer.detect(aiocb.EngineConfig(tracing=False), "m") is None
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(aiocb.ConfigError, match=r"aiocb\[otel\]"):
        Tracer.detect(aiocb.EngineConfig(tracing=True), "m")
