from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from aiocb.cli.columns import Columns
from aiocb.cli.run import Column, summarize

from .conftest import CTRL_C, FAKE, REAL, Spawn, run_plain, without_build

pytestmark = pytest.mark.slow

SUMMARY = r"{} prompts?, \d+ tokens in \d+\.\d\d s \| \d+ tok/s \| first token after \d+\.\d\d s"


def test_live_columns(spawn: Spawn) -> None:
    prompts = ["--temperature", "0", "alpha", "--temperature", "0.5", "beta", "gamma", "--temperature", "1", "delta"]
    prompts[6:6] = ["--temperature", "0.8"]
    terminal = spawn([*FAKE, "run", "fake", *prompts], FAKE_STEP_S="0.02")
    terminal.expect("╭")
    terminal.expect(SUMMARY.format(4) + r" \(median; slowest")
    assert terminal.wait() == 0
    last = terminal.output[terminal.output.rindex("[1] ") :]
    wanted = [("0", "alpha"), ("0.5", "beta"), ("0.8", "gamma"), ("1", "delta")]
    for number, (temperature, text) in enumerate(wanted, 1):
        assert f"[{number}] (temperature {temperature})" in last
        assert f"user:{text};>" in last
    # Side by side on a wide terminal.
    assert re.search("user:alpha;>.*user:beta;>.*user:gamma;>", last)
    # Drawn again and again while it ran.
    assert terminal.output.count("[1] ") > 3
    assert "Traceback" not in terminal.output


def test_ctrl_c_ends_all_and_shows_what_is_there(spawn: Spawn) -> None:
    terminal = spawn([*FAKE, "run", "fake", "forever 1", "forever 2", "--max-new-tokens", "50000"], FAKE_STEP_S="0.01")
    terminal.expect("tick tick")
    terminal.send(CTRL_C)
    terminal.expect(SUMMARY.format(2))
    assert terminal.wait(10) == 130
    assert "tick tick" in terminal.output[terminal.output.rindex("[1] ") :]
    assert "Traceback" not in terminal.output


def test_plain_lines() -> None:
    result = run_plain([*FAKE, "run", "fake", "first", "second 😀", "--temperature", "0.5"])
    lines = result.stdout.splitlines()
    assert lines[:6] == [
        "[1] (temperature 0.5) first",
        "user:first;>",
        "",
        "[2] (temperature 0.5) second 😀",
        "user:second 😀;>",
        "",
    ]
    assert re.fullmatch(SUMMARY.format(2) + r" \(median; slowest \d+\.\d\d s\)", lines[6])
    assert len(lines) == 7
    assert result.stderr == ""
    assert result.returncode == 0


def test_raw_system_and_standard_input() -> None:
    result = run_plain([*FAKE, "run", "fake", "--raw"], stdin="one\n\ntwo\n")
    assert result.stdout.splitlines()[:5] == ["[1] one", "one", "", "[2] two", "two"]
    result = run_plain([*FAKE, "run", "fake", "--system", "Be brief.", "one", "--max-new-tokens", "30"])
    assert result.stdout.splitlines()[1] == "system:Be brief.;user:one;>"
    result = run_plain([*FAKE, "run", "base", "text"])
    assert result.stdout.splitlines()[1] == "text"


def test_one_prompt_that_fails_leaves_the_others_alone() -> None:
    result = run_plain([*FAKE, "run", "fake", "good", "x" * 1000, "--max-new-tokens", "65000"])
    assert result.returncode == 1
    assert "user:good;>" in result.stdout
    assert re.search("error: .*65000", result.stdout)
    assert "1 failed" in result.stdout


def test_the_default_limit_is_what_fits() -> None:
    result = run_plain([*FAKE, "run", "fake", "forever"], FAKE_CONTEXT="50")
    assert result.stdout.startswith("[1] forever\ntick tick")
    assert "1 prompt, 36 tokens" in result.stdout
    assert result.returncode == 0
    result = run_plain([*FAKE, "run", "fake", "forever", "--max-new-tokens", "37"], FAKE_CONTEXT="50")
    assert "error: max_new_tokens=37" in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "fake", "a", "b", "c", "--temperature", "0", "--temperature", "1"], "2 were given for 3 prompts"),
        (["run", "fake"], "at least one prompt"),
        (["run", "fake", "a", "--temperature", "-1"], "temperature"),
        (["run", "fake", "a", "--max-new-tokens", "0"], "max-new-tokens"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str) -> None:
    result = run_plain([*REAL, *arguments])
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error(spawn: Spawn) -> None:
    command = " ".join(FAKE) + " run fake " + " ".join(["forever"] * 40) + " --max-new-tokens 3000 | head -1"
    result = run_plain(["bash", "-c", command], FAKE_STEP_S="0")
    assert result.stdout == "[1] forever\n"
    assert result.stderr == ""


@pytest.mark.model
@pytest.mark.timeout(400)  # the first start of all compiles the kernels
def test_a_real_model() -> None:
    result = run_plain([*REAL, "run", "smollm2", "--temperature", "0", "What is the capital of France?", "Say hello."])
    assert result.returncode == 0
    assert "Paris" in result.stdout
    assert re.search(SUMMARY.format(2), result.stdout)
    assert without_build(result.stderr) == ""


def column(number: int, text: str, **values: object) -> Column:
    result = Column(number, "prompt", None, text=text)
    for name, value in values.items():
        setattr(result, name, value)
    return result


def draw(columns: list[Column], *, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    view = Columns(columns, console)
    console.print(view.render())
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_columns_fit_the_screen() -> None:
    columns = [column(number, "\n".join(f"line {i}" for i in range(100))) for number in range(1, 5)]
    wide = draw(columns, width=140, height=20)
    assert len(wide) <= 20
    assert sum("line 99" in line for line in wide) == 1
    assert wide[-2].count("line 99") == 4 or any(line.count("line 99") == 4 for line in wide)
    narrow = draw(columns, width=40, height=40)
    assert len(narrow) <= 40
    assert sum("line 99" in line for line in narrow) == 4


def test_markup_and_escapes_of_a_model_are_text() -> None:
    lines = draw([column(1, "[bold]x[/bold] \x1b[31mred\x07", error="bad [thing]")], width=60, height=20)
    text = "\n".join(lines)
    assert "[bold]x[/bold]" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "bad [thing]" in text


def test_summary() -> None:
    columns = [column(1, "x", num_tokens=10, first_s=0.1), column(2, "y", num_tokens=20, first_s=0.3)]
    assert summarize(columns, 2.0) == (
        "2 prompts, 30 tokens in 2.00 s | 15 tok/s | first token after 0.20 s (median; slowest 0.30 s)"
    )
    assert summarize([column(1, "", error="no")], 0.0) == "1 prompt, 0 tokens in 0.00 s | 0 tok/s | 1 failed"
