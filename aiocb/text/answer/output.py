"""The text of one output in which reasoning and tool calls are told apart from content."""

from __future__ import annotations

import secrets
import string
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from aiocb.outputs import ToolCallDelta
from aiocb.text.answer.dialect import AnswerPlan
from aiocb.text.answer.reader import Part
from aiocb.text.output import MARKS, AnswerDelta, TextOutput, merge_answers
from aiocb.text.pieces import Detokenizer
from aiocb.text.stop_strings import StopMatcher

__all__ = ["AnswerOutput"]

_ID_CHARACTERS = string.ascii_letters + string.digits
_NO_MARKS = dict.fromkeys(MARKS)


class AnswerOutput(TextOutput):
    """Splits an output's text by a plan; stop strings are searched in content only.

    A token waits until its text is decided, so that it goes with the text that shows it, or behind it.

    Args:
        detokenizer: yields the plan's markers even where they are special tokens, and marks (`MARKS`) for those that
            stop strings name.
        plan: what to look for.
        matcher, min_new_tokens, echo: see `TextOutput`.
        stop_names: stop strings as they were given, by their form with marks.
    """

    __slots__ = ("_calls", "_ends", "_num_fed", "_parser", "_plan", "_reasoning", "_stop_names")

    def __init__(
        self,
        detokenizer: Detokenizer,
        plan: AnswerPlan,
        matcher: StopMatcher | None = None,
        *,
        min_new_tokens: int = 0,
        echo: Sequence[int] = (),
        stop_names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detokenizer, matcher, min_new_tokens=min_new_tokens, echo=echo)
        self._shown = self._shown.translate(_NO_MARKS)
        self.is_plain = False
        self._plan = plan
        self._parser = plan.parser()
        self._stop_names = stop_names or {}
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_fed = 0
        self._ends: deque[int] = deque()  # where the text of each token ends that waits for its delivery

    def fork(self, matcher: StopMatcher | None) -> AnswerOutput:
        """See `TextOutput.fork`."""
        other = AnswerOutput(
            self.detokenizer.fork(),
            self._plan,
            matcher,
            min_new_tokens=self._min_new_tokens,
            stop_names=self._stop_names,
        )
        other._shown = self._shown
        return other

    def push(self, token_ids: Sequence[int]) -> str | None:
        """See `TextOutput.push`; where a call is to be the only one, its end is the end of the output."""
        parser = self._parser
        for token_id in token_ids:
            self.num_tokens += 1
            text = self.detokenizer.push((token_id,))
            self._num_fed += len(text)
            was_thinking = parser.is_thinking
            self._add(parser.push(text))
            self.num_reasoning_tokens += was_thinking or parser.is_thinking
            self._ends.append(self._num_fed)
            if self.has_ended:
                break
        return self._matched

    def flush(self) -> str | None:
        """See `TextOutput.flush`."""
        if not self.has_ended:
            self._add(self._parser.push(self.detokenizer.flush()))
            self._add(self._parser.flush())
            self._release()
        return self._matched

    def take_answer(self) -> AnswerDelta | None:
        """Reasoning and calls that have not been taken."""
        if not self._reasoning and not self._calls:
            return None
        reasoning, self._reasoning = self._reasoning, []
        calls, self._calls = self._calls, []
        return merge_answers([AnswerDelta("".join(reasoning), tuple(calls))])

    def take_ready(self, count: int) -> int:
        """See `TextOutput.take_ready`."""
        held = self._parser.num_held + (0 if self._matcher is None else self._matcher.num_held)
        decided = self._num_fed - (0 if self.has_ended else held)
        ready = 0
        while ready < count and self._ends[0] <= decided:
            self._ends.popleft()
            ready += 1
        return ready

    def _add(self, parts: Iterable[Part]) -> None:
        for kind, text, number in parts:
            if self.has_ended:
                return
            if kind == "content":
                self._add_content(text)
                continue
            self._release()
            if kind == "call":
                self._calls.append(ToolCallDelta(number, _make_id(), text, ""))
            elif kind == "end":
                self.has_ended = self._plan.ends_after_call
            else:
                text = text.translate(_NO_MARKS)
                if kind == "reasoning":
                    self._reasoning.append(text)
                else:
                    self._calls.append(ToolCallDelta(number, None, None, text))

    def _add_content(self, text: str) -> None:
        matcher = self._matcher
        if matcher is not None:
            if self.num_tokens < self._min_new_tokens:
                text = matcher.skip(text)
            else:
                text, found = matcher.push(text)
                if found is not None:
                    self._matched = self._stop_names.get(found, found)
                    self.has_ended = True
        self._shown += text.translate(_NO_MARKS)

    def _release(self) -> None:
        """No stop string goes on behind content."""
        if self._matcher is not None:
            self._shown += self._matcher.flush().translate(_NO_MARKS)


def _make_id() -> str:
    """An id that every template takes: some refuse others than nine letters and digits."""
    return "".join([secrets.choice(_ID_CHARACTERS) for _ in range(9)])
