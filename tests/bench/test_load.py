"""The load benchmark: summaries, whole runs over a fake model, small ones over a real one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aiocb
from aiocb.bench.cli import app
from aiocb.bench.figures import medians, quantile_ms
from aiocb.bench.idle import IdleRunner
from aiocb.bench.load import Arrival, Workload, draw, measure, summary
from aiocb.errors import ConfigError
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import byte_tokenizer


def test_summary_counts_and_times() -> None:
    results = [[0.0, 0.1, 0.2, 0.4], [1.0, 1.3]]
    row = summary(results, 2.0)
    assert row["output_tokens"] == 4
    assert row["output_tokens_per_s"] == 2.0
    assert row["ttft_p50_ms"] == pytest.approx(200.0)
    assert row["itl_p50_ms"] == pytest.approx(150.0)


def test_quantile() -> None:
    assert quantile_ms([], 0.5) is None
    assert quantile_ms([3.0], 0.99) == 3000.0
    assert quantile_ms([4.0, 1.0, 2.0, 3.0], 0.5) == 2500.0


def test_medians_field_by_field() -> None:
    assert medians([{"a": 1, "b": "x"}, {"a": 5, "b": "x"}, {"a": 2, "b": "x"}]) == {"a": 2, "b": "x"}


def test_measure_delivers_every_token() -> None:
    async def main() -> None:
        engine = aiocb.Engine.from_runner(lambda _: IdleRunner(64), ModelDefaults(32_000, 1 << 20))
        async with engine:
            row = await measure(engine, [Arrival(0.0, [1, 2], 5), Arrival(0.001, [3], 3)])
        assert row["output_tokens"] == 8
        assert row["requests"] == 2
        assert row["wakeups_per_step"] <= 1.5

    asyncio.run(main())


def test_prompts_that_the_text_cannot_fill_are_refused() -> None:
    with pytest.raises(ConfigError, match="tokens of text"):
        Workload(prompt_len=(1 << 30, 1 << 30)).arrivals(byte_tokenizer())


def test_plot_is_a_png(tmp_path: Path) -> None:
    rows = [
        {"rate": rate, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "itl_p50_ms": 3.0, "itl_p99_ms": 4.0}
        for rate in (1.0, 2.0)
    ]
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.model
def test_offline_command_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    result = CliRunner().invoke(
        app,
        ["offline", "--requests", "3", "--prompt-len", "8", "16", "--new-len", "2", "4", "--repeats", "1"]
        + ["--json", str(target)],
    )
    assert result.exit_code == 0, result.output
    record = json.loads(target.read_text())
    assert record["rows"][0]["output_tokens"] >= 6


@pytest.mark.model
def test_invariance_of_a_real_model(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    lengths = ["--requests", "6", "--prompt-len", "16", "96", "--new-len", "6", "24"]
    result = CliRunner().invoke(app, ["invariance", "smollm2", *lengths, "--json", str(file), "--quantization", "int8"])
    assert result.exit_code == 0, result.output
    rows = {row["run"]: row for row in json.loads(file.read_text())["rows"]}
    assert all(row["identical"] == 6 for row in rows.values()), rows
    assert rows["prefix hits"]["cached_prompt_tokens"] > 0
    assert rows["preempted"]["preemptions"] > 0
    assert rows["batched, budget 48"]["steps"] != rows["batched, budget 512"]["steps"]
