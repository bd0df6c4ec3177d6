"""`aiocb top`: what a server, or an engine of this process, does now. Main thread, with a loop of its own.

Everything shown comes from two snapshots of its counters: what they are, and how they differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = ["Sample", "View", "fetch", "percentile", "run_top", "watch"]

_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60
_TIMEOUT_S = 5.0
_LATENCIES = (
    ("first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("in the queue", "request_queue_time_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was found at one moment.

    Attributes:
        at: seconds of a monotone clock.
        status: in one word.
        stats: the document of `/stats`; empty where there is none.
        problem: why there is none.
    """

    at: float
    status: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def percentile(histogram: Mapping[str, Any], share: float, before: Mapping[str, Any] | None = None) -> float | None:
    """A percentile of a histogram, or of what it has gained, by straight lines within its buckets.

    Args:
        histogram: `bounds`, cumulative `counts` and `count`.
        share: 0..1.
        before: an earlier state of the same.
    """
    counts = list(histogram["counts"])
    total = histogram["count"]
    if before:
        counts = [now - then for now, then in zip(counts, before["counts"], strict=True)]
        total -= before["count"]
    if total <= 0:
        return None
    wanted, below, low = share * total, 0, 0.0
    for bound, count in zip(histogram["bounds"], counts, strict=True):
        if count >= wanted:
            within = (wanted - below) / max(count - below, 1)
            return float(low + (bound - low) * within)
        below, low = count, bound
    return float(low)


class View:
    """Keeps the latest samples and draws them.

    Args:
        title: what is watched.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._samples: deque[Sample] = deque(maxlen=_HISTORY)
        self._speeds: deque[float] = deque(maxlen=_HISTORY)
        self.problem = ""

    def add(self, sample: Sample) -> None:
        """Take a sample; one without figures leaves the last ones standing."""
        self.problem = sample.problem
        if not sample.stats:
            return
        if self._samples:
            last = self._samples[-1]
            seconds = max(sample.at - last.at, 1e-6)
            gained = _tokens(sample.stats) - _tokens(last.stats)
            if gained < 0:  # it has been started anew
                self._samples.clear()
                self._speeds.clear()
            else:
                self._speeds.append(gained / seconds)
        self._samples.append(sample)

    def figures(self) -> dict[str, Any]:
        """The figures that are shown, by name; times in seconds."""
        if not self._samples:
            return {"status": "unreachable", "problem": self.problem}
        sample, first = self._samples[-1], self._samples[0]
        stats = sample.stats
        queries = stats["prefix_cache_queries"]
        figures: dict[str, Any] = {
            "status": sample.status if not self.problem else "unreachable",
            "running": stats["num_requests_running"],
            "waiting": stats["num_requests_waiting"],
            "paused": stats["num_requests_paused"],
            "tokens_per_second": self._speeds[-1] if self._speeds else 0.0,
            "cache": stats["kv_cache_usage_perc"],
            "prefix_hits": stats["prefix_cache_hits"] / queries if queries else 0.0,
            "preemptions": stats["num_preemptions"],
            "aborts": stats["num_aborts"],
            "ended": dict(stats["request_success"]),
            "step_age": stats["step_age_seconds"],
        }
        for label, name in _LATENCIES:
            before = first.stats[name] if first is not sample else None
            recent = {f"p{share}": percentile(stats[name], share / 100, before) for share in (50, 95, 99)}
            if recent["p50"] is None:
                recent = {f"p{share}": percentile(stats[name], share / 100) for share in (50, 95, 99)}
            figures[label] = recent
        return figures

    def render(self) -> RenderableType:
        """The picture of now."""
        figures = self.figures()
        colour = {"ok": "green", "loading": "yellow", "draining": "yellow"}.get(figures["status"], "red")
        head = Text.assemble((self._title, "bold"), "  ", (figures["status"], colour))
        if self.problem:
            head.append(f"  {self.problem}", "red")
        if "running" not in figures:
            return head
        requests = _table("requests")
        for name in ("running", "waiting", "paused"):
            requests.add_row(name, str(figures[name]))
        cache = _table("cache")
        cache.add_row("in use", f"{figures['cache']:.0%}")
        cache.add_row("prefix hits", f"{figures['prefix_hits']:.0%}")
        cache.add_row("preemptions", str(figures["preemptions"]))
        ended = _table("ended")
        for reason, count in sorted(figures["ended"].items()):
            ended.add_row(reason, str(count))
        if not figures["ended"]:
            ended.add_row("none yet", "")
        times = Table(box=None, pad_edge=False, title="latency", title_justify="left", title_style="bold")
        for column in ("", "p50", "p95", "p99"):
            times.add_column(column, justify="right" if column else "left")
        for label, _ in _LATENCIES:
            times.add_row(label, *(_seconds(figures[label][p]) for p in ("p50", "p95", "p99")))
        speed = Text.assemble(
            ("tokens/s  ", "bold"), f"{figures['tokens_per_second']:.0f}  ", (sparkline(self._speeds), "cyan")
        )
        return Group(head, "", speed, "", Columns([requests, cache, ended], padding=(0, 4)), "", times)


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """A line of blocks as high as the values."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values)


