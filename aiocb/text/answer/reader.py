"""An answer's text as it arrives, and where its parts go; the ground that the formats of calls stand on.

A format is written as if all of the text were there: a generator that yields wherever it needs more. What it decides
does not depend on where the text was cut, because every primitive waits until its own answer is certain.

```
text:  ....shown....|....undecided....|....not looked at yet....
                    mark              at
```
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Literal, NamedTuple, TypeVar

__all__ = ["Markers", "Part", "Reader", "Steps"]

_SPACE = re.compile(r"\s*")

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A piece of parsing: yields when it needs more text, returns its result."""


class Part(NamedTuple):
    """A piece of an answer; pieces are only ever added.

    Attributes:
        kind: `content` and `reasoning` are text; `call` begins a tool call, `arguments` goes on with its JSON text,
            `end` says that its arguments are complete.
        text: the piece, or the name of the function of a `call`.
        number: which call of the answer.
    """

    kind: Literal["content", "reasoning", "call", "arguments", "end"]
    text: str = ""
    number: int = 0


class Markers:
    """Literals that are looked for in a text which arrives in parts.

    Args:
        markers: non-empty texts.
    """

    __slots__ = ("_all", "_begun", "_longest")

    def __init__(self, markers: Iterable[str]) -> None:
        known = sorted(set(markers), key=len, reverse=True)
        self._all = re.compile("|".join(map(re.escape, known)) or "(?!)")
        self._begun = frozenset(marker[:size] for marker in known for size in range(1, len(marker)))
        self._longest = max(map(len, self._begun), default=0)

    def find(self, reader: Reader) -> tuple[int, str | None]:
        """Where the text behind the cursor holds the first marker, and which; without one, where one may yet begin."""
        text = reader.text
        found = self._all.search(text, reader.at)
        if found is not None:
            return found.start(), found.group()
        if not reader.has_ended:
            for size in range(min(self._longest, len(text) - reader.at), 0, -1):
                if text[-size:] in self._begun:
                    return len(text) - size, None
        return len(text), None


class Reader:
    """The text so far, a cursor, and the parts that are certain.

    Args:
        markers: what is never shown as content.

    Attributes:
        markers: as given.
        text, at: what is kept of the text, and the cursor.
        mark: up to here the text has been shown or dropped for good.
        has_ended: no more text follows.
        parts: what has been found and not been taken.
        num_calls: how many have begun.
    """

    __slots__ = ("_num_dropped", "at", "has_ended", "mark", "markers", "num_calls", "parts", "text")

    def __init__(self, markers: Markers) -> None:
        self.markers = markers
        self._num_dropped = 0
        self.text = ""
        self.at = 0
        self.mark = 0
        self.has_ended = False
        self.parts: list[Part] = []
        self.num_calls = 0

    @property
    def num_held(self) -> int:
        """Characters that nothing has been decided about."""
        return len(self.text) - self.mark

    def feed(self, text: str) -> None:
        """Add text, and let go of what is done. Positions in `text` change: no generator keeps one across a yield."""
        mark = self.mark
        self.text = self.text[mark:] + text
        self.at -= mark
        self._num_dropped += mark
        self.mark = 0

    @property
    def place(self) -> int:
        """The cursor, counted from the beginning of the answer: this may be kept across a yield."""
        return self._num_dropped + self.at

    def go_back(self, place: int) -> None:
        """Put the cursor where it was; not before `mark`."""
        self.at = place - self._num_dropped

    # ── what is certain ──────────────────────────────────────────────────────────────────────────────────────────

    def commit(self) -> None:
        """Everything before the cursor is done."""
        self.mark = self.at

    def show(self, kind: Literal["content", "reasoning"], end: int) -> None:
        """Show the text from the cursor to `end` and go there."""
        if end > self.at:
            self.parts.append(Part(kind, self.text[self.at : end]))
        self.at = self.mark = end

    def add_content(self, text: str) -> None:
        """Show a text; what is before the cursor is done."""
        self.parts.append(Part("content", text))
        self.commit()

    def add_reasoning(self, text: str) -> None:
        """The same with reasoning."""
        self.parts.append(Part("reasoning", text))
        self.commit()

    def begin_call(self, name: str) -> None:
        """Begin a call; the text before the cursor is done."""
        self.parts.append(Part("call", name, self.num_calls))
        self.num_calls += 1
        self.commit()

    def add_arguments(self, text: str) -> None:
        """Go on with the arguments of the latest call; the text before the cursor is done."""
        if text:
            self.parts.append(Part("arguments", text, self.num_calls - 1))
        self.commit()

    def end_call(self) -> None:
        """The arguments of the latest call are complete."""
        self.parts.append(Part("end", "", self.num_calls - 1))
        self.commit()

    # ── looking ahead ────────────────────────────────────────────────────────────────────────────────────────────

    def peek(self) -> Steps[str]:
        """The next character, "" at the end of the text."""
        while self.at >= len(self.text) and not self.has_ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Steps[str]:
        """Go behind white space; the next character."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or self.has_ended:
                return self.text[self.at : self.at + 1]
            yield

    def take(self, literal: str) -> Steps[bool]:
        """Go behind a literal if the text goes on with it."""
        size = len(literal)
        while True:
            found = self.text[self.at : self.at + size]
            if found == literal:
                self.at += size
                return True
            if self.has_ended or not literal.startswith(found):
                return False
            yield

    def take_one(self, literals: tuple[str, ...]) -> Steps[str | None]:
        """Go behind the first of some literals that the text goes on with; which it was."""
        for literal in literals:
            if (yield from self.take(literal)):
                return literal
        return None
