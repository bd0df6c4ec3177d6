"""Plans that have been submitted and not collected, and what they hold back: `Flights`. Owned by the worker thread.

A plan in flight reads and writes the blocks that it names, whatever has become of their request meanwhile. So there is
one place where blocks are given back, and one rule: at once when no plan in flight names the request, else when the
last one that does has landed. The same holds for the word to the runner that the request is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from aiocb.cache.manager import CacheManager
from aiocb.scheduler.request import Request
from aiocb.step import StepPlan

__all__ = ["Flights"]


@dataclass(slots=True, eq=False)
class _Flight:
    """One plan in flight; `tables` and `closed` come back when it lands."""

    plan: StepPlan
    requests: Sequence[Request]
    others: Sequence[Request]
    tables: list[tuple[list[int], ...]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def names(self, request: Request) -> bool:
        return request in self.requests or request in self.others


class Flights:
    """The plans in flight, oldest first.

    Args:
        cache: whose blocks they name.
    """

    __slots__ = ("_cache", "_closed", "_flights")

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._flights: deque[_Flight] = deque()
        self._closed: list[int] = []

    def __len__(self) -> int:
        return len(self._flights)

    def launch(self, plan: StepPlan, requests: Sequence[Request], others: Sequence[Request]) -> None:
        """Note that a plan is on its way.

        Args:
            plan: with entries.
            requests: aligned with them.
            others: requests whose blocks it reads without an entry for them.
        """
        self._flights.append(_Flight(plan, requests, others))

    def land(self, plan: StepPlan) -> Sequence[Request]:
        """Note that the oldest plan has been executed, and give back what waited for it; returns its requests."""
        flight = self._flights.popleft()
        assert flight.plan is plan, "plans land in the order in which they were launched"
        for tables in flight.tables:
            self._cache.free_tables(tables)
        self._closed += flight.closed
        return flight.requests

    def give_back(self, request: Request) -> None:
        """Take all blocks of a request, and let the runner close it; idempotent."""
        flight = next((flight for flight in reversed(self._flights) if flight.names(request)), None)
        tables = self._cache.detach(request)
        if flight is None:
            self._cache.free_tables(tables)
        else:
            flight.tables.append(tables)
        if request.is_open:
            request.is_open = False
            (self._closed if flight is None else flight.closed).append(request.id)

    def holds(self, request: Request) -> bool:
        """True while a plan in flight names this request."""
        return any(flight.names(request) for flight in self._flights)

    def num_held(self, group: int) -> int:
        """Blocks of a group that are going to come back."""
        return sum(len(tables[group]) for flight in self._flights for tables in flight.tables if tables)

    def held_tables(self) -> Iterator[tuple[list[int], ...]]:
        """The block tables that are going to come back."""
        for flight in self._flights:
            yield from flight.tables

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
