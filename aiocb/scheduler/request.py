"""The scheduler's view of one request: `Request`, its states, and `ParallelGroup` for n samples of one prompt.

Owned by the worker thread. Nothing outside the scheduler changes a status, and the scheduler changes it only through
`TRANSITIONS` (after h11's state tables): an event that a status does not know raises.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiocb.cache.sequence import CachedSequence
from aiocb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aiocb.outputs import FinishReason

__all__ = ["TRANSITIONS", "ParallelGroup", "Request", "RequestStatus"]


class RequestStatus(enum.Enum):
    """Where a request is. Prefill and decode are not states: both are RUNNING."""

    WAITING = "waiting"
    """Has never run; holds no blocks."""
    RUNNING = "running"
    """Holds blocks and a seat; takes part in steps."""
    PREEMPTED = "preempted"
    """Waits again, without blocks; what it has computed is recomputed."""
    PAUSED = "paused"
    """Its reader is behind: takes no part, keeps its blocks as long as nobody else needs them."""
    FINISHED = "finished"


WAITING, RUNNING, PREEMPTED, PAUSED, FINISHED = RequestStatus

TRANSITIONS: dict[RequestStatus, dict[str, RequestStatus]] = {
    WAITING: {"admit": RUNNING, "pause": PAUSED, "finish": FINISHED},
    RUNNING: {"preempt": PREEMPTED, "pause": PAUSED, "finish": FINISHED},
    PREEMPTED: {"admit": RUNNING, "pause": PAUSED, "finish": FINISHED},
    # A paused request may lose its blocks and stay paused; on resume it then waits, else it runs.
    PAUSED: {"preempt": PAUSED, "resume": RUNNING, "requeue": PREEMPTED, "finish": FINISHED},
    FINISHED: {},
}


@dataclass(slots=True, eq=False)
class ParallelGroup:
    """The n samples of one prompt. The first one admitted computes the prompt, the others fork from it.

    Attributes:
        leader: the member that others fork from; a new one leads when the old one cannot be forked from any more.
        last_fork: the member that forked last: second choice for forking (its window has moved the least).
    """

    leader: Request | None = None
    last_fork: Request | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Request(CachedSequence):
    """One sequence to generate.

    Attributes:
        tokens: the prompt, at least one token, and what follows it; the list is its own.
        id: internal, unique for the engine's life.
        sampling: resolved parameters.
        max_tokens, min_tokens: most and fewest tokens, prompt and output.
        seed: 64-bit key of the random stream.
        index: which of the n parallel samples.
        priority: lower runs first (scheduler type `priority` only).
        deadline, queue_deadline: absolute, in the clock of `Scheduler.expire`; the second counts until it first runs.
        submitted_at: time of submission, for metrics.
        payload: the engine's own object; the scheduler never looks at it.
        group: of the n samples that this one belongs to.
        eos_ids, end_ids: end-of-sequence ids, and these with the stop ids; they end the request beyond `min_tokens`
            tokens.
        arrival: position in the order of arrival, given by `Scheduler.add`.
        rank: (priority, arrival): the order of importance, lowest first.
        finish_reason: None until it has ended.
        has_run: it was admitted at least once.
        is_open: the runner keeps a record of it.
        num_cached_tokens: tokens that were not computed thanks to the prefix cache (or to a fork) when it first ran.
        num_prompt_logprobs: prompt positions whose log-probabilities have been delivered.
        parked_on, followers, pending_start: of `PendingPrefixes`; a follower waits for so many computed tokens.
        follows, follows_from: tokens that have to come next, behind so many.
        has_starved: a step of a single token of it has run out of memory.
        history: what a drafter remembers of it.
    """

    id: int
    sampling: SamplingParams
    max_tokens: int
    seed: int = 0
    index: int = 0
    priority: int = 0
    deadline: float | None = None
    queue_deadline: float | None = None
    submitted_at: float | None = None
    payload: Any = None
    group: ParallelGroup | None = None

    min_tokens: int = field(init=False)
    eos_ids: frozenset[int] = field(init=False)
    end_ids: frozenset[int] = field(init=False)
    arrival: int = field(default=-1, init=False)
    rank: tuple[int, int] = field(default=(0, -1), init=False)
    status: RequestStatus = field(default=WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    has_run: bool = field(default=False, init=False)
    is_open: bool = field(default=False, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_prompt_logprobs: int = field(default=0, init=False)
    first_scheduled_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    parked_on: Request | None = field(default=None, init=False)
    followers: dict[Request, int] = field(default_factory=dict, init=False)
    pending_start: int = field(default=-1, init=False)
    follows: tuple[int, ...] = field(default=(), init=False)
    follows_from: int = field(default=-1, init=False)
    has_starved: bool = field(default=False, init=False)
    history: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        CachedSequence.__post_init__(self)  # `super()` knows the class from before it got slots
        if not 0 < self.num_prompt_tokens < self.max_tokens:
            raise ValueError(
                f"{self.num_prompt_tokens} prompt tokens of at most {self.max_tokens}: nothing to generate"
            )
        sampling, eos = self.sampling, self.sampling.eos_token_id
        self.min_tokens = self.num_prompt_tokens + (sampling.min_new_tokens or 0)
        self.eos_ids = frozenset((eos,) if isinstance(eos, int) else eos or ())
        self.end_ids = self.eos_ids.union(sampling.stop_token_ids or ())

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """True once it has ended, for whatever reason."""
        return self.status is FINISHED

    @property
    def skips_prefix(self) -> bool:
        """True while cached KV is of no use because logits of the prompt are still owed."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def cut(self, num_output_tokens: int) -> None:
        """Forget the last tokens of a request that is about to end, or has ended: what follows a stop string."""
        del self.tokens[self.num_prompt_tokens + num_output_tokens :]

    def transition(self, event: str) -> None:
        """Change the status as `TRANSITIONS` says (scheduler only).

        Raises:
            RuntimeError: the status does not know this event.
        """
        try:
            self.status = TRANSITIONS[self.status][event]
        except KeyError:
            raise RuntimeError(f"{self!r} cannot {event}") from None

    def __repr__(self) -> str:
        name = f"{self.id}" if self.group is None else f"{self.id}#{self.index}"
        end = "" if self.finish_reason is None else f" ({self.finish_reason})"
        return (
            f"<Request {name} {self.status.value}{end} "
            f"[{self.num_computed_tokens}/{self.num_tokens} computed | {self.num_output_tokens} output]>"
        )
