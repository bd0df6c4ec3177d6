"""A life of an engine as event loops see it: one bridge per loop, and the way of a stream to the worker.

Loop threads, except `_on_exit` (worker thread).
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio

from aiocb.engine.bridge import LoopBridge, Signal, fail, resolve
from aiocb.engine.core import EngineCore
from aiocb.engine.encoder import Encoder
from aiocb.engine.life import Life
from aiocb.engine.output import Submission
from aiocb.engine.prepare import Prepared, StreamSpec, prepare
from aiocb.engine.room import Place
from aiocb.engine.slot import End, Lane, Slot
from aiocb.errors import QueueFull, RequestTimeout
from aiocb.outputs import FinishReason, RequestMetrics, Usage

if TYPE_CHECKING:
    from aiocb.config import EngineConfig
    from aiocb.engine.source import Source

__all__ = ["Intent", "Session", "Submitted"]

T = TypeVar("T")
_LONGEST_ALARM_S = 1e6
_ENCODER_EXIT_S = 1.0
_LET_IN_S = 0.002


class Submitted(NamedTuple):
    """A stream that the worker knows of: where its output arrives, and its prompt."""

    slot: Slot
    lanes: tuple[Lane, ...]
    prompt_token_ids: list[int]


class Intent:
    """What the holder of a stream has decided while it is still being submitted.

    Attributes:
        is_finishing: it is to end at once, without output.
        abandon: lets go of its preparation, while that is waited for (any thread).
        withdraw: takes it out of the line for room in the queue, while it stands there (any thread).
    """

    __slots__ = ("abandon", "is_finishing", "withdraw")

    def __init__(self) -> None:
        self.is_finishing = False
        self.abandon: Callable[[], None] | None = None
        self.withdraw: Callable[[], None] | None = None


class Session(Life):
    """Admits streams of any event loop to a life; see `Life` for the arguments.

    Attributes:
        built: set when it can serve or has failed.
        exited: set when its thread is about to end.
        encoder: prepares requests.
        compiler: prepares those whose structure has to be compiled first, so that the others need not wait; its thread
            is started when there is one.
    """

    def __init__(self, source: Source, config: EngineConfig, number: int = 1) -> None:
        super().__init__(source, config, number)
        self.built = Signal()
        self.exited = Signal()
        self._bridges: dict[asyncio.AbstractEventLoop, LoopBridge] = {}
        self._bridges_lock = threading.Lock()  # taken once per event loop, when its bridge is made
        self._num_wakeups_before = 0
        self.encoder = Encoder()
        self.compiler = Encoder("aiocb compiler")
        self._compiler_lock = threading.Lock()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the threads; `built` is set when the worker can serve or has failed.

        Raises:
            EngineError: the system gives no thread.
        """
        self.encoder.start()
        try:
            self.worker.start(lambda _error: self.built.set(), self._on_exit)
        except BaseException:
            self._stop_encoders()
            raise

    def _on_exit(self) -> None:
        self._stop_encoders()
        for loop, bridge in tuple(self._bridges.items()):
            if loop.is_closed():
                bridge.discard()
            else:
                bridge.fail_waiting(self.worker.make_end_error)
        self.exited.set()

    async def shutdown(self, drain: float | None, *, leaves_others: bool = False) -> None:
        """Refuse, drain to a deadline, abort the rest, join. Where rank 0 is another process, wait for it to do so.

        Args:
            drain: seconds; None is without a bound, 0 aborts at once.
            leaves_others: end here, whatever other processes do, which cannot go on then.

        Raises:
            EngineDead: it was followed, and has not ended orderly.
        """
        worker = self.worker
        if self.is_foreign:
            return  # its thread belongs to another process, which will end it
        try:
            if self.follows and not leaves_others:
                await self.exited.wait()
            elif worker.state in ("running", "draining") and drain != 0:
                worker.drain(lambda: None)
                with anyio.move_on_after(drain):
                    for (
                        encoder
                    ) in self._started_encoders():  # what has begun before is in line, or with the worker, then
                        await encoder.submit(int)
                    is_left = True
                    while is_left:  # until a round in which nobody stood in line: what the worker was told is all
                        is_left = any(
                            bridge.line.is_waiting or bridge.line.num_reserved
                            for loop, bridge in tuple(self._bridges.items())
                            if not loop.is_closed()
                        )
                        drained = Signal()
                        worker.drain(drained.set)
                        await drained.wait()
                        if is_left:
                            await anyio.sleep(_LET_IN_S)  # their loops let them in now
        finally:
            worker.stop()
            # Bounded by one step: shielded, so that a cancelled scope still leaves no thread behind. Not so a model
            # that is being loaded: its thread ends by itself when the caller does not want to wait.
            with anyio.CancelScope(shield=worker.state != "starting"):
                await self.exited.wait()
            worker.join(1.0)
            # Bounded by one job, which may be a long one: its thread ends by itself when nobody wants to wait.
            with anyio.move_on_after(_ENCODER_EXIT_S, shield=True):
                for encoder in self._started_encoders():
                    await encoder.exited.wait()
                    encoder.join(_ENCODER_EXIT_S)
        if self.follows and not leaves_others and worker.state == "dead":
            raise worker.make_dead_error()

    @property
    def num_wakeups(self) -> int:
        """Callbacks posted into event loops."""
        return self._num_wakeups_before + sum(bridge.num_wakeups for bridge in tuple(self._bridges.values()))

    # ── submission ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, spec: StreamSpec) -> asyncio.Future[Prepared | Exception]:
        """Have a request checked and encoded; its place among others is taken here.

        Raises:
            EngineClosed, EngineDead: the engine cannot serve.
        """
        if self.rank:
            self.raise_if_following()
        self.raise_if_unusable()
        limits, text = self.limits, self.text
        assert limits is not None and text is not None
        encoder = self.encoder
        sampling = spec.sampling
        is_structured = (  # not a call: there is one of these for every request
            sampling.json_schema is not None
            or sampling.regex is not None
            or sampling.choice is not None
            or sampling.grammar is not None
        )
        if (spec.tools and spec.needs_compiler) or (is_structured and not text.has_compiled(sampling)):
            encoder = self._started_compiler()
        return encoder.submit(partial(prepare, spec, limits, text))

    def _started_compiler(self) -> Encoder:
        with self._compiler_lock:
            if not self.compiler.is_started:
                self.compiler.start()
        return self.compiler

    def _started_encoders(self) -> list[Encoder]:
        return [encoder for encoder in (self.encoder, self.compiler) if encoder.is_started]

    def _stop_encoders(self) -> None:
        for encoder in (self.encoder, self.compiler):
            encoder.stop(self.worker.make_end_error)

    async def ask(self, change: Callable[[EngineCore], None]) -> None:
        """Have something done between two steps, and wait for it.

        Raises:
            Exception: whatever it raised, which the engine survives.
            EngineClosed, EngineDead: the engine ended before.
        """
        done = Signal()
        errors: list[Exception] = []

        def run(core: EngineCore) -> None:
            try:
                if self.worker.state in ("dead", "closed"):  # whoever empties the inbox then has no runner
                    raise self.worker.make_end_error()
                change(core)
            except Exception as error:
                errors.append(error)
            finally:
                done.set()

        self.put((EngineCore.call, run))
        await done.wait()
        if errors:
            raise errors[0]

    async def submit(self, spec: StreamSpec, begun: asyncio.Future[Prepared | Exception], intent: Intent) -> Submitted:
        """Wait for its preparation and for room in the queue, and hand a stream to the worker.

        Nothing is registered before the last await; registration is one synchronous step.

        Args:
            spec: the request.
            begun: what `begin` has returned for it.
            intent: of whoever holds the stream.

        Raises:
            InvalidRequest, QueueFull, RequestTimeout, EngineClosed, EngineDead: see `Stream.__anext__`.
        """
        submitted_at = time.monotonic()
        bridge = self._bridge(asyncio.get_running_loop())
        intent.abandon = partial(bridge.withdraw, begun)
        try:  # it cancels what it does not wait for any more, and that is not begun then
            prepared = await self._in_time(begun, spec, submitted_at, "the request was not prepared")
        finally:
            intent.abandon = None
        if isinstance(prepared, Exception):
            raise prepared
        place = None
        if self.config.max_queue_size and not intent.is_finishing:
            place = await self._wait_for_room(bridge, spec, intent, prepared.sampling.n, submitted_at)
        try:
            self._raise_if_refusing()
            return self._hand_over(bridge, spec, prepared, intent, submitted_at)
        finally:
            if place is not None:  # only now: whoever drains is to find it here or in the inbox
                self._leave(bridge, place)

    def _hand_over(
        self, bridge: LoopBridge, spec: StreamSpec, prepared: Prepared, intent: Intent, submitted_at: float
    ) -> Submitted:
        """Register a stream and let the worker have it; nothing is awaited."""
        num_lanes = prepared.sampling.n
        slot = Slot(spec.request_id, bridge, num_lanes)
        lanes = slot.make_lanes()
        bridge.register(lanes)
        if prepared.max_output_tokens == 0 or intent.is_finishing:
            reason: FinishReason = "cancelled" if intent.is_finishing else "length"
            end = End(reason, None, Usage(len(prepared.prompt_token_ids), 0), RequestMetrics(None, None, 0.0))
            for lane in lanes:
                lane.push((), prepared.texts[lane.index].take() if prepared.texts else "", None, end)
            return Submitted(slot, lanes, prepared.prompt_token_ids)
        deadline = None if spec.timeout is None else submitted_at + spec.timeout
        queue_deadline = None if spec.queue_timeout is None else submitted_at + spec.queue_timeout
        submission = Submission(
            slot,
            lanes,
            prepared.prompt_token_ids,
            prepared.sampling,
            prepared.max_output_tokens,
            submitted_at,
            spec.priority,
            deadline,
            queue_deadline,
            spec.cache_salt,
            spec.stream_interval,
            spec.max_unread_tokens,
            spec.on_unread,
            prepared.drop_output,
            prepared.texts,
            None if self.tracer is None else self.tracer.begin(spec.request_id, prepared.sampling),
            spec.adapter,
        )
        bridge.line.enter(num_lanes)
        self.put((EngineCore.submit, submission))
        return Submitted(slot, lanes, prepared.prompt_token_ids)

    async def _wait_for_room(
        self, bridge: LoopBridge, spec: StreamSpec, intent: Intent, count: int, submitted_at: float
    ) -> Place | None:
        """Return when the queue has room for `count` requests, which are to enter before anything is awaited.

        The place that is returned keeps the room until it is left.
        """
        self.room.check(count)
        line = bridge.line
        if line.can_enter(count):
            return None
        if spec.on_full == "refuse":
            raise QueueFull(f"the queue is full ({self.room.limit} requests wait); try later or pass on_full='wait'")
        future: asyncio.Future[None] = bridge.loop.create_future()
        place = line.join(count, partial(resolve, future, None))
        bridge.waiters.add(future)
        intent.withdraw = partial(bridge.withdraw, future)
        try:
            # Only now, when the worker can see this place: it forgets bridges in which nobody waits. And the worker
            # reads `is_waiting_for_room` after it made room, so look again.
            self.put((EngineCore.watch_room, bridge))
            # Whoever ends the worker after this line finds the future in line and fails it.
            self._raise_if_refusing()
            line.let_in()
            await self._in_time(future, spec, submitted_at, "no room in the queue")
        except BaseException:
            self._leave(bridge, place)
            raise
        finally:
            intent.withdraw = None
            bridge.waiters.discard(future)
        return place

    def _leave(self, bridge: LoopBridge, place: Place) -> None:
        """Give up a place; whether or not it led into the queue, all who stand in line are to look for room again."""
        had_room = place.is_let_in
        bridge.line.leave(place)
        bridge.line.let_in()
        if had_room:  # in other loops, too
            self.put((EngineCore.watch_room, bridge))

    def _raise_if_refusing(self) -> None:
        """Refuse what cannot be served any more; what began before the engine drained is let in."""
        worker = self.worker
        if worker.is_stopping or not worker.is_draining:
            self.raise_if_unusable()

    async def _in_time(self, future: asyncio.Future[T], spec: StreamSpec, submitted_at: float, failure: str) -> T:
        """Wait for a future as long as the time before the first step allows."""
        bounds = [bound for bound in (spec.timeout, spec.queue_timeout) if bound is not None]
        remaining = min(bounds) - (time.monotonic() - submitted_at) if bounds else math.inf
        alarm = None
        if remaining < _LONGEST_ALARM_S:
            late = RequestTimeout(f"{failure} within {min(bounds)} s", "queue")
            alarm = future.get_loop().call_later(remaining, fail, future, late)
        try:
            return await future
        finally:
            future.cancel()  # of no effect on one that is done
            if alarm is not None:
                alarm.cancel()

    def _bridge(self, loop: asyncio.AbstractEventLoop) -> LoopBridge:
        bridge = self._bridges.get(loop)
        if bridge is None:
            with self._bridges_lock:
                for other in [other for other in self._bridges if other.is_closed()]:
                    closed = self._bridges.pop(other)
                    closed.discard()
                    self.room.close_line(closed.line)
                    self._num_wakeups_before += closed.num_wakeups
                bridge = self._bridges[loop] = LoopBridge(loop, self.room.open_line(), self._abandon)
        return bridge

    def _abandon(self, slot: Slot) -> None:
        self.put((EngineCore.abort, slot))
