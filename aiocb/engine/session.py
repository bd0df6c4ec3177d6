"""One life of an engine, from entering to closing: a worker, its core, and a bridge per event loop.

Loop threads, except `_build` and `_release` (worker thread). Streams hold their session: a stream that is closed after
its engine has been entered again still reaches the core that it came from.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from aiocb.config import Choice, EngineConfig
from aiocb.engine.admission import Limits, StreamSpec, encode_prompt, plan_request
from aiocb.engine.bridge import LoopBridge, Signal
from aiocb.engine.core import EngineCore
from aiocb.engine.limits import make_scheduler
from aiocb.engine.output import Submission
from aiocb.engine.slot import End, Lane, Slot
from aiocb.engine.worker import Worker
from aiocb.errors import EngineClosed, QueueFull, RequestTimeout
from aiocb.outputs import RequestMetrics, Usage
from aiocb.text.processor import TextProcessor, is_long

if TYPE_CHECKING:
    from aiocb.engine.core import Command
    from aiocb.engine.source import Built, Source

__all__ = ["Session"]

_MAX_ENCODERS = 2


class Session:
    """Starts a worker over a source and admits streams to it.

    Args:
        source: builds the runner.
        config: the engine's settings.
    """

    def __init__(self, source: Source, config: EngineConfig) -> None:
        self.source = source
        self.config = config
        self.limits: Limits | None = None
        self.text: TextProcessor | None = None
        self.choices: list[Choice] = []
        self.is_logged = False
        self.built = Signal()
        self.exited = Signal()
        self.worker = Worker(self._build, self._release)
        self._built: Built | None = None
        self._bridges: dict[asyncio.AbstractEventLoop, LoopBridge] = {}
        self._bridges_lock = threading.Lock()  # taken once per event loop, when its bridge is made
        self._num_wakeups_before = 0
        self._num_submitted_before = 0
        self._encoders: dict[asyncio.AbstractEventLoop, anyio.CapacityLimiter] = {}

    # ── worker thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _build(self) -> EngineCore:
        built = self.source.build(self.config)
        built.text.prepare()
        scheduler, limits, choices = make_scheduler(self.config, built)
        self._built, self.text, self.limits = built, built.text, limits
        self.choices = [*built.choices, *choices]
        return EngineCore(
            built.runner,
            scheduler,
            random_source=random.Random(self.config.seed) if self.config.seed is not None else None,
            debug_checks=self.config.debug_checks,
        )

    def _release(self, core: EngineCore) -> None:
        if self._built is None:
            return
        is_dead = self.worker.state == "dead"
        if not is_dead:
            core.release_runner()
        self.source.release(self._built, is_dead)

    def _on_exit(self) -> None:
        make_error = self.worker.make_dead_error if self.worker.state == "dead" else _closed_error
        for loop, bridge in tuple(self._bridges.items()):
            if loop.is_closed():
                bridge.discard()
            else:
                bridge.fail_waiting(make_error)
        self.exited.set()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the worker; `built` is set when it can serve or has failed."""
        self.worker.start(lambda _error: self.built.set(), self._on_exit)

    async def shutdown(self, drain: float | None) -> None:
        """Refuse, drain to a deadline, abort the rest, join.

        Args:
            drain: seconds; None is without a bound, 0 aborts at once.
        """
        worker = self.worker
        try:
            if worker.state in ("running", "draining") and drain != 0:
                drained = Signal()
                worker.drain(drained.set)
                with anyio.move_on_after(drain):
                    await drained.wait()
        finally:
            worker.stop()
            # Bounded by one step: shielded, so that a cancelled scope still leaves no thread behind. Not so a model
            # that is being loaded: its thread ends by itself when the caller does not want to wait.
            with anyio.CancelScope(shield=worker.state != "starting"):
                await self.exited.wait()
            worker.join(1.0)

    @property
    def is_over(self) -> bool:
        """True when it takes no more requests, now or soon: a new entry needs a new session."""
        return self.worker.is_stopping or self.worker.state in ("draining", "closed", "dead")

    def put(self, command: Command) -> None:
        """Hand a command to the core; safe in destructors and in any thread."""
        self.worker.put(command)

    @property
    def num_wakeups(self) -> int:
        """Callbacks posted into event loops."""
        return self._num_wakeups_before + sum(bridge.num_wakeups for bridge in tuple(self._bridges.values()))

    def raise_if_unusable(self) -> None:
        """Refuse a submission while the engine cannot serve.

        Raises:
            EngineDead: the worker has died.
            EngineClosed: the engine is closing or closed.
        """
        state = self.worker.state
        if state == "running" and not self.worker.is_stopping:
            return
        if state == "dead":
            raise self.worker.make_dead_error()
        what = "closing" if state == "running" else state
        raise EngineClosed(f"the engine is {what}; it accepts no new requests")

    # ── admission ────────────────────────────────────────────────────────────────────────────────────────────────

    async def admit(self, spec: StreamSpec) -> tuple[Slot, tuple[Lane, ...]]:
        """Check, encode, wait for room, and hand a stream to the worker.

        Nothing is registered before the last await; registration is one synchronous step.

        Raises:
            InvalidRequest, QueueFull, RequestTimeout, EngineClosed, EngineDead: see `Stream.__anext__`.
        """
        submitted_at = time.monotonic()
        self.raise_if_unusable()
        limits, text = self.limits, self.text
        assert limits is not None and text is not None
        loop = asyncio.get_running_loop()
        bridge = self._bridge(loop)
        if is_long(spec.prompt, spec.tools):
            prompt_token_ids = await anyio.to_thread.run_sync(
                encode_prompt,
                text,
                spec,
                limits.defaults.vocab_size,
                limiter=self._encoder(loop),
                abandon_on_cancel=True,
            )
        else:
            prompt_token_ids = encode_prompt(text, spec, limits.defaults.vocab_size)
        plan = plan_request(spec, prompt_token_ids, limits, text)
        num_lanes = plan.sampling.n
        if self.config.max_queue_size:
            await self._wait_for_room(bridge, spec, num_lanes, submitted_at)
        self.raise_if_unusable()
        # ── from here on: no await ──
        spec.prompt_token_ids = plan.prompt_token_ids
        slot = Slot(spec.request_id, bridge, num_lanes)
        lanes = slot.make_lanes()
        if plan.sampling.echo:
            skip = bool(plan.sampling.skip_special_tokens)
            echoed = text.decode(plan.prompt_token_ids, skip_special_tokens=skip)
            for lane in lanes:
                lane.texts.append(echoed)
        bridge.register(lanes)
        if plan.max_output_tokens == 0:
            end = End("length", None, Usage(len(plan.prompt_token_ids), 0), RequestMetrics(None, None, 0.0))
            for lane in lanes:
                lane.push((), "", None, end)
            bridge.num_submitted -= num_lanes
            return slot, lanes
        deadline = None if spec.timeout is None else submitted_at + spec.timeout
        queue_deadline = None if spec.queue_timeout is None else submitted_at + spec.queue_timeout
        wants_text = plan.sampling.detokenize and text.has_tokenizer
        submission = Submission(
            slot,
            lanes,
            plan.prompt_token_ids,
            plan.sampling,
            plan.max_output_tokens,
            submitted_at,
            spec.priority,
            deadline,
            queue_deadline,
            spec.cache_salt,
            spec.stream_interval,
            spec.max_unread_tokens,
            spec.on_unread,
            plan.drop_output,
            text.make_detokenizer if wants_text else None,
        )
        self.put((EngineCore.submit, submission))
        return slot, lanes

    def has_room(self, count: int) -> bool:
        """Whether the bounded queue has room for `count` more requests."""
        limit = self.config.max_queue_size
        core = self.worker.core
        if not limit or core is None:
            return True
        submitted = self._num_submitted_before
        submitted += sum(bridge.num_submitted + bridge.num_reserved for bridge in tuple(self._bridges.values()))
        return submitted - core.recorder.num_left_queue + count <= limit

    async def _wait_for_room(self, bridge: LoopBridge, spec: StreamSpec, count: int, submitted_at: float) -> None:
        limit = self.config.max_queue_size
        if count > limit:
            raise QueueFull(f"{count} samples cannot enter a queue of {limit} (max_queue_size)")
        if spec.on_full == "refuse":
            if bridge.is_waiting_for_room or not self.has_room(count):
                raise QueueFull(f"the queue is full ({limit} requests wait); try later or pass on_full='wait'")
            return

        def watch(future: asyncio.Future[None]) -> None:
            spec.withdraw = partial(bridge.withdraw, future)
            self.put((EngineCore.watch_room, bridge))
            # Whoever ends the worker after this line finds the future in line and fails it.
            self.raise_if_unusable()

        bounds = [bound for bound in (spec.timeout, spec.queue_timeout) if bound is not None]
        remaining = min(bounds) - (time.monotonic() - submitted_at) if bounds else None
        try:
            with anyio.move_on_after(remaining) as scope:
                await bridge.wait_for_room(count, watch)
        finally:
            spec.withdraw = None
        if scope.cancelled_caught:
            raise RequestTimeout(f"no room in the queue within {min(bounds)} s", "queue")

    def _bridge(self, loop: asyncio.AbstractEventLoop) -> LoopBridge:
        bridge = self._bridges.get(loop)
        if bridge is None:
            with self._bridges_lock:
                for other in [other for other in self._bridges if other.is_closed()]:
                    closed = self._bridges.pop(other)
                    closed.discard()
                    self._encoders.pop(other, None)
                    self._num_wakeups_before += closed.num_wakeups
                    self._num_submitted_before += closed.num_submitted
                bridge = self._bridges[loop] = LoopBridge(loop, self.has_room, self._abandon)
        return bridge

    def _abandon(self, slot: Slot) -> None:
        self.put((EngineCore.abort, slot))

    def _encoder(self, loop: asyncio.AbstractEventLoop) -> anyio.CapacityLimiter:
        limiter = self._encoders.get(loop)
        if limiter is None:
            limiter = self._encoders[loop] = anyio.CapacityLimiter(_MAX_ENCODERS)
        return limiter


def _closed_error() -> EngineClosed:
    return EngineClosed("the engine was closed while this request waited for the queue")
