"""`aiocb bench overhead | kernels | offline | serve | invariance`: tables, JSON on request, a plot for `serve`."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app"]

app = typer.Typer(help="Measure the engine on this machine.", no_args_is_help=True, pretty_exceptions_enable=False)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as JSON.")]
Model = Annotated[str, typer.Argument(help="A hub name, a directory, a GGUF file, or smollm2.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, or as stored.")]
Int8 = Annotated[bool, typer.Option("--int8", help="8-bit weights in the CPU kernels.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each case; medians are shown.")]
Requests = Annotated[int, typer.Option(min=1, help="Number of requests.")]


@app.command()
def overhead(repeats: Repeats = 3, json_file: JsonFile = None) -> None:
    """The engine's own cost with a model that computes nothing: chunks per second."""
    from aiocb.bench.overhead import run

    _report("overhead", run(repeats), json_file)


@app.command()
def kernels(
    quick: Annotated[bool, typer.Option(help="One shape of each kernel.")] = False, json_file: JsonFile = None
) -> None:
    """Each native kernel against torch and against the bound of memory or arithmetic."""
    from aiocb.bench.kernels import run

    _report("kernels", run(quick=quick), json_file)


@app.command()
def offline(
    model: Model = "smollm2",
    requests: Requests = 64,
    prompt_len: Annotated[tuple[int, int], typer.Option(help="Shortest and longest prompt.")] = (16, 512),
    new_len: Annotated[tuple[int, int], typer.Option(help="Fewest and most new tokens.")] = (16, 128),
    dtype: Dtype = "auto",
    int8: Int8 = False,
    repeats: Repeats = 3,
    json_file: JsonFile = None,
) -> None:
    """All requests at once."""
    rows = asyncio.run(_load(model, [float("inf")], requests, prompt_len, new_len, dtype, int8, repeats))
    _report("offline", rows, json_file)


@app.command()
def serve(
    model: Model = "smollm2",
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second; several are measured in turn.")] = None,
    requests: Requests = 64,
    prompt_len: Annotated[tuple[int, int], typer.Option(help="Shortest and longest prompt.")] = (16, 512),
    new_len: Annotated[tuple[int, int], typer.Option(help="Fewest and most new tokens.")] = (16, 96),
    dtype: Dtype = "auto",
    int8: Int8 = False,
    repeats: Repeats = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw latency over load into this PNG file.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Poisson arrivals: time to first token and between tokens over load."""
    rows = asyncio.run(_load(model, rate or [1.0, 2.0, 4.0, 8.0], requests, prompt_len, new_len, dtype, int8, repeats))
    _report("serve", rows, json_file)
    if plot is not None:
        draw(rows, plot)


@app.command()
def invariance(
    model: Model = "smollm2",
    requests: Requests = 64,
    prompt_len: Annotated[tuple[int, int], typer.Option(help="Shortest and longest prompt.")] = (16, 512),
    new_len: Annotated[tuple[int, int], typer.Option(help="Fewest and most new tokens.")] = (16, 128),
    dtype: Dtype = "auto",
    int8: Int8 = False,
    json_file: JsonFile = None,
) -> None:
    """Whether outputs are the same, bit by bit, alone and in any batch; exit status 1 when not."""
    from aiocb.bench.invariance import run

    rows = asyncio.run(
        run(
            model,
            num_requests=requests,
            prompt_len=prompt_len,
            new_len=new_len,
            dtype=dtype,
            quantization="int8" if int8 else None,
        )
    )
    _report("invariance", rows, json_file)
    if any(row["identical"] != row["requests"] for row in rows):
        raise typer.Exit(1)


async def _load(
    model: str,
    rates: list[float],
    requests: int,
    prompt_len: tuple[int, int],
    new_len: tuple[int, int],
    dtype: str,
    int8: bool,
    repeats: int,
) -> list[dict[str, Any]]:
    import aiocb
    from aiocb.bench.load import measure, medians, poisson

    engine = aiocb.Engine.from_pretrained(model, dtype=dtype, quantization="int8" if int8 else None)
    async with engine:
        await measure(engine, poisson(engine.tokenizer, float("inf"), 4, prompt_len=(24, 64), new_len=(8, 8)))
        rows = []
        for rate in rates:
            arrivals = poisson(engine.tokenizer, rate, requests, prompt_len=prompt_len, new_len=new_len, seed=1)
            runs = []
            for _ in range(repeats):
                engine.reset_prefix_cache()
                runs.append(await measure(engine, arrivals))
            rows.append({"rate": "all at once" if rate == float("inf") else rate, **medians(runs)})
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
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


def _report(name: str, rows: list[dict[str, Any]], json_file: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    import aiocb

    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    table = Table(title=f"{name} ({machine}, aiocb {aiocb.__version__})", title_justify="left")
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)  # a file or a pipe: never cut a column
    console.print(table)
    if json_file is not None:
        record = {"bench": name, "machine": machine, "version": aiocb.__version__, "rows": rows}
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value}"
