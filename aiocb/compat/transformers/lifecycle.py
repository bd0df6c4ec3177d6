"""The life of a manager: start, stop, pause, destroy. Any thread; the state changes in this file only.

Life cycle, as a table; `add_request` keeps requests for the start, takes them, or drops them with a warning:

| state    | event                          | next            | `add_request` |
|----------|--------------------------------|-----------------|---------------|
| new      | start                          | starting        | keeps         |
| starting | ready / failed                 | running / as before | keeps     |
| running  | stop                           | stopping        | takes         |
| running, stopping | a step raised         | dead            |               |
| stopping | nothing left / hard stop done  | stopped         | drops         |
| stopped, dead | start                     | starting        | drops         |
| any      | destroy                        | destroyed       | drops         |
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from aiocb.compat.transformers.parameters import Parameters
from aiocb.compat.transformers.results import StoppedError
from aiocb.compat.transformers.router import Router
from aiocb.compat.transformers.session import ThreadSession, Ticket
from aiocb.engine.core import EngineCore
from aiocb.engine.slot import End
from aiocb.errors import InvalidRequest

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from transformers import GenerationConfig

    from aiocb.config import EngineConfig
    from aiocb.engine.slot import Slot
    from aiocb.engine.source import Source

__all__ = ["Lifecycle", "State"]

logger = logging.getLogger("aiocb")

State = Literal["new", "starting", "running", "stopping", "stopped", "dead", "destroyed"]


class Lifecycle:
    """Owns at most one session (a worker thread and its core) at a time.

    Args:
        source: builds the runner.
        config: the engine's settings.
        generation_config: what requests start from; None takes the model's.

    Attributes:
        warmed_up: `warmup` has been called and a session is there.
    """

    def __init__(self, source: Source, config: EngineConfig, generation_config: GenerationConfig | None) -> None:
        self.config = config
        self.warmed_up = False
        self._source = source
        self._router = Router(self._went_idle, self._abandon)
        self._lock = self._router.lock
        self._changed = threading.Condition(self._lock)
        self._opening = threading.Lock()
        self._pauses = threading.local()
        self._state: State = "new"
        self._session: ThreadSession | None = None
        self._last: ThreadSession | None = None  # for joining its thread
        self._is_held = False  # the session waits between two lives, or between `warmup` and `start`
        self._keeps_session = False
        self._stops_hard = False
        self._buffered: deque[Ticket] = deque()
        self.configure(generation_config)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._source.name} {self._state} [{self._router.num_live} requests]>"

    def configure(self, generation_config: GenerationConfig | None) -> None:
        """Take another generation config for the requests to come; it is copied.

        Raises:
            ConfigError: it asks for beams, or for something unsupported.
        """
        self._parameters = Parameters(
            self._source.model,
            generation_config,
            logprobs=self.config.return_logprobs,
            drop_unsupported=self.config.drop_unsupported_processors,
        )

    @property
    def model(self) -> Any:
        """The model."""
        return self._source.model

    @property
    def generation_config(self) -> GenerationConfig | None:
        """A copy of the config that requests start from."""
        return self._parameters.config

    @property
    def num_return_sequences(self) -> int:
        """Samples per prompt."""
        return self._parameters.num_return_sequences

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_running(self) -> bool:
        """True from `start` until the last request of a stopped session has ended."""
        return self._state in ("running", "stopping")

    def warmup(self) -> None:
        """Build everything now, so that `start` returns at once. Nothing runs before `start`.

        Raises:
            ConfigError: the model or the settings cannot work.
        """
        self._check_not_destroyed()
        session, is_new = self._open()
        with self._lock:
            is_new = is_new and not self.is_running()
            if is_new:
                self._is_held = True
                session.hold()
            self.warmed_up = True
        if is_new:
            session.held.wait()

    def start(self) -> None:
        """Start the background thread, or start it again after `stop`; returns when it can serve.

        Raises:
            ConfigError: the model or the settings cannot work; nothing is left running.
            RuntimeError: the manager has been destroyed.
        """
        with self._lock:
            while self._state == "stopping":
                self._raise_if_pausing("start")
                self._changed.wait()  # the earlier session still finishes its requests
            self._check_not_destroyed()
            if self._state in ("starting", "running"):
                logger.warning("the manager has already been started")
                return
            before, self._state = self._state, "starting"
        try:
            session, _ = self._open()
        except BaseException:
            self._set_state(before)
            raise
        while True:
            with self._lock:
                if session is not self._session:
                    return  # it has died already
                if self._is_destroyed:
                    self._session = None
                    session.worker.stop(_stop_error)
                self._check_not_destroyed()
                if not self._buffered:
                    if self._is_held:
                        self._is_held = False
                        session.release()
                    self._set_state("running")
                    return
                ticket = self._buffered.popleft()
            self._submit_buffered(session, ticket)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Accept nothing more and end when every queued and active request has finished.

        Results that have not been read stay readable.

        Args:
            block: wait for the end.
            timeout: seconds to wait for; None has no bound. Afterwards the session still finishes, in the background.
            keep_for_next_session: keep the worker and its cache, and the manager on the model, for another `start`.
            hard_stop: fail queued and active requests with a `RuntimeError` at the next step. Also after an ordinary
                `stop` that has not come to its end.

        Raises:
            RuntimeError: this thread is inside `pause()`.
        """
        self._raise_if_pausing("stop")
        with self._lock:
            session = self._session
            if self._state == "dead":
                self._set_state("stopped")
            elif not self.is_running() or session is None:
                logger.warning("the manager has not been started")
                return
            else:
                if self._state == "running":
                    self._state, self._keeps_session, self._stops_hard = "stopping", keep_for_next_session, False
                if hard_stop and self._keeps_session:
                    session.put((EngineCore.end_all, _stop_error))
                elif hard_stop:
                    self._stops_hard = True
                    session.worker.stop(_stop_error)
                if self._router.num_live == 0:
                    self._went_idle()
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait until the manager is not running any more, for at most `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self.is_running():
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    logger.warning("the manager is still finishing its requests after %s s", timeout)
                    return
                self._changed.wait(remaining)
            last, is_kept = self._last, self._last is self._session
        rest = None if deadline is None else max(deadline - time.monotonic(), 0.1)
        if last is not None and is_kept:
            last.held.wait(rest)  # the model is free from here on
        elif last is not None:
            last.worker.join(rest)

    def destroy(self) -> None:
        """Stop if it is running, and give everything back. Idempotent; the manager cannot be started again.

        Raises:
            RuntimeError: this thread is inside `pause()`.
        """
        self._raise_if_pausing("destroy")
        if self.is_running():
            self.stop(block=True)
        with self._lock:
            session, self._session = self._session, None
            self._last = session or self._last
            self._set_state("destroyed")
            tickets = list(self._buffered)
            self._buffered.clear()
            for ticket in tickets:
                self._fail(ticket, StoppedError("the manager was destroyed before this request ran"))
        if self._last is not None:
            self._last.worker.stop(_stop_error)
            self._last.worker.join()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop; hard when the block raised."""
        if self.is_running():
            self.stop(hard_stop=exc_type is not None)

    @contextlib.contextmanager
    def pause(self) -> Iterator[Any]:
        """Hold the step loop while the model is used or changed; yields the model.

        Requests stay as they are and go on when the last thread has left. Prefixes cached before are not hit after
        it, because the weights may have changed.

        Raises:
            RuntimeError: the manager is not running.
        """
        with self._lock:
            session = self._session
            if not self.is_running() or session is None:
                raise RuntimeError("there is nothing to pause: the manager is not running")
            held = session.hold()
        self._pauses.depth = getattr(self._pauses, "depth", 0) + 1
        try:
            held.wait()
            if session is not self._session:
                raise RuntimeError("the manager has ended before it could be paused")
            yield self.model
        finally:
            self._pauses.depth -= 1
            session.release()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> tuple[ThreadSession, bool]:
        """The session that is there, or a new one (True)."""
        with self._opening:
            session = self._session
            if session is not None:
                return session, False
            session = ThreadSession(self._source, self.config, self._router, self._exited)
            session.open()
            with self._lock:
                self._session = self._last = session
                self._is_held = False
            return session, True

    def _submit_buffered(self, session: ThreadSession, ticket: Ticket) -> None:
        try:
            plan = session.plan(ticket, self._parameters)
        except InvalidRequest as error:
            self._fail(ticket, error)
        else:
            with self._lock:
                session.submit(ticket, plan)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a request that the engine has not seen."""
        with self._lock:
            for record in ticket.records:
                record.prompt_ids = ticket.token_ids
            self._router.register(ticket.records)
            self._router.deliver([(record, (), None, End("error", error=error)) for record in ticket.records])

    def _abandon(self, slot: Slot) -> None:
        """End a request at the next step."""
        session = self._session
        if session is not None:
            session.cancel(slot)

    def _went_idle(self) -> None:
        """No request is left (lock held): a session that was told to stop has come to its end."""
        session = self._session
        if self._state != "stopping" or session is None:
            return
        if self._keeps_session:
            self._is_held = True
            session.hold()
            self._set_state("stopped")
        elif not self._stops_hard:
            session.worker.stop(_stop_error)

    def _exited(self, session: ThreadSession) -> None:
        """The worker's last act."""
        with self._lock:
            if session is self._session:
                self._session = None
                self.warmed_up = False
                if self._state != "destroyed":
                    self._set_state("dead" if session.worker.state == "dead" else "stopped")

    def _set_state(self, state: State) -> None:
        with self._lock:
            self._state = state
            self._router.is_running = self.is_running()
            self._changed.notify_all()
            if self._last is not None:
                self._last.bridge.moved.notify_all()
            self._router.notify_all()

    @property
    def _is_destroyed(self) -> bool:
        return self._state == "destroyed"

    def _check_not_destroyed(self) -> None:
        if self._is_destroyed:
            raise RuntimeError("the manager has been destroyed; make a new one")

    def _raise_if_pausing(self, what: str) -> None:
        if getattr(self._pauses, "depth", 0):
            raise RuntimeError(f"{what} inside pause() would wait for ever: leave the pause first")


def _stop_error() -> Exception:
    return StoppedError("the manager was stopped (hard_stop=True) before this request was complete")
