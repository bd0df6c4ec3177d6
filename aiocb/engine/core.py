"""The step loop's one step: inbox → schedule → execute → update → emit. Worker thread only, no locks, no asyncio.

Time, the runner and the source of random seeds are arguments: a whole run replays from a seed (see
`aiocb.testing.simulator`).
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.engine.output import OutputState, Submission
from aiocb.engine.slot import Delivery, End, Slot
from aiocb.engine.stats import Recorder, Stats
from aiocb.errors import AiocbError, RequestError, RequestFailed
from aiocb.scheduler.request import ParallelGroup, Request
from aiocb.scheduler.scheduler import Finished, Scheduler, Update
from aiocb.text.detokenizer import StopMatcher

if TYPE_CHECKING:
    from aiocb.engine.bridge import Bridge
    from aiocb.step import Runner

__all__ = ["Command", "EngineCore"]

Command = tuple[Callable[["EngineCore", Any], None], Any]
"""What goes into the inbox: a method of the core and its argument."""


class EngineCore:
    """Owns the requests, the scheduler and the runner; everything happens in `step()`.

    Args:
        runner: executes plans.
        scheduler: decides them; it owns the cache's book-keeping.
        clock: seconds, monotone.
        random_source: draws the seeds of requests that bring none.
        debug_checks: check every invariant after every step.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_source: random.Random | None = None,
        debug_checks: bool = False,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.clock = clock
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.recorder = Recorder()
        self.last_event_at = clock()
        self.is_stepping = False
        self.is_paused = False
        self._random = random_source or random.Random()
        self._debug_checks = debug_checks
        self._requests: dict[Slot, list[Request]] = {}
        self._next_id = 1
        self._num_received = 0
        self._num_pauses = 0
        self._room_watchers: set[Bridge] = set()
        self._num_told: int | None = None
        self._touched: list[Bridge] = []
        self._calls: list[Callable[[EngineCore], object]] = []

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Apply what has arrived, run the model once over what can run, deliver what came out.

        Raises:
            Exception: whatever the runner raised; the engine is then dead.
        """
        self._apply_inbox()
        now = self.clock()
        self._emit_finished(self.scheduler.expire(now), now)
        if not self.is_paused:
            plan = self.scheduler.schedule(now)
            self._publish_queue()
            if plan.entries:
                self.is_stepping, self.last_event_at = True, now
                result = self.runner.execute(plan)
                now = self.last_event_at = self.clock()
                self.is_stepping = False
                self._emit(self.scheduler.update(plan, result, now), now)
                self.recorder.record_step(now, self.scheduler.num_running)
            else:
                self.recorder.last_step_at = None
        self._publish_queue()
        if self._debug_checks:
            self.check_invariants()
        self._tell_room_watchers()
        self._flush()
        if self._calls:
            self._answer_calls()

    @property
    def has_work(self) -> bool:
        """True when `step()` would find something to do without new commands."""
        return not self.is_paused and self.scheduler.has_work

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of any request, in the core's clock."""
        return self.scheduler.next_deadline

    @property
    def num_requests(self) -> int:
        """Streams that have not ended."""
        return len(self._requests)

    def check_invariants(self) -> None:
        """Check scheduler, cache and the registry of streams.

        Raises:
            AssertionError: naming what does not hold.
        """
        self.scheduler.check_invariants()
        for slot, requests in self._requests.items():
            assert requests, f"{slot.request_id} is registered without a living request"
            assert all(not request.is_finished for request in requests), f"{slot.request_id} keeps an ended request"

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, submission: Submission) -> None:
        """Admit a stream to the queue: one request per lane, all or nothing."""
        self._num_received += len(submission.lanes)
        requests: list[Request] = []
        try:
            self._enqueue(submission, requests)
        except Exception as error:
            # Admission has checked all that it knows of; what it missed costs this stream and no other.
            for request in requests:
                if request.arrival >= 0:
                    self.scheduler.finish(request, "error", now=self.clock())
            for lane in submission.lanes:
                failure = error if isinstance(error, RequestError) and lane.index == 0 else _failure(error)
                self._post(submission.slot, Delivery(lane, (), "", None, End("error", error=failure)))
        else:
            self._requests[submission.slot] = requests

    def _enqueue(self, submission: Submission, requests: list[Request]) -> None:
        sampling = submission.sampling
        prompt = submission.prompt_token_ids
        seed = sampling.seed if sampling.seed is not None else self._random.getrandbits(63)
        group = ParallelGroup() if len(submission.lanes) > 1 else None
        for lane in submission.lanes:
            request = Request(
                self._next_id,
                prompt if group is None else list(prompt),
                sampling,
                max_tokens=len(prompt) + submission.max_output_tokens,
                seed=_lane_seed(seed, lane.index),
                index=lane.index,
                priority=submission.priority,
                cache_salt=submission.cache_salt,
                deadline=submission.deadline,
                queue_deadline=submission.queue_deadline,
                submitted_at=submission.submitted_at,
                payload=OutputState(submission, lane, StopMatcher),
                group=group,
            )
            self._next_id += 1
            requests.append(request)
        if group is None:
            self.scheduler.add(requests[0])
        else:
            self.scheduler.add_group(requests)

    def abort(self, slot: Slot) -> None:
        """End a stream whose reader has left; nothing more is delivered. Unknown or ended streams are ignored."""
        requests = self._requests.get(slot)
        if requests:
            now = self.clock()
            self.recorder.num_aborts += len(requests)
            for request in tuple(requests):
                self._end(request, self.scheduler.finish(request, "cancelled", now=now), now)

    def finish_early(self, slot: Slot) -> None:
        """End a stream now and deliver what is there."""
        requests = self._requests.get(slot)
        if requests:
            now = self.clock()
            for request in tuple(requests):
                self._end(request, self.scheduler.finish(request, "cancelled", now=now), now)

    def resume(self, slot: Slot) -> None:
        """Go on with a stream that was paused because its reader was behind."""
        slot.is_paused = False
        for request in self._requests.get(slot, ()):
            self.scheduler.resume(request)

    def watch_room(self, bridge: Bridge) -> None:
        """Tell a bridge when the bounded queue may have room again, from the end of this step on."""
        self._room_watchers.add(bridge)
        self._num_told = None

    def reset_prefix_cache(self, _: None) -> None:
        """Forget all cached prefixes; running requests keep their cache."""
        self.scheduler.reset_prefix_cache()

    def pause(self, acknowledge: Callable[[], None]) -> None:
        """Stop stepping (commands are still applied, deadlines still hold) and tell so. Pauses nest."""
        self._num_pauses += 1
        self.is_paused = True
        acknowledge()

    def unpause(self, _: None) -> None:
        """End one pause. After the last one the weights may have changed: what was cached is computed anew."""
        self._num_pauses -= 1
        if self._num_pauses:
            return
        self.is_paused = False
        self.scheduler.reset_prefix_cache()
        self.scheduler.preempt_all()
        reload_weights = getattr(self.runner, "reload_weights", None)
        if reload_weights is not None:
            reload_weights()

    def call(self, operation: Callable[[EngineCore], object]) -> None:
        """Run a function when what was asked for before it has been done and delivered (for tests and tools)."""
        self._calls.append(operation)

    def end_all(self, make_error: Callable[[], Exception]) -> None:
        """End every stream with an error of its own, now, whatever state the scheduler is in."""
        self._apply_inbox()
        now = self.clock()
        for requests in tuple(self._requests.values()):
            for request in tuple(requests):
                finished = self.scheduler.finish(request, "error", error=make_error(), now=now)
                self._end(request, finished, now)
        self._flush()

    def release_runner(self) -> None:
        """Let the runner forget the requests of this core; another core may use it next."""
        release = getattr(self.runner, "release", None)
        if release is not None:
            release(self.scheduler.take_released())

    def end_all_dead(self, make_error: Callable[[], Exception]) -> None:
        """As `end_all` after a failed step: the scheduler may be broken and is not asked."""
        for slot, requests in tuple(self._requests.items()):
            for request in requests:
                end = End("error", error=make_error())
                self._post(slot, Delivery(request.payload.lane, (), "", None, end))
        self._requests.clear()
        self._flush()
        self.refuse_inbox(make_error)

    def refuse_inbox(self, make_error: Callable[[], Exception]) -> None:
        """End whatever is still in the inbox of a core that will not step again (any thread)."""
        while True:
            try:
                operation, argument = self.inbox.get_nowait()
            except queue.Empty:
                break
            if operation is EngineCore.submit:
                ends = [Delivery(lane, (), "", None, End("error", error=make_error())) for lane in argument.lanes]
                argument.slot.bridge.post(ends)
            elif operation is EngineCore.pause:
                argument()
            elif operation is EngineCore.call:
                self.call(argument)
        self._answer_calls()

    def _answer_calls(self) -> None:
        calls, self._calls = self._calls, []
        for operation in calls:
            operation(self)

    def _publish_queue(self) -> None:
        """Publish how many requests have left the queue, as one number that any thread can read."""
        self.recorder.num_left_queue = self._num_received - self.scheduler.num_waiting

    def _tell_room_watchers(self) -> None:
        """Let this step's batch (an empty one if need be) look for room again where somebody waits for it."""
        if not self._room_watchers or self._num_told == self.recorder.num_left_queue:
            return
        self._num_told = self.recorder.num_left_queue
        for bridge in tuple(self._room_watchers):
            if not bridge.is_waiting_for_room:
                self._room_watchers.discard(bridge)
            elif not bridge.outbox:
                self._touched.append(bridge)

    def _apply_inbox(self) -> None:
        get = self.inbox.get_nowait
        while True:
            try:
                operation, argument = get()
            except queue.Empty:
                return
            operation(self, argument)

    # ── emit ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _emit(self, updates: Iterable[Update], now: float) -> None:
        touched = self._touched
        new_delivery = tuple.__new__
        for update in updates:
            request, token_ids, logprobs, prompt_logprobs, finished = update
            output: OutputState = request.payload
            try:
                if output.is_plain and finished is None and prompt_logprobs is None:
                    slot = output.slot
                    detokenizer = output.detokenizer
                    text = detokenizer.push(token_ids) if detokenizer is not None else ""
                    slot.num_sent += 1
                    bridge = slot.bridge
                    outbox = bridge.outbox
                    if not outbox:
                        touched.append(bridge)
                    outbox.append(new_delivery(Delivery, (output.lane, token_ids, text, logprobs, None)))
                else:
                    self._emit_slowly(update, now)
                    if finished is not None:
                        continue
                if output.max_unread is not None:
                    self._check_reader(request, output, now)
            except Exception as error:
                failure = _failure(error)
                finished = finished or self.scheduler.finish(request, "error", error=failure, now=now)
                self._end(request, finished, now, failure)

    def _emit_slowly(self, update: Update, now: float) -> None:
        request, token_ids, logprobs, prompt_logprobs, finished = update
        output: OutputState = request.payload
        if prompt_logprobs is not None:
            output.add_prompt_logprobs(prompt_logprobs)
        matched = output.add(token_ids, logprobs, request.num_output_tokens) if token_ids else None
        if matched is not None:
            if finished is None:
                finished = self.scheduler.finish(request, "stop", stop_reason=matched, now=now)
            else:
                finished = finished._replace(reason="stop", stop_reason=matched)
        if finished is not None:
            self._end(request, finished, now, stopped_by_string=matched is not None)
        elif output.interval is not None and len(output.token_ids) >= output.interval:
            self._post(output.slot, output.take(None))

    def _end(
        self,
        request: Request,
        finished: Finished | None,
        now: float,
        error: Exception | None = None,
        *,
        stopped_by_string: bool = False,
    ) -> None:
        """Deliver a request's terminal event; exactly once, because `Scheduler.finish` answers exactly once."""
        if finished is None:
            return
        output: OutputState = request.payload
        slot = output.slot
        error = error or finished.error
        if error is None:
            try:
                output.flush(stopped_by_string=stopped_by_string)
            except Exception as flush_error:
                error = _failure(flush_error)
        elif not isinstance(error, AiocbError):
            error = _failure(error)
        reason, stop_reason = finished.reason, finished.stop_reason
        if error is not None:
            reason = "timeout" if reason == "timeout" else "error"
        elif output.drop_output and reason == "stop":
            reason, stop_reason = "length", None
        end = output.end(request, now, reason, stop_reason, error)
        self._post(slot, output.take(end))
        siblings = self._requests.get(slot)
        if siblings is not None:
            siblings.remove(request)
            if not siblings:
                del self._requests[slot]
        self.recorder.record_end(request, end)

    def _emit_finished(self, finished: Sequence[Finished], now: float) -> None:
        for event in finished:
            self._end(event.request, event, now)

    def _check_reader(self, request: Request, output: OutputState, now: float) -> None:
        """Hold a request back, or end it, when its reader is too far behind."""
        slot = output.slot
        assert output.max_unread is not None
        if slot.num_sent - slot.num_read < output.max_unread:
            return
        if output.on_unread == "cancel":
            self._end(request, self.scheduler.finish(request, "cancelled", now=now), now)
            return
        for sibling in self._requests.get(slot, ()):
            self.scheduler.pause(sibling)
        slot.is_paused = True
        # The reader may have caught up before it could see the flag: it would then never ask to be resumed.
        if slot.num_sent - slot.num_read < output.max_unread:
            self.resume(slot)

    def _post(self, slot: Slot, delivery: Delivery) -> None:
        bridge = slot.bridge
        if not bridge.outbox:
            self._touched.append(bridge)
        bridge.outbox.append(delivery)

    def _flush(self) -> None:
        """Hand every touched bridge its batch: one wake-up per step and event loop."""
        if not self._touched:
            return
        for bridge in self._touched:
            batch, bridge.outbox = bridge.outbox, []
            if not bridge.post(batch):
                self._abandon(bridge)
        self._touched.clear()

    def _abandon(self, bridge: Bridge) -> None:
        """The loop behind a bridge is closed: end its streams and no others."""
        self._room_watchers.discard(bridge)
        now = self.clock()
        for slot, requests in tuple(self._requests.items()):
            if slot.bridge is bridge:
                self.recorder.num_aborts += len(requests)
                for request in tuple(requests):
                    self._end(request, self.scheduler.finish(request, "cancelled", now=now), now)
        bridge.outbox = []

    # ── counters ─────────────────────────────────────────────────────────────────────────────────────────────────

    def stats(self, num_loop_wakeups: int) -> Stats:
        """A snapshot of all counters (any thread: plain reads of single-writer values)."""
        return self.recorder.snapshot(self.scheduler, num_loop_wakeups, self.clock() - self.last_event_at)


def _failure(error: Exception) -> RequestFailed:
    """A new error for one lane, with what really happened as its cause."""
    failure = RequestFailed(f"this request could not be processed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _lane_seed(seed: int, index: int) -> int:
    """A stream of its own for every parallel sample; sample 0 is what a single request would produce."""
    return (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
