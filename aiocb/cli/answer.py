"""One answer as it arrives: its text, its figures, and what Ctrl-C does to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine
    from aiocb.engine.stream import Stream
    from aiocb.outputs import Chunk

__all__ = ["Answer"]


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """What has come of a request so far.

    Attributes:
        first_s, last_s: seconds to the first and to the latest token.
        num_interrupts: how often Ctrl-C was pressed.
        has_thought: there was reasoning, which is shown and no part of `text`.
    """

    text: str = ""
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    finish_reason: str | None = None
    num_interrupts: int = 0
    has_thought: bool = False
    stream: Stream | None = None

    async def read(
        self, engine: Engine, prompt: Any, arguments: dict[str, Any], show: Callable[[str], object] | None = None
    ) -> None:
        """Stream the answer; None among the arguments is unset.

        Raises:
            RequestError: the request was refused or has failed.
        """
        started = time.perf_counter()
        self.stream = engine.stream(prompt, **{name: value for name, value in arguments.items() if value is not None})
        async with self.stream as stream:
            if self.num_interrupts:
                stream.finish()  # pressed before there was anything to finish
            async for chunk in stream:
                if chunk.token_ids:
                    self.last_s = time.perf_counter() - started
                    self.first_s = self.first_s or self.last_s
                self.num_tokens += len(chunk.token_ids)
                if show is not None:
                    show(self._shown(chunk))
                self.text += chunk.text
                self.finish_reason = chunk.finish_reason

    def _shown(self, chunk: Chunk) -> str:
        """What is new for a reader: reasoning, too, with an empty line behind it."""
        if chunk.reasoning_content:
            self.has_thought = True
        is_over = self.has_thought and not self.text and bool(chunk.text)
        between = "\n\n" if is_over else ""
        return chunk.reasoning_content + between + chunk.text

    def interrupt(self) -> None:
        """First Ctrl-C: end with the next step and show what is there. Second: do not even wait for that."""
        self.num_interrupts += 1
        if self.stream is not None:
            self.stream.finish() if self.num_interrupts == 1 else self.stream.close()
