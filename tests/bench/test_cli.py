"""The commands of `aiocb bench`: options, what is written down, small runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aiocb
from aiocb.bench.cli import app

COMMANDS = ("overhead", "loop", "startup", "kernels", "offline", "serve", "invariance", "quality")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["offline", "--prompt-len", "16", "8"], "smaller number first"),
        (["offline", "--new-len", "0", "8"], "none below 1"),
        (["serve", "--rate", "0"], "above 0"),
        (["serve", "--rate", "4", "--rate", "-1"], "above 0"),
        (["serve", "--rate", "inf"], "above 0"),
        (["serve", "--plot", "/nonexistent/x.png"], "no folder /nonexistent"),
        (["overhead", "--json", "/nonexistent/x.json"], "no folder /nonexistent"),
        (["overhead", "--repeats", "0"], "--repeats"),
        (["kernels", "--threads", "0"], "--threads"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert says in result.output


def test_a_record_says_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"case": "one", "a_ms": 1.5}, {"case": "two", "a_ms": None, "only_here": 3}]
    monkeypatch.setattr("aiocb.bench.overhead.run", lambda repeats: rows)
    monkeypatch.setattr("sys.argv", ["aiocb", "bench", "overhead", "--json", "a file"])
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["overhead", "--json", str(file)])
    assert result.exit_code == 0, result.output
    for text in ("case", "a ms", "only here", "two", "1.5"):
        assert text in result.output
    record = json.loads(file.read_text())
    assert record["bench"] == "overhead"
    assert record["command"] == "aiocb bench overhead --json 'a file'"
    assert record["version"] == aiocb.__version__
    assert record["rows"] == rows
    assert "cores" in record["machine"] and "Python" in record["machine"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


@pytest.mark.model
@pytest.mark.timeout(400)  # the first start of all compiles the kernels
def test_a_start_is_timed_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["startup", "--repeats", "2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    events = [row["event"] for row in rows]
    for event in ("aiocb is imported", "the engine runs", "first token", "the process has ended"):
        assert event in events
    for column in ("first_run_s", "median_s"):
        times = [row[column] for row in rows]
        assert times == sorted(times)


@pytest.mark.model
def test_quality_of_a_real_model(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["quality", "--tokens", "512", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["aiocb bfloat16"]["error_ratio"] < 1
    assert rows["aiocb int8"]["weight_mb"] < rows["aiocb bfloat16"]["weight_mb"]
