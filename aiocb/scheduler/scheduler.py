"""Decides which tokens of which requests the next step computes: `Scheduler`. Owned by the worker thread.

There is no prefill and no decode phase. Every request has tokens and `num_computed_tokens`, and a step lets the second
catch up with the first under a budget of tokens, requests and blocks; a request whose tokens are all computed at the
end of the step is sampled. Chunked prefill, prefix hits and resuming after preemption all follow from that.

    add ─► waiting ──admit──► prefilling ──last chunk──► decoding ──► finished          finish() from anywhere
              ▲   ▲ parked       │ ▲                      │ ▲
              │   └─ on an owner │ └──────── resume ──────┼─┤
              └────── preempt ───┴────────────────────────┘ └─► paused

`schedule` decides and touches no tensor, `update` takes the result and returns events. In between the plan borrows the
requests' lists; `add`, `finish`, `pause`, `resume` and `expire` may be called there.

Progress: a request that needs a block takes it from paused requests or from running ones of *lower* rank, never from
itself. The running request of the highest rank can thus take all blocks and always advances; nothing waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiocb.cache.manager import CacheManager
from aiocb.config import SchedulerType
from aiocb.errors import InvalidRequest, RequestFailed, RequestTimeout
from aiocb.outputs import FinishReason, TokenLogprobs
from aiocb.scheduler.pending import PendingPrefixes
from aiocb.scheduler.queue import Deadlines, WaitingQueue
from aiocb.scheduler.request import ParallelGroup, Request, RequestStatus
from aiocb.step import BlockCopy, StepEntry, StepPlan, StepResult

__all__ = ["Finished", "Scheduler", "Update"]

# Locals of the hot loops; tuple.__new__ builds a NamedTuple in half the time of its own constructor.
_new = tuple.__new__
_WAITING, _RUNNING, _PREEMPTED, _PAUSED, _FINISHED = RequestStatus

MAX_PARKED_PER_STEP = 64
"""Most requests parked behind a pending prefix in one step: bounds the look-ups of one step, not the waiting."""


class Finished(NamedTuple):
    """The end of a request; there is exactly one."""

    request: Request
    reason: FinishReason
    stop_reason: str | int | None = None
    error: Exception | None = None


class Update(NamedTuple):
    """What a step has brought one request. `finished` is set on its last update."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finished: Finished | None = None