def _table(title: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column()
    table.add_column(justify="right")
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _tokens(stats: Mapping[str, Any]) -> int:
    # One observation for each token of each request; the counters of tokens grow when requests end.
    return int(stats["inter_token_latency_seconds"]["count"])


def fetch(url: str, api_key: str | None) -> Sample:
    """Ask a server; what goes wrong is in the sample. Blocks for seconds at most."""
    base = url.rstrip("/")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        status = "ok"
        with contextlib.suppress(urllib.error.HTTPError):
            status = _ask(f"{base}/health", {}).get("status", "ok")
        stats = _ask(f"{base}/stats", headers)
    except urllib.error.HTTPError as error:
        problem = "it asks for a key: --api-key" if error.code == 401 else f"{error.code} {error.reason}"
        with contextlib.suppress(Exception):
            problem = json.loads(error.read())["error"]["message"] if error.code != 401 else problem
        return Sample(time.monotonic(), "refused", problem=problem)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Sample(time.monotonic(), "unreachable", problem=f"{base}: {reason}")
    return Sample(time.monotonic(), status, stats)


def _ask(url: str, headers: dict[str, str]) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


async def watch(engine: Engine, *, interval: float = 1.0, console: Console | None = None) -> None:
    """Show what an engine of this process does, in its terminal, until cancelled.

    Args:
        engine: a running one.
        interval: seconds from one picture to the next.
        console: instead of standard output.
    """
    from aiocb.serve.stats import stats_document

    async def take() -> Sample:
        health = engine.health()
        status = "hung" if health.is_hung else "ok" if health.is_ok else health.state
        return Sample(time.monotonic(), status, stats_document(engine) if health.is_ok or health.is_hung else {})

    await _follow(take, repr(engine.name), interval, console or Console())


async def _follow(take: Callable[[], Awaitable[Sample]], title: str, interval: float, console: Console) -> None:
    view = View(title)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False, transient=True) as live:
        while True:
            view.add(await take())
            live.update(view.render(), refresh=True)
            await asyncio.sleep(interval)


def run_top(url: str, api_key: str | None, interval: float, *, once: bool, as_json: bool) -> int:
    """Watch a server until Ctrl-C, or look once; return the exit code."""
    if once or as_json or not sys.stdout.isatty():
        view = View(url)
        view.add(fetch(url, api_key))
        if not view.problem:
            time.sleep(min(interval, 1.0))  # a speed needs two looks
            view.add(fetch(url, api_key))
        if as_json:
            print(json.dumps(view.figures()))
        else:
            Console().print(view.render())
        return 1 if view.problem else 0

    async def take() -> Sample:
        return await asyncio.to_thread(fetch, url, api_key)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_follow(take, url, interval, Console()))
    return 0
