"""Offline and online load on a real model: throughput, time to first token, time between tokens, loop lag."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import aiocb
from aiocb.bench.figures import Row, lag_probe, medians, quantile_ms, wakeups_per_step
from aiocb.bench.options import Dtype, Model, Quantization
from aiocb.errors import ConfigError

__all__ = ["Arrival", "NewLen", "Workload", "corpus", "draw", "measure", "run", "summary"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload: when it arrives (seconds), its prompt, and how many tokens it generates."""

    at_s: float
    prompt: list[int]
    num_new: int


def corpus(tokenizer: Any) -> list[int]:
    """English text that is on every machine (the standard library's own help topics), as token ids."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _ordered(bounds: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= bounds[0] <= bounds[1]:
        raise typer.BadParameter(f"give the smaller number first, and none below 1, not {bounds[0]} {bounds[1]}")
    return bounds


PromptLen = Annotated[tuple[int, int], typer.Option(callback=_ordered, help="Shortest and longest prompt.")]
NewLen = Annotated[tuple[int, int], typer.Option(callback=_ordered, help="Fewest and most new tokens.")]


@dataclass(frozen=True, slots=True)
class Workload:
    """Random requests and the model that answers them; its fields are options of the commands."""

    model: Model = "smollm2"
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 64
    prompt_len: PromptLen = (16, 512)
    new_len: NewLen = (16, 128)
    dtype: Dtype = "auto"
    quantization: Quantization = None

    def engine(self, **options: Any) -> aiocb.Engine:
        """An engine over the model; options are those of `Engine.from_pretrained`."""
        return aiocb.Engine.from_pretrained(self.model, dtype=self.dtype, quantization=self.quantization, **options)

    def arrivals(self, tokenizer: Any, rate: float = math.inf) -> list[Arrival]:
        """The same requests every time: slices of `corpus`, with exponential gaps of mean `1 / rate` seconds.

        Prompt lengths are log-uniform, output lengths uniform, both within the bounds.

        Raises:
            ConfigError: the text is shorter than the longest prompt.
        """
        chooser, places = random.Random(1), random.Random(1)
        low, high = map(math.log, self.prompt_len)
        lengths = [round(math.exp(chooser.uniform(low, high))) for _ in range(self.requests)]
        text = corpus(tokenizer)
        if max(lengths) >= len(text):
            raise ConfigError(
                f"there are {len(text)} tokens of text, which is too few for prompts of {self.prompt_len[1]}"
            )
        at, arrivals = 0.0, []
        for length in lengths:
            if math.isfinite(rate):
                at += chooser.expovariate(rate)
            first = places.randrange(len(text) - length)
            arrivals.append(Arrival(at, text[first : first + length], chooser.randint(*self.new_len)))
        return arrivals


async def run(workload: Workload, rates: Sequence[float], repeats: int) -> list[Row]:
    """Return a row per rate (requests per second; inf is all at once): medians of `repeats` runs after a warm-up."""
    rows = []
    async with workload.engine() as engine:
        warm_up = dataclasses.replace(workload, requests=4, prompt_len=(24, 64), new_len=(8, 8))
        await measure(engine, warm_up.arrivals(engine.tokenizer))
        for rate in rates:
            arrivals = workload.arrivals(engine.tokenizer, rate)
            runs = []
            for _ in range(repeats):
                engine.reset_prefix_cache()
                runs.append(await measure(engine, arrivals))
            rows.append({"rate": "all at once" if rate == math.inf else rate, **medians(runs)})
    return rows


def draw(rows: Sequence[Row], path: Path) -> None:
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


async def measure(engine: aiocb.Engine, arrivals: Sequence[Arrival]) -> Row:
    """Run a workload (greedy, end-of-sequence ignored) and summarise it; see `summary` for the fields."""
    lags: list[float] = []
    start = time.perf_counter()
    before = engine.stats()

    async def one(arrival: Arrival) -> list[float]:
        await asyncio.sleep(max(0.0, start + arrival.at_s - time.perf_counter()))
        times = [time.perf_counter()]
        stream = engine.stream(
            arrival.prompt, temperature=0.0, max_new_tokens=arrival.num_new, ignore_eos=True, detokenize=False
        )
        async for chunk in stream:
            times += [time.perf_counter()] * len(chunk.token_ids)
        return times

    probe = asyncio.ensure_future(lag_probe(lags))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(arrival)) for arrival in arrivals]
    finally:
        probe.cancel()
    wall = time.perf_counter() - start
    return {
        **summary([task.result() for task in tasks], wall),
        "loop_lag_p99_ms": quantile_ms(lags, 0.99),
        "wakeups_per_step": wakeups_per_step(before, engine.stats()),
    }


def summary(results: Sequence[Sequence[float]], wall: float) -> Row:
    """Output tokens per second; median and 99th percentile of time to first token and between tokens, in ms.

    Args:
        results: of each request, when it was submitted and when each of its tokens was there, in seconds.
        wall: seconds that all took.
    """
    first = [times[1] - times[0] for times in results if len(times) > 1]
    between = [b - a for times in results for a, b in itertools.pairwise(times[1:])]
    num_tokens = sum(len(times) - 1 for times in results)
    return {
        "requests": len(results),
        "output_tokens": num_tokens,
        "wall_s": round(wall, 3),
        "output_tokens_per_s": round(num_tokens / wall, 1),
        "ttft_p50_ms": quantile_ms(first, 0.5),
        "ttft_p99_ms": quantile_ms(first, 0.99),
        "itl_p50_ms": quantile_ms(between, 0.5),
        "itl_p99_ms": quantile_ms(between, 0.99),
    }
