"""Continuous batching: `Scheduler` owns the requests and takes the results of steps. Owned by the worker thread.

There is no prefill and no decode phase. Every request has tokens and `num_computed_tokens`, and a step lets the second
catch up with the first under a budget of tokens, requests and blocks; a request whose tokens are all computed at the
end of the step is sampled. Chunked prefill, prefix hits and resuming after preemption all follow from that.

    add ─► waiting ──admit──► prefilling ──last chunk──► decoding ──► finished          finish() from anywhere
              ▲   ▲ parked       │ ▲                      │ ▲
              │   └─ on an owner │ └──────── resume ──────┼─┤
              └────── preempt ───┴────────────────────────┘ └─► paused

`schedule` decides (see `planner`) and touches no tensor, `update` takes the result and returns events. Plans may
overlap: while one is in flight the next is made, with the sampled tokens of the first still unknown. Results come in
the order of the plans; what came for a request that has ended or lost its blocks meanwhile is dropped. All other
methods may be called at any time in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from aiocb.cache.manager import CacheManager
from aiocb.config import SchedulerType
from aiocb.errors import InvalidRequest, RequestFailed, RequestTimeout
from aiocb.outputs import FinishReason
from aiocb.scheduler.admission import Admission
from aiocb.scheduler.events import Finished, Update
from aiocb.scheduler.pace import Pace
from aiocb.scheduler.planner import Drafter, Planner
from aiocb.scheduler.queue import Deadlines
from aiocb.scheduler.request import Request, RequestStatus
from aiocb.scheduler.roster import Roster
from aiocb.scheduler.shortage import Shortage
from aiocb.step import StepPlan, StepResult

__all__ = ["Finished", "Scheduler", "Update"]

# tuple.__new__ builds a NamedTuple in half the time of its own constructor.
_new = tuple.__new__
_WAITING, _RUNNING, _, _PAUSED, _FINISHED = RequestStatus


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
        drafter: makes the drafts of decoding requests; None makes none. Models with states get none: a state cannot be
            taken back when a draft was wrong.
        max_draft_rows: most rows of a step in which anything is drafted, those that decode included; None: no bound.
        jumps: tokens that a request's structure forces are computed together with the one before them; not in models
            with states, either.
        pace: makes steps with prompts smaller where they would last too long; None: `max_batch_tokens` alone counts.

    Attributes:
        num_draft_tokens, num_accepted_tokens: what the drafter proposed and steps have verified, and what was right.
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
        drafter: Drafter | None = None,
        max_draft_rows: int | None = None,
        jumps: bool = True,
        pace: Pace | None = None,
    ) -> None:
        if max_batch_tokens < 1 or max_requests_per_batch < 1:
            raise ValueError("a step needs room for one token and one request")
        self.cache = cache
        self.scheduler_type = scheduler_type
        self.max_batch_tokens = max_batch_tokens
        self.max_requests_per_batch = min(max_requests_per_batch, max_batch_tokens)
        self.max_prefill_chunk = min(max_prefill_chunk or max_batch_tokens, max_batch_tokens)
        self.safety_margin = safety_margin
        self.pace = pace
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._num_arrivals = 0
        self._roster = Roster(cache)
        self._admission = Admission(self._roster, self.max_requests_per_batch, safety_margin)
        self._deadlines = Deadlines()
        self._flights = self._roster.flights
        self._shortage = Shortage(self._roster, max_batch_tokens)
        self._planner = Planner(
            self._roster,
            self._admission,
            max_batch_tokens=max_batch_tokens,
            max_prefill_chunk=self.max_prefill_chunk,
            scheduler_type=scheduler_type,
            drafter=drafter,
            max_draft_rows=max_draft_rows,
            jumps=jumps,
        )

    # What the engine asks

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return self._roster.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, the preempted ones included."""
        return len(self._roster.queue) + self._roster.pending.num_parked

    @property
    def num_paused(self) -> int:
        """Requests whose reader is behind."""
        return len(self._roster.paused)

    @property
    def num_requests(self) -> int:
        """All that have not finished."""
        return self.num_running + self.num_waiting + self.num_paused

    @property
    def num_preemptions(self) -> int:
        """How often blocks were taken from a request."""
        return self._roster.num_preemptions

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens that were looked up in the prefix cache when their request first ran."""
        return self._admission.num_queried

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens of these that were found."""
        return self._admission.num_hit

    @property
    def num_steps_out_of_memory(self) -> int:
        """How often a step had to be taken back."""
        return self._shortage.num_steps

    @property
    def max_step_tokens(self) -> int:
        """Token budget of the next step: `max_batch_tokens`, or less for a while after one ran out of memory."""
        return self._shortage.max_tokens

    @property
    def step_tokens(self) -> int:
        """What the last step with prompts might have had: less than `max_step_tokens` where it would last too long."""
        most = self._shortage.max_tokens
        return most if self.pace is None or self.pace.last_budget is None else min(self.pace.last_budget, most)

    @property
    def has_work(self) -> bool:
        """True when there is something to compute, or to tell the runner; paused requests alone are no work."""
        roster = self._roster
        return bool(roster.decoding or roster.prefilling or roster.queue or self._flights or self._flights.has_closed)

    @property
    def num_in_flight(self) -> int:
        """Plans that `schedule` has returned and `update` has not taken yet."""
        return len(self._flights)

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
        if request.max_tokens > self.cache.max_request_tokens:
            raise InvalidRequest(
                f"{request.max_tokens} tokens (prompt and output) can never fit into the cache: shorten the prompt, "
                "lower max_new_tokens or raise num_blocks"
            )
        assert request.status is _WAITING and request.arrival < 0, f"{request!r} was added before"
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.rank = (request.priority if self.scheduler_type == "priority" else 0, request.arrival)
        self._deadlines.push(request)
        self._roster.queue.push(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
    ) -> Finished | None:
        """End a request in whatever state it is and give its blocks back; its full blocks stay hittable. O(1).

        Returns:
            The end, or None when it had ended before: there is only one.
        """
        if request.status is _FINISHED:
            return None
        self._roster.remove(request, "finish")
        request.finish_reason = reason
        self._deadlines.discard(request)
        self._flights.give_back(request)
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
            finished = self.finish(request, "timeout", error=error)
            if finished is not None:
                ended.append(finished)
        return ended

    def pause(self, request: Request) -> None:
        """Leave a request out of the steps; it keeps its blocks until others need them. No-op unless it is active."""
        self._roster.pause(request)

    def resume(self, request: Request) -> None:
        """Let a paused request go on, where it stopped if it still has its blocks. No-op unless it is paused."""
        self._roster.resume(request)

    def preempt_all(self) -> None:
        """Take the blocks of every request: all is recomputed (after the weights have changed).

        What lies in the swap space belongs to the version before; it is dropped when its request is admitted.
        """
        for request in [*self._roster.running(), *self._roster.paused.values()]:
            if request.tables or request.status is _RUNNING:
                self._roster.preempt(request, None)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (the weights have changed); what runs goes on with what it has."""
        self.cache.reset_prefix()
        self._roster.forget_pending()

    # The step

    def schedule(self, now: float | None = None) -> StepPlan:
        """Decide the next step. May preempt; touches no tensor.

        Args:
            now: the time to note for requests that run for the first time.

        Returns:
            A plan. Without entries when nothing can be computed before a plan in flight has been collected, or there is
            no work; then it needs no `update`, and is to be executed only if it closes something.
        """
        budget = self._shortage.max_tokens
        if self.pace is not None and now is not None:
            budget = self.pace.budget_of(self._roster, budget, now)
        return self._planner.plan(budget, now)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn how long a step has taken; see `Pace`."""
        if self.pace is not None and plan.entries:
            self.pace.observe(plan, seconds)

    def update(self, plan: StepPlan, result: StepResult, now: float | None = None) -> list[Update]:
        """Take what a step has computed: append tokens, check the ends, publish full blocks.

        What came for a request that has ended or was preempted since `schedule` is dropped.

        Args:
            plan: the oldest one in flight.
            result: what the runner made of it.
            now: the time to note for first tokens.
        """
        if not plan.entries:
            return []
        if len(result.token_ids) != len(plan.entries):
            raise ValueError(f"the runner returned {len(result.token_ids)} results for {len(plan.entries)} entries")
        flight = self._flights.land(plan)
        requests, snapshots = flight.requests, flight.snapshots
        if self._shortage.is_acute:
            self._shortage.recover()
        updates: list[Update] = []
        append = updates.append
        cache, prefilling = self.cache, self._roster.prefilling
        page_size = cache.page_size
        running, new, update_type = _RUNNING, _new, Update
        errors, prompt_logprobs, follows = result.errors, result.prompt_logprobs, result.follows
        all_logprobs = repeat(None) if result.logprobs is None else result.logprobs
        for request, entry, token_ids, logprobs in zip(requests, plan.entries, result.token_ids, all_logprobs):
            # Paused while its step ran: the result counts, if its blocks have not been taken since.
            if request.status is not running and not (request.status is _PAUSED and request.capacity):
                continue
            request_id, start, count, _, is_sampled, _, _, _, drafts = entry
            if errors and request_id in errors:
                # Not published: the KV of this step may be what is wrong.
                append(Update(request, (), None, None, self._fail(request, errors[request_id])))
                continue
            computed = start + count
            if drafts:
                # What was computed of drafts that were not accepted is computed again.
                computed = request.num_scheduled_tokens = start + len(token_ids)
                if request.follows_from != start + 1:  # guesses, not what has to follow
                    self.num_draft_tokens += len(drafts)
                    self.num_accepted_tokens += len(token_ids) - 1
                request.tokens += token_ids
            request.num_computed_tokens = computed
            if computed % page_size < count:
                cache.publish(request)
            if snapshots and request in snapshots:
                cache.publish_snapshot(request, snapshots.pop(request))
            if prefilling and request_id in prefilling:
                self._advance(request, is_sampled, now)
            elif request.first_token_at is None and is_sampled:
                request.first_token_at = now
            prompt = None
            if prompt_logprobs and request_id in prompt_logprobs:
                prompt = tuple(prompt_logprobs[request_id])
                last = min(computed, request.num_prompt_tokens - 1)
                request.num_prompt_logprobs = max(request.num_prompt_logprobs, last)
            if not is_sampled:
                if prompt:
                    append(Update(request, (), None, prompt, None))
                continue
            if not token_ids:
                error = RequestFailed("the runner returned no token for a request that it should have sampled")
                append(Update(request, (), None, prompt, self._fail(request, error)))
                continue
            finished = None
            if drafts:
                finished, kept = self._find_end(request, len(token_ids))
                token_ids, logprobs = token_ids[:kept], logprobs and logprobs[:kept]
            else:
                token = token_ids[0]
                tokens = request.tokens
                tokens.append(token)
                num_tokens = len(tokens)
                if token in request.end_ids and num_tokens > request.min_tokens:
                    finished = self._stop(request, token)
                elif num_tokens >= request.max_tokens:
                    finished = self.finish(request, "length")
            if follows and request_id in follows:
                finished = self._follow(request, follows[request_id], finished)
            append(new(update_type, (request, token_ids, logprobs, prompt, finished)))
        if snapshots:
            self._flights.drop(snapshots)
        return updates

    def retract(self, plans: Sequence[StepPlan], error: Exception) -> list[Update]:
        """Take back plans that were not executed because there is no memory; their requests are computed again.

        The next steps are smaller. What runs out of memory with a single token of one request ends that request, if it
        does so a second time, with nobody else in the cache.

        Args:
            plans: the newest ones in flight, oldest first: the one that failed, and those behind it.
            error: what the runner raised.
        """
        starving = self._shortage.take_back(plans)
        if starving is None:
            return []
        failure = RequestFailed(
            f"a single token of this request has run out of memory at position {starving.num_computed_tokens}, with "
            "nothing else in the cache: lower num_blocks or max_memory_percent, or shorten the request"
        )
        failure.__cause__ = error
        return [Update(starving, (), None, None, self._fail(starving, failure))]

    def _find_end(self, request: Request, count: int) -> tuple[Finished | None, int]:
        """Let the first of the last `count` tokens that ends a request end it; how many of them remain."""
        num_before = len(request.tokens) - count
        for kept in range(1, count + 1):
            token, num_tokens = request.tokens[num_before + kept - 1], num_before + kept
            is_end = token in request.end_ids and num_tokens > request.min_tokens
            if is_end or num_tokens >= request.max_tokens:
                del request.tokens[num_tokens:]
                finished = self._stop(request, token) if is_end else self.finish(request, "length")
                return finished, kept
        return None, count

    def _follow(self, request: Request, follows: tuple[int, ...] | None, finished: Finished | None) -> Finished | None:
        """Note what a request's structure says after its last token; one that is complete has ended."""
        if follows is None:
            # What came last may also have been the last that fits: it is whole all the same.
            if finished is not None and finished.reason == "length":
                request.finish_reason = "stop"
                return Finished(request, "stop", None, None)
            return finished or self.finish(request, "stop")
        if finished is None:
            self._planner.expect(request, follows)
        return finished

    def _stop(self, request: Request, token: int) -> Finished | None:
        return self.finish(request, "stop", stop_reason=None if token in request.eos_ids else token)

    def _fail(self, request: Request, error: Exception) -> Finished | None:
        return self.finish(request, "error", error=error)

    def _advance(self, request: Request, is_sampled: bool, now: float | None) -> None:
        """Take note of a prompt's chunk: deliver followers, and move on to decoding after the last one."""
        if is_sampled:
            if request.first_token_at is None:
                request.first_token_at = now
            self._roster.settle(request)
        else:
            self._roster.wake(request, request.num_computed_tokens)

    def open_requests(self) -> Iterator[Request]:
        """The requests that the runner keeps a record of, apart from those that it is about to close."""
        return self._roster.open_requests()

    def check_invariants(self) -> None:
        """Check every container, the cache and the pending prefixes, against each other.

        Raises:
            AssertionError: something is in two places, in none, or in a state that does not fit.
        """
        self._roster.check_invariants()
        assert 0 <= self.prefix_cache_hits <= self.prefix_cache_queries

    def __repr__(self) -> str:
        blocks = "+".join(f"{pool.num_used}/{pool.num_usable}" for pool in self.cache.pools)
        pool = None if self.cache.states is None else self.cache.states.pool
        states = "" if pool is None else f" | slots {pool.num_used}/{pool.num_usable}"
        hits = 100 * self.prefix_cache_hits / max(self.prefix_cache_queries, 1)
        return (
            f"<Scheduler {self.scheduler_type} [{self.num_running} running, {self.num_waiting} waiting, "
            f"{self.num_paused} paused | blocks {blocks}{states} | prefix hits {hits:.0f} % | "
            f"{self.num_preemptions} preemptions]>"
        )
