"""The text of one output: detokenizer, stop strings and echo in one place. No threads, no event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from aiocb.outputs import ToolCallDelta
from aiocb.text.pieces import Detokenizer
from aiocb.text.stop_strings import StopMatcher

__all__ = ["MARKS", "AnswerDelta", "Marking", "TextOutput", "merge_answers"]

MARKS = range(0xD800, 0xE000)
"""Code points that stand for special tokens in stop strings: halves of surrogate pairs, which no text contains."""


class Marking(NamedTuple):
    """What a matcher needs whose stop strings name special tokens that the text leaves out.

    Attributes:
        detokenizer: yields the text with a mark (`MARKS`) for each special token that a stop string names.
        names: the stop strings as they were given, by their form with marks.
    """

    detokenizer: Detokenizer
    names: Mapping[str, str]


class AnswerDelta(NamedTuple):
    """What is new of an answer besides its text; see `Chunk`."""

    reasoning_content: str
    tool_calls: tuple[ToolCallDelta, ...]


class TextOutput:
    """Turns one output's tokens into text that may be shown.

    `"".join(every take())` equals `tokenizer.decode` of the output, cut at the stop string that matched; with an echo
    it equals `decode(prompt + output)`, cut in the same way.

    A stop string counts with the token that completes it: text that is complete before `min_new_tokens` tokens ends
    nothing, wherever it stands, and what began before and is complete later does. What the end of the output releases
    (half a character, a byte run) counts with the last token.

    Args:
        detokenizer: a fresh one; it is used up.
        matcher: of this output, or None.
        min_new_tokens: from so many tokens on stop strings count.
        echo: the prompt's tokens; their text comes first and is not searched.
        marking: where stop strings name special tokens that the text leaves out: the matcher sees this text instead.

    Attributes:
        detokenizer: for whoever pushes to it directly, which is right while `is_plain`.
        num_tokens: output tokens so far, up to the one that completed a stop string: what was pushed behind it does
            not belong to the output.
        num_reasoning_tokens: of these, those within reasoning.
        has_ended: a stop string was completed, or what else ends the output by itself.
    """

    __slots__ = (
        "_due",
        "_marking",
        "_matched",
        "_matcher",
        "_min_new_tokens",
        "_shown",
        "_waiting",
        "detokenizer",
        "has_ended",
        "is_plain",
        "num_reasoning_tokens",
        "num_tokens",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None = None,
        *,
        min_new_tokens: int = 0,
        echo: Sequence[int] = (),
        marking: Marking | None = None,
    ) -> None:
        self.detokenizer = detokenizer
        self.is_plain = matcher is None and not echo
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.has_ended = False
        self._matcher = matcher
        self._matched: str | None = None
        self._min_new_tokens = min_new_tokens
        self._shown = detokenizer.push(echo) if echo else ""
        self._marking = marking
        self._waiting = ""  # with marks: text that the matcher has not passed yet
        self._due = 0  # with marks: characters that it has passed, and that have not come yet
        if marking is not None and echo:
            marking.detokenizer.push(echo)

    def fork(self, matcher: StopMatcher | None) -> TextOutput:
        """Return one for another sample of the same prompt; only before the first token."""
        other = TextOutput(self.detokenizer.fork(), matcher, min_new_tokens=self._min_new_tokens)
        other.is_plain, other._shown = self.is_plain, self._shown
        if self._marking is not None:
            other._marking = self._marking._replace(detokenizer=self._marking.detokenizer.fork())
        return other

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Take further tokens; return the stop string that they complete, if any."""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            self._shown += self.detokenizer.push(token_ids)
            return None
        marking = self._marking
        for token_id in token_ids:
            self.num_tokens += 1
            ids = (token_id,)
            text = self.detokenizer.push(ids)
            self._search(self._matcher, text, text if marking is None else marking.detokenizer.push(ids))
            if self._matched is not None:
                break
        return self._matched

    def flush(self) -> str | None:
        """End the output: release what is held; return the stop string that it ends with, if any."""
        matcher, marking = self._matcher, self._marking
        text = self.detokenizer.flush()
        if matcher is None:
            self._shown += text
        elif self._matched is None:
            self._search(matcher, text, text if marking is None else marking.detokenizer.flush())
            if self._matched is None:
                self._shown += matcher.flush() if marking is None else self._waiting
        return self._matched

    def take(self) -> str:
        """Everything that may be shown and has not been taken."""
        text, self._shown = self._shown, ""
        return text

    def take_answer(self) -> AnswerDelta | None:
        """Reasoning and calls that have not been taken."""
        return None

    def take_ready(self, count: int) -> int:
        """How many of the first `count` tokens that wait for delivery may go: those whose text is decided."""
        return count

    def _search(self, matcher: StopMatcher, text: str, searched: str) -> None:
        """Show what may be shown of `text`, now that the matcher has seen `searched`."""
        if self.num_tokens < self._min_new_tokens:
            passed, matched = matcher.skip(searched), None
        else:
            passed, matched = matcher.push(searched)
        marking = self._marking
        if marking is None:
            self._shown += passed
            self._matched = matched
            self.has_ended = matched is not None
            return
        self._waiting += text
        self._due += sum(ord(character) not in MARKS for character in passed)
        self.has_ended = matched is not None
        if matched is not None:
            self._matched = marking.names[matched]
            self._waiting += self.detokenizer.flush()
        shown, self._waiting = self._waiting[: self._due], self._waiting[self._due :]
        self._due -= len(shown)
        self._shown += shown


def merge_answers(answers: Sequence[AnswerDelta]) -> AnswerDelta:
    """Several deltas as one: of each call its head, if it is there, and one piece of its arguments."""
    if not answers:
        return _NOTHING
    merged: list[ToolCallDelta] = []
    pieces: list[str] = []
    for delta in chain.from_iterable([answer.tool_calls for answer in answers]):
        if delta.name is None and pieces and merged[-1].index == delta.index:
            pieces.append(delta.arguments)
            continue
        if pieces:
            merged[-1] = replace(merged[-1], arguments="".join(pieces))
        merged.append(delta)
        pieces = [delta.arguments] if delta.name is None else []
    if pieces:
        merged[-1] = replace(merged[-1], arguments="".join(pieces))
    return AnswerDelta("".join([answer.reasoning_content for answer in answers]), tuple(merged))


_NOTHING = AnswerDelta("", ())
