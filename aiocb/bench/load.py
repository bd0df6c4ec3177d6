"""Offline and online load on a real model: throughput, time to first token, time between tokens, loop lag."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiocb
from aiocb.errors import ConfigError

__all__ = [
    "Arrival",
    "Measured",
    "Workload",
    "corpus",
    "draw",
    "lag_probe",
    "measure",
    "medians",
    "milliseconds",
    "poisson",
    "quantile",
    "run",
    "summary",
]


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


def corpus(tokenizer: Any) -> list[int]:
    """English text that is on every machine (the standard library's own help topics), as token ids."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def poisson(
    tokenizer: Any, rate: float, count: int, *, prompt_len: tuple[int, int], new_len: tuple[int, int], seed: int = 0
) -> list[Arrival]:
    """A workload of slices of `corpus` with exponential gaps of mean `1 / rate` s; `rate=inf` lets all arrive at once.

    Prompt lengths are log-uniform, output lengths uniform, both within the given bounds.

    Raises:
        ConfigError: the text is shorter than the longest prompt.
    """
    chooser = random.Random(seed)
    low, high = (math.log(bound) for bound in prompt_len)
    lengths = [round(math.exp(chooser.uniform(low, high))) for _ in range(count)]
    text, places = corpus(tokenizer), random.Random(seed)
    if max(lengths) >= len(text):
        raise ConfigError(f"there are {len(text)} tokens of text, which is too few for prompts of {prompt_len[1]}")
    at, arrivals = 0.0, []
    for length in lengths:
        if math.isfinite(rate):
            at += chooser.expovariate(rate)
        first = places.randrange(len(text) - length)
        arrivals.append(Arrival(at, text[first : first + length], chooser.randint(*new_len)))
    return arrivals


@dataclass(frozen=True, slots=True)
class Workload:
    """Random requests and the model that answers them.

    Attributes:
        model, dtype: as `Engine.from_pretrained` takes them.
        int8: weights of 8 bits.
        num_requests: how many.
        prompt_len, new_len: fewest and most tokens.
    """

    model: str
    dtype: str
    int8: bool
    num_requests: int
    prompt_len: tuple[int, int]
    new_len: tuple[int, int]

    def engine(self, **options: Any) -> aiocb.Engine:
        """An engine over the model; options are those of `Engine.from_pretrained`."""
        quantization: Literal["int8"] | None = "int8" if self.int8 else None
        return aiocb.Engine.from_pretrained(self.model, dtype=self.dtype, quantization=quantization, **options)

    def arrivals(self, tokenizer: Any, rate: float = math.inf) -> list[Arrival]:
        """The same requests every time; see `poisson`."""
        return poisson(tokenizer, rate, self.num_requests, prompt_len=self.prompt_len, new_len=self.new_len, seed=1)


async def run(workload: Workload, rates: Sequence[float], repeats: int) -> list[dict[str, Any]]:
    """Return a row per rate (requests per second; inf is all at once): medians of `repeats` runs after a warm-up."""
    rows = []
    async with workload.engine() as engine:
        await measure(engine, poisson(engine.tokenizer, math.inf, 4, prompt_len=(24, 64), new_len=(8, 8)))
        for rate in rates:
            arrivals = workload.arrivals(engine.tokenizer, rate)
            runs = []
            for _ in range(repeats):
                engine.reset_prefix_cache()
                runs.append(await measure(engine, arrivals))
            rows.append({"rate": "all at once" if rate == math.inf else rate, **medians(runs)})
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot time to first token and between tokens over the arrival rate (PNG)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    rates = [row["rate"] for row in rows]
    for axis, key, title in ((axes[0], "ttft", "time to first token"), (axes[1], "itl", "time between tokens")):
        for share in ("p50", "p99"):
            axis.plot(rates, [row[f"{key}_{share}_ms"] for row in rows], marker="o", label=share)
        axis.set(xlabel="requests per second", ylabel="ms", title=title, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
        "loop_lag_p99_ms": milliseconds(quantile(lags, 0.99)),
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
        "ttft_p50_ms": milliseconds(quantile(first, 0.5)),
        "ttft_p99_ms": milliseconds(quantile(first, 0.99)),
        "itl_p50_ms": milliseconds(quantile(between, 0.5)),
        "itl_p99_ms": milliseconds(quantile(between, 0.99)),
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


def milliseconds(seconds: float | None) -> float | None:
    """For a table: two decimals."""
    return None if seconds is None else round(seconds * 1e3, 2)
