"""Counters and times. Written by the worker thread, read from any thread as frozen snapshots."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aiocb.errors import EngineDead, EngineError

if TYPE_CHECKING:
    from aiocb.engine.slot import End
    from aiocb.scheduler.request import Request
    from aiocb.scheduler.scheduler import Scheduler

__all__ = ["LATENCY_BUCKETS", "EngineState", "Health", "Histogram", "HistogramSnapshot", "Recorder", "Stats"]

EngineState = Literal["created", "starting", "running", "draining", "closed", "dead"]

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histograms of times, in seconds."""
_TOKEN_BUCKETS = tuple(float(1 << power) for power in range(4, 21))


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Cumulative counts as Prometheus has them: `counts[i]` observations are `<= bounds[i]`.

    Attributes:
        bounds: upper bounds.
        counts: cumulative; observations above the last bound are in `count` only.
        count, sum: number and sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    sum: float


class Histogram:
    """A fixed-bucket histogram with one writer.

    Args:
        bounds: upper bounds, rising.
    """

    __slots__ = ("_bounds", "_count", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._count = 0
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Add `times` observations of the same value."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._count += times
        self._sum += seconds * times

    def snapshot(self) -> HistogramSnapshot:
        """Cumulative counts at this moment."""
        total, counts = 0, []
        for count in self._counts[:-1]:
            total += count
            counts.append(total)
        return HistogramSnapshot(self._bounds, tuple(counts), self._count, self._sum)


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine; names are those that dashboards of this field know.

    Attributes:
        num_requests_running: requests that hold cache and take part in steps.
        num_requests_waiting: requests in the queue (preempted ones included).
        num_requests_paused: requests held back because their reader is behind.
        kv_cache_usage_perc: referenced blocks by all blocks, 0..1; cached, unreferenced prefixes do not count.
        state_cache_usage_perc: slots of states that requests hold by all slots, 0..1; snapshots do not count. 0 where a
            model has no states, as all that follows about them.
        num_state_slots, num_state_snapshots: slots in all, and those whose state others can go on from.
        state_cache_bytes, state_cache_budget_bytes: memory of the slots that hold something, and of all.
        num_state_hits: how often a request has gone on from a snapshot.
        cpu_offload_usage_perc: places of the swap space that are taken, 0..1; 0 where there is none.
        num_offloads, num_restores: how often a request that was preempted was copied out, and in again; the others are
            recomputed.
        num_steps: steps that ran the model.
        num_loop_wakeups: callbacks posted into event loops.
        num_preemptions: how often a request gave its cache back to others.
        num_steps_out_of_memory: steps that were taken back and computed again in smaller ones.
        max_step_tokens: token budget of a step now: `max_batch_tokens`, or less where it would last longer than
            `target_itl` says, or after one has run out of memory.
        spec_decode_num_draft_tokens, spec_decode_num_accepted_tokens: tokens that were proposed and verified
            (`speculation`), and those of them that came.
        step_cost_seconds, step_cost_seconds_per_token, step_cost_seconds_per_key: what a step is believed to take: a
            constant, for each token, and for each key that a token is compared with. 0 without `target_itl`.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found.
        prompt_tokens, generation_tokens: of the requests that have ended.
        num_aborts: requests that were cancelled while they were alive.
        request_success: ended requests by finish reason.
        time_to_first_token_seconds, inter_token_latency_seconds, e2e_request_latency_seconds,
            request_queue_time_seconds, step_seconds: distributions.
        request_tokens: how many tokens, prompt and output, the requests that have ended had.
        step_age_seconds: since the last step began or ended.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_requests_paused: int
    kv_cache_usage_perc: float
    state_cache_usage_perc: float
    num_state_slots: int
    num_state_snapshots: int
    num_state_hits: int
    state_cache_bytes: int
    state_cache_budget_bytes: int
    cpu_offload_usage_perc: float
    num_offloads: int
    num_restores: int
    num_steps: int
    num_loop_wakeups: int
    num_preemptions: int
    num_steps_out_of_memory: int
    max_step_tokens: int
    spec_decode_num_draft_tokens: int
    spec_decode_num_accepted_tokens: int
    step_cost_seconds: float
    step_cost_seconds_per_token: float
    step_cost_seconds_per_key: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_aborts: int
    request_success: dict[str, int]
    time_to_first_token_seconds: HistogramSnapshot
    inter_token_latency_seconds: HistogramSnapshot
    e2e_request_latency_seconds: HistogramSnapshot
    request_queue_time_seconds: HistogramSnapshot
    step_seconds: HistogramSnapshot
    request_tokens: HistogramSnapshot
    step_age_seconds: float


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine can serve.

    Attributes:
        state: where it is in its life.
        is_ok: running (or draining) and not hung.
        is_hung: a step has been running for longer than `EngineConfig.hang_timeout`.
        step_age_s: seconds since the last step began (while one runs) or ended.
        error: what killed the engine.
    """

    state: EngineState
    is_ok: bool
    is_hung: bool
    step_age_s: float | None
    error: BaseException | None

    def raise_if_bad(self) -> None:
        """Raise when the engine cannot serve.

        Raises:
            EngineDead: a step has raised, or the current one hangs.
            EngineError: it is not running.
        """
        if self.is_ok:
            return
        if self.state == "dead":
            raise EngineDead("the engine has died") from self.error
        if self.is_hung:
            raise EngineDead(f"the engine hangs: its step has been running for {self.step_age_s:.1f} s")
        raise EngineError(f"the engine is {self.state}")


class Recorder:
    """The worker's counters.

    Args:
        buckets: upper bounds of the histograms of times, in seconds.

    Attributes:
        last_step_at: when the last step ended, None when it was not the one before this.
    """

    def __init__(self, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self.num_steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_aborts = 0
        self.last_step_at: float | None = None
        self.finished: Counter[str] = Counter()
        self.ttft = Histogram(buckets)
        self.inter_token = Histogram(buckets)
        self.e2e = Histogram(buckets)
        self.queue = Histogram(buckets)
        self.step = Histogram(buckets)
        self.tokens = Histogram(_TOKEN_BUCKETS)

    def record_step(self, now: float, num_running: int) -> None:
        """Count a step; every running request has waited for its token from the end of the step before."""
        self.num_steps += 1
        if self.last_step_at is not None:
            elapsed = now - self.last_step_at
            self.step.observe(elapsed)
            if num_running:
                self.inter_token.observe(elapsed, num_running)
        self.last_step_at = now

    def record_end(self, request: Request, end: End) -> None:
        """Count an ended request and its times."""
        self.finished[end.finish_reason] += 1
        self.generation_tokens += request.num_output_tokens
        if request.has_run:
            self.prompt_tokens += request.num_prompt_tokens
            self.tokens.observe(request.num_prompt_tokens + request.num_output_tokens)
        metrics = end.metrics
        if metrics is not None:
            self.e2e.observe(metrics.total_s)
            if metrics.queue_s is not None:
                self.queue.observe(metrics.queue_s)
            if metrics.time_to_first_token_s is not None:
                self.ttft.observe(metrics.time_to_first_token_s)

    def snapshot(self, scheduler: Scheduler, num_loop_wakeups: int, step_age_seconds: float) -> Stats:
        """All counters at this moment."""
        states, swap = scheduler.cache.states, scheduler.cache.swap
        return Stats(
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_paused,
            scheduler.cache.usage(),
            0.0 if states is None else states.usage,
            0 if states is None else states.pool.num_usable,
            0 if states is None else states.num_snapshots,
            0 if states is None else states.num_hits,
            0 if states is None else states.num_bytes,
            0 if states is None else states.pool.num_usable * states.layout.slot_bytes,
            0.0 if swap is None else swap.usage,
            0 if swap is None else swap.num_out,
            0 if swap is None else swap.num_in,
            self.num_steps,
            num_loop_wakeups,
            scheduler.num_preemptions,
            scheduler.num_steps_out_of_memory,
            scheduler.step_tokens,
            scheduler.num_draft_tokens,
            scheduler.num_accepted_tokens,
            *((0.0, 0.0, 0.0) if scheduler.pace is None else scheduler.pace.cost.figures),
            scheduler.prefix_cache_queries,
            scheduler.prefix_cache_hits,
            self.prompt_tokens,
            self.generation_tokens,
            self.num_aborts,
            dict(self.finished),
            self.ttft.snapshot(),
            self.inter_token.snapshot(),
            self.e2e.snapshot(),
            self.queue.snapshot(),
            self.step.snapshot(),
            self.tokens.snapshot(),
            step_age_seconds,
        )
