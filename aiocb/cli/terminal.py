"""What the commands share: a quiet process, an engine with a loop, the room for an answer, interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from aiocb.bench.options import Dtype, Model, Quantization
from aiocb.errors import AiocbError, ConfigError

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = [
    "INTERRUPTED",
    "ModelOptions",
    "Run",
    "build_engine",
    "context_len",
    "follow",
    "is_silent",
    "loading",
    "num_processes",
    "on_interrupt",
    "one_line",
    "open_engine",
    "printable",
    "quieten",
    "room_left",
]

T = TypeVar("T")

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

# Model output goes to a terminal: an escape sequence in it must not reach the terminal's interpreter.
_CONTROL = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; chosen when not given.", rich_help_panel="Model")]
Threads = Annotated[int | None, typer.Option(help="Threads of the CPU kernels.", rich_help_panel="Model")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel="Model")
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how to load it; the fields are options of the commands."""

    model: Model
    dtype: Dtype = "auto"
    device: Device = None
    quantization: Quantization = None
    threads: Threads = None
    trust_remote_code: Trust = False


def quieten() -> None:
    """Silence the libraries' warnings and bars; a user's own settings of these variables win."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_VERBOSITY", "error"),
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


def one_line(text: str) -> str:
    """The text of an error, harmless and without line ends."""
    return printable(" ".join(text.split()))


def build_engine(options: ModelOptions, progress: Callable[[str, float], None] | None, **settings: Any) -> Engine:
    """Return the engine for the options; nothing is loaded yet. settings: further ones of `EngineConfig`."""
    import aiocb

    extra: dict[str, Any] = {}
    if options.trust_remote_code:
        extra["trust_remote_code"] = True
    if num_processes() > 1:
        extra["distributed_config"] = aiocb.DistributedConfig()
    return aiocb.Engine.from_pretrained(
        options.model,
        config=aiocb.EngineConfig(num_threads=options.threads, **settings),
        dtype=options.dtype,
        device=options.device,
        quantization=options.quantization,
        progress=progress,
        **extra,
    )


def num_processes() -> int:
    """How many processes `torchrun` has started for this program; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_silent() -> bool:
    """True where another of these processes takes the prompts and prints."""
    return num_processes() > 1 and os.environ.get("RANK", "0") != "0"


def follow(options: ModelOptions) -> int:
    """Run this process's share of the model until the process that prints has ended; return the exit code.

    Ctrl-C reaches all processes; what it means, that one decides.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    async def main() -> None:
        async with build_engine(options, None):
            pass

    with on_interrupt(lambda: None):
        asyncio.run(main())
    return 0


class Run(Protocol):
    """Runs a coroutine to its end on a loop that stands still otherwise."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Ctrl-C cancels it.

        Raises:
            KeyboardInterrupt: it was pressed, and nothing inside has dealt with it.
        """


@contextlib.contextmanager
def open_engine(options: ModelOptions) -> Iterator[tuple[Run, Engine]]:
    """Load the model behind a bar; yield what runs coroutines, and the running engine.

    The loop stands still between the calls of `Run`. So a chat can read its next line in the main thread with its line
    editor and the ordinary Ctrl-C, and no thread has to be stuck in `input` when the program ends.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    runner = asyncio.Runner(loop_factory=_loop_factory())
    run = functools.partial(_run, runner)
    try:
        with loading(f"Loading {options.model}") as progress:
            try:
                engine = build_engine(options, progress)
                run(engine.__aenter__())
            except AiocbError:
                raise
            except Exception as error:  # whatever a library has against the model or the device
                raise ConfigError(f"cannot load {options.model}: {type(error).__name__}: {error}") from error
        try:
            yield run, engine
        finally:
            run(engine.__aexit__(None, None, None))
    finally:
        with on_interrupt(lambda: None):
            runner.close()


def _run(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, T]) -> T:
    """See `Run`. An exception that a signal raises between two callbacks would leave the loop unusable."""
    task: asyncio.Task[Any] | None = None
    is_pressed = False

    async def main() -> T:
        nonlocal task
        task = asyncio.current_task()
        if is_pressed:
            coroutine.close()
            raise asyncio.CancelledError
        return await coroutine

    def interrupt() -> None:
        nonlocal is_pressed
        is_pressed = True
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    with on_interrupt(interrupt):
        try:
            result = runner.run(main())
        except asyncio.CancelledError:
            if not is_pressed:
                raise
    if is_pressed:
        raise KeyboardInterrupt
    return result


def context_len(engine: Engine) -> int:
    """The most tokens, prompt and answer together, that one request of a running engine can have."""
    return engine.max_request_tokens


async def room_left(engine: Engine, prompt: Any) -> int:
    """How many tokens fit behind a prompt.

    Raises:
        InvalidRequest: it was refused, or is too long by itself.
    """
    nothing = await engine.generate(prompt, max_new_tokens=0)
    return context_len(engine) - nothing.usage.num_prompt_tokens


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextlib.contextmanager
def loading(title: str) -> Iterator[Callable[[str, float], None] | None]:
    """How far loading is, on standard error: a bar for each stage that has one; nothing when that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        task, shown = bars.add_task(f"{escape(title)} ...", total=None), ""

        def progress(stage: str, fraction: float) -> None:
            nonlocal shown
            if stage != shown:
                shown = stage
                bars.reset(task, total=None, description=f"{escape(title)} ({escape(stage)})")
            if 0 < fraction < 1:
                bars.update(task, total=1.0, completed=fraction)

        yield progress


@contextlib.contextmanager
def on_interrupt(callback: Callable[[], None]) -> Iterator[None]:
    """Call back for every Ctrl-C inside, instead of cancelling the task.

    At once, between two instructions of the main thread, and not as a callback of the loop: that one would be lost when
    the loop is about to stop.
    """
    previous = signal.signal(signal.SIGINT, lambda *_: callback())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
