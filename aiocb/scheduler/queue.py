"""The orders in which requests wait: `WaitingQueue` by rank, `Deadlines` by time. Owned by the worker thread.

Both are binary heaps with lazy deletion: leaving is O(1) whatever stands before, and stale entries are swept once they
are the majority, so neither time nor memory depends on how many have come and gone. A heap also puts a preempted
request back in front without a second list: it arrived before everybody who has never run. (A deque cannot remove from
the middle; a heap costs a newcomer that belongs at the end one comparison.)
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from aiocb.scheduler.request import Request

__all__ = ["Deadlines", "Waiting", "WaitingQueue"]

_MIN_STALE = 64


class Waiting(NamedTuple):
    """A request's place in a heap: its rank, and itself."""

    priority: int
    arrival: int
    request: Request


class _Deadline(NamedTuple):
    """One deadline of a request; that of the queue counts for nothing once it has run."""

    at: float
    request_id: int
    is_queue: bool
    request: Request

    @property
    def is_moot(self) -> bool:
        return self.request.is_finished or (self.is_queue and self.request.has_run)


class WaitingQueue:
    """Requests by rank, lowest first; equal priorities in order of arrival."""

    __slots__ = ("_heap", "_length")

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in sorted(self._heap, key=lambda entry: entry[:2]) if _is_live(entry))

    def push(self, request: Request) -> None:
        """Put a request in the place of its rank. O(1) for one that arrives last, else O(log n)."""
        assert request.queue_entry is None, f"{request!r} waits already"
        request.queue_entry = entry = Waiting(*request.rank, request)
        heappush(self._heap, entry)
        self._length += 1

    def peek(self) -> Request | None:
        """The first request, or None."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if _is_live(entry):
                return entry.request
            heappop(heap)
        return None

    def discard(self, request: Request) -> bool:
        """Take a request out, wherever it stands; False when it was not here. O(1) amortised."""
        if request.queue_entry is None:
            return False
        request.queue_entry = None
        self._length -= 1
        heap = self._heap
        if len(heap) - self._length > max(self._length, _MIN_STALE):
            heap[:] = filter(_is_live, heap)
            heapify(heap)
        return True

    def check_invariants(self) -> None:
        """Raise `AssertionError` when the count and the entries disagree."""
        live = [entry for entry in self._heap if _is_live(entry)]
        assert len(live) == self._length
        assert len(self._heap) <= 2 * max(self._length, _MIN_STALE) + 1, "stale entries pile up"
        assert all(entry[:2] == entry.request.rank for entry in live)

    def __repr__(self) -> str:
        return f"<WaitingQueue {self._length} waiting>"


def _is_live(entry: Waiting) -> bool:
    # By identity: a request that left and came back has a new entry, the old one stays stale.
    return entry.request.queue_entry is entry


class Deadlines:
    """Requests with a deadline, earliest first."""

    __slots__ = ("_heap", "_num_stale")

    def __init__(self) -> None:
        self._heap: list[_Deadline] = []
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Watch the deadlines of a request, if it has any."""
        if request.deadline is not None:
            heappush(self._heap, _Deadline(request.deadline, request.id, False, request))
        if request.queue_deadline is not None:
            heappush(self._heap, _Deadline(request.queue_deadline, request.id, True, request))

    def discard(self, request: Request) -> None:
        """Note that a request has ended; call it once per request. O(1) amortised."""
        self._num_stale += (request.deadline is not None) + (request.queue_deadline is not None)
        heap = self._heap
        if self._num_stale > _MIN_STALE and 2 * self._num_stale > len(heap):
            heap[:] = [entry for entry in heap if not entry.is_moot]
            heapify(heap)
            self._num_stale = 0

    @property
    def next_at(self) -> float | None:
        """The earliest time at which something may be due."""
        return self._heap[0].at if self._heap else None

    def pop_due(self, now: float) -> Request | None:
        """Take out one request that is overdue, or None. O(1) when nothing is due."""
        heap = self._heap
        while heap and heap[0].at <= now:
            entry = heappop(heap)
            if entry.request.is_finished:
                self._num_stale -= self._num_stale > 0
            elif not entry.is_moot:
                return entry.request
        return None

    def __repr__(self) -> str:
        return f"<Deadlines {len(self._heap)} watched>"
