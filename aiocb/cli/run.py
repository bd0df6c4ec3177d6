"""`aiocb run`: several prompts at once, each in a live column."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiocb.cli.answer import Answer
from aiocb.cli.terminal import (
    INTERRUPTED,
    ModelOptions,
    on_interrupt,
    open_engine,
    room_left,
)
from aiocb.errors import AiocbError

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = ["Column", "Run", "summarize"]

_REFRESH_S = 1 / 12
_MAX_NEW_TOKENS = 256


@dataclass(slots=True, eq=False)
class Column(Answer):
    """One prompt and what has become of it."""

    number: int
    prompt: str
    temperature: float | None
    error: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def label(self) -> str:
        """Number and temperature."""
        return f"[{self.number}]" + ("" if self.temperature is None else f" (temperature {self.temperature:g})")


@dataclass(slots=True)
class Run:
    """Streams all prompts at once and shows them.

    Attributes:
        options: the model.
        columns: the prompts.
        system: a system message for all.
        raw: continue the prompts as text.
        sampling: keywords of `Engine.stream`; None is unset.
    """

    options: ModelOptions
    columns: list[Column]
    system: str | None
    raw: bool
    sampling: dict[str, Any]

    def run(self) -> int:
        """Run all prompts; return the exit code: 1 when any has failed, 130 after Ctrl-C."""
        with open_engine(self.options) as (run, engine):
            if getattr(engine.tokenizer, "chat_template", None) is None:
                self.raw = True
            started = time.perf_counter()
            run(self._stream_all(engine))
            seconds = time.perf_counter() - started
        print(summarize(self.columns, seconds))
        if self.columns[0].num_interrupts:
            return INTERRUPTED
        return int(any(column.error is not None for column in self.columns))

    async def _stream_all(self, engine: Engine) -> None:
        show = _show_live if sys.stdout.isatty() else _show_plain
        with on_interrupt(self._interrupt):
            async with asyncio.TaskGroup() as group:
                group.create_task(show(self.columns))
                for column in self.columns:
                    group.create_task(self._read(engine, column))

    def _interrupt(self) -> None:
        for column in self.columns:
            column.interrupt()

    async def _read(self, engine: Engine, column: Column) -> None:
        prompt: Any = column.prompt
        if not self.raw:
            system = [{"role": "system", "content": self.system}] if self.system else []
            prompt = [*system, {"role": "user", "content": prompt}]
        arguments = {"temperature": column.temperature, **self.sampling}
        try:
            if arguments["max_new_tokens"] is None:
                arguments["max_new_tokens"] = max(1, min(_MAX_NEW_TOKENS, await room_left(engine, prompt)))
            await column.read(engine, prompt, arguments)
        except AiocbError as error:
            column.error = str(error)
        finally:
            if column.error is None and column.finish_reason is None:
                column.finish_reason = "cancelled"
            column.done.set()


async def _show_live(columns: list[Column]) -> None:
    from aiocb.cli.columns import Columns

    view = Columns(columns)
    with view.live() as live:
        # A clock of its own: drawing the screen for every token would cost more than the tokens.
        while not all(column.done.is_set() for column in columns):
            live.update(view.render(), refresh=True)
            await asyncio.sleep(_REFRESH_S)
    view.print_all()


async def _show_plain(columns: list[Column]) -> None:
    """Print each answer as soon as it and those before it are complete."""
    for column in columns:
        await column.done.wait()
        ending = f"error: {column.error}" if column.error is not None else ""
        print(
            f"{column.label} {column.prompt}",
            *filter(None, (column.text.strip("\n"), ending)),
            "",
            sep="\n",
            flush=True,
        )


def summarize(columns: list[Column], seconds: float) -> str:
    """One line: prompts, tokens, tokens per second, time to the first token."""
    num_tokens = sum(column.num_tokens for column in columns)
    first = [column.first_s for column in columns if column.first_s is not None]
    parts = [
        f"{len(columns)} prompt{'s' if len(columns) > 1 else ''}, {num_tokens} tokens in {seconds:.2f} s",
        f"{num_tokens / seconds if seconds > 0 else 0.0:.0f} tok/s",
    ]
    if first:
        which = f" (median; slowest {max(first):.2f} s)" if len(first) > 1 else ""
        parts.append(f"first token after {statistics.median(first):.2f} s{which}")
    failed = sum(column.error is not None for column in columns)
    if failed:
        parts.append(f"{failed} failed")
    return " | ".join(parts)
