"""What the benchmarks make of what they measure: medians, quantiles, sides that take turns."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aiocb.engine.stats import Stats

__all__ = ["Row", "alternate", "lag_probe", "medians", "quantile_ms", "wakeups_per_step"]

Row = dict[str, Any]
"""One line of a table."""

T = TypeVar("T")


def medians(rows: Sequence[Row]) -> Row:
    """Field by field, the median of repeated runs (fields that are not numbers are taken from the first)."""
    return {
        key: statistics.median(row[key] for row in rows)
        if all(isinstance(row[key], (int, float)) for row in rows)
        else value
        for key, value in rows[0].items()
    }


def quantile_ms(seconds: Sequence[float], share: float) -> float | None:
    """The interpolated quantile in milliseconds, with two decimals for a table; None of nothing."""
    import numpy as np

    return round(float(np.quantile(seconds, share)) * 1e3, 2) if len(seconds) else None


def wakeups_per_step(before: Stats, after: Stats) -> float:
    """How often the event loops were woken for each step between two snapshots."""
    steps = after.num_steps - before.num_steps
    return round((after.num_loop_wakeups - before.num_loop_wakeups) / max(steps, 1), 3)


def alternate(
    sides: Sequence[T], prepare: Callable[[T], object], run: Callable[[T], object], repeats: int
) -> list[float]:
    """Median seconds of `run` for each side, in turn, so that a slow spell of the machine hits all; the first is free.

    Args:
        sides: what is compared.
        prepare: called before every run, and not timed.
        run: what is timed.
        repeats: runs of each side that count.
    """
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats + 1):
        for side, values in zip(sides, times, strict=True):
            prepare(side)
            started = time.perf_counter()
            run(side)
            values.append(time.perf_counter() - started)
    return [statistics.median(values[1:]) for values in times]


async def lag_probe(lags: list[float], interval: float = 0.001) -> None:
    """Append how late a ticker of `interval` seconds is, again and again; cancel it to stop."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(interval)
        lags.append(time.perf_counter() - before - interval)