class Scheduler:
    """Continuous batching over one `CacheManager`.

    Args:
        cache: of the runner that executes the plans.
        max_batch_tokens: token budget of a step.
        max_requests_per_batch: most requests in a step; bounded by `max_batch_tokens`, so that all can decode.
        max_prefill_chunk: most prompt tokens of one request in a step while others decode; None: the whole budget.
        scheduler_type: `fifo`: decoding first, then prompts in order of arrival; `prefill_first`: prompts first;
            `priority`: as fifo, by (priority, arrival), and a more important request preempts a less important one.
        safety_margin: while less than this share of the blocks is free, nothing is admitted unless nothing runs.

    Attributes:
        num_preemptions, prefix_cache_queries, prefix_cache_hits: counters; the last two in tokens.
        num_generated_tokens, num_prompt_tokens_computed: output so far; prompt tokens that went through the model.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        max_prefill_chunk: int | None = None,
        scheduler_type: SchedulerType = "fifo",
        safety_margin: float = 0.0,
    ) -> None:
        if max_batch_tokens < 1 or max_requests_per_batch < 1:
            raise ValueError("a step needs room for one token and one request")
        self.cache = cache
        self.scheduler_type = scheduler_type
        self.max_batch_tokens = max_batch_tokens
        self.max_requests_per_batch = min(max_requests_per_batch, max_batch_tokens)
        self.max_prefill_chunk = min(max_prefill_chunk or max_batch_tokens, max_batch_tokens)
        self.safety_margin = safety_margin
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_generated_tokens = 0
        self.num_prompt_tokens_computed = 0
        self._num_arrivals = 0
        self._queue = WaitingQueue()
        self._deadlines = Deadlines()
        self._pending = PendingPrefixes(cache.page_size)
        # Insertion-ordered sets by id: O(1) to leave, as fast to walk as a list.
        self._prefilling: dict[int, Request] = {}
        self._decoding: dict[int, Request] = {}
        self._paused: dict[int, Request] = {}
        self._released: list[int] = []
        self._blocked: tuple[Request, tuple[int, ...]] | None = None
        # The step being built, then in flight.
        self._plan: StepPlan | None = None
        self._entries: list[StepEntry] = []
        self._flight: list[Request] = []
        self._copies: list[BlockCopy] = []
        self._budget = 0
        self._has_preempted = False
        self._guest: Request | None = None

    # What the engine asks

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, the preempted ones included."""
        return len(self._queue) + self._pending.num_parked

    @property
    def num_paused(self) -> int:
        """Requests whose reader is behind."""
        return len(self._paused)

    @property
    def num_requests(self) -> int:
        """All that have not finished."""
        return self.num_running + self.num_waiting + self.num_paused

    @property
    def kv_cache_usage_perc(self) -> float:
        """Share of the cache that requests hold, 0 to 1; blocks that are only cached do not count."""
        return self.cache.usage()

    @property
    def has_work(self) -> bool:
        """True when `schedule` has something to do; paused requests alone are no work."""
        return bool(self._decoding or self._prefilling or self._queue)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do, None for never: how long an idle worker may sleep."""
        return self._deadlines.next_at

    # What the engine tells

    def add(self, request: Request) -> None:
        """Let a new request wait for its turn.

        Raises:
            InvalidRequest: it could never fit into the cache.
        """
        if not self.cache.can_ever_fit(request.max_tokens):
            raise InvalidRequest(
                f"{request.max_tokens} tokens (prompt and output) can never fit into the cache of "
                f"{self.cache.max_request_tokens} tokens; shorten the prompt, lower max_new_tokens or raise num_blocks"
            )
        assert request.status is _WAITING and request.arrival < 0, f"{request!r} was added before"
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.rank = (request.priority if self.scheduler_type == "priority" else 0, request.arrival)
        self._deadlines.push(request)
        self._queue.push(request)

    def add_group(self, requests: Sequence[Request]) -> ParallelGroup:
        """Add the n samples of one prompt, all or none; the prompt is computed once.

        Raises:
            InvalidRequest: one of them could never fit into the cache; none was added.
        """
        groups = {id(request.group): request.group for request in requests}
        group = next(iter(groups.values()), None) or ParallelGroup()
        if len(groups) > 1:
            raise ValueError("the samples of one prompt share one group")
        if any(request.tokens != requests[0].tokens for request in requests):
            raise ValueError("the samples of one prompt have one prompt")
        for request in requests:
            if request.group is None:
                request.group = group
                group.requests.append(request)
        # The longest first: if that one is refused, no other has been added yet.
        self.add(max(requests, key=lambda request: request.max_tokens))
        for request in requests:
            if request.arrival < 0:
                self.add(request)
        return group

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
        now: float | None = None,
    ) -> Finished | None:
        """End a request in whatever state it is and give its blocks back; its full blocks stay hittable. O(1).

        Returns:
            The end, or None when it had ended before: there is only one.
        """
        status = request.status
        if status is _FINISHED:
            return None
        if status is _RUNNING:
            self._leave(request)
        elif status is _PAUSED:
            del self._paused[request.id]
        elif not self._pending.unpark(request):
            self._queue.discard(request)
        request.transition("finish")
        request.finish_reason = reason
        request.finished_at = now
        self._deadlines.discard(request)
        self.cache.free(request)
        if request.has_run:
            self._released.append(request.id)
        return Finished(request, reason, stop_reason, error)

    def expire(self, now: float) -> list[Finished]:
        """End the requests whose deadline has passed. O(1) when none has."""
        ended = []
        while (request := self._deadlines.pop_due(now)) is not None:
            if request.has_run:
                message = f"the request's timeout has passed after {request.num_output_tokens} output tokens"
                error = RequestTimeout(message, "run")
            else:
                error = RequestTimeout("the request's timeout has passed while it was waiting to run", "queue")
            finished = self.finish(request, "timeout", error=error, now=now)
            if finished is not None:
                ended.append(finished)
        return ended

    def pause(self, request: Request) -> None:
        """Leave a request out of the steps; it keeps its blocks until others need them. No-op unless it is active."""
        status = request.status
        if status is _PAUSED or status is _FINISHED:
            return
        if status is _RUNNING:
            self._leave(request)
        elif not self._pending.unpark(request):
            self._queue.discard(request)
        request.transition("pause")
        self._paused[request.id] = request

    def resume(self, request: Request) -> None:
        """Let a paused request go on, where it stopped if it still has its blocks. No-op unless it is paused."""
        if request.status is not _PAUSED:
            return
        del self._paused[request.id]
        if request.capacity:
            request.transition("resume")
            self._join(request)
        else:
            request.transition("requeue")
            self._queue.push(request)

    def preempt_all(self) -> None:
        """Take the blocks of every request: all is recomputed (after the weights have changed)."""
        for request in [*self._prefilling.values(), *self._decoding.values()]:
            self._preempt(request)
        for request in self._paused.values():
            if request.capacity:
                self._preempt(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (the weights have changed); what runs goes on with what it has."""
        self.cache.reset_prefix()
        for request in self._prefilling.values():
            self._pending.discard(request)
            self._wake(request)

    # The step: decide

    def schedule(self, now: float | None = None) -> StepPlan:
        """Decide the next step. May preempt; touches no tensor.

        Args:
            now: the time to note for requests that run for the first time.

        Returns:
            A plan, valid until `update`; without entries only when there is no work. `released_ids` travel with the
            next plan that has entries.
        """
        assert self._plan is None, "the last plan has not been updated"
        self._entries, self._flight, self._copies = [], [], []
        self._budget = self.max_batch_tokens
        self._has_preempted = False
        self._guest = None
        if self.scheduler_type == "prefill_first":
            self._schedule_prompts(now)
            self._schedule_decoding()
        else:
            if self.scheduler_type == "priority":
                self._make_way()
            self._schedule_decoding()
            self._schedule_prompts(now)
        released: tuple[int, ...] = ()
        if self._entries:
            released = tuple(self._released)
            self._released.clear()
        num_tokens = self.max_batch_tokens - self._budget
        plan = StepPlan(tuple(self._entries), num_tokens, tuple(self._copies), released)
        if plan.entries:
            self._plan = plan
        return plan

    def _schedule_decoding(self) -> None:
        entries, flight = self._entries, self._flight
        limit = min(self._budget, self.max_requests_per_batch - len(flight))
        requests = list(self._decoding.values())
        count = len(entries)
        has_excess = len(requests) > limit
        for request in requests:
            if has_excess and len(entries) - count >= limit:
                break
            computed = request.num_computed_tokens
            # A request that an earlier one of this loop has preempted has no capacity left.
            if computed >= request.capacity and not self._make_room(request):
                continue
            flight.append(request)
            entries.append(
                _new(
                    StepEntry,
                    (
                        request.id,
                        request.tokens,
                        request.num_prompt_tokens,
                        computed,
                        1,
                        request.tables,
                        1,
                        True,
                        request.sampling,
                        request.seed,
                    ),
                )
            )
        if has_excess:
            # Resumed requests can exceed the seats: those that got one now stand at the end of the line.
            for request in flight[count:]:
                self._decoding[request.id] = self._decoding.pop(request.id)
        if self._has_preempted:
            # Entries may have been withdrawn, of this loop and of before.
            self._budget = self.max_batch_tokens - sum(entry.num_new_tokens for entry in entries)
        else:
            self._budget -= len(entries) - count

    def _schedule_prompts(self, now: float | None) -> None:
        cap = self.max_prefill_chunk if self._decoding else self.max_batch_tokens
        for request in self._by_rank(self._prefilling):
            if self._budget < 1 or len(self._flight) >= self.max_requests_per_batch:
                return
            if request.status is _RUNNING:
                self._schedule_chunk(request, cap)
        if self._queue:
            self._admit(cap, now)

    def _schedule_chunk(self, request: Request, cap: int) -> None:
        cache = self.cache
        if not request.skips_prefix:
            # Others may have published what comes next since the last chunk.
            saved = cache.attach(request, cache.match(request))
            self.prefix_cache_hits += saved if request.num_preemptions == 0 else 0
            request.num_cached_tokens += saved if request.num_preemptions == 0 else 0
        start = request.num_computed_tokens
        end = len(request.tokens)
        count = cache.fit(request, min(end - start, cap, self._budget))
        while count < 1:
            victim = self._find_victim(request)
            if victim is None:
                return
            self._preempt(victim)
            count = cache.fit(request, min(end - start, cap, self._budget))
        has_room = cache.allocate(request, start + count)
        assert has_room
        is_sampled = start + count == end
        num_logits = 1 if is_sampled else 0
        if request.skips_prefix:
            # Rows that a preemption cut off are not delivered twice.
            num_logits = max(num_logits, start + count - max(start, request.num_prompt_logprobs))
        self._flight.append(request)
        self._entries.append(
            StepEntry(
                request.id,
                request.tokens,
                request.num_prompt_tokens,
                start,
                count,
                request.tables,
                num_logits,
                is_sampled,
                request.sampling,
                request.seed,
            )
        )
        self._budget -= count

    # Admission

    def _admit(self, cap: int, now: float | None) -> None:
        num_parked = 0
        promised = self._promised(cap)
        # After a preemption the free blocks belong to those who are short of them; a newcomer would take them at once.
        while (
            not self._has_preempted
            and self._budget > 0
            and self.num_running < self.max_requests_per_batch
            and len(self._flight) < self.max_requests_per_batch
            and (request := self._queue.peek()) is not None
            and (self._guest is None or self._guest is request)
        ):
            owner = self._find_owner(request)
            if owner is not None:
                if num_parked == MAX_PARKED_PER_STEP:
                    return
                num_parked += 1
                self._queue.discard(request)
                self._pending.park(request, *owner)
                continue
            if not self._seat(request, cap, promised):
                return
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now
            self._schedule_chunk(request, cap)
            for g, blocks in enumerate(self.cache.demand(request, cap) if request.tables else ()):
                promised[g] += blocks

    def _find_owner(self, request: Request) -> tuple[Request, int] | None:
        """Who computes what this request needs, and how far it pays to wait; None: it computes on its own."""
        found: tuple[Request, int] | None = None
        group, cache = request.group, self.cache
        if request.skips_prefix:
            return None
        leader = group.leader if group is not None and not request.has_run else None
        common = request.num_prompt_tokens - 1
        if leader is not None and leader.id in self._prefilling and leader.num_computed_tokens < common:
            found = leader, common
        elif self._fork_source(request) is None and cache.sharing:
            hits = cache.match(request)
            cache.extend_digests(request, len(request.tokens) // cache.page_size)
            found = self._pending.find(request.digests, hits, (len(request.tokens) - 1) // cache.page_size)
        # A more important request does not wait for the turn of a less important one.
        return found if found is None or found[0].rank[0] <= request.rank[0] else None

    def _seat(self, request: Request, cap: int, promised: list[int]) -> bool:
        """Let the first of the queue run if there is room; paused requests give up theirs for it."""
        while True:
            is_idle = not self._decoding and not self._prefilling
            free = self.cache.num_free()
            blocked = self._blocked
            if is_idle or blocked is None or blocked[0] is not request or any(map(int.__gt__, free, blocked[1])):
                may_enter = is_idle or self.cache.has_margin(self.safety_margin)
                if may_enter and (self._try_fork(request) or self._try_start(request, cap, promised, is_idle)):
                    self._blocked = None
                    return True
                # Looked up again only when blocks have come back: a long prompt at the head costs nothing meanwhile.
                self._blocked = request, free
            victim = self._find_paused_victim()
            if victim is None:
                return False
            self._preempt(victim)

    def _try_start(self, request: Request, cap: int, promised: list[int], is_idle: bool) -> bool:
        cache = self.cache
        hits = 0 if request.skips_prefix else cache.match(request)
        chunk = max(1, min(cap, self._budget))
        if not cache.can_hold(request, hits, chunk, promised) and not (is_idle and not self._find_paused_victim()):
            return False
        self._enter(request)
        saved = cache.attach(request, hits)
        if cache.sharing:
            cache.extend_digests(request, len(request.tokens) // cache.page_size)
            self._pending.add(request, hits)
        if not request.has_run:
            request.num_cached_tokens = saved
            if not request.skips_prefix:
                self.prefix_cache_queries += len(request.tokens)
                self.prefix_cache_hits += saved
        if request.group is not None and not request.has_run:
            request.group.leader = request
        request.has_run = True
        return True

    def _fork_source(self, request: Request) -> Request | None:
        group = request.group
        if group is None or request.has_run or request.skips_prefix:
            return None
        common = request.num_prompt_tokens - 1
        for source in (group.leader, group.last_fork):
            # A fork may itself have been made in this very step: its copy has not happened yet.
            if source is None or not self.cache.can_fork(source, common):
                continue
            if source is group.leader or source.num_computed_tokens > common:
                return source
        return None

    def _try_fork(self, request: Request) -> bool:
        source = self._fork_source(request)
        if source is None:
            return False
        common = request.num_prompt_tokens - 1
        copies = self.cache.fork(source, request, common)
        if copies is None:
            return False
        self._copies += copies
        self._enter(request)
        assert request.group is not None
        request.group.last_fork = request
        request.num_cached_tokens = common
        request.has_run = True
        return True

    def _enter(self, request: Request) -> None:
        self._queue.discard(request)
        request.transition("admit")
        self._prefilling[request.id] = request

    def _promised(self, cap: int) -> list[int]:
        """Per group, the blocks that prompts under way are still going to take."""
        promised = [0] * len(self.cache.pools)
        for request in self._prefilling.values():
            if request.tables:
                for g, blocks in enumerate(self.cache.demand(request, cap)):
                    promised[g] += blocks
        return promised

    # Preemption

    def _make_room(self, request: Request) -> bool:
        """Get a decoding request its next block; False when it has to sit this step out."""
        while request.status is _RUNNING:
            if self.cache.allocate(request, request.num_computed_tokens + 1):
                return True
            victim = self._find_victim(request)
            if victim is None:
                break
            self._preempt(victim)
        return False

    def _make_way(self) -> None:
        """Preempt less important requests, if that gets the most important waiting one a seat and blocks."""
        request = self._queue.peek()
        if request is None or request.priority >= max((r.priority for r in self._running()), default=0):
            return
        cap = self.max_prefill_chunk
        victims = sorted((r for r in self._running() if r.priority > request.priority), key=lambda r: r.rank)
        if not victims or self._find_owner(request) is not None:
            return
        hits = 0 if request.skips_prefix else self.cache.match(request)
        promised = self._promised(cap)
        gains = [sum(column) for column in zip(*(map(len, r.tables) for r in victims if r.tables))] or promised
        at_most = [blocks - gain for blocks, gain in zip(promised, gains, strict=True)]
        if len(victims) < self.num_running and not self.cache.can_hold(request, hits, cap, at_most):
            return
        while victims and not (
            self.num_running < self.max_requests_per_batch
            and self.cache.has_margin(self.safety_margin)
            and self.cache.can_hold(request, hits, cap, self._promised(cap))
        ):
            self._preempt(victims.pop())
            self._guest = request
        # Those blocks are meant for the waiting request.
        self._has_preempted = False

    def _find_victim(self, request: Request) -> Request | None:
        """Whose blocks `request` may take: a paused one's, else the least important of those below its own rank."""
        paused = self._find_paused_victim()
        if paused is not None:
            return paused
        worst = max(self._running(), key=lambda r: r.rank, default=request)
        return worst if worst.rank > request.rank else None

    def _find_paused_victim(self) -> Request | None:
        holders = [request for request in self._paused.values() if request.capacity]
        return max(holders, key=lambda request: request.rank) if holders else None

    def _preempt(self, request: Request) -> None:
        """Take all blocks of a request, which recomputes them later; an entry of the step being built is withdrawn."""
        is_paused = request.status is _PAUSED
        if not is_paused:
            self._leave(request)
            self._withdraw(request)
            self._has_preempted = True
        request.transition("preempt")
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.cache.free(request)
        if not is_paused:
            self._queue.push(request)

    def _withdraw(self, request: Request) -> None:
        if self._plan is not None or request not in self._flight:
            return
        i = self._flight.index(request)
        del self._flight[i]
        self._budget += self._entries.pop(i).num_new_tokens
        # Its blocks go to somebody else in this step: a copy into them must not happen.
        held = [set(table) for table in request.tables]
        self._copies = [copy for copy in self._copies if copy.target not in held[copy.group]]

    # The step: take the result

    def update(self, plan: StepPlan, result: StepResult, now: float | None = None) -> list[Update]:
        """Take what a step has computed: append tokens, check the ends, publish full blocks.

        What came for a request that has ended or was preempted since `schedule` is dropped.

        Args:
            plan: the last one that `schedule` returned.
            result: what the runner made of it.
            now: the time to note for first tokens and ends.
        """
        if not plan.entries:
            return []
        assert plan is self._plan, "update() takes the plan that schedule() returned last"
        self._plan = None
        updates: list[Update] = []
        append = updates.append
        cache, prefilling = self.cache, self._prefilling
        page_size = cache.page_size
        num_generated = 0
        errors, all_logprobs, prompt_logprobs = result.errors, result.logprobs, result.prompt_logprobs
        is_plain = not errors and all_logprobs is None and not prompt_logprobs
        for i, (request, entry, token) in enumerate(zip(self._flight, plan.entries, result.token_ids, strict=True)):
            if request.status is not _RUNNING and not self._is_valid(request, entry):
                continue
            count = entry[4]
            computed = request.num_computed_tokens = entry[3] + count
            if errors and request.id in errors:
                # Not published: the KV of this step may be what is wrong.
                finished = self.finish(request, "error", error=errors[request.id], now=now)
                append(Update(request, (), None, None, finished))
                continue
            if computed % page_size < count:
                cache.publish(request)
            if prefilling and request.id in prefilling:
                self._advance(request, entry, now)
            elif request.first_token_at is None:
                request.first_token_at = now
            logprobs = None
            prompt = None
            if not is_plain:
                if all_logprobs is not None and (logprob := all_logprobs[i]) is not None:
                    logprobs = (logprob,)
                if prompt_logprobs and request.id in prompt_logprobs:
                    prompt = tuple(prompt_logprobs[request.id])
                    last = min(computed, request.num_prompt_tokens - 1)
                    request.num_prompt_logprobs = max(request.num_prompt_logprobs, last)
            if not entry[7]:
                if prompt:
                    append(Update(request, (), None, prompt, None))
                continue
            if token is None:
                error = RequestFailed("the runner returned no token for a request that it should have sampled")
                append(Update(request, (), None, prompt, self.finish(request, "error", error=error, now=now)))
                continue
            tokens = request.tokens
            tokens.append(token)
            num_tokens = len(tokens)
            num_generated += 1
            finished = None
            if token in request.end_ids and num_tokens > request.min_tokens:
                stop_reason = None if token in request.eos_ids else token
                finished = self.finish(request, "stop", stop_reason=stop_reason, now=now)
            elif num_tokens >= request.max_tokens:
                finished = self.finish(request, "length", now=now)
            append(_new(Update, (request, (token,), logprobs, prompt, finished)))
        self.num_generated_tokens += num_generated
        self._entries, self._flight = [], []
        return updates

    def _advance(self, request: Request, entry: StepEntry, now: float | None) -> None:
        """Take note of a prompt's chunk: deliver followers, and move on to decoding after the last one."""
        num_prompt = min(request.num_computed_tokens, request.num_prompt_tokens) - entry.num_computed_tokens
        self.num_prompt_tokens_computed += max(num_prompt, 0)
        if entry.is_sampled:
            if request.first_token_at is None:
                request.first_token_at = now
            del self._prefilling[request.id]
            self._decoding[request.id] = request
            self._pending.discard(request)
            self._wake(request)
        elif request.followers:
            self._wake(request, request.num_computed_tokens)

    def _is_valid(self, request: Request, entry: StepEntry) -> bool:
        # Paused while its step ran: the result counts, if its blocks have not been taken since.
        return request.status is _PAUSED and request.tables is entry.block_tables

    # Containers

    def _running(self) -> Iterator[Request]:
        yield from self._prefilling.values()
        yield from self._decoding.values()

    def _by_rank(self, requests: dict[int, Request]) -> list[Request]:
        return sorted(requests.values(), key=lambda request: request.rank)

    def _join(self, request: Request) -> None:
        """Put a resumed request where it belongs: one token to compute is decoding."""
        if len(request.tokens) - request.num_computed_tokens == 1 and request.num_output_tokens:
            self._decoding[request.id] = request
            return
        self._prefilling[request.id] = request
        if self.cache.sharing and request.cache_version == self.cache.version:
            self.cache.extend_digests(request, len(request.tokens) // self.cache.page_size)
            self._pending.add(request, request.num_computed_tokens // self.cache.page_size)

    def _leave(self, request: Request) -> None:
        """Take a running request out of the steps; whoever waits for its prefix is told."""
        if self._decoding.pop(request.id, None) is None:
            del self._prefilling[request.id]
            self._pending.discard(request)
            self._wake(request)

    def _wake(self, owner: Request, num_tokens: int | None = None) -> None:
        if owner.followers:
            for request in self._pending.wake(owner, num_tokens):
                self._queue.push(request)

    def check_invariants(self) -> None:
        """Check every container, the cache and the pending prefixes, against each other.

        Raises:
            AssertionError: something is in two places, in none, or in a state that does not fit.
        """
        running = list(self._running())
        paused = list(self._paused.values())
        waiting = list(self._queue)
        assert all(request.status is _RUNNING for request in running)
        assert all(request.status is _PAUSED for request in paused)
        assert all(request.status in (_WAITING, _PREEMPTED) and not request.capacity for request in waiting)
        everybody = [*running, *paused, *waiting]
        assert len({request.id for request in everybody}) == len(everybody), "a request is in two places"
        assert all(request.parked_on is None for request in everybody)
        for request in self._decoding.values():
            assert len(request.tokens) - request.num_computed_tokens == 1, f"{request!r} is not decoding"
        for request in everybody:
            assert request.num_computed_tokens < len(request.tokens) <= request.max_tokens
        self._queue.check_invariants()
        self._pending.check_invariants(self._prefilling.values())
        self.cache.check_invariants([*running, *paused])
        assert 0 <= self.prefix_cache_hits <= self.prefix_cache_queries

    def __repr__(self) -> str:
        blocks = "+".join(f"{pool.num_used}/{pool.num_usable}" for pool in self.cache.pools)
        hits = 100 * self.prefix_cache_hits / max(self.prefix_cache_queries, 1)
        return (
            f"<Scheduler {self.scheduler_type} [{self.num_running} running, {self.num_waiting} waiting, "
            f"{self.num_paused} paused | blocks {blocks} | prefix hits {hits:.0f} % | "
            f"{self.num_preemptions} preemptions]>"
        )
