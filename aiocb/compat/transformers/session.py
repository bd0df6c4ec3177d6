"""One life of the engine for plain threads: the worker and core of `aiocb.engine`, read without an event loop.

Any thread, except `ThreadSession.post` (worker thread).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from aiocb.compat.transformers.router import Reply, Router
from aiocb.engine.core import EngineCore
from aiocb.engine.life import Life
from aiocb.engine.output import Submission
from aiocb.engine.prepare import Prepared, StreamSpec, prepare_tokens
from aiocb.engine.slot import Delta, End, Lane, Slot
from aiocb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aiocb.compat.transformers.parameters import Parameters
    from aiocb.config import EngineConfig
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


class ThreadLane(Lane):
    """A lane that names the reply its output goes to."""

    __slots__ = ("reply",)

    def __init__(self, slot: Slot, index: int, reply: Reply) -> None:
        super().__init__(slot, index)
        self.reply = reply


class ThreadSession(Life):
    """A life that threads open, submit to and hold; also the `Bridge` that hands each step's deltas to a `Router`.

    Args:
        source, config: as for `Life`.
        router: where outputs go; its lock is held where requests enter the bounded queue.
        on_exit: called in the worker thread as its last act.

    Attributes:
        held: set once the latest `hold` has taken effect.
        num_waiting: threads that wait for a place in the bounded queue.
    """

    def __init__(
        self, source: Source, config: EngineConfig, router: Router, on_exit: Callable[[ThreadSession], None]
    ) -> None:
        super().__init__(source, config)
        self.outbox: list[Delta] = []
        self.held = threading.Event()
        self.num_waiting = 0
        self._router = router
        self._line = self.room.open_line()
        self._ready = threading.Event()
        self._on_exit = on_exit

    def open(self) -> None:
        """Start the worker and wait until it can serve.

        Raises:
            ConfigError: the model or the settings cannot work.
            Exception: whatever building the runner raised.
        """
        self.worker.start(lambda _error: self._ready.set(), lambda: self._on_exit(self))
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
        slot = Slot(ticket.request_id, self, len(ticket.replies))
        for reply in ticket.replies:
            reply.prompt_ids = prepared.prompt_token_ids
            reply.cancel = functools.partial(self.put, (EngineCore.abort, slot))
        if prepared.max_output_tokens == 0:
            self._router.end(ticket.replies, End("length"))
            return
        self._line.enter(len(ticket.replies))
        first = ticket.replies[0]
        age = time.perf_counter() - first.created_time
        submission = Submission(
            slot,
            tuple(ThreadLane(slot, index, reply) for index, reply in enumerate(ticket.replies)),
            prepared.prompt_token_ids,
            prepared.sampling,
            prepared.max_output_tokens,
            time.monotonic() - age,
            # One delivery per token, or one at the end.
            stream_interval=1 if first.is_streaming or first.timestamps is not None else None,
        )
        self.put((EngineCore.submit, submission))

    def wait_for_room(self, count: int, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, with the router's lock held, for room in the queue or until `is_over`; False when the time is over."""
        if self.room.has_room(count):
            return True
        if count > self.room.limit:
            return False
        self.num_waiting += 1
        try:
            self.put((EngineCore.watch_room, self))
            return self._router.moved.wait_for(lambda: self.room.has_room(count) or is_over(), timeout)
        finally:
            self.num_waiting -= 1

    # ── what the worker calls: see `Bridge` ──────────────────────────────────────────────────────────────────────

    @property
    def is_waiting_for_room(self) -> bool:
        """True when a thread waits for a place in the bounded queue."""
        return self.num_waiting > 0

    def post(self, batch: list[Delta]) -> bool:
        """Deliver; True, because the readers are threads of this process."""
        if self.num_waiting:
            with self._router.lock:
                self._router.moved.notify_all()
        if batch:
            self._router.deliver(
                [(cast("ThreadLane", lane).reply, tokens, logprobs, end) for lane, tokens, _, logprobs, end, _ in batch]
            )
        return True

    def lane_ended(self, lane: Lane) -> None:
        """Nothing to count: the router does."""

    def wake(self, slot: Slot) -> None:
        """Nobody is parked on a slot."""

    # ── holding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self) -> threading.Event:
        """Ask the worker to pause; the event is set once no step runs. Holds add up."""
        self.held = threading.Event()
        self.put((EngineCore.pause, self.held.set))
        return self.held

    def unhold(self) -> None:
        """Give up one hold. After the last one steps go on, over the weights as they are then."""
        self.put((EngineCore.unpause, None))
