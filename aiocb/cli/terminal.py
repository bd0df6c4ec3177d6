"""What the commands share: a quiet process, an engine with a loop, interrupts, and errors in one line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = [
    "ModelOptions",
    "build_engine",
    "on_interrupt",
    "open_engine",
    "printable",
    "quieten",
    "report_errors",
    "sampling_arguments",
]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

# Model output goes to a terminal: an escape sequence in it must not reach the terminal's interpreter.
_CONTROL = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how to load it."""

    model: str
    dtype: str = "auto"
    device: str | None = None
    int8: bool = False
    threads: int | None = None
    trust_remote_code: bool = False
    debug: bool = False


def quieten() -> None:
    """Silence the libraries' warnings and bars; a user's own settings of these variables win."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal in the C locale shows "?" instead of failing


def printable(text: str) -> str:
    """The text with control characters (escape sequences) made visible and harmless."""
    return text.translate(_CONTROL)


def sampling_arguments(**values: Any) -> dict[str, Any]:
    """Keywords for `Engine.stream`: the values that are set."""
    return {name: value for name, value in values.items() if value is not None}


def build_engine(options: ModelOptions, progress: Callable[[str, float], None] | None) -> Engine:
    """Return the engine for the options; nothing is loaded yet."""
    import aiocb

    return aiocb.Engine.from_pretrained(
        options.model,
        config=aiocb.EngineConfig(num_threads=options.threads),
        dtype=options.dtype,
        device=options.device,
        quantization="int8" if options.int8 else None,
        progress=progress,
        **({"trust_remote_code": True} if options.trust_remote_code else {}),
    )


@contextlib.contextmanager
def open_engine(options: ModelOptions) -> Iterator[tuple[asyncio.Runner, Engine]]:
    """Load the model behind a spinner; yield a loop (not running) and the running engine.

    The loop stands still between the calls of `runner.run`. So a chat can read its next line in the main thread with
    the ordinary line editor and the ordinary Ctrl-C, and no thread has to be stuck in `input` when the program ends.
    """
    if options.debug:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        with _spinner(f"Loading {options.model}") as progress:
            engine = build_engine(options, progress)
            runner.run(engine.__aenter__())
        try:
            yield runner, engine
        finally:
            runner.run(engine.__aexit__(None, None, None))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextlib.contextmanager
def _spinner(title: str) -> Iterator[Callable[[str, float], None] | None]:
    """A spinner on standard error while a model loads; nothing when that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{escape(title)} ...") as status:

        def progress(stage: str, fraction: float) -> None:
            share = f" {fraction:.0%}" if 0 < fraction < 1 else ""
            status.update(f"{escape(title)} ({escape(stage)}{share}) ...")

        yield progress


@contextlib.contextmanager
def on_interrupt(callback: Callable[[], None]) -> Iterator[None]:
    """Call back on the running loop for every Ctrl-C inside, instead of cancelling the task."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def report_errors(is_debug: bool) -> Iterator[None]:
    """Turn an exception into one line on standard error and an exit code.

    Raises:
        typer.Exit: 1 after an error, 130 after Ctrl-C.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _leave_at_once(INTERRUPTED)
    except BrokenPipeError:
        # The reader (`| head`) has left. Python would complain about it once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except Exception as error:
        if is_debug:
            raise
        while isinstance(error, ExceptionGroup):  # of a task group: they all have one cause
            error = error.exceptions[0]
        print(f"aiocb: {printable(str(error)) or type(error).__name__}", file=sys.stderr)
        raise typer.Exit(1) from None


def _leave_at_once(code: int) -> None:
    """Exit without waiting for a daemon thread that may be in the middle of loading a model."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
