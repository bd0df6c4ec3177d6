"""Decides what the next step computes: `Planner`. Owned by the worker thread.

Who decodes comes first (with `prefill_first` last), one token each or what a drafter proposes; then the prompts under
way, in chunks; then whoever may start to run. Each takes blocks as it needs them, from less important requests if need
be. What is to be copied, swapped and put aside in the same step is collected in a `Draft` on the way.

Progress: a request that needs a block takes it from paused requests or from running ones of *lower* rank, never from
itself. The running request of the highest rank can thus take all blocks and always advances; nothing waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from aiocb.cache.states import Snapshot
from aiocb.config import SchedulerType
from aiocb.scheduler.admission import Admission
from aiocb.scheduler.draft import Draft
from aiocb.scheduler.request import Request, RequestStatus
from aiocb.scheduler.roster import Roster
from aiocb.step import BlockSwap, StepEntry, StepPlan

__all__ = ["Drafter", "Planner"]

# tuple.__new__ builds a NamedTuple in half the time of its own constructor.
_new = tuple.__new__
_RUNNING = RequestStatus.RUNNING

Drafter = Callable[[Request], Sequence[int]]
"""Guesses how a request goes on: any number of tokens, none where it has no idea."""


class Planner:
    """Builds plans from what the roster holds.

    Args:
        roster: where the requests are.
        admission: who may start.
        max_batch_tokens, max_prefill_chunk, scheduler_type, drafter, max_draft_rows, jumps: as for the `Scheduler`.
    """

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        *,
        max_batch_tokens: int,
        max_prefill_chunk: int,
        scheduler_type: SchedulerType,
        drafter: Drafter | None,
        max_draft_rows: int | None,
        jumps: bool,
    ) -> None:
        self.cache = roster.cache
        self.max_batch_tokens = max_batch_tokens
        self.max_prefill_chunk = max_prefill_chunk
        self.scheduler_type = scheduler_type
        self._roster = roster
        self._admission = admission
        self._flights = roster.flights
        self._drafter = drafter if self.cache.states is None else None
        self._max_draft_rows = max_batch_tokens if max_draft_rows is None else max_draft_rows
        self._jumps = jumps and self.cache.states is None
        self._expects = False
        switch = self.cache.layout.switch
        self._restart_length = switch.length if switch is not None and switch.is_recomputed else None

    def plan(self, max_tokens: int, now: float | None) -> StepPlan:
        """Decide the next step, and put it in flight; see `Scheduler.schedule`.

        Args:
            max_tokens: its budget.
            now: the time to note for requests that run for the first time.
        """
        if self._restart_length is not None:
            self._restart_longer(self._restart_length)
        draft = Draft(max_tokens, self._admission.max_requests)
        if self.scheduler_type == "prefill_first":
            self._schedule_prompts(draft, now)
            self._schedule_decoding(draft)
        else:
            if self.scheduler_type == "priority":
                self._admission.make_way(draft, self.max_prefill_chunk)
            self._schedule_decoding(draft)
            self._schedule_prompts(draft, now)
        assert draft.entries or not (draft.copies or draft.states or draft.swaps_in), "a copy would be lost"
        snapshots = self._take_snapshots(draft) if draft.snapshots else {}
        swaps_out: tuple[BlockSwap, ...] = ()
        swap = self.cache.swap
        if swap is not None and draft.entries and swap.pending:
            draft.sources += cast("list[Request]", list(swap.pending))
            swaps_out = swap.take_pending()
        plan = draft.plan(self._flights.take_closed(), snapshots, swaps_out)
        if plan.entries:
            self._flights.launch(plan, draft, snapshots)
        return plan

    def _take_snapshots(self, draft: Draft) -> dict[Request, Snapshot]:
        """Take the slots that nobody needed to live in; the snapshots for which none is left are not taken."""
        states = self.cache.states
        assert states is not None
        taken = {}
        for request, is_rolling in draft.snapshots.items():
            snapshot = states.snapshot(request, is_rolling=is_rolling)
            if snapshot is not None:
                taken[request] = snapshot
        return taken

    def _restart_longer(self, length: int) -> None:
        """Let those who have got longer than their keys are good for compute all anew (see `step.LengthSwitch`)."""
        for request in list(self._roster.running()):
            if len(request.tokens) > length and request.capacity and not request.cache_kind:
                self._roster.preempt(request, None)

    def _schedule_decoding(self, draft: Draft) -> None:
        decoding, entries, requests = self._roster.decoding, draft.entries, draft.requests
        start = len(entries)
        limit = min(draft.budget, draft.max_requests - start)
        # A copy: preemption changes the original.
        candidates = list(decoding.values())
        has_excess = len(candidates) > limit
        # Beside many others a draft costs as much as it can bring.
        drafter = self._drafter if len(candidates) < self._max_draft_rows else None
        is_special = bool(self._flights) or drafter is not None or self._expects
        self._expects = False
        spare = limit - len(candidates)  # tokens that nobody needs for his next one
        guesses = min(spare, self._max_draft_rows - len(candidates))
        new, entry_type = _new, StepEntry
        # A snapshot of each full block, for whoever goes on with this conversation.
        page_size = self.cache.page_size if self.cache.states is not None and self.cache.sharing else 0
        for request in candidates:
            if has_excess and len(entries) - start >= limit:
                break
            position = request.num_scheduled_tokens
            if is_special:
                if position != len(request.tokens) - 1 and not self._can_run_ahead(request):
                    continue
                if num_drafts := self._add_drafts(request, draft, spare, drafter, guesses):
                    spare -= num_drafts
                    guesses -= num_drafts
                    continue
            block_start: int = 0
            blocks: tuple[tuple[int, ...], ...] = ()
            # A request that an earlier one of this loop has preempted has no capacity left.
            if position >= request.capacity:
                if not self._make_room(request, position + 1, draft):
                    continue
                block_start, blocks = self.cache.new_blocks(request)
            request.num_scheduled_tokens = position + 1
            requests.append(request)
            entries.append(new(entry_type, (request.id, position, 1, 1, True, (), block_start, blocks, ())))
            if page_size and (position + 1) % page_size == 0:
                draft.snapshots[request] = True
        if has_excess:
            # Resumed requests can exceed the seats: those that got one now stand at the end of the line.
            for request in requests[start:]:
                decoding[request.id] = decoding.pop(request.id)
        if draft.has_preempted or is_special:
            draft.recount()
        else:
            draft.budget -= len(entries) - start

    def expect(self, request: Request, follows: tuple[int, ...]) -> None:
        """Let the next step compute tokens that have to come next, with the one before them."""
        if self._jumps:
            request.follows, request.follows_from = follows, len(request.tokens)
            self._expects = True

    def _can_run_ahead(self, request: Request) -> bool:
        """True when the next step can compute a token that the plan in flight is still going to sample."""
        # Not behind drafts, whose number of accepted tokens is unknown, and not behind what is the last token anyway.
        position = request.num_scheduled_tokens
        is_known = position == len(request.tokens) and position <= request.max_tokens - 2
        return is_known and not (position == self._restart_length and not request.cache_kind)

    def _add_drafts(self, request: Request, draft: Draft, spare: int, drafter: Drafter | None, guesses: int) -> int:
        """Let the step compute what has to follow, or verify what the drafter proposes.

        Returns:
            How many drafts: 0 when there are, or fit, none. At most `spare` that follow, and `guesses` of the drafter.
        """
        position, num_tokens = request.num_scheduled_tokens, len(request.tokens)
        # One more token than there are drafts is sampled, and the last one of all is never computed.
        most = min(request.max_tokens - num_tokens - 1, spare)
        if self._restart_length is not None and not request.cache_kind:
            most = min(most, self._restart_length - num_tokens)
        if position != num_tokens - 1 or most < 1:
            return 0
        num_logits = 0
        if request.follows_from == num_tokens:
            drafts = request.follows[:most]
            num_logits = 1 if request.sampling.logprobs is None else 1 + len(drafts)
        elif drafter is not None and guesses > 0:
            drafts = tuple(drafter(request))[: min(most, guesses)]
        else:
            return 0
        count = 1 + len(drafts)
        if not drafts or not self.cache.allocate(request, position + count):
            return 0
        request.num_scheduled_tokens = position + count
        draft.requests.append(request)
        block_start, blocks = self.cache.new_blocks(request)
        draft.entries.append(
            StepEntry(request.id, position, count, num_logits or count, True, (), block_start, blocks, drafts)
        )
        return len(drafts)

    def _schedule_prompts(self, draft: Draft, now: float | None) -> None:
        roster = self._roster
        cap = self.max_prefill_chunk if roster.decoding else self.max_batch_tokens
        if roster.prefilling:
            for request in sorted(roster.prefilling.values(), key=lambda request: request.rank):
                if self.scheduler_type == "priority":
                    self._admit(draft, cap, now, request.rank)
                if not draft.has_room:
                    return
                if request.status is _RUNNING and request.num_scheduled_tokens < len(request.tokens):
                    self._schedule_chunk(request, cap, draft)
        self._admit(draft, cap, now, None)

    def _admit(self, draft: Draft, cap: int, now: float | None, before: tuple[int, int] | None) -> None:
        admission = self._admission
        if not admission.has_candidate(draft, before):
            return
        promised = admission.promised(cap)
        while (admitted := admission.next(draft, cap, promised, before)) is not None:
            if admitted.first_scheduled_at is None:
                admitted.first_scheduled_at = now
            self._schedule_chunk(admitted, cap, draft)
            admission.promise(admitted, cap, promised)

    def _schedule_chunk(self, request: Request, cap: int, draft: Draft) -> None:
        cache = self.cache
        start = request.num_scheduled_tokens
        if not request.skips_prefix and start == request.num_computed_tokens and request.swapped is None:
            # Others may have published what comes next since the last chunk.
            self._admission.count_hits(request, cache.attach(request, cache.match(request)))
            start = request.num_scheduled_tokens
        wanted = min(len(request.tokens) - start, cap, draft.budget)
        if self._make_room(request, start + 1, draft):
            point = cache.next_snapshot(request, request.followers.values())
            count = cache.fit(request, min(wanted, point - start) if point else wanted)
            cache.allocate(request, start + count)
            draft.add_chunk(request, count, *cache.new_blocks(request))
            if request.num_scheduled_tokens == point:
                request.snapshot_at = point
                draft.snapshots[request] = False

    def _make_room(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Get blocks for the first `num_tokens` tokens of a running request; False: it has to sit this step out."""
        while request.status is _RUNNING:
            if self.cache.allocate(request, num_tokens):
                return True
            # What is going to come back when a plan in flight has landed is waited for.
            if self._flights and all(
                pool.num_free + self._flights.num_held(group) > 0 for group, pool in enumerate(self.cache.pools)
            ):
                self._admission.short = request
                break
            victim = self._roster.find_victim(request)
            if victim is None:
                break
            self._roster.preempt(victim, draft)
        return False
