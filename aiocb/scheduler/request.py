"""The scheduler's view of one request: `Request`, its states, and `ParallelGroup` for n samples of one prompt.

Owned by the worker thread. Nothing outside the scheduler changes a status, and the scheduler changes it only through
`TRANSITIONS` (after h11's state tables): an event that a status does not know raises.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiocb.cache.sequence import CachedSequence
from aiocb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aiocb.outputs import FinishReason
    from aiocb.scheduler.queue import Waiting

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


class ParallelGroup:
    """The n samples of one prompt. The first one admitted computes the prompt, the others fork from it.

    Attributes:
        requests: all members.
        leader: the member that others fork from; a new one leads when the old one cannot be forked from any more.
        last_fork: the member that forked last: second choice for forking (its window has moved the least).
    """

    __slots__ = ("last_fork", "leader", "requests")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.leader: Request | None = None
        self.last_fork: Request | None = None

    def __repr__(self) -> str:
        done = sum(request.is_finished for request in self.requests)
        return f"<ParallelGroup {done}/{len(self.requests)} finished>"


class Request(CachedSequence):
    """One sequence to generate.

    Args:
        id: internal, unique for the engine's life.
        tokens: the prompt, at least one token; copied.
        sampling: resolved parameters.
        max_tokens: most tokens, prompt and output; default: prompt plus `sampling.max_new_tokens`.
        seed: 64-bit key of the random stream.
        index: which of the n parallel samples.
        priority: lower runs first (scheduler type `priority` only).
        cache_salt: prefixes are shared only within one salt.
        deadline, queue_deadline: absolute, in the clock of `Scheduler.expire`; the second counts until it first runs.
        submitted_at: time of submission, for metrics.
        payload: the engine's own object; the scheduler never looks at it.
        group: of the n samples that this one belongs to.

    Attributes:
        arrival: position in the order of arrival, given by `Scheduler.add`.
        rank: (priority, arrival): the order of importance, lowest first.
        num_cached_tokens: tokens that were not computed thanks to the prefix cache (or to a fork) when it first ran.
        num_prompt_logprobs: prompt positions whose log-probabilities have been delivered.
        has_run: it was admitted at least once.
        is_open: the runner keeps a record of it.
        end_ids: end-of-sequence and stop ids together; they end the request beyond `min_tokens` tokens.
        finish_reason: None until it has ended.
    """

    __slots__ = (
        "arrival",
        "deadline",
        "end_ids",
        "eos_ids",
        "finish_reason",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "followers",
        "group",
        "has_run",
        "id",
        "index",
        "is_open",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "parked_on",
        "payload",
        "pending_start",
        "priority",
        "queue_deadline",
        "queue_entry",
        "rank",
        "sampling",
        "seed",
        "status",
        "submitted_at",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        id: int,  # noqa: A002
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        max_tokens: int | None = None,
        seed: int = 0,
        index: int = 0,
        priority: int = 0,
        cache_salt: str | bytes | None = None,
        deadline: float | None = None,
        queue_deadline: float | None = None,
        submitted_at: float | None = None,
        payload: Any = None,
        group: ParallelGroup | None = None,
    ) -> None:
        super().__init__(list(tokens), cache_salt)
        self.id = id
        self.num_prompt_tokens = len(self.tokens)
        if max_tokens is None:
            if sampling.max_new_tokens is None:
                raise ValueError("max_tokens is needed where the sampling parameters have no max_new_tokens")
            max_tokens = self.num_prompt_tokens + sampling.max_new_tokens
        if not 0 < self.num_prompt_tokens < max_tokens:
            raise ValueError(f"{self.num_prompt_tokens} prompt tokens of at most {max_tokens}: nothing to generate")
        self.max_tokens = max_tokens
        self.min_tokens = self.num_prompt_tokens + (sampling.min_new_tokens or 0)
        self.sampling = sampling
        self.eos_ids = frozenset(_as_ids(sampling.eos_token_id))
        self.end_ids = self.eos_ids.union(sampling.stop_token_ids or ())
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self.num_prompt_logprobs = 0
        self.seed = seed
        self.index = index
        self.priority = priority
        self.arrival = -1
        self.rank = (priority, -1)
        self.deadline = deadline
        self.queue_deadline = queue_deadline
        self.status = WAITING
        self.finish_reason: FinishReason | None = None
        self.has_run = self.is_open = False
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.submitted_at = submitted_at
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.payload = payload
        self.group = group
        if group is not None:
            group.requests.append(self)
        # Bookkeeping of WaitingQueue (its heap entry) and PendingPrefixes.
        self.queue_entry: Waiting | None = None
        self.parked_on: Request | None = None
        self.followers: list[tuple[int, Request]] = []
        self.pending_start = -1

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_tokens(self) -> list[int]:
        """The output so far (a copy)."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """True once it has ended, for whatever reason."""
        return self.status is FINISHED

    @property
    def skips_prefix(self) -> bool:
        """True while cached KV is of no use because logits of the prompt are still owed."""
        return self.wants_prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens - 1

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


def _as_ids(value: int | Sequence[int] | None) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value
