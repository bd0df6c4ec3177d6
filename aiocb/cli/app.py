"""Commands and their options. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from aiocb.bench.cli import app as bench
from aiocb.bench.options import Model, complete_model, spread
from aiocb.cli.serve import ServeOptions
from aiocb.cli.terminal import ModelOptions, follow, is_silent

__all__ = ["app"]

app = typer.Typer(
    help="Continuous batching for asyncio: stream any Hugging Face causal language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")]
Seed = Annotated[int | None, typer.Option(help="Makes the answers repeatable.")]
System = Annotated[str | None, typer.Option(help="The system message.")]


@dataclass(frozen=True, slots=True)
class DefaultModel(ModelOptions):
    """Which model, if another one than the default."""

    model: Model = "smollm2"


def _set_debug(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        context.ensure_object(dict)["debug"] = True
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")


Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_set_debug, help="Tracebacks and log messages.", rich_help_panel="Model"),
]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from aiocb._version import __version__

        print(f"aiocb {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options that come before the command."""


@app.command()
@spread
def chat(
    model: DefaultModel,
    system: System = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; unset: the model's own.")] = None,
    top_p: TopP = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer, as far as they fit.")] = 1024,
    seed: Seed = None,
    _debug: Debug = False,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D leaves, /help shows the rest."""
    if is_silent():
        raise typer.Exit(follow(model))
    from aiocb.cli.chat import Chat

    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
    raise typer.Exit(Chat(model, system, **sampling).run())


@app.command()
@spread
def run(
    model: ModelOptions,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts; none: one per line of standard input.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="Once for all prompts, or once per prompt; 0 is greedy.")
    ] = None,
    top_p: TopP = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer; unset: 256, as far as they fit.")
    ] = None,
    seed: Seed = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as text, without the chat template.")
    ] = False,
    _debug: Debug = False,
) -> None:
    """Answer several prompts at once, each in its own column."""
    if is_silent():
        raise typer.Exit(follow(model))
    from aiocb.cli.run import Column, Run

    texts = prompts if prompts else _lines()
    if not texts:
        raise typer.BadParameter("give at least one prompt, or lines on standard input", param_hint="PROMPTS")
    temperatures: list[float | None] = [*temperature] if temperature else [None]
    if len(temperatures) not in (1, len(texts)):
        raise typer.BadParameter(
            f"{len(temperatures)} were given for {len(texts)} prompts; give one, or one per prompt",
            param_hint="--temperature",
        )
    temperatures *= 1 if len(temperatures) == len(texts) else len(texts)
    columns = [Column(number, *prompt) for number, prompt in enumerate(zip(texts, temperatures, strict=True), 1)]
    sampling = {"top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
    raise typer.Exit(Run(model, columns, system, raw, sampling).run())


@app.command()
@spread
def info(model: DefaultModel, _debug: Debug = False) -> None:
    """Load a model and show what was chosen for it, and why."""
    if is_silent():
        raise typer.Exit(follow(model))
    from aiocb.cli.info import show_info

    show_info(model)


@app.command()
@spread
def serve(model: DefaultModel, options: ServeOptions, _debug: Debug = False) -> None:
    """Serve a model over HTTP, as OpenAI's interface, with a chat page."""
    if is_silent():
        raise typer.Exit(follow(model))
    from aiocb.cli.serve import run_server

    raise typer.Exit(run_server(model, options))


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="owner/repo, owner/repo:Q4_K_M, owner/repo@revision, or a link.")],
    _debug: Debug = False,
) -> None:
    """Download a model from the hub, so that it starts at once and without a network."""
    from aiocb.cli import models

    raise typer.Exit(models.pull(model))


@app.command("list")
def list_(_debug: Debug = False) -> None:
    """Show the models that are on this machine."""
    from aiocb.cli import models

    models.list_models()


@app.command()
def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", autocompletion=complete_model, help="As `list` shows them."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Also what killed downloads have left.")] = False,
    _debug: Debug = False,
) -> None:
    """Remove models from this machine, with all that was made of them."""
    from aiocb.cli import models

    if not names and not unfinished:
        raise typer.BadParameter("name a model, or say --unfinished", param_hint="MODEL")
    models.remove(names or [], is_sure=yes, unfinished=unfinished)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Of a server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="AIOCB_API_KEY", help="Where the server asks for one.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds from one picture to the next.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures once, as JSON.")] = False,
) -> None:
    """Watch a server: requests, cache, tokens per second, latencies. Ctrl-C leaves."""
    from aiocb.cli.top import run_top

    raise typer.Exit(run_top(url, api_key, interval, once=once, as_json=as_json))


app.add_typer(bench, name="bench")


def _lines() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        return []
    return [line for line in sys.stdin.read().splitlines() if line.strip()]
