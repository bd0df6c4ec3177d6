"""The orders in which requests wait: `WaitingQueue` by rank, `Deadlines` by time. Owned by the worker thread.

Both are a binary heap of keys beside a dictionary of who is there: leaving is O(1) whatever stands before, and stale
keys are swept once they are the majority, so neither time nor memory depends on how many have come and gone. A heap
also puts a preempted request back in front without a second list: it arrived before everybody who has never run. (A
deque cannot remove from the middle; a heap costs a newcomer that belongs at the end one comparison.)
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from aiocb.scheduler.request import Request

__all__ = ["Deadlines", "WaitingQueue"]

_MIN_STALE = 64

K = TypeVar("K", tuple[int, int], tuple[float, int, bool])


class _Heap(Generic[K]):
    """Requests by key, lowest first."""

    __slots__ = ("_heap", "_requests")

    def __init__(self) -> None:
        self._requests: dict[K, Request] = {}
        self._heap: list[K] = []

    def __len__(self) -> int:
        return len(self._requests)

    def _add(self, key: K, request: Request) -> None:
        assert key not in self._requests, f"{request!r} waits already"
        self._requests[key] = request
        heappush(self._heap, key)

    def _first(self) -> K | None:
        heap = self._heap
        while heap and heap[0] not in self._requests:
            heappop(heap)
        return heap[0] if heap else None

    def _drop(self, key: K) -> bool:
        if self._requests.pop(key, None) is None:
            return False
        if len(self._heap) - len(self) > max(len(self), _MIN_STALE):
            self._heap = list(self._requests)
            heapify(self._heap)
        return True


class WaitingQueue(_Heap[tuple[int, int]]):
    """Requests by rank, lowest first; equal priorities in order of arrival."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[rank] for rank in sorted(self._requests))

    def push(self, request: Request) -> None:
        """Put a request in the place of its rank. O(1) for one that arrives last, else O(log n)."""
        self._add(request.rank, request)

    def peek(self) -> Request | None:
        """The first request, or None."""
        rank = self._first()
        return None if rank is None else self._requests[rank]

    def discard(self, request: Request) -> bool:
        """Take a request out, wherever it stands; False when it was not here. O(1) amortised."""
        return self._drop(request.rank)

    def check_invariants(self) -> None:
        """Raise `AssertionError` when heap and requests disagree."""
        assert set(self._requests) <= set(self._heap), "a request that nobody will find"
        assert len(self._heap) <= 2 * max(len(self), _MIN_STALE) + 1, "stale entries pile up"
        assert all(rank == request.rank for rank, request in self._requests.items())

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)} waiting>"


class Deadlines(_Heap[tuple[float, int, bool]]):
    """Requests with a deadline, earliest first; that of the queue counts for nothing once a request has run."""

    __slots__ = ()

    def push(self, request: Request) -> None:
        """Watch the deadlines of a request, if it has any."""
        for key in _deadlines(request):
            self._add(key, request)

    def discard(self, request: Request) -> None:
        """Watch a request no longer: it has ended. O(1) amortised."""
        for key in _deadlines(request):
            self._drop(key)

    @property
    def next_at(self) -> float | None:
        """The earliest time at which something may be due."""
        key = self._first()
        return None if key is None else key[0]

    def pop_due(self, now: float) -> Request | None:
        """Take out one request that is overdue, or None. O(1) when nothing is due."""
        while self._heap and self._heap[0][0] <= now:
            key = heappop(self._heap)
            request, (_, _, is_queue) = self._requests.pop(key, None), key
            if request is not None and not (is_queue and request.has_run):
                return request
        return None

    def __repr__(self) -> str:
        return f"<Deadlines {len(self)} watched>"


def _deadlines(request: Request) -> list[tuple[float, int, bool]]:
    times = ((request.deadline, False), (request.queue_deadline, True))
    return [(at, request.id, is_queue) for at, is_queue in times if at is not None]
