"""`aiocb chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aiocb.cli.answer import Answer
from aiocb.cli.reader import make_reader
from aiocb.cli.terminal import (
    INTERRUPTED,
    ModelOptions,
    context_len,
    on_interrupt,
    one_line,
    open_engine,
    printable,
    room_left,
)
from aiocb.cli.wrap import WordWrap
from aiocb.errors import ConfigError, InvalidRequest, RequestError
from aiocb.sampling_params import ModelDefaults, SamplingParams

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = ["Chat"]

_HELP = """\
/system TEXT      set the system message (without a text: remove it)
/temperature X    0 is greedy (without a number: the model's own)
/top_p X          nucleus sampling (without a number: the model's own)
/max N            most tokens of an answer (without a number: as many as fit)
/reset            forget the conversation
/save FILE        write the conversation: messages as JSON to a name that ends in .json, else text
/quit             leave (also Ctrl-D)
Ctrl-C stops an answer, twice leaves. Enter sends; Alt-Enter, or a \\ before Enter, begins a new line.
Pasted lines are one message. The arrow keys bring back what was sent before."""


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


_SETTINGS: dict[str, tuple[str, Callable[[str], float]]] = {
    "/temperature": ("temperature", float),
    "/top_p": ("top_p", float),
    "/max": ("max_new_tokens", _positive),
}


class Chat:
    """Reads messages, streams answers, keeps the conversation.

    Args:
        options: the model.
        system: the system message, or None.
        sampling: keywords of `Engine.stream`; None is unset.
    """

    def __init__(self, options: ModelOptions, system: str | None, **sampling: Any) -> None:
        self._options = options
        self._system = system
        self._sampling = sampling
        self._messages: list[dict[str, str]] = []
        self._first = 0  # of the messages that the model still sees
        self._saved: Path | None = None
        self._is_terminal = sys.stdout.isatty()

    @property
    def _preamble(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def run(self) -> int:
        """Chat until the user leaves; return the exit code: 1 when messages from a pipe were not (all) answered, or
        none from a terminal.

        Raises:
            ConfigError: the model cannot be loaded, or has no chat template.
        """
        read = make_reader()
        is_typed = sys.stdin is not None and sys.stdin.isatty()
        num_answered = num_failed = num_interrupts = 0
        with open_engine(self._options) as (run, engine):
            if getattr(engine.tokenizer, "chat_template", None) is None:
                raise ConfigError(
                    f"{self._options.model} has no chat template (a base model?); "
                    f"continue texts with: aiocb run --raw {self._options.model} 'Once upon a time'"
                )
            if is_typed:
                self._note(f"{self._options.model}: /help shows the commands, Ctrl-D leaves.")
            while num_interrupts < 2:
                try:
                    text = read().rstrip("\n")
                    num_interrupts = 0
                    if text.startswith("/"):
                        if not self._command(text):
                            break
                    elif text.strip():
                        num_interrupts = run(self._answer(engine, text))
                        num_answered += 1
                        if num_interrupts and not is_typed:
                            return INTERRUPTED
                except RequestError as error:
                    num_failed += 1
                    self._error(str(error))
                except EOFError:
                    break
                except KeyboardInterrupt:
                    if not is_typed:
                        raise
                    num_interrupts += 1
                    self._note("Ctrl-C once more, or Ctrl-D leaves.")
        if is_typed:
            return int(num_failed > 0 and not num_answered)
        if not num_answered and not num_failed:
            self._error("there was no message on standard input")
        return int(num_failed > 0 or not num_answered)

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _command(self, text: str) -> bool:
        """Obey a message that begins with a slash; False means leave."""
        name, *others = text.split(maxsplit=1)
        rest = "".join(others).strip()
        match name:
            case "/quit" | "/exit" | "/bye":
                return False
            case "/help":
                self._note(_HELP)
            case "/reset":
                self._messages.clear()
                self._first = 0
                self._note("The conversation is forgotten.")
            case "/system":
                self._system = rest or None
                self._note("The system message is set." if rest else "There is no system message now.")
            case "/save":
                self._save(rest)
            case command if command in _SETTINGS:
                self._set(command, rest)
            case command:
                self._error(f"unknown command {command}; /help shows what there is")
        return True

    def _set(self, command: str, text: str) -> None:
        name, parse = _SETTINGS[command]
        try:
            value = parse(text) if text else None
            SamplingParams(**{name: value}).resolve(ModelDefaults(1, 1 << 62))  # type: ignore[arg-type]
        except InvalidRequest as error:
            self._error(str(error))
        except ValueError:
            self._error(f"{command} takes a number, not {text}")
        else:
            unset = "unset" if name == "max_new_tokens" else "the model’s own"
            self._sampling[name] = value
            self._note(f"The {name} is {unset if value is None else f'{value:g}'} now.")

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        messages = [*self._preamble, *self._messages]
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
        else:
            text = "\n".join(f"{message['role']}:\n{message['content'].strip()}\n" for message in messages)
        try:
            # Only what this chat has written before is replaced.
            with path.open("w" if path == self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._error(f"/save FILE: {error}")
        else:
            self._saved = path
            self._note(f"Saved {len(messages)} messages in {path}.")

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, engine: Engine, text: str) -> int:
        """Stream the answer to a text; both join the conversation. Return how often Ctrl-C was pressed.

        Raises:
            RequestError: the request was refused or has failed.
        """
        question = {"role": "user", "content": text}
        answer = Answer()
        wrap = WordWrap(sys.stdout.write, lambda: shutil.get_terminal_size().columns)

        def show(text: str) -> None:
            if self._is_terminal:
                wrap.push(printable(text))
            else:
                sys.stdout.write(text)
            sys.stdout.flush()

        with on_interrupt(answer.interrupt):
            messages, limit = await self._fit(engine, question)
            try:
                await answer.read(engine, messages, {**self._sampling, "max_new_tokens": limit}, show)
            finally:
                wrap.flush()
                if answer.text or answer.finish_reason is not None:
                    print(flush=True)
        self._messages += [question, {"role": "assistant", "content": answer.text}]
        if self._is_terminal:
            end = "stopped, " if answer.num_interrupts else ""
            if answer.finish_reason == "length":
                end = "cut, " if limit == self._sampling["max_new_tokens"] else "cut at the end of the context, "
            first_s, later = answer.first_s or 0.0, answer.num_tokens - 1
            rate = later / (answer.last_s - first_s) if later > 0 and answer.last_s > first_s else 0.0
            self._note(f"[{end}{answer.num_tokens} tokens, {rate:.0f} tok/s, first after {first_s:.2f} s]")
        return answer.num_interrupts

    async def _fit(self, engine: Engine, question: dict[str, str]) -> tuple[list[dict[str, str]], int]:
        """The messages to send and the limit of the answer: what is left of the context, at most what was asked for.

        The oldest turns are left out, for good, where less than a quarter of the context would be left.

        Raises:
            InvalidRequest: the question does not fit, or was refused.
        """
        context = context_len(engine)
        wanted = self._sampling["max_new_tokens"] or context
        first = self._first
        while True:
            messages = [*self._preamble, *self._messages[first:], question]
            try:
                room = await room_left(engine, messages)
            except InvalidRequest:
                if first == len(self._messages):
                    raise
                room = 0
            if room >= min(wanted, context // 4) or first == len(self._messages):
                break
            first += 2
        if first > self._first:
            turns = (first - self._first) // 2
            self._note(f"[left out, for they do not fit the context any more: the oldest turns of the chat, {turns}]")
            self._first = first
        return messages, max(1, min(wanted, room))

    def _note(self, text: str) -> None:
        """Something of the program, not of the model: dim on a terminal."""
        typer.secho(printable(text), dim=True, err=not self._is_terminal)

    def _error(self, text: str) -> None:
        typer.secho(one_line(text), fg="red", err=True)
