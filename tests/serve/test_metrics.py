"""`GET /metrics`: names, buckets and labels; gauges go back to nothing; the dashboard asks for what there is."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import aiocb
from aiocb.errors import ConfigError
from aiocb.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS, LagMeter
from aiocb.testing import FakeRunner, assert_quiescent, byte_tokenizer, fake_engine

from .helpers import CHAT, ENDLESS, MESSAGES, Served, serving

pytestmark = pytest.mark.asyncio
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "aiocb.json"
OF_VLLM = [
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
]  # fmt: skip
"""As that server's own dashboards ask for them."""


async def scraped(served: Served, **headers: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every sample by its name as scraped."""
    response = await served.client.get("/metrics", headers=headers)
    assert response.status_code == 200
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_what_is_shown_is_what_has_happened() -> None:
    async with serving(served_model_name=("m", "other")) as served:
        for _ in range(3):
            await served.client.post(CHAT, json={"messages": MESSAGES, "model": "other"})
        await served.client.post(CHAT, json={"messages": MESSAGES, "model": "user text"})
        await served.client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
        found = await scraped(served)
        success = {labels["finished_reason"]: value for labels, value in found["aiocb:request_success_total"]}
        assert success == {"stop": 3, "length": 1, "cancelled": 0, "timeout": 0, "error": 0}
        assert found["aiocb:generation_tokens_total"] == [({"model_name": "m"}, 3 * 12 + 1)]
        stats = served.engine.stats()
        assert found["aiocb:prompt_tokens_total"][0][1] == stats.prompt_tokens > 0
        assert found["aiocb:time_to_first_token_seconds_count"][0][1] == 4
        assert found["aiocb:request_tokens_sum"][0][1] == stats.prompt_tokens + stats.generation_tokens
        http = {(labels["route"], labels["status"]): value for labels, value in found["aiocb:http_requests_total"]}
        assert http[CHAT, "200"] == 4
        assert http[CHAT, "404"] == 1
        assert found["aiocb:event_loop_lag_seconds_count"][0][1] >= 0
        assert found["aiocb:build_info"][0][0]["version"] == aiocb.__version__


async def test_every_counter_of_the_engine_has_a_name() -> None:
    async with serving() as served:
        found = await scraped(served)
        for name in GAUGES:
            assert f"aiocb:{name}" in found
        for name in COUNTERS:
            assert f"aiocb:{name}_total" in found
        for name in HISTOGRAMS:
            assert f"aiocb:{name}_bucket" in found


async def test_another_prefix_serves_other_dashboards() -> None:
    async with serving(metrics_prefix="vllm:") as served:
        await served.chat()
        found = await scraped(served)
        for name in OF_VLLM:
            assert name in found
            assert all("model_name" in labels for labels, _ in found[name])
        assert not any(name.startswith("aiocb:") for name in found)


async def test_formats_by_what_is_accepted() -> None:
    async with serving() as served:
        plain = await served.client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        other = await served.client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert other.headers["content-type"].startswith("application/openmetrics-text")
        assert other.text.endswith("# EOF\n")


async def test_buckets_are_the_operator_s() -> None:
    engine = aiocb.Engine.from_runner(
        lambda _: FakeRunner(eos_token_id=256),
        aiocb.ModelDefaults(260, 4096, (256,)),
        byte_tokenizer(),
        config=aiocb.EngineConfig(latency_buckets=(0.002, 7.0)),
    )
    async with serving(engine) as served:
        await served.chat(max_tokens=2)
        found = await scraped(served)
        bounds = [labels["le"] for labels, _ in found["aiocb:time_to_first_token_seconds_bucket"]]
        assert bounds == ["0.002", "7.0", "+Inf"]
    for wrong in ((), (2.0, 1.0), (0.0, 1.0), [1.0], (float("inf"),), ("1",)):
        with pytest.raises(ConfigError, match="latency_buckets"):
            aiocb.EngineConfig(latency_buckets=wrong)  # type: ignore[arg-type]


async def test_first_buckets_are_small_and_last_ones_large() -> None:
    async with serving() as served:
        found = await scraped(served)
        bounds = [labels["le"] for labels, _ in found["aiocb:time_to_first_token_seconds_bucket"]]
        assert float(bounds[0]) == 0.001
        assert float(bounds[-2]) >= 100


async def test_gauges_are_nothing_after_a_storm() -> None:
    engine = fake_engine(runner=FakeRunner(num_blocks=40), tokenizer=byte_tokenizer())
    async with serving(engine) as served:
        body = {**ENDLESS, "max_tokens": 200, "stream": True}
        calls = [
            asyncio.create_task(served.client.post(CHAT, json=body, headers={"x-request-id": "same"}))
            for _ in range(30)
        ]
        while engine.stats().num_steps < 20:
            await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        while served.service.num_calls:
            await asyncio.sleep(0.002)
        await assert_quiescent(engine)
        found = await scraped(served)
        for name in ("num_requests_running", "num_requests_waiting", "num_requests_paused", "kv_cache_usage_perc"):
            assert found[f"aiocb:{name}"][0][1] == 0, name


async def test_labels_do_not_grow_with_what_clients_send() -> None:
    async with serving(api_key=("k",), waits=False) as served:
        for number in range(50):
            await served.client.get(f"/nowhere/{number}")
            await served.client.get(f"/v1/models/{number}")
            await served.client.get(f"/v1/streams/{number}")
        response = await served.client.get("/metrics", headers={"authorization": "Bearer k"})
        routes = set(re.findall(r'route="([^"]+)"', response.text))
        assert routes <= {"other", "/health", "/metrics", "/v1/models/{name:path}", "/v1/streams/{id}"}


async def test_the_dashboard_asks_for_what_there_is() -> None:
    text = DASHBOARD.read_text()
    dashboard: dict[str, Any] = json.loads(text)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 10
    for prefix in ("aiocb:", "vllm:"):
        async with serving(metrics_prefix=prefix) as served:
            await served.chat()
            found = await scraped(served)
            for query in queries:
                names = re.findall(r"\$\{prefix\}([a-z0-9_]+)", query)
                assert names, query
                for name in names:
                    assert f"{prefix}{name}" in found, (prefix, name)


async def test_the_lag_of_a_loop_is_seen() -> None:
    meter = LagMeter()
    task = asyncio.create_task(meter.run())
    await asyncio.sleep(0)
    time.sleep(0.15)  # what is measured is a loop that stands still
    while not meter.buckets()[0][-1][1]:
        await asyncio.sleep(0.001)
    task.cancel()
    _, total = meter.buckets()
    assert total > 0.05


async def test_the_sender_s_span_is_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.test_tracing import Spans

    spans = Spans(monkeypatch)
    async with serving() as served:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        for stream in (False, True):
            body = {"messages": MESSAGES, "stream": stream}
            await served.client.post(CHAT, json=body, headers={"traceparent": parent})
    found = spans.named("aiocb.request")
    assert [f"{span.context.trace_id:032x}" for span in found] == ["0af7651916cd43dd8448eb211c80319c"] * 2
    assert {f"{span.parent.span_id:016x}" for span in found if span.parent} == {"b7ad6b7169203331"}
