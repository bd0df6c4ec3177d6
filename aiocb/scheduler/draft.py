"""The step under construction: `Draft`. Built by `Scheduler.schedule`, gone with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiocb.cache.states import Snapshot
from aiocb.scheduler.request import Request
from aiocb.step import BlockCopy, BlockSwap, OpenedRequest, StateCopy, StepEntry, StepPlan

__all__ = ["Draft"]


@dataclass(slots=True, eq=False)
class Draft:
    """Entries, and the budget that is left for more.

    Attributes:
        max_tokens: token budget of the step.
        max_requests: most entries.
        entries, requests: aligned; the hot loops of the scheduler append to both directly.
        copies: block copies that come before the forward pass.
        states: copies of states that come before the forward pass, in order.
        swaps_in: what is copied back from the swap space before anything else.
        snapshots: whose state is to be put aside after it, if slots are left then; True for rolling ones.
        sources: requests whose blocks or states are copied.
        budget: tokens left.
        has_preempted: a running request has lost its blocks while this step was built.
        num_parked: requests that were parked while this step was built.
        guest: the request that others were preempted for: the only one to be admitted in this step.
    """

    max_tokens: int
    max_requests: int
    entries: list[StepEntry] = field(default_factory=list, init=False)
    requests: list[Request] = field(default_factory=list, init=False)
    opened: dict[int, OpenedRequest] = field(default_factory=dict, init=False)
    copies: list[BlockCopy] = field(default_factory=list, init=False)
    swaps_in: dict[Request, list[BlockSwap]] = field(default_factory=dict, init=False)
    states: list[StateCopy] = field(default_factory=list, init=False)
    snapshots: dict[Request, bool] = field(default_factory=dict, init=False)
    sources: list[Request] = field(default_factory=list, init=False)
    budget: int = field(init=False)
    has_preempted: bool = field(default=False, init=False)
    num_parked: int = field(default=0, init=False)
    guest: Request | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.budget = self.max_tokens

    @property
    def has_room(self) -> bool:
        """True when another entry can be added."""
        return self.budget > 0 and len(self.entries) < self.max_requests

    def add_chunk(self, request: Request, count: int, block_start: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        """Let the step compute the next `count` tokens of a request; the blocks are there.

        Args:
            request: a running one.
            count: how many tokens.
            block_start, blocks: what the runner has to be told of its tables.
        """
        start = request.num_scheduled_tokens
        end = request.num_scheduled_tokens = start + count
        is_sampled = end == len(request.tokens)
        num_logits = 1 if is_sampled else 0
        if request.skips_prefix:
            # Rows that were delivered before a preemption are not delivered twice.
            num_logits = max(num_logits, end - max(start, request.num_prompt_logprobs))
        if not request.is_open:
            request.is_open = True
            self.opened[request.id] = OpenedRequest(
                request.id,
                tuple(request.tokens),
                request.num_prompt_tokens,
                request.sampling,
                request.seed,
                request.adapter,
                state_slot=request.state_slot,
            )
        if request.state_source:
            self.states.append(StateCopy(request.state_source, request.state_slot))
        self.requests.append(request)
        self.entries.append(StepEntry(request.id, start, count, num_logits, is_sampled, (), block_start, blocks))
        self.budget -= count

    def recount(self) -> None:
        """Compute the budget anew, after entries were appended directly and others withdrawn."""
        self.budget = self.max_tokens - sum(entry.num_new_tokens for entry in self.entries)

    def withdraw(self, request: Request) -> bool:
        """Take out a request that is about to lose its blocks; no-op when it has no entry.

        Returns:
            True when all that it has computed is where it says; False when it has been waiting for a copy of this step.
        """
        num_copies = len(self.copies) + len(self.states)
        if self.copies and request.tables:
            # Its blocks go to somebody else in this step: a copy into them must not happen.
            held = [set(table) for table in request.tables]
            self.copies = [copy for copy in self.copies if copy.target not in held[copy.group]]
        if self.states and request.state_slot:
            self.states = [copy for copy in self.states if copy.target != request.state_slot]
        is_whole = num_copies == len(self.copies) + len(self.states)
        self.swaps_in.pop(request, None)
        if self.opened.pop(request.id, None) is not None:
            request.is_open = False  # the runner never hears of it
        if request in self.requests:
            i = self.requests.index(request)
            del self.requests[i]
            self.budget += self.entries.pop(i).num_new_tokens
        self.snapshots.pop(request, None)
        return is_whole

    def plan(
        self, closed: tuple[int, ...], snapshots: Mapping[Request, Snapshot], swaps_out: tuple[BlockSwap, ...]
    ) -> StepPlan:
        """Return the finished plan."""
        num_tokens = self.max_tokens - self.budget
        plan = StepPlan(tuple(self.entries), num_tokens, tuple(self.opened.values()), closed, tuple(self.copies))
        if swaps_out or self.swaps_in:
            swaps_in = tuple(swap for swaps in self.swaps_in.values() for swap in swaps)
            plan = plan._replace(swaps_out=swaps_out, swaps_in=swaps_in)
        if not self.states and not snapshots:
            return plan
        states_after = tuple(StateCopy(request.state_slot, taken.slot) for request, taken in snapshots.items())
        return plan._replace(states_before=tuple(self.states), states_after=states_after)

    def __repr__(self) -> str:
        return f"<Draft [{len(self.entries)} requests | {self.max_tokens - self.budget}/{self.max_tokens} tokens]>"
