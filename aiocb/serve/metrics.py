"""`GET /metrics`: the engine's counters for Prometheus, read when they are asked for.

The names are those that dashboards of this field know, behind a prefix: `aiocb:` or, for dashboards made for vLLM,
`vllm:`. Counters are scraped with `_total` behind their name, as Prometheus wants it. Labels never hold what a client
has sent: routes are those of the server, `model_name` is the first of its names.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from aiocb._version import __version__
from aiocb.errors import EngineError

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine
    from aiocb.engine.stats import HistogramSnapshot, Stats

__all__ = ["LagMeter", "Metrics"]

_LAG_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TICK_S = 0.05

GAUGES = {
    "num_requests_running": "Requests that hold cache and take part in steps.",
    "num_requests_waiting": "Requests in the queue.",
    "num_requests_paused": "Requests whose reader is behind.",
    "kv_cache_usage_perc": "Referenced blocks by all blocks, 0 to 1.",
    "state_cache_usage_perc": "Slots of states that requests hold by all slots, 0 to 1.",
    "cpu_offload_usage_perc": "Places of the swap space that are taken, 0 to 1.",
    "step_age_seconds": "Since the last step began or ended.",
    "max_step_tokens": "Token budget of a step now.",
    "step_cost_seconds": "What a step is believed to take without its tokens.",
    "step_cost_seconds_per_token": "What each token of a step is believed to add.",
    "step_cost_seconds_per_key": "What each key that a token is compared with is believed to add.",
}
COUNTERS = {
    "num_preemptions": "How often a request gave its cache back to others.",
    "num_steps": "Steps that ran the model.",
    "num_loop_wakeups": "Callbacks posted into event loops.",
    "num_steps_out_of_memory": "Steps that were taken back and computed again in smaller ones.",
    "num_offloads": "How often a preempted request was copied out.",
    "num_restores": "How often one was copied in again.",
    "num_aborts": "Requests that were cancelled while they were alive.",
    "spec_decode_num_draft_tokens": "Tokens that were proposed and verified.",
    "spec_decode_num_accepted_tokens": "Tokens that were proposed and came.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found there.",
    "prompt_tokens": "Prompt tokens of the requests that have ended.",
    "generation_tokens": "Output tokens of the requests that have ended.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From submission to the first token.",
    "inter_token_latency_seconds": "From one token of a request to the next.",
    "e2e_request_latency_seconds": "From submission to the end.",
    "request_queue_time_seconds": "From submission to the first step.",
    "step_seconds": "From one step to the next.",
    "request_tokens": "Prompt and output tokens of requests that have ended.",
}


class LagMeter:
    """How late the event loop runs what is due: a ticker that the server's lifespan owns."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_LAG_BOUNDS) + 1)
        self._sum = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.observe(max(0.0, time.monotonic() - due))

    def observe(self, seconds: float) -> None:
        """Add one delay."""
        self._counts[bisect_left(_LAG_BOUNDS, seconds)] += 1
        self._sum += seconds

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        total, found = 0, []
        for bound, count in zip((*map(str, _LAG_BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found, self._sum


class Metrics:
    """What a scrape shows; a registry of its own, so that several engines of a process do not meet.

    Args:
        engine: whose counters are shown; nothing of them before it has run.
        model_name: label of all that is the engine's.
        prefix: before every name.
        lag: of the event loop; None shows none.
    """

    def __init__(self, engine: Engine, model_name: str, prefix: str = "aiocb:", lag: LagMeter | None = None) -> None:
        self._engine = engine
        self._model_name = model_name
        self._prefix = prefix
        self._lag = lag
        self._requests: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_request(self, route: str, status: int) -> None:
        """Count a request of HTTP.

        Args:
            route: the server's own path of it, or `other`.
            status: of the response.
        """
        self._requests[route, str(status)] += 1

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text of a scrape, in the format that is asked for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        prefix, labels = self._prefix, ["model_name"]
        info = InfoMetricFamily(f"{prefix}build", "What runs here.")
        info.add_metric([], {"version": __version__, "model_name": self._model_name})
        yield info
        http = CounterMetricFamily(
            f"{prefix}http_requests", "Requests by route and status.", labels=["route", "status"]
        )
        for key, count in sorted(self._requests.items()):
            http.add_metric(list(key), count)
        yield http
        if self._lag is not None:
            buckets, total = self._lag.buckets()
            lag = HistogramMetricFamily(f"{prefix}event_loop_lag_seconds", "How late the event loop runs what is due.")
            lag.add_metric([], buckets, total)
            yield lag
        try:
            stats = self._engine.stats()
        except EngineError:
            return  # it has not run yet
        yield from self._of_engine(stats, labels)

    def _of_engine(self, stats: Stats, labels: Sequence[str]) -> Iterable[Metric]:
        prefix, values = self._prefix, [self._model_name]
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"{prefix}{name}", text, labels=labels)
            gauge.add_metric(values, getattr(stats, name))
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"{prefix}{name}", text, labels=labels)
            counter.add_metric(values, getattr(stats, name))
            yield counter
        ended = CounterMetricFamily(
            f"{prefix}request_success", "Requests that have ended, by reason.", labels=[*labels, "finished_reason"]
        )
        for reason in ("stop", "length", "cancelled", "timeout", "error"):
            ended.add_metric([*values, reason], stats.request_success.get(reason, 0))
        yield ended
        for name, text in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"{prefix}{name}", text, labels=labels)
            snapshot: HistogramSnapshot = getattr(stats, name)
            buckets: list[Any] = [(str(b), c) for b, c in zip(snapshot.bounds, snapshot.counts, strict=True)]
            histogram.add_metric(values, [*buckets, ("+Inf", snapshot.count)], snapshot.sum)
            yield histogram
