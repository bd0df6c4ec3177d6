"""What is done when a step has run out of memory: `Shortage`. Owned by the worker thread.

A smaller step comes first: half of the tokens, again and again. Where one token is too much, everybody gives his blocks
back, so that it is tried with nothing beside it. If that fails too, it is the request's own end. Later steps grow
again, the more slowly the more often it happens: a budget that fails every minute would be worse than a small one.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiocb.scheduler.request import Request, RequestStatus
from aiocb.scheduler.roster import Roster
from aiocb.step import StepPlan

__all__ = ["Shortage"]

FIRST_PATIENCE = 32
LAST_PATIENCE = 4096
"""Steps that have to succeed before the budget is doubled: at first, and at most."""


class Shortage:
    """The token budget of steps while memory is short.

    Args:
        roster: where the requests are.
        most: the budget when it is not.

    Attributes:
        max_tokens: the budget of the next step.
        num_steps: that have run out of memory.
    """

    __slots__ = ("_has_grown", "_most", "_num_good", "_patience", "_roster", "max_tokens", "num_steps")

    def __init__(self, roster: Roster, most: int) -> None:
        self.max_tokens = most
        self.num_steps = 0
        self._most = most
        self._roster = roster
        self._patience = FIRST_PATIENCE
        self._num_good = 0
        self._has_grown = False

    @property
    def is_acute(self) -> bool:
        """True while steps are smaller than they might be."""
        return self.max_tokens < self._most

    def take_back(self, plans: Sequence[StepPlan]) -> Request | None:
        """Undo the newest plans in flight, the oldest of which has failed, and make the next step smaller.

        Their requests lose their blocks: what the runner has written for them is not known. What was computed before is
        found again through the prefix cache.

        Returns:
            The request that cannot be helped, if there is one.
        """
        roster, failed = self._roster, plans[0]
        requests: Sequence[Request] = ()
        victims: dict[int, Request] = {}
        for plan in reversed(plans):
            requests = roster.flights.take_back(plan)
            victims |= {request.id: request for request in requests}
        self.num_steps += 1
        self._num_good = 0
        if self._has_grown:
            self._has_grown = False
            self._patience = min(2 * self._patience, LAST_PATIENCE)
        self.max_tokens = max(failed.num_tokens // 2, 1)
        starving = None
        if failed.num_tokens == 1 and requests[0].status is not RequestStatus.FINISHED:
            [request] = requests
            starving = request if request.has_starved else None
            request.has_starved = True
            victims |= {other.id: other for other in (*roster.running(), *roster.paused.values())}
        for request in victims.values():
            if request.tables:  # it has not ended, nor lost them before
                roster.preempt(request, None)
        return starving

    def recover(self) -> None:
        """Take note of a step that had enough memory; the budget grows after some of them."""
        self._num_good += 1
        if self._num_good >= self._patience:
            self._num_good = 0
            self._has_grown = True
            self.max_tokens = min(2 * self.max_tokens, self._most)

    def __repr__(self) -> str:
        return f"<Shortage [{self.max_tokens}/{self._most} tokens | {self.num_steps} steps out of memory]>"
