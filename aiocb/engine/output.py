"""From sampled tokens to deltas: text, stop strings, intervals, back-pressure. Worker thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aiocb.engine.slot import Delta, End, Lane, Slot
from aiocb.outputs import FinishReason, RequestMetrics, TokenLogprobs, Usage
from aiocb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aiocb.scheduler.request import Request
    from aiocb.text.detokenizer import Detokenizer, StopMatcher

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
    make_detokenizer: Callable[..., Detokenizer] | None = None


class OutputState:
    """One lane's output on the worker's side: what was sampled, but not yet delivered."""

    __slots__ = (
        "detokenizer",
        "drop_output",
        "interval",
        "is_plain",
        "lane",
        "logprobs",
        "matcher",
        "max_unread",
        "min_new_tokens",
        "on_unread",
        "prompt_logprobs",
        "slot",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        submission: Submission,
        lane: Lane,
        make_matcher: Callable[[Sequence[str], bool], StopMatcher],
    ) -> None:
        sampling = submission.sampling
        self.slot = submission.slot
        self.lane = lane
        self.interval = submission.stream_interval
        self.max_unread = submission.max_unread_tokens
        self.on_unread = submission.on_unread
        self.drop_output = submission.drop_output
        self.detokenizer: Detokenizer | None = None
        if submission.make_detokenizer is not None:
            self.detokenizer = submission.make_detokenizer(skip_special_tokens=bool(sampling.skip_special_tokens))
        self.matcher: StopMatcher | None = None
        if sampling.stop:
            self.matcher = make_matcher(sampling.stop, sampling.include_stop_str_in_output)
        self.is_plain = self.interval == 1 and self.matcher is None and not self.drop_output
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.min_new_tokens = sampling.min_new_tokens or 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keep prompt log-probabilities until the end; the first prompt token has none."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None]
        self.prompt_logprobs.extend(logprobs)

    def add(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None, num_output_tokens: int
    ) -> str | None:
        """Take new tokens; return the stop string that they complete, if any.

        `num_output_tokens` includes the new ones: no stop string matches before `min_new_tokens`.
        """
        if self.drop_output:
            return None
        self.token_ids.extend(token_ids)
        if logprobs is not None:
            self.logprobs.extend(logprobs)
        if self.detokenizer is None:
            return None
        text = self.detokenizer.push(token_ids)
        if self.matcher is None or num_output_tokens < self.min_new_tokens:
            self.text += text
            return None
        if not text:
            return None
        emit, matched = self.matcher.push(text)
        self.text += emit
        return matched

    def flush(self, *, stopped_by_string: bool) -> None:
        """Release text that was held back; after a stop string nothing follows."""
        if self.detokenizer is None or stopped_by_string or self.drop_output:
            return
        text = self.detokenizer.flush()
        if self.matcher is not None:
            emit, matched = self.matcher.push(text) if text else ("", None)
            self.text += emit
            if matched is None:
                self.text += self.matcher.flush()
        else:
            self.text += text

    def take(self, end: End | None) -> Delta:
        """Everything not yet delivered, as one delta."""
        token_ids = tuple(self.token_ids)
        logprobs = tuple(self.logprobs) if self.logprobs else None
        delta = Delta(self.lane, token_ids, self.text, logprobs, end)
        self.slot.num_sent += len(token_ids)
        self.token_ids.clear()
        self.logprobs.clear()
        self.text = ""
        return delta

    def end(
        self,
        request: Request,
        now: float,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
    ) -> End:
        """The terminal event, with counts and times."""
        if error is not None and request.num_output_tokens and not self.drop_output:
            error.add_note(f"{request.num_output_tokens} tokens had been produced")
        return End(
            reason,
            stop_reason,
            Usage(
                request.num_prompt_tokens,
                0 if self.drop_output else request.num_output_tokens,
                request.num_cached_tokens,
            ),
            request_metrics(request, now),
            error,
            None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )


def request_metrics(request: Request, now: float) -> RequestMetrics:
    """Times of a request that ends now, in seconds."""
    submitted = request.submitted_at
    assert submitted is not None
    first_scheduled = request.first_scheduled_at
    first_token = request.first_token_at
    return RequestMetrics(
        None if first_scheduled is None else first_scheduled - submitted,
        None if first_token is None else first_token - submitted,
        now - submitted,
        request.num_preemptions,
    )
