"""One machine for streamed and whole answers: text goes in, parts come out, the same for every cut of the text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from aiocb.text.answer.calls import Calls, Parser
from aiocb.text.answer.formats import CallFormat
from aiocb.text.answer.harmony import read_harmony
from aiocb.text.answer.reader import Markers, Part, Reader, Steps

__all__ = ["AnswerParser", "ThoughtMarks"]


class ThoughtMarks(NamedTuple):
    """What stands before and behind a model's reasoning."""

    opener: str
    closer: str


class AnswerParser:
    """Splits one answer into content, reasoning and tool calls; see `Part`.

    Parts are only ever added. What may still become markup is held back, and released when it does not. Joined parts
    do not depend on how the text was cut. Nothing that a model may write raises.

    Args:
        thoughts: the marks of reasoning, or None.
        is_thinking: the answer begins within reasoning, because the prompt has opened it.
        call_format: how calls are written, or None where none are looked for.
        names: of the functions that may be called; whatever names another one is text.
        schemas: the JSON schemas of their parameters.
    """

    def __init__(
        self,
        thoughts: ThoughtMarks | None = None,
        *,
        is_thinking: bool = False,
        call_format: CallFormat | None = None,
        names: Collection[str] = (),
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        self._thoughts = thoughts
        self._format = call_format
        self._calls = Calls(names, schemas or {})
        markers = [*(thoughts or ()), *(call_format.markers if call_format is not None else ())]
        self._reader = Reader(Markers(markers))
        self._closer = Markers([] if thoughts is None else [thoughts.closer])
        self.is_thinking = is_thinking
        if call_format is not None and call_format.has_messages:
            self._steps = read_harmony(self._reader, self._calls, self._set_thinking)
        else:
            self._steps = self._run(is_thinking)
        next(self._steps)

    @property
    def num_held(self) -> int:
        """Characters of the text that have been neither shown nor dropped."""
        return self._reader.num_held

    def push(self, text: str) -> Sequence[Part]:
        """Take further text; return what is certain now."""
        if text:
            self._reader.feed(text)
            next(self._steps)
        return self._take()

    def flush(self) -> Sequence[Part]:
        """The text has ended; return the rest."""
        self._reader.has_ended = True
        for _ in self._steps:  # it does not yield any more
            pass
        self._reader.commit()
        return self._take()

    def _set_thinking(self, is_thinking: bool) -> None:
        self.is_thinking = is_thinking

    def _take(self) -> Sequence[Part]:
        parts = self._reader.parts
        if parts:
            self._reader.parts = []
        return parts

    def _run(self, is_thinking: bool) -> Steps[None]:
        reader, thoughts, calls = self._reader, self._thoughts, self._format
        yield
        if is_thinking:
            yield from self._think()
        if calls is not None and calls.starts is not None:
            yield from self._try(calls.starts, reader.place)
        while True:
            end, marker = reader.markers.find(reader)
            reader.show("content", end)
            if marker is None:
                if reader.has_ended:
                    return
                yield
                continue
            start = reader.place
            reader.at += len(marker)
            if thoughts is not None and marker == thoughts.opener:
                yield from self._think()
                if calls is not None and calls.starts is not None:
                    yield from self._try(calls.starts, reader.place)
            elif calls is not None and marker in calls.openers:
                yield from self._try(calls.openers[marker], start)
            else:
                yield from self._end_markup()

    def _think(self) -> Steps[None]:
        """Reasoning, up to its closer; without the white space around it, which belongs to the marks."""
        reader = self._reader
        assert self._thoughts is not None
        self.is_thinking = True
        yield from reader.skip_space()
        if (yield from reader.take(self._thoughts.opener)):  # again, where the prompt has opened it
            yield from reader.skip_space()
        reader.commit()
        while True:
            end, marker = self._closer.find(reader)
            reader.show("reasoning", reader.at + len(reader.text[reader.at : end].rstrip()))
            if marker is not None:
                reader.at = end + len(marker)
                self.is_thinking = False
                yield from self._end_markup()
                return
            if reader.has_ended:
                reader.at = end
                reader.commit()
                return
            yield

    def _end_markup(self) -> Steps[None]:
        """Drop what is before the cursor, and the white space that follows."""
        reader = self._reader
        reader.commit()
        yield from reader.skip_space()
        reader.commit()

    def _try(self, parser: Parser, start: int) -> Steps[None]:
        """Read calls from the cursor on; where there is none, the text stays text.

        Args:
            parser: for what follows.
            start: where the opener stands; the cursor, where there is none.
        """
        reader = self._reader
        body = reader.place
        if (yield from parser(reader, self._calls)):
            yield from self._end_markup()
            return
        reader.go_back(body)
        opener = reader.text[reader.at - (body - start) : reader.at]
        if opener in _SPOKEN:
            character = yield from reader.skip_space()
            if character and character not in _SPOKEN[opener]:  # somebody writes about it
                reader.go_back(start)
                reader.show("content", reader.at + len(opener))
                return
            reader.go_back(body)
        reader.commit()


_SPOKEN = {"<tool_call>": "{[<", "<function=": ""}
"""Openers that are ordinary text in many vocabularies, and what follows them where a call was meant."""
