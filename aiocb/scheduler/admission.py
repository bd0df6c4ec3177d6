"""Who may start to run: `Admission`. Owned by the worker thread.

A waiting request is admitted when there is a seat (and a slot, where the model has states), when enough of the cache is
free, and when all of its present tokens fit beside what the prompts under way are still going to take. The first of the
queue that cannot be admitted holds back the others, so that a long prompt is not overtaken for ever. Before that it is
looked up: what the prefix cache holds is attached; what another request is computing right now is waited for
(`PendingPrefixes`).
"""

from __future__ import annotations

from operator import gt

from aiocb.scheduler.draft import Draft
from aiocb.scheduler.request import Request, RequestStatus
from aiocb.scheduler.roster import Roster
from aiocb.step import StateCopy

__all__ = ["Admission"]

MAX_PARKED_PER_STEP = 64
"""Most requests parked behind a pending prefix in one step: bounds the look-ups of one step. (In all, no more are
parked than there are seats: they could not run at once anyway.)"""


class Admission:
    """The rules for the first of the queue.

    Args:
        roster: where the requests are.
        max_requests: seats.
        safety_margin: while less than this share of the blocks is free, only an idle engine admits.

    Attributes:
        num_queried, num_hit: prompt tokens that were looked up in the prefix cache, and found.
        short: a running request that waits for blocks which come back when a plan in flight lands.
    """

    def __init__(self, roster: Roster, max_requests: int, safety_margin: float) -> None:
        self.roster = roster
        self.cache = roster.cache
        self.max_requests = max_requests
        self.safety_margin = safety_margin
        self.num_queried = 0
        self.num_hit = 0
        self.short: Request | None = None
        self._blocked: tuple[Request, tuple[int, ...]] | None = None

    def has_candidate(self, draft: Draft, before: tuple[int, int] | None = None) -> bool:
        """True when there is a seat, and somebody to be considered for it.

        Args:
            draft: the step being built.
            before: consider only those of a higher rank than this.
        """
        # After a preemption the free blocks are for those who are short of them; a newcomer would take them at once.
        if draft.has_preempted or not draft.has_room or self.roster.num_running >= self.max_requests:
            return False
        if self.short is not None:
            if self.short.status is RequestStatus.RUNNING and self.short.num_scheduled_tokens >= self.short.capacity:
                return False
            self.short = None
        request = self.roster.queue.peek()
        if request is None or (draft.guest is not None and draft.guest is not request):
            return False
        return self._can_open(request) and (before is None or request.rank < before)

    def _can_open(self, request: Request) -> bool:
        """False while a plan in flight names it from before its preemption: it has not been closed yet."""
        return not (request.num_preemptions and self.roster.flights.holds(request))

    def next(
        self, draft: Draft, cap: int, promised: list[int], before: tuple[int, int] | None = None
    ) -> Request | None:
        """Admit the first of the queue that need not wait for another's prefix, or nobody.

        Args:
            draft: the step being built; a fork adds its block copies.
            cap: the most tokens of it that one step will compute.
            promised: per group, the blocks that prompts under way are still going to take.
            before: admit only those of a higher rank than this.
        """
        roster, queue = self.roster, self.roster.queue
        while self.has_candidate(draft, before):
            request = queue.peek()
            assert request is not None
            is_idle = not roster.num_running
            if is_idle or self._may_look_up(request):
                if self._try_fork(request, draft):
                    return request
                hits = 0 if request.skips_prefix else self.cache.match(request)
                self._drop_stale(request, hits)
                owner = self._find_owner(request, hits)
                if owner is not None:
                    if draft.num_parked == MAX_PARKED_PER_STEP or roster.pending.num_parked >= self.max_requests:
                        return None
                    draft.num_parked += 1
                    queue.discard(request)
                    roster.pending.park(request, *owner)
                    continue
                if self._try_start(request, hits, min(cap, draft.budget), promised, draft):
                    return request
                self._blocked = request, self.cache.num_free()
            # Readers that are behind must not hold the cache against those that are not.
            victim = roster.find_paused_victim()
            if victim is None:
                return None
            roster.preempt(victim, draft)
        return None

    def count_hits(self, request: Request, saved: int) -> None:
        """Count tokens that were found in the prefix cache between two chunks."""
        # Only once per request: what is found again after a preemption was not saved but lost and regained.
        if saved and request.num_preemptions == 0:
            request.num_cached_tokens += saved
            self.num_hit += saved

    def promised(self, cap: int) -> list[int]:
        """Per group, the blocks that prompts under way are still going to take."""
        promised = [0] * len(self.cache.pools)
        for request in self.roster.prefilling.values():
            self.promise(request, cap, promised)
        return promised

    def promise(self, request: Request, cap: int, promised: list[int]) -> None:
        """Add what one admitted request is still going to take."""
        if request.tables:
            for g, blocks in enumerate(self.cache.demand(request, cap)):
                promised[g] += blocks

    def make_way(self, draft: Draft, cap: int) -> None:
        """Preempt less important requests, if that gets the most important waiting one a seat and blocks."""
        roster, cache = self.roster, self.cache
        request = roster.queue.peek()
        if request is None or not self._can_open(request):
            return
        victims = [running for running in roster.running() if running.priority > request.priority]
        if not victims:
            return
        hits = 0 if request.skips_prefix else cache.match(request)
        if self._fork_source(request) is not None or self._find_owner(request, hits) is not None:
            return
        gains = [0] * len(cache.pools)
        for victim in victims:
            for g, table in enumerate(victim.tables):
                gains[g] += len(table)
        at_most = [blocks - gain for blocks, gain in zip(self.promised(cap), gains, strict=True)]
        if len(victims) < roster.num_running and not (
            cache.has_margin(self.safety_margin, gains) and cache.can_hold(request, hits, cap, at_most)
        ):
            return
        victims.sort(key=lambda victim: victim.rank)
        while victims and not (
            roster.num_running < self.max_requests
            and (cache.has_slot or roster.flights.has_held_slots)
            and cache.has_margin(self.safety_margin)
            and cache.can_hold(request, hits, cap, self.promised(cap))
        ):
            roster.preempt(victims.pop(), draft)
            draft.guest = request
        # The room is for the guest.
        draft.has_preempted = False

    def _may_look_up(self, request: Request) -> bool:
        # Only when blocks have come back since it was refused: a long prompt at the head costs nothing meanwhile.
        blocked = self._blocked
        if blocked is not None and blocked[0] is request and not any(map(gt, self.cache.num_free(), blocked[1])):
            return False
        return self.cache.has_margin(self.safety_margin)

    def _find_owner(self, request: Request, hits: int) -> tuple[Request, int] | None:
        """Who computes what this request needs, and how far it pays to wait; None: it goes on on its own."""
        if request.skips_prefix or request.swapped is not None:
            return None
        found: tuple[Request, int] | None = None
        cache, group = self.cache, request.group
        leader = group.leader if group is not None and not request.has_run else None
        common = request.num_prompt_tokens - 1
        if leader is not None and leader.id in self.roster.prefilling and leader.num_computed_tokens < common:
            found = leader, common if cache.states is None else common // cache.page_size * cache.page_size
        elif cache.sharing:
            cache.extend_block_hashes(request, len(request.tokens) // cache.page_size)
            # Where KV was found but no state, what comes behind it is what may be waited for.
            start = max(hits, request.branch_at // cache.page_size)
            found = self.roster.pending.find(request.block_hashes, start, (len(request.tokens) - 1) // cache.page_size)
        if found is not None and cache.states is not None:
            found = self._with_snapshot(request, hits, *found)
        # A more important request does not wait for the turn of a less important one.
        return found if found is None or found[0].rank[0] <= request.rank[0] else None

    def _with_snapshot(self, request: Request, hits: int, owner: Request, target: int) -> tuple[Request, int] | None:
        """How far it pays to wait where states are needed: to a snapshot that the owner has not taken yet."""
        states = self.cache.states
        if states is None or not states.layout.interval or not self.cache.sharing:
            return None  # nothing is ever put aside
        if target > max(owner.num_scheduled_tokens, hits * self.cache.page_size):
            return owner, target  # its chunk is going to end there
        if max(owner.num_computed_tokens, hits * self.cache.page_size) < owner.snapshot_at <= target:
            return owner, owner.snapshot_at
        # Too late: this request computes it again, and puts it aside there for all who come after it.
        request.branch_at = max(request.branch_at, target)
        return None

    def _drop_stale(self, request: Request, hits: int) -> None:
        """Let a request have what the prefix cache has instead of what lies in the swap space, if that is more."""
        swap = self.cache.swap
        if swap is not None and request.swapped is not None and not swap.is_worth_it(request, hits):
            swap.free(swap.forget(request))

    def _try_start(self, request: Request, hits: int, chunk: int, promised: list[int], draft: Draft) -> bool:
        roster, cache = self.roster, self.cache
        if not cache.has_slot:
            return False
        # Alone, a request can be computed in smaller chunks if need be.
        is_alone = not roster.num_running and roster.find_paused_victim() is None
        if not is_alone and not cache.can_hold(request, hits, chunk, promised):
            return False
        is_first = not request.has_run
        if request.swapped is not None:
            assert cache.swap is not None
            swaps = cache.swap.take_in(request, hits)
            if swaps is None:
                return False
            draft.swaps_in[request] = swaps
        roster.enter(request)
        saved = cache.attach(request, hits)
        roster.announce(request)
        if is_first:
            request.num_cached_tokens = saved
            if not request.skips_prefix:
                self.num_queried += len(request.tokens)
                self.num_hit += saved
            if request.group is not None:
                request.group.leader = request
        self._blocked = None
        return True

    def _fork_source(self, request: Request) -> Request | None:
        group = request.group
        if group is None or request.has_run or request.skips_prefix:
            return None
        common = request.num_prompt_tokens - 1
        for source in (group.leader, group.last_fork):
            # A fork may itself have been made in this very step: its copy has not happened yet.
            if source is None or (source is group.last_fork and source.num_computed_tokens <= common):
                continue
            if self.cache.can_fork(source, common) and not self._moves_on(source):
                return source
        return None

    def _moves_on(self, source: Request) -> bool:
        """True when a plan in flight changes the state that a fork would copy."""
        return self.cache.states is not None and self.roster.flights.holds(source)

    def _try_fork(self, request: Request, draft: Draft) -> bool:
        source = self._fork_source(request)
        if source is None:
            return False
        common = request.num_prompt_tokens - 1
        copies = self.cache.fork(source, request, common)
        if copies is None:
            return False
        self.roster.enter(request)
        draft.copies += copies
        if request.state_slot and not request.state_source:
            draft.states.append(StateCopy(source.state_slot, request.state_slot))
        if copies or request.state_slot:
            draft.sources.append(source)
        assert request.group is not None
        request.group.last_fork = request
        request.num_cached_tokens = common
        self._blocked = None
        return True

    def __repr__(self) -> str:
        return f"<Admission [{self.max_requests} seats | margin {self.safety_margin:g} | hit {self.num_hit} tokens]>"
