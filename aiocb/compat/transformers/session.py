"""One life of the engine for plain threads: the worker and core of `aiocb.engine`, with a bridge that needs no loop.

Any thread, except `ThreadBridge.post` (worker thread).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from aiocb.compat.transformers.router import Reply, Router
from aiocb.engine.core import EngineCore
from aiocb.engine.life import Life
from aiocb.engine.output import Submission
from aiocb.engine.prepare import Prepared, StreamSpec, prepare_tokens
from aiocb.engine.slot import Delta, End, Lane, Slot
from aiocb.outputs import RequestMetrics, Usage
from aiocb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aiocb.compat.transformers.parameters import Parameters
    from aiocb.config import EngineConfig
    from aiocb.engine.room import Line
    from aiocb.engine.source import Source
    from aiocb.text.prompts import TakenPrompt

__all__ = ["ThreadSession", "Ticket"]


class Ticket(NamedTuple):
    """One call of `add_request`, as given; it waits here until the manager has started.

    Attributes:
        prompt: what `take_prompt` has made of the user's.
        parameters: what it starts from, as it was when the request was made.
        replies: one per sample.
    """

    prompt: TakenPrompt
    sampling: SamplingParams
    parameters: Parameters
    replies: tuple[Reply, ...]

    @property
    def request_id(self) -> str:
        """The label of the first sample."""
        return self.replies[0].request_id

    @property
    def interval(self) -> int | None:
        """Tokens per delivery; None is one delivery, at the end."""
        return 1 if self.replies[0].is_streaming or self.replies[0].timestamps is not None else None

    @property
    def token_ids(self) -> list[int]:
        """The prompt as far as it can be read without checking it; else empty."""
        return [token for token in self.prompt if isinstance(token, int)] if isinstance(self.prompt, tuple) else []


class ThreadLane(Lane):
    """A lane that names the reply its output goes to."""

    __slots__ = ("reply",)

    def __init__(self, slot: Slot, index: int, reply: Reply) -> None:
        super().__init__(slot, index)
        self.reply = reply


class ThreadBridge:
    """A `Bridge` that hands each step's deltas to a `Router`, in the worker thread.

    Attributes:
        line: for the bounded queue; used with the router's lock held.
        moved: notified when the queue has moved on, or the session has ended.
        num_waiting: threads that wait for that.
    """

    def __init__(self, router: Router, line: Line) -> None:
        self.line = line
        self.num_waiting = 0
        self.outbox: list[Delta] = []
        self.moved = threading.Condition(router.lock)
        self._router = router

    @property
    def is_waiting_for_room(self) -> bool:
        """True when a thread waits for a place in the bounded queue."""
        return self.num_waiting > 0

    def post(self, batch: list[Delta]) -> bool:
        """Deliver; True, because the readers are threads of this process."""
        if self.num_waiting:
            with self.moved:
                self.moved.notify_all()
        if batch:
            self._router.deliver([(_reply(lane), tokens, logprobs, end) for lane, tokens, _, logprobs, end in batch])
        return True

    def lane_ended(self, lane: Lane) -> None:
        """Nothing to count: the router does."""

    def wake(self, slot: Slot) -> None:
        """Nobody is parked on a slot."""


class ThreadSession(Life):
    """A life that threads open, submit to and hold.

    Args:
        source, config: as for `Life`.
        router: where outputs go.
        on_exit: called in the worker thread as its last act.

    Attributes:
        held: set once the latest `hold` has taken effect.
    """

    def __init__(
        self, source: Source, config: EngineConfig, router: Router, on_exit: Callable[[ThreadSession], None]
    ) -> None:
        super().__init__(source, config)
        self.bridge = ThreadBridge(router, self.room.open_line())
        self._ready = threading.Event()
        self._listener = on_exit
        self._lock = router.lock
        self._num_holds = 0
        self.held = threading.Event()

    def open(self) -> None:
        """Start the worker and wait until it can serve.

        Raises:
            ConfigError: the model or the settings cannot work.
            Exception: whatever building the runner raised.
        """
        self.worker.start(lambda _error: self._ready.set(), lambda: self._listener(self))
        try:
            self._ready.wait()
        except BaseException:
            self.worker.stop()
            raise
        error = self.worker.error
        if self.worker.state == "closed" and error is not None:
            self.worker.join()
            raise error

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, ticket: Ticket) -> Prepared:
        """Check a request against the model and the cache; nothing is registered.

        Raises:
            InvalidRequest: the request can never run as asked.
        """
        assert self.limits is not None and self.text is not None
        limits = ticket.parameters.limits(self.limits)
        prompt = self.text.normalize_prompt(ticket.prompt, vocab_size=limits.defaults.vocab_size)
        sampling = ticket.parameters.complete(ticket.sampling, len(prompt))
        prepared = prepare_tokens(StreamSpec(prompt, sampling, ticket.request_id), prompt, limits, self.text)
        ticket.parameters.check_room(prepared, limits)
        return prepared

    def submit(self, ticket: Ticket, prepared: Prepared) -> None:
        """Hand a planned request to the worker; its replies are registered. Never waits."""
        slot = Slot(ticket.request_id, self.bridge, len(ticket.replies))
        lanes: list[Lane] = []
        for index, reply in enumerate(ticket.replies):
            reply.slot = slot
            reply.prompt_ids = prepared.prompt_token_ids
            lanes.append(ThreadLane(slot, index, reply))
        if prepared.max_output_tokens == 0:
            end = End("length", None, Usage(len(prepared.prompt_token_ids), 0), RequestMetrics(None, None, 0.0))
            self.bridge.post([Delta(lane, (), "", None, end) for lane in lanes])
            return
        self.bridge.line.enter(len(lanes))
        age = time.perf_counter() - ticket.replies[0].created_time
        submission = Submission(
            slot,
            tuple(lanes),
            prepared.prompt_token_ids,
            prepared.sampling,
            prepared.max_output_tokens,
            time.monotonic() - age,
            stream_interval=ticket.interval,
        )
        self.put((EngineCore.submit, submission))

    def cancel(self, slot: Slot) -> None:
        """End a request at the next step; its last output says so."""
        self.put((EngineCore.abort, slot))

    def wait_for_room(self, timeout: float | None) -> None:
        """Wait, with the router's lock held, until the queue has moved on, the session ends or the time is over."""
        self.bridge.num_waiting += 1
        try:
            self.put((EngineCore.watch_room, self.bridge))
            self.bridge.moved.wait(timeout)
        finally:
            self.bridge.num_waiting -= 1

    # ── holding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self) -> threading.Event:
        """Ask the worker to pause; the event is set once no step runs. Holds add up."""
        with self._lock:
            self._num_holds += 1
            if self._num_holds == 1:
                self.held = threading.Event()
                self.put((EngineCore.pause, self.held.set))
            return self.held

    def unhold(self) -> None:
        """Give up one hold. After the last one steps go on, over the weights as they are then."""
        with self._lock:
            self._num_holds -= 1
            if self._num_holds == 0:
                self.put((EngineCore.unpause, None))


def _reply(lane: Lane) -> Reply:
    assert isinstance(lane, ThreadLane)
    return lane.reply
