"""`aiocb bench ...`: a table on the screen, JSON on request. Each command imports what it needs when it runs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from aiocb.bench.figures import Row
from aiocb.bench.load import NewLen, Workload
from aiocb.bench.options import Dtype, Model, Quantization, spread

__all__ = ["app"]

app = typer.Typer(help="Measure the engine on this machine.", no_args_is_help=True, pretty_exceptions_enable=False)


def _in_folder(path: Path | None) -> Path | None:
    if path is not None and not path.parent.is_dir():  # seen now, not after minutes of measuring
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def _positive(rates: list[float] | None) -> list[float] | None:
    for rate in rates or ():
        if not 0 < rate < math.inf:
            raise typer.BadParameter(f"requests per second must be a number above 0, not {rate:g}")
    return rates


JsonFile = Annotated[
    Path | None, typer.Option("--json", callback=_in_folder, help="Write the figures to this file as JSON.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each case; medians are shown.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the CPU kernels.")]


@app.command()
def overhead(repeats: Repeats = 3, json_file: JsonFile = None) -> None:
    """The engine's own cost with a model that computes nothing: chunks per second."""
    from aiocb.bench.overhead import run

    _report("overhead", run(repeats), json_file)


@app.command()
def loop(repeats: Repeats = 3, json_file: JsonFile = None) -> None:
    """How long the event loop stands still when many requests arrive at once and while it streams."""
    from aiocb.bench.loop import run

    _report("loop", run(repeats), json_file)


@app.command()
def startup(
    model: Model = "smollm2",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    repeats: Repeats = 5,
    json_file: JsonFile = None,
) -> None:
    """A start seen from outside: seconds from a new process to a running engine and its first token."""
    from aiocb.bench.startup import run

    _report("startup", run(model, dtype=dtype, quantization=quantization, repeats=repeats), json_file)


@app.command()
def kernels(
    quick: Annotated[bool, typer.Option(help="One shape of each kernel.")] = False,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Each native kernel against torch and against the bound of memory or arithmetic."""
    from aiocb.bench.kernels import run

    _report("kernels", run(num_threads=threads, quick=quick), json_file)


@app.command()
@spread
def offline(workload: Workload, repeats: Repeats = 3, json_file: JsonFile = None) -> None:
    """All requests at once."""
    from aiocb.bench.load import run

    _report("offline", asyncio.run(run(workload, [math.inf], repeats)), json_file)


@dataclass(frozen=True, slots=True)
class _Served(Workload):
    new_len: NewLen = (16, 96)


@app.command()
@spread
def serve(
    workload: _Served,
    rate: Annotated[
        list[float] | None,
        typer.Option(callback=_positive, help="Requests per second; several are measured in turn."),
    ] = None,
    repeats: Repeats = 1,
    plot: Annotated[
        Path | None, typer.Option(callback=_in_folder, help="Draw latency over load into this PNG file.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Poisson arrivals: time to first token and between tokens over load."""
    from aiocb.bench.load import draw, run

    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("a plot needs matplotlib: pip install 'aiocb[bench]'", param_hint="--plot")
    rows = _report("serve", asyncio.run(run(workload, rate or [1.0, 2.0, 4.0, 8.0], repeats)), json_file)
    if plot is not None:
        draw(rows, plot)


@app.command()
@spread
def invariance(workload: Workload, json_file: JsonFile = None) -> None:
    """Whether outputs are the same, bit by bit, alone and in any batch; exit status 1 when not."""
    from aiocb.bench.invariance import run

    rows = _report("invariance", asyncio.run(run(workload)), json_file)
    if any(row["identical"] != row["requests"] for row in rows):
        raise typer.Exit(1)


@app.command()
def quality(
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of text.")] = 20_480,
    speed: Annotated[bool, typer.Option("--speed", help="How long steps take in both, instead.")] = False,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """What 8-bit weights cost: each way of running a model against the same model in float32, on English text."""
    from aiocb.bench import quality as bench

    if speed:
        _report("speed of quantisation", bench.speed(model, num_threads=threads), json_file)
    else:
        _report("quality", bench.measure(model, num_tokens=tokens, num_threads=threads), json_file)


def _report(name: str, rows: list[Row], json_file: Path | None) -> list[Row]:
    """Show what was measured, and write it down with all that says what it is of."""
    from rich.console import Console
    from rich.table import Table

    import aiocb

    machine = _machine()
    table = Table(title=f"{name} ({machine}, aiocb {aiocb.__version__})", title_justify="left")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    Console(width=None if sys.stdout.isatty() else 240).print(table)  # into a file or a pipe: never cut a column
    if json_file is not None:
        command = shlex.join(["aiocb", *sys.argv[1:]])
        record = {"bench": name, "command": command, "machine": machine, "version": aiocb.__version__, "rows": rows}
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return rows


def _machine() -> str:
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            processor = next(names, processor)
    except OSError:
        pass  # not Linux
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value}"
