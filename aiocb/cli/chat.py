"""`aiocb chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from aiocb.cli.terminal import ModelOptions, on_interrupt, open_engine, printable, sampling_arguments
from aiocb.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = ["Chat"]

_HELP = """\
/system TEXT      set the system message (without a text: remove it)
/temperature X    0 is greedy (without a number: the model's own)
/reset            forget the conversation
/quit             leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


class Chat:
    """Reads lines, streams answers, keeps the conversation.

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
        self._is_terminal = sys.stdout.isatty()

    def run(self) -> None:
        """Chat until the user leaves.

        Raises:
            ConfigError: the model cannot be loaded, or has no chat template.
        """
        with open_engine(self._options) as (runner, engine):
            if getattr(engine.tokenizer, "chat_template", None) is None:
                raise ConfigError(
                    f"{self._options.model} has no chat template (a base model?); "
                    f"continue texts with: aiocb run --raw {self._options.model} 'Once upon a time'"
                )
            self._note(f"{self._options.model}: /help shows the commands, Ctrl-D leaves.")
            while (line := self._read()) is not None:
                if not line.strip():
                    continue
                if line.startswith("/"):
                    if not self._command(line):
                        return
                    continue
                try:
                    runner.run(self._answer(engine, line))
                except RequestError as error:
                    self._error(str(error))

    def _read(self) -> str | None:
        """The next line, or None at the end of input. Ctrl-C begins the line anew."""
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            import readline  # noqa: F401  (gives input() editing and history)
        lines: list[str] = []
        while True:
            try:
                line = input(("... " if lines else "> ") if is_interactive else "")
            except EOFError:
                if is_interactive:
                    print()
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                print()
                self._note("/quit or Ctrl-D leaves.")
                lines = []
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _command(self, line: str) -> bool:
        """Obey a line that begins with a slash; False means leave."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name == "/reset":
            self._messages.clear()
            self._note("The conversation is forgotten.")
        elif name == "/system":
            self._system = rest or None
            self._note("The system message is set." if rest else "There is no system message now.")
        elif name == "/temperature":
            self._set_temperature(rest)
        elif name == "/help":
            self._note(_HELP)
        else:
            self._error(f"unknown command {name}; /help shows what there is")
        return True

    def _set_temperature(self, text: str) -> None:
        try:
            value = float(text) if text else None
        except ValueError:
            value = -1.0
        if value is not None and not 0 <= value < float("inf"):
            self._error(f"the temperature must be a number from 0 up, not {text}")
            return
        self._sampling["temperature"] = value
        self._note(f"The temperature is {'the model’s own' if value is None else f'{value:g}'} now.")

    async def _answer(self, engine: Engine, line: str) -> None:
        """Stream the answer to a line; both join the conversation once there is an answer.

        Raises:
            RequestError: the request was refused or has failed.
        """
        question = {"role": "user", "content": line}
        system = [{"role": "system", "content": self._system}] if self._system else []
        arguments = sampling_arguments(**self._sampling)
        texts: list[str] = []
        started = time.perf_counter()
        first_s = 0.0
        num_tokens = num_interrupts = 0
        reason = None
        stream = engine.stream([*system, *self._messages, question], **arguments)

        def interrupt() -> None:
            # The first press ends the answer with the next step; should a step take long, the second does not wait.
            nonlocal num_interrupts
            num_interrupts += 1
            stream.finish() if num_interrupts == 1 else stream.close()

        with on_interrupt(interrupt):
            try:
                async with stream:
                    if num_interrupts:
                        stream.finish()  # pressed before there was anything to finish
                    async for chunk in stream:
                        if chunk.token_ids and not num_tokens:
                            first_s = time.perf_counter() - started
                        num_tokens += len(chunk.token_ids)
                        reason = chunk.finish_reason
                        texts.append(chunk.text)
                        self._write(chunk.text)
            finally:
                if texts:
                    print(flush=True)
        seconds = time.perf_counter() - started
        self._messages += [question, {"role": "assistant", "content": "".join(texts)}]
        end = "stopped, " if num_interrupts else "cut, " if reason == "length" else ""
        rate = (num_tokens - 1) / (seconds - first_s) if num_tokens > 1 and seconds > first_s else 0.0
        self._note(f"[{end}{num_tokens} tokens, {rate:.0f} tok/s, first after {first_s:.2f} s]", only_terminal=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(printable(text) if self._is_terminal else text)
        sys.stdout.flush()

    def _note(self, text: str, *, only_terminal: bool = False) -> None:
        """Something of the program, not of the model: dim on a terminal."""
        if self._is_terminal:
            print(f"\x1b[2m{printable(text)}\x1b[0m")
        elif not only_terminal:
            print(text, file=sys.stderr)

    def _error(self, text: str) -> None:
        print(f"\x1b[31m{printable(text)}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr)
