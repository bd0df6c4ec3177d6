"""The state that a stream and the engine share. Loop thread, except where a line says "worker".

```
Stream ──► Lane 0 .. n-1 ──► Slot          core ──► Request ──► OutputState ──► Lane
```

A `Slot` never refers to its `Stream` or its lanes, so there is no cycle: a dropped stream is freed at once and its
`__del__` aborts the request.
Data lives here and nowhere else: a cancelled reader, or a lost wake-up, loses no token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aiocb.outputs import FinishReason, RequestMetrics, TokenLogprobs, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiocb.text.output import AnswerDelta

__all__ = ["Bridge", "Delta", "End", "Lane", "Slot"]


class Bridge(Protocol):
    """What the worker needs of a place that reads deltas."""

    outbox: list[Delta]
    """The current step's deltas; the worker's own."""

    @property
    def is_waiting_for_room(self) -> bool:
        """True when somebody waits for a place in the bounded queue."""

    def post(self, batch: list[Delta]) -> bool:
        """Hand over one step's deltas (worker thread). False when the other side is gone."""

    def lane_ended(self, lane: Lane) -> None:
        """Count a lane's end (called where the batch is read)."""

    def wake(self, slot: Slot) -> None:
        """Wake the parked reader of a slot, from any thread."""


class End(NamedTuple):
    """The one terminal event of a lane.

    Attributes:
        finish_reason: why it ended.
        stop_reason: the stop string or token id that matched.
        usage, metrics: None when the request was refused before it existed.
        error: raised to the reader after everything before it has been read; each lane has its own instance.
        prompt_logprobs: for the whole prompt, when asked for.
    """

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Delta(NamedTuple):
    """What one step adds to one lane."""

    lane: Lane
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    end: End | None
    answer: AnswerDelta | None = None


@dataclass(slots=True, eq=False, repr=False)
class Lane:
    """One sample's unread output. Everything is merged here until the reader takes it as one delta."""

    slot: Slot
    index: int
    token_ids: Sequence[int] = field(default=(), init=False)
    texts: list[str] = field(default_factory=list, init=False)
    logprobs: Sequence[TokenLogprobs] | None = field(default=None, init=False)
    end: End | None = field(default=None, init=False)
    answers: list[AnswerDelta] = field(default_factory=list, init=False)
    is_ready: bool = field(default=False, init=False)

    def push(
        self,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprobs, ...] | None,
        end: End | None,
        answer: AnswerDelta | None = None,
    ) -> None:
        """Add a delta and wake the reader. A second end is ignored."""
        if self.end is not None:
            return
        slot = self.slot
        if token_ids:
            if not self.token_ids:
                self.token_ids = token_ids
                self.logprobs = logprobs
            else:
                # Unread output exists: merge. A list grows in amortised O(1), a tuple would be copied each time.
                if isinstance(self.token_ids, tuple):
                    self.token_ids = list(self.token_ids)
                self.token_ids.extend(token_ids)  # type: ignore[attr-defined]
                if logprobs is not None:
                    if not isinstance(self.logprobs, list):
                        self.logprobs = list(self.logprobs or ())
                    self.logprobs.extend(logprobs)
        if text:
            self.texts.append(text)
        if answer is not None:
            self.answers.append(answer)
        if end is not None:
            self.end = end
            slot.num_open -= 1
            slot.bridge.lane_ended(self)
            if slot.on_end is not None and (slot.num_open == 0 or end.error is not None):
                on_end, slot.on_end = slot.on_end, None
                on_end()
        if not self.is_ready:
            self.is_ready = True
            slot.ready.append(self)
        waiter = slot.waiter
        if waiter is not None:
            slot.waiter = None
            if not waiter.done():
                waiter.set_result(None)


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Slot:
    """One stream's request: its lanes, the parked reader, and the marks that the worker reads.

    Attributes:
        request_id: the user's label.
        bridge: the way from the worker to this slot's event loop.
        num_open: lanes that have not ended.
        ready: lanes with something unread, in order of arrival.
        waiter: the parked reader's future.
        is_closed: set once by `Stream.close()`; nothing is delivered after it.
        num_read: tokens taken by the reader; written on the loop, read by the worker (back-pressure).
        is_paused: the worker has paused the request because the reader is behind; the reader resumes it.
        num_sent: tokens put on their way; worker only.
        on_end: called once on the loop, when the last lane has ended or the first one with an error.
    """

    request_id: str
    bridge: Bridge
    num_open: int
    ready: deque[Lane] = field(default_factory=deque, init=False)
    waiter: asyncio.Future[None] | None = field(default=None, init=False)
    is_closed: bool = field(default=False, init=False)
    num_read: int = field(default=0, init=False)
    is_paused: bool = field(default=False, init=False)
    num_sent: int = field(default=0, init=False)
    on_end: Callable[[], object] | None = field(default=None, init=False)

    def make_lanes(self) -> tuple[Lane, ...]:
        """The lanes of a new slot, one per parallel sample."""
        return tuple(Lane(self, index) for index in range(self.num_open))

    def wake(self) -> None:
        """Wake the parked reader, if any (loop thread)."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)
