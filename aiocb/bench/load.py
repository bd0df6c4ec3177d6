"""Offline and online load on a real model: throughput, time to first token, time between tokens, loop lag."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiocb

__all__ = ["Arrival", "Measured", "corpus_prompts", "lag_probe", "measure", "medians", "poisson", "quantile", "summary"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload: when it arrives (seconds), its prompt, and how many tokens it generates."""

    at_s: float
    prompt: list[int]
    num_new: int


@dataclass(slots=True)
class Measured:
    """Times of one request, in seconds from the start of the run."""

    submitted_s: float
    token_times_s: list[float] = field(default_factory=list)


def corpus_prompts(tokenizer: Any, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Slices of English text (the standard library's own help topics), as token ids."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
    corpus = tokenizer.encode(text, add_special_tokens=False)
    chooser = random.Random(seed)
    return [corpus[(start := chooser.randrange(len(corpus) - length)) : start + length] for length in lengths]


def poisson(
    tokenizer: Any, rate: float, count: int, *, prompt_len: tuple[int, int], new_len: tuple[int, int], seed: int = 0
) -> list[Arrival]:
    """A workload with exponential gaps of mean `1 / rate` s; `rate=inf` lets all arrive at once.

    Prompt lengths are log-uniform, output lengths uniform, both within the given bounds.
    """
    chooser = random.Random(seed)
    low, high = (math.log(bound) for bound in prompt_len)
    lengths = [round(math.exp(chooser.uniform(low, high))) for _ in range(count)]
    prompts = corpus_prompts(tokenizer, lengths, seed)
    at, arrivals = 0.0, []
    for prompt in prompts:
        if math.isfinite(rate):
            at += chooser.expovariate(rate)
        arrivals.append(Arrival(at, prompt, chooser.randint(*new_len)))
    return arrivals


async def lag_probe(lags: list[float], interval: float = 0.001) -> None:
    """Append how late a ticker of `interval` seconds is, again and again; cancel it to stop."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(interval)
        lags.append(time.perf_counter() - before - interval)


async def measure(engine: aiocb.Engine, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Run a workload (greedy, end-of-sequence ignored) and summarise it; see `summary` for the fields."""
    lags: list[float] = []
    start = time.perf_counter()
    before = engine.stats()

    async def one(arrival: Arrival) -> Measured:
        delay = start + arrival.at_s - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        result = Measured(time.perf_counter() - start)
        stream = engine.stream(
            arrival.prompt, temperature=0.0, max_new_tokens=arrival.num_new, ignore_eos=True, detokenize=False
        )
        async for chunk in stream:
            now = time.perf_counter() - start
            result.token_times_s += [now] * len(chunk.token_ids)
        return result

    probe = asyncio.ensure_future(lag_probe(lags))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(arrival)) for arrival in arrivals]
    finally:
        probe.cancel()
    wall = time.perf_counter() - start
    after = engine.stats()
    return {
        **summary([task.result() for task in tasks], wall),
        "loop_lag_p99_ms": _ms(quantile(lags, 0.99)),
        "wakeups_per_step": round(
            (after.num_loop_wakeups - before.num_loop_wakeups) / max(after.num_steps - before.num_steps, 1), 3
        ),
    }


def summary(results: Sequence[Measured], wall: float) -> dict[str, Any]:
    """Output tokens per second; median and 99th percentile of time to first token and between tokens, in ms."""
    first = [each.token_times_s[0] - each.submitted_s for each in results if each.token_times_s]
    between = [b - a for each in results for a, b in zip(each.token_times_s, each.token_times_s[1:], strict=False)]
    num_tokens = sum(len(each.token_times_s) for each in results)
    return {
        "requests": len(results),
        "output_tokens": num_tokens,
        "wall_s": round(wall, 3),
        "output_tokens_per_s": round(num_tokens / wall, 1),
        "ttft_p50_ms": _ms(quantile(first, 0.5)),
        "ttft_p99_ms": _ms(quantile(first, 0.99)),
        "itl_p50_ms": _ms(quantile(between, 0.5)),
        "itl_p99_ms": _ms(quantile(between, 0.99)),
    }


def quantile(values: Sequence[float], share: float) -> float | None:
    """The interpolated quantile, or None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Field by field, the median of repeated runs (fields that are not numbers are taken from the first)."""
    return {
        key: statistics.median(row[key] for row in rows)
        if all(isinstance(row[key], (int, float)) for row in rows)
        else value
        for key, value in rows[0].items()
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
