"""From sampled tokens to deltas: text, stop strings, intervals, back-pressure. Worker thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aiocb.engine.slot import Delta, End, Lane, Slot
from aiocb.outputs import FinishReason, RequestMetrics, TokenLogprobs, Usage
from aiocb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aiocb.engine.tracing import Trace
    from aiocb.scheduler.request import Request
    from aiocb.text.output import TextOutput
    from aiocb.text.pieces import Detokenizer

__all__ = ["OutputState", "Submission"]


@dataclass(slots=True, eq=False)
class Submission:
    """Everything that goes into the worker's inbox for one stream.

    Attributes:
        slot, lanes: where its output goes.
        prompt_token_ids: the prompt, checked.
        sampling: resolved parameters.
        max_output_tokens: most output tokens, at least 1.
        deadline, queue_deadline: absolute, in the core's clock.
        stream_interval: tokens per delivery; None delivers once, at the end.
        max_unread_tokens: back-pressure bound, None is none.
        on_unread: what to do beyond the bound.
        drop_output: compute the prompt only (`max_new_tokens=0` with prompt log-probabilities).
        texts: the text of each lane; empty when nobody wants text.
        trace: makes spans of it; None where nobody traces.
        adapter: name of one that is loaded; None is the model alone.
    """

    slot: Slot
    lanes: tuple[Lane, ...]
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_output_tokens: int
    submitted_at: float
    priority: int = 0
    deadline: float | None = None
    queue_deadline: float | None = None
    cache_salt: str | None = None
    stream_interval: int | None = 1
    max_unread_tokens: int | None = None
    on_unread: Literal["pause", "cancel"] = "pause"
    drop_output: bool = False
    texts: tuple[TextOutput, ...] = ()
    trace: Trace | None = None
    adapter: str | None = None


class OutputState:
    """One lane's output on the worker's side: what was sampled, but not yet delivered."""

    __slots__ = (
        "detokenizer",
        "drop_output",
        "interval",
        "is_plain",
        "lane",
        "logprobs",
        "max_unread",
        "num_cut",
        "on_unread",
        "prompt_logprobs",
        "slot",
        "text",
        "token_ids",
        "trace",
    )

    def __init__(self, submission: Submission, lane: Lane) -> None:
        self.slot = submission.slot
        self.trace = submission.trace
        self.lane = lane
        self.interval = submission.stream_interval
        self.max_unread = submission.max_unread_tokens
        self.on_unread = submission.on_unread
        self.drop_output = submission.drop_output
        self.text: TextOutput | None = submission.texts[lane.index] if submission.texts else None
        self.detokenizer: Detokenizer | None = None if self.text is None else self.text.detokenizer
        self.is_plain = self.interval == 1 and not self.drop_output and (self.text is None or self.text.is_plain)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_cut = 0  # tokens of the last step that came after the one that completed a stop string
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if submission.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has none, and a prompt may have no other

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keep prompt log-probabilities until the end."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs.extend(logprobs)

    def add(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> str | None:
        """Take new tokens; return the stop string that they complete, if any. Tokens after it are dropped."""
        text = self.text
        if self.drop_output:
            return None
        num_before = 0 if text is None else text.num_tokens
        try:
            return None if text is None else text.push(token_ids)
        finally:  # also where a detokenizer raises: what came before is delivered
            count = len(token_ids) if text is None else text.num_tokens - num_before
            self.num_cut = len(token_ids) - count
            self.token_ids.extend(token_ids[:count])
            if logprobs is not None:
                self.logprobs.extend(logprobs[:count])

    @property
    def has_ended(self) -> bool:
        """The text has ended by itself: by a stop string, or by a call that is to be the only one."""
        return self.text is not None and self.text.has_ended

    def flush(self) -> str | None:
        """Release text that was held back; return the stop string that the text ends with, if any."""
        return None if self.text is None else self.text.flush()

    def take(self, end: End | None) -> Delta:
        """Everything not yet delivered, as one delta; before the end, without tokens whose text is undecided."""
        text = self.text
        count = len(self.token_ids)
        if text is not None and end is None:
            count = text.take_ready(count)
        token_ids = tuple(self.token_ids[:count])
        logprobs = tuple(self.logprobs[:count]) or None
        self.slot.num_sent += count
        del self.token_ids[:count], self.logprobs[:count]
        if text is None:
            return Delta(self.lane, token_ids, "", logprobs, end)
        return Delta(self.lane, token_ids, text.take(), logprobs, end, text.take_answer())

    def end(
        self,
        request: Request,
        now: float,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
    ) -> End:
        """The terminal event, with counts and times."""
        submitted, scheduled, first = request.submitted_at, request.first_scheduled_at, request.first_token_at
        assert submitted is not None
        num_output_tokens = 0 if self.drop_output else request.num_output_tokens
        if error is not None and num_output_tokens:
            error.add_note(f"{num_output_tokens} tokens had been produced")
        return End(
            reason,
            stop_reason,
            Usage(
                request.num_prompt_tokens,
                num_output_tokens,
                request.num_cached_tokens,
                0 if self.text is None else self.text.num_reasoning_tokens,
            ),
            RequestMetrics(
                None if scheduled is None else scheduled - submitted,
                None if first is None else first - submitted,
                now - submitted,
                request.num_preemptions,
            ),
            error,
            None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )
