"""The step loop's one step: inbox → schedule → execute → update → deliver. Worker thread only, no locks, no asyncio.

Time, the runner and the source of random seeds are arguments: a whole run replays from a seed (see
`aiocb.testing.simulator`).
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from aiocb.engine.adapters import LoadedAdapter, LoadedAdapters
from aiocb.engine.delivery import Delivery, error_delta
from aiocb.engine.output import OutputState
from aiocb.engine.room import Room
from aiocb.engine.stats import LATENCY_BUCKETS, Recorder, Stats
from aiocb.errors import AdapterInUse
from aiocb.scheduler.request import ParallelGroup, Request
from aiocb.step import StepOutOfMemory

if TYPE_CHECKING:
    from aiocb.engine.output import Submission
    from aiocb.engine.slot import Bridge, Slot
    from aiocb.model.load.peft import LoraWeights
    from aiocb.scheduler.scheduler import Scheduler, Update
    from aiocb.step import Handle, Runner, StepPlan, StepResult

__all__ = ["Command", "EngineCore"]

logger = logging.getLogger("aiocb")

Command = tuple[Callable[["EngineCore", Any], None], Any]
"""What goes into the inbox: a method of the core and its argument."""

Hold = Callable[[Callable[[], None]], None]
"""Calls back when the model may be used outside the steps."""


class EngineCore:
    """Owns the requests, the scheduler and, while it lives, the runner; everything happens in `step()`.

    Args:
        runner: executes plans.
        scheduler: decides them; it owns the cache's book-keeping.
        room: of the bounded queue.
        request_ids: ids that the runner has not met yet.
        clock: seconds, monotone.
        random_source: draws the seeds of requests that bring none.
        debug_checks: check every invariant after every step.
        hold: asks other processes that run the model, too; None where there are none.
        buckets: upper bounds of the histograms of times, in seconds.

    Attributes:
        adapters: that requests may choose, by name.
        delivery: the streams and what is on its way to them.
        last_event_at: when the last step began or ended.
        is_stepping: the runner is at work.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        room: Room | None = None,
        request_ids: Iterator[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        random_source: random.Random | None = None,
        debug_checks: bool = False,
        hold: Hold | None = None,
        buckets: tuple[float, ...] = LATENCY_BUCKETS,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.room = room or Room(0)
        self.adapters = LoadedAdapters()
        self.clock = clock
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.recorder = Recorder(buckets)
        self.delivery = Delivery(scheduler, self.recorder, clock)
        self.last_event_at = clock()
        self.is_stepping = False
        self._last_collected_at = self.last_event_at
        self._request_ids = request_ids or itertools.count(1)
        self._random = random_source or random.Random()
        self._debug_checks = debug_checks
        self._hold: Hold = hold or (lambda acknowledge: acknowledge())
        self._flights: deque[tuple[StepPlan, Handle, float]] = deque()  # with the time of submission
        self._retracted: list[Update] = []
        self._num_received = 0
        self._num_pauses = 0
        self._watchers: set[Bridge] = set()
        self._num_told: int | None = None
        self._calls: list[Callable[[EngineCore], object]] = []

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Apply what has arrived, run the model once over what can run, deliver what came out.

        Raises:
            Exception: whatever the runner raised; the engine is then dead.
        """
        self._apply_inbox()
        plan = self._schedule()
        results = self._execute(plan)
        updates = self._update(results)
        self._deliver(updates)

    def _apply_inbox(self) -> None:
        get = self.inbox.get_nowait
        while True:
            try:
                operation, argument = get()
            except queue.Empty:
                return
            operation(self, argument)

    def _schedule(self) -> StepPlan | None:
        """End what is overdue, and decide what the runner does next; None when that is nothing."""
        now = self.clock()
        for event in self.scheduler.expire(now):
            self.delivery.end(event, now)
        if self.is_paused:
            return None
        plan = self.scheduler.schedule(now)
        self._publish_queue()
        return plan if plan.entries or plan.closed else None

    def _execute(self, plan: StepPlan | None) -> list[tuple[StepPlan, StepResult]]:
        """Submit a plan; collect the oldest one in flight when there are as many as may be, all without a new one."""
        flights, runner = self._flights, self.runner
        if plan is not None:
            self.is_stepping, self.last_event_at = True, self.clock()
            try:
                flights.append((plan, runner.submit(plan), self.last_event_at))
            except StepOutOfMemory as error:
                self._retract([plan], error)
        results = []
        while flights and (len(flights) >= runner.depth or plan is None):
            oldest, handle, begun = flights.popleft()
            try:
                results.append((oldest, runner.collect(handle)))
            except StepOutOfMemory as error:
                # The runner has nothing in flight any more.
                behind = [later for later, *_ in flights]
                flights.clear()
                self._retract([oldest, *behind], error)
                self.last_event_at = self.clock()
                continue
            # The runner works on one plan at a time: on this one since the one before was collected, at the earliest.
            begun, self.last_event_at = max(begun, self._last_collected_at), self.clock()
            self._last_collected_at = self.last_event_at
            self.scheduler.observe(oldest, self.last_event_at - begun)
        self.is_stepping = bool(flights)
        return results

    def _retract(self, plans: list[StepPlan], error: StepOutOfMemory) -> None:
        """Let the scheduler compute again, in smaller steps, what these plans would have computed."""
        scheduler = self.scheduler
        if scheduler.max_step_tokens == scheduler.max_batch_tokens:
            logger.warning(
                "a step of %d tokens has run out of memory (%s); smaller ones follow", plans[0].num_tokens, error
            )
        self._retracted += scheduler.retract([plan for plan in plans if plan.entries], error)

    def _update(self, results: list[tuple[StepPlan, StepResult]]) -> list[Update]:
        """Let the scheduler take what has been computed."""
        updates, self._retracted = self._retracted, []
        for plan, result in results:
            if plan.entries:
                updates += self.scheduler.update(plan, result, self.last_event_at)
                self.recorder.record_step(self.last_event_at, self.scheduler.num_running)
        if not results:
            self.recorder.last_step_at = None
        return updates

    def _deliver(self, updates: list[Update]) -> None:
        """Hand out what a step has brought, and the word that the queue has moved on."""
        self.delivery.take(updates, self.last_event_at)
        self._publish_queue()
        if self._debug_checks:
            self.check_invariants()
        self._tell_watchers()
        self.delivery.flush()
        if self._calls:
            self._answer_calls()

    @property
    def is_paused(self) -> bool:
        """True while no step is taken; commands are."""
        return self._num_pauses > 0

    @property
    def has_work(self) -> bool:
        """True when `step()` would find something to do without new commands."""
        return not self.is_paused and self.scheduler.has_work

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of any request, in the core's clock."""
        return self.scheduler.next_deadline

    def check_invariants(self) -> None:
        """Check scheduler, cache and the registry of streams.

        Raises:
            AssertionError: naming what does not hold.
        """
        self.scheduler.check_invariants()
        self.delivery.check_invariants()
        assert len(self._flights) <= self.runner.depth

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, submission: Submission) -> None:
        """Admit a stream to the queue: one request per lane, all or nothing."""
        self._num_received += len(submission.lanes)
        requests: list[Request] = []
        try:
            self._enqueue(submission, requests)
        except BaseException as error:
            # All that is known to go wrong has been refused before; what was missed costs this stream and no other.
            for request in requests:
                if request.arrival >= 0:
                    self.scheduler.finish(request, "error")
            self.delivery.refuse(submission, error)
        else:
            self.delivery.open(submission.slot, requests)

    def _enqueue(self, submission: Submission, requests: list[Request]) -> None:
        sampling = submission.sampling
        prompt = submission.prompt_token_ids
        adapter = None if submission.adapter is None else self.adapters.key_of(submission.adapter)
        seed = sampling.seed if sampling.seed is not None else self._random.getrandbits(63)
        group = ParallelGroup() if len(submission.lanes) > 1 else None
        for lane in submission.lanes:
            request = Request(
                list(prompt),
                submission.cache_salt,
                adapter,
                id=next(self._request_ids),
                sampling=sampling,
                max_tokens=len(prompt) + submission.max_output_tokens,
                seed=lane_seed(seed, lane.index),
                index=lane.index,
                priority=submission.priority,
                deadline=submission.deadline,
                queue_deadline=submission.queue_deadline,
                submitted_at=submission.submitted_at,
                payload=OutputState(submission, lane),
                group=group,
            )
            requests.append(request)
        for request in requests:
            self.scheduler.add(request)

    def abort(self, slot: Slot) -> None:
        """End a stream whose reader has left; nothing more is delivered. Unknown or ended streams are ignored."""
        self.recorder.num_aborts += self.delivery.end_stream(slot, "cancelled")

    def finish_early(self, slot: Slot) -> None:
        """End a stream now and deliver what is there."""
        self.delivery.end_stream(slot, "cancelled")

    def resume(self, slot: Slot) -> None:
        """Go on with a stream that was paused because its reader was behind."""
        self.delivery.resume(slot)

    def watch_room(self, bridge: Bridge) -> None:
        """Tell a bridge when the bounded queue may have room again, from the end of this step on."""
        self._watchers.add(bridge)
        self._num_told = None

    def load_adapter(self, name: str, path: str, weights: LoraWeights) -> None:
        """Let requests choose an adapter by this name; see `Engine.load_adapter` for what it raises."""
        before = self.adapters.find(name)
        if before is not None and before.key != weights.key:
            self._check_unused(name)
        self.runner.load_adapter(weights.key, weights)
        self._drop_unnamed(self.adapters.put(name, LoadedAdapter(weights.key, path)))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; see `Engine.unload_adapter` for what it raises."""
        self.adapters.key_of(name)
        self._check_unused(name)
        self._drop_unnamed(self.adapters.remove(name))

    def _check_unused(self, name: str) -> None:
        key = self.adapters.key_of(name)
        count = sum(request.adapter == key for _, requests in self.delivery.streams() for request in requests)
        if count:
            raise AdapterInUse(
                f"adapter {name!r} is used by {count} requests: wait until they have ended, or abort them"
            )

    def _drop_unnamed(self, key: str | None) -> None:
        if key is not None:
            self.runner.drop_adapter(key)

    def reset_prefix_cache(self, _: None) -> None:
        """Forget all cached prefixes; running requests keep their cache."""
        self.scheduler.reset_prefix_cache()

    def pause(self, acknowledge: Callable[[], None]) -> None:
        """Stop stepping (commands are still applied, deadlines still hold) and tell so. Pauses nest."""
        self._num_pauses += 1
        self._land()
        self._hold(acknowledge)

    def unpause(self, _: None) -> None:
        """End one pause. After the last one the weights may have changed: what was cached is computed anew."""
        self._num_pauses -= 1
        if self._num_pauses:
            return
        self.scheduler.reset_prefix_cache()
        self.scheduler.preempt_all()
        self.runner.reload_weights()

    def call(self, operation: Callable[[EngineCore], object]) -> None:
        """Run a function when what was asked for before it has been done and delivered (for tests and tools)."""
        self._calls.append(operation)

    def _land(self) -> None:
        """Collect every plan in flight; what came out goes with the next flush."""
        if self._flights:
            self.delivery.take(self._update(self._execute(None)), self.last_event_at)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end_all(self, make_error: Callable[[], Exception]) -> None:
        """End every stream with an error of its own, now, and let the runner close all requests.

        Raises:
            Exception: whatever the runner raised over the plans in flight; `end_all_dead` is then to follow.
        """
        self._apply_inbox()
        self._land()
        self.delivery.end_all(make_error)
        plan = self.scheduler.schedule()
        if plan.closed:
            self._execute(plan)
            self._land()

    def end_all_dead(self, make_error: Callable[[], Exception]) -> None:
        """As `end_all` after a failed step: neither the scheduler nor the runner is asked."""
        self.delivery.end_all_dead(make_error)
        self.refuse_inbox(make_error)

    def refuse_inbox(self, make_error: Callable[[], Exception]) -> None:
        """End whatever is still in the inbox of a core that will not step again (any thread)."""
        while True:
            try:
                operation, argument = self.inbox.get_nowait()
            except queue.Empty:
                break
            if operation is EngineCore.submit:
                argument.slot.bridge.post([error_delta(lane, make_error()) for lane in argument.lanes])
            elif operation is EngineCore.pause:
                argument()
            elif operation is EngineCore.call:
                self.call(argument)
        self._answer_calls()

    def _answer_calls(self) -> None:
        calls, self._calls = self._calls, []
        for operation in calls:
            operation(self)

    # ── what others read ─────────────────────────────────────────────────────────────────────────────────────────

    def _publish_queue(self) -> None:
        """Publish how many requests have left the queue, as one number that any thread can read."""
        self.room.num_left = self._num_received - self.scheduler.num_waiting

    def _tell_watchers(self) -> None:
        """Let this step's batch (an empty one if need be) look for room again where somebody waits for it."""
        if not self._watchers or self._num_told == self.room.num_left:
            return
        self._num_told = self.room.num_left
        for bridge in tuple(self._watchers):
            if bridge.is_waiting_for_room:
                self.delivery.touch(bridge)
            else:
                self._watchers.discard(bridge)

    def stats(self, num_loop_wakeups: int) -> Stats:
        """A snapshot of all counters (any thread: plain reads of single-writer values)."""
        return self.recorder.snapshot(self.scheduler, num_loop_wakeups, self.clock() - self.last_event_at)


def lane_seed(seed: int, index: int) -> int:
    """A stream of its own for every parallel sample; sample 0 is what a single request would produce."""
    return (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
