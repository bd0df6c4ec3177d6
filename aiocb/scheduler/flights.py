"""Plans that have been submitted and not collected, and what they hold back: `Flights`. Owned by the worker thread.

A plan in flight reads and writes the blocks that it names, whatever has become of their request meanwhile. So there is
one place where blocks are given back, and one rule: at once when no plan in flight names the request, else when the
last one that does has landed. The same holds for slots of states, for snapshots that a plan reads or writes, and for
the word to the runner that the request is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from aiocb.cache.manager import CacheManager
from aiocb.cache.sequence import Held
from aiocb.cache.states import Snapshot
from aiocb.scheduler.draft import Draft
from aiocb.scheduler.request import Request
from aiocb.step import StepPlan

__all__ = ["Flight", "Flights"]


@dataclass(slots=True, eq=False)
class Flight:
    """One plan in flight.

    Attributes:
        requests: aligned with the plan's entries.
        others: requests whose blocks it reads without an entry for them.
        snapshots: those that it writes.
        held: what comes back: of requests that have let go of it, and what the plan itself reads.
        closed: ids of requests that the runner is told of then.
    """

    plan: StepPlan
    requests: Sequence[Request]
    others: Sequence[Request]
    snapshots: dict[Request, Snapshot]
    held: list[Held] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def names(self, request: Request) -> bool:
        """True when it reads or writes what is this request's."""
        return request in self.requests or request in self.others


class Flights:
    """The plans in flight, oldest first.

    Args:
        cache: whose blocks they name.
    """

    __slots__ = ("_cache", "_closed", "_flights")

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._flights: deque[Flight] = deque()
        self._closed: list[int] = []

    def __len__(self) -> int:
        return len(self._flights)

    def launch(self, plan: StepPlan, draft: Draft, snapshots: dict[Request, Snapshot]) -> None:
        """Note that a plan is on its way.

        Args:
            plan: with entries.
            draft: what it was made from.
            snapshots: that it takes.
        """
        flight = Flight(plan, draft.requests, draft.sources, snapshots)
        if plan.states_before:
            for request in draft.requests:
                if request.state_source:
                    flight.held.append(Held((), (request.state_source,)))
                    request.state_source = 0
        if plan.swaps_in:
            assert self._cache.swap is not None
            for request in draft.swaps_in:
                flight.held.append(Held((), (), self._cache.swap.forget(request)))
        self._flights.append(flight)

    def land(self, plan: StepPlan) -> Flight:
        """Note that the oldest plan has been executed, and give back what waited for it.

        The snapshots that it has written are to be published by whoever looks at its result, and `drop`ped if not.
        """
        flight = self._flights.popleft()
        assert flight.plan is plan, "plans land in the order in which they were launched"
        for held in flight.held:
            self._cache.free(held)
        self._closed += flight.closed
        return flight

    def drop(self, snapshots: dict[Request, Snapshot]) -> None:
        """Give back the slots of snapshots that are of no use to anybody."""
        self._cache.free(Held((), tuple(snapshot.slot for snapshot in snapshots.values())))
        snapshots.clear()

    def take_back(self, plan: StepPlan) -> Sequence[Request]:
        """Note that the newest plan has not been executed and is not going to be; returns its requests."""
        flight = self._flights.pop()
        assert flight.plan is plan, "plans are taken back in the reverse order of their launch"
        if self._flights:  # which may name the same requests
            self._flights[-1].held += flight.held
            self._flights[-1].closed += flight.closed
        else:
            for held in flight.held:
                self._cache.free(held)
            self._closed += flight.closed
        self.drop(flight.snapshots)
        return flight.requests

    def give_back(self, request: Request) -> None:
        """Take all blocks of a request, and its slots, and let the runner close it; idempotent.

        What lies in the swap space is kept for it as long as it has not ended.
        """
        flight = next((flight for flight in reversed(self._flights) if flight.names(request)), None)
        held = self._cache.detach(request)
        if request.swapped is not None and request.is_finished:
            assert self._cache.swap is not None
            held = held._replace(places=self._cache.swap.forget(request))
        if flight is None:
            self._cache.free(held)
        else:
            flight.held.append(held)
        if request.is_open:
            request.is_open = False
            (self._closed if flight is None else flight.closed).append(request.id)

    def holds(self, request: Request) -> bool:
        """True while a plan in flight names this request."""
        return any(flight.names(request) for flight in self._flights)

    def num_held(self, group: int) -> int:
        """Blocks of a group that are going to come back."""
        return sum(len(held.tables[group]) for held in self.held() if held.tables)

    @property
    def has_held_slots(self) -> bool:
        """True when slots of states are going to come back."""
        return any(held.slots for held in self.held())

    def held(self) -> Iterator[Held]:
        """What is going to come back, snapshots that are being written included."""
        for flight in self._flights:
            yield from flight.held
            if flight.snapshots:
                yield Held((), tuple(snapshot.slot for snapshot in flight.snapshots.values()))

    def take_closed(self) -> tuple[int, ...]:
        """The ids that the next plan has to close."""
        closed = tuple(self._closed)
        self._closed.clear()
        return closed

    @property
    def has_closed(self) -> bool:
        """True when the runner has to be told of requests that are closed."""
        return bool(self._closed)

    def __repr__(self) -> str:
        return f"<Flights {len(self._flights)} in flight>"
