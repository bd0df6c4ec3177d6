"""Where every request is: `Roster`, the containers behind the scheduler, and the moves between them.

Owned by the worker thread. Each unfinished request is in exactly one place: the waiting queue, parked behind another's
prefix, prefilling, decoding, or paused. Only the last three hold blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiocb.cache.manager import CacheManager
from aiocb.scheduler.draft import Draft
from aiocb.scheduler.flights import Flights
from aiocb.scheduler.pending import PendingPrefixes
from aiocb.scheduler.queue import WaitingQueue
from aiocb.scheduler.request import Request, RequestStatus

__all__ = ["Roster"]

_WAITING, _RUNNING, _PREEMPTED, _PAUSED, _FINISHED = RequestStatus


class Roster:
    """All unfinished requests of a scheduler.

    Args:
        cache: that they hold blocks of.

    Attributes:
        flights: plans in flight, through which blocks are given back.
        queue: those that wait to be admitted.
        pending: who computes which prefix, and who is parked on it.
        prefilling: run, with more than their newest token to compute.
        decoding: run, with exactly their newest token to compute.
        paused: their reader is behind.
        num_preemptions: how often blocks were taken.
    """

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.flights = Flights(cache)
        self.queue = WaitingQueue()
        self.pending = PendingPrefixes(cache.page_size)
        # Insertion-ordered sets by id: O(1) to leave, as fast to walk as a list.
        self.prefilling: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.paused: dict[int, Request] = {}
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self.prefilling) + len(self.decoding)

    def running(self) -> Iterator[Request]:
        """All requests that take part in steps."""
        yield from self.prefilling.values()
        yield from self.decoding.values()

    def open_requests(self) -> Iterator[Request]:
        """All that the runner keeps a record of, apart from those that it is about to close."""
        return (request for request in (*self.running(), *self.paused.values()) if request.is_open)

    def enter(self, request: Request) -> None:
        """Admit the first of the queue."""
        self.queue.discard(request)
        request.transition("admit")
        request.has_run = True
        self.prefilling[request.id] = request

    def remove(self, request: Request, event: str) -> None:
        """Take a request out of wherever it is, with this event ("finish" or "pause")."""
        status = request.status
        request.transition(event)
        if status is _RUNNING:
            self._leave(request)
        elif status is _PAUSED:
            del self.paused[request.id]
        elif not self.pending.unpark(request):
            self.queue.discard(request)

    def pause(self, request: Request) -> None:
        """Set a request aside with its blocks. No-op unless it is active."""
        if request.status is not _PAUSED and request.status is not _FINISHED:
            self.remove(request, "pause")
            self.paused[request.id] = request

    def resume(self, request: Request) -> None:
        """Put a paused request where it belongs: one token to compute is decoding, no blocks is waiting."""
        if request.status is not _PAUSED:
            return
        del self.paused[request.id]
        if not request.capacity:
            request.transition("requeue")
            self.queue.push(request)
            return
        request.transition("resume")
        if request.is_open and len(request.tokens) - request.num_computed_tokens == 1 and request.num_output_tokens:
            self.decoding[request.id] = request
            return
        self.prefilling[request.id] = request
        self.announce(request)

    def announce(self, request: Request) -> None:
        """Note that an admitted request computes the rest of its prefix, so that others can wait for it."""
        cache = self.cache
        if cache.sharing and request.cache_version == cache.version:
            cache.extend_block_hashes(request, len(request.tokens) // cache.page_size)
            start = request.num_computed_tokens // cache.page_size
            self.pending.add(request, start, request.branch_at // cache.page_size)

    def settle(self, request: Request) -> None:
        """Move a request whose tokens are all computed on to decoding."""
        del self.prefilling[request.id]
        self.decoding[request.id] = request
        self.pending.discard(request)
        self.wake(request)

    def wake(self, owner: Request, num_tokens: int | None = None) -> None:
        """Queue those who wait for `owner` to compute so many tokens (None: all who wait for it)."""
        if owner.followers:
            for request in self.pending.wake(owner, num_tokens):
                self.queue.push(request)

    def forget_pending(self) -> None:
        """Let nobody wait for a prefix any more (the weights have changed)."""
        for request in self.prefilling.values():
            self.pending.discard(request)
            self.wake(request)

    def find_victim(self, request: Request) -> Request | None:
        """Whose blocks `request` may take: a paused one's, else the least important of those below its own rank."""
        paused = self.find_paused_victim()
        if paused is not None:
            return paused
        worst = max(self.running(), key=lambda r: r.rank, default=request)
        return worst if worst.rank > request.rank else None

    def find_paused_victim(self) -> Request | None:
        """The least important paused request that holds blocks."""
        if not self.paused:
            return None
        return max((r for r in self.paused.values() if r.tables), key=lambda r: r.rank, default=None)

    def preempt(self, request: Request, draft: Draft | None) -> None:
        """Take all blocks of a request, which has them copied back, or recomputes them, later.

        Args:
            request: a running or paused one.
            draft: the step being built: its entry is withdrawn from it. None when what it has is worth nothing any
                more.
        """
        is_paused = request.status is _PAUSED
        is_whole = draft is not None
        if not is_paused:
            self._leave(request)
            if draft is not None:
                is_whole = draft.withdraw(request)
                draft.has_preempted = True
        request.transition("preempt")
        request.num_preemptions += 1
        self.num_preemptions += 1
        swap = self.cache.swap
        # One that was about to be copied in still has its places.
        if swap is not None and is_whole and request.swapped is None:
            swap.put_out(request, moves_on=self.flights.holds(request))
        self.flights.give_back(request)
        if not is_paused:
            self.queue.push(request)

    def _leave(self, request: Request) -> None:
        # Whoever waits for its prefix is told.
        if self.decoding.pop(request.id, None) is None:
            del self.prefilling[request.id]
            self.pending.discard(request)
            self.wake(request)

    def check_invariants(self) -> None:
        """Check every container, the cache and the pending prefixes, against each other.

        Raises:
            AssertionError: something is in two places, in none, or in a state that does not fit.
        """
        running = list(self.running())
        paused = list(self.paused.values())
        waiting = list(self.queue)
        assert all(request.status is _RUNNING for request in running)
        assert all(request.status is _PAUSED for request in paused)
        assert all(request.status in (_WAITING, _PREEMPTED) and not request.capacity for request in waiting)
        everybody = [*running, *paused, *waiting]
        assert len({request.id for request in everybody}) == len(everybody), "a request is in two places"
        assert all(request.parked_on is None for request in everybody)
        for request in self.decoding.values():
            assert len(request.tokens) - request.num_computed_tokens == 1, f"{request!r} is not decoding"
        for request in everybody:
            assert request.num_computed_tokens < len(request.tokens) <= request.max_tokens
        self.queue.check_invariants()
        self.pending.check_invariants(self.prefilling.values())
        for request in self.decoding.values():
            assert request.is_open and request.num_sent_blocks == len(request.tables[0]), "the runner lacks blocks"
        assert not any(request.is_open for request in waiting), "a request waits with a record at the runner"
        self.cache.check_invariants(everybody, self.flights.held())

    def __repr__(self) -> str:
        return (
            f"<Roster [{self.num_running} running, {len(self.queue)} waiting, {self.pending.num_parked} parked, "
            f"{len(self.paused)} paused]>"
        )
