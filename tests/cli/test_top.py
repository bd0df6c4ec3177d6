"""`aiocb top`: figures from two snapshots, pictures at any width, servers that are away."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from rich.console import Console

from aiocb.cli.top import Sample, View, fetch, percentile, run_top, sparkline, watch
from aiocb.serve.stats import stats_document
from aiocb.testing import fake_engine
from tests.serve.helpers import Served, serving


def drawn(view: View, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(view.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return str(text)


def test_percentiles_are_read_off_buckets() -> None:
    histogram = {"bounds": [1.0, 2.0, 4.0], "counts": [0, 10, 10], "count": 12}
    assert percentile(histogram, 0.5) == pytest.approx(1.6)
    assert percentile(histogram, 0.99) == 4.0  # beyond the last bound
    assert percentile(histogram, 0.5, histogram) is None
    before = {"bounds": [1.0, 2.0, 4.0], "counts": [0, 8, 8], "count": 8}
    assert percentile(histogram, 0.5, before) == pytest.approx(2.0)


def test_a_sparkline_is_as_high_as_its_values() -> None:
    assert sparkline([0, 4, 8]) == " ▄█"
    assert sparkline([]) == sparkline([0.0]) == ""


async def snapshots() -> list[dict[str, Any]]:
    async with fake_engine(reply="abcdef" * 10) as engine:
        first = stats_document(engine)
        await asyncio.gather(*(engine.generate("Hi") for _ in range(4)))
        return [first, stats_document(engine)]


def test_speed_and_ends_come_from_two_snapshots() -> None:
    first, second = asyncio.run(snapshots())
    view = View("here")
    view.add(Sample(10.0, "ok", first))
    view.add(Sample(12.0, "ok", second))
    figures = view.figures()
    gained = second["inter_token_latency_seconds"]["count"]
    assert figures["tokens_per_second"] == pytest.approx(gained / 2)
    assert figures["ended"] == {"stop": 4}
    assert figures["first token"]["p50"] > 0
    for width in (40, 80, 120):
        text = drawn(view, width)
        for word in ("running", "prefix hits", "stop", "p99", "tokens/s"):
            assert word in text
    view.add(Sample(13.0, "ok", first))  # started anew: nothing is negative
    assert view.figures()["tokens_per_second"] == 0.0


def test_a_server_that_goes_away_is_shown_and_comes_back() -> None:
    first, second = asyncio.run(snapshots())
    view = View("here")
    assert "unreachable" in drawn(view, 80)
    view.add(Sample(1.0, "ok", first))
    view.add(Sample(2.0, "unreachable", problem="connection refused"))
    assert "connection refused" in drawn(view, 80)
    assert view.figures()["status"] == "unreachable"
    view.add(Sample(3.0, "ok", second))
    assert view.figures()["status"] == "ok"


async def in_a_thread(served: Served, *arguments: Any, **options: Any) -> Any:
    return await asyncio.to_thread(*arguments, **options)


def test_a_server_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with serving(api_key=("k",), waits=False) as served:
            while (await served.client.get("/health")).status_code != 200:
                await asyncio.sleep(0.005)
            url = f"http://127.0.0.1:{served.port}"
            refused = await asyncio.to_thread(fetch, url, None)
            assert "--api-key" in refused.problem
            sample = await asyncio.to_thread(fetch, url, "k")
            assert (sample.status, sample.problem) == ("ok", "")
            assert await asyncio.to_thread(run_top, url, "k", 0.1, once=False, as_json=True) == 0
            figures = json.loads(capsys.readouterr().out)
            assert figures["status"] == "ok"
            assert figures["running"] == 0
            assert await asyncio.to_thread(run_top, url, "k", 0.1, once=True, as_json=False) == 0
            assert "tokens/s" in capsys.readouterr().out

    asyncio.run(main())
    assert run_top("http://127.0.0.1:9", None, 0.1, once=True, as_json=False) == 1
    assert "127.0.0.1:9" in capsys.readouterr().out
    assert run_top("ftp://x", None, 0.1, once=True, as_json=True) == 1


def test_an_engine_of_this_process_is_watched() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)

    async def main() -> None:
        async with fake_engine(reply="abc") as engine:
            task = asyncio.create_task(watch(engine, interval=0.01, console=console))
            await engine.generate("Hi")
            while "p99" not in console.file.getvalue():  # type: ignore[attr-defined]
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
