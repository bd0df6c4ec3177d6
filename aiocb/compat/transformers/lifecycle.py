"""The life of a manager: start, stop, pause, destroy. Any thread; the state changes in this file only.

Life cycle, as a table; `submit` keeps requests for the start, takes them, or drops them with a warning:

| state    | event                          | next            | `submit` |
|----------|--------------------------------|-----------------|----------|
| new      | start                          | starting        | keeps    |
| starting | ready / failed                 | running / as before | keeps |
| running  | stop                           | stopping        | takes    |
| running, stopping | a step raised         | dead            |          |
| stopping | nothing left / hard stop done  | stopped         | drops    |
| stopped, dead | start                     | starting        | drops    |
| any      | destroy                        | destroyed       | drops    |

A process that was forked from the one in which the session runs has neither the session nor anybody who would ever
unlock what was locked: there nothing is waited for, and what needs the session is refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from aiocb.compat.transformers.results import RequestQueueFull, StoppedError
from aiocb.compat.transformers.router import Router
from aiocb.compat.transformers.session import ThreadSession, Ticket
from aiocb.engine.core import EngineCore
from aiocb.engine.slot import End
from aiocb.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from aiocb.config import EngineConfig
    from aiocb.engine.prepare import Prepared
    from aiocb.engine.source import Source

__all__ = ["Lifecycle", "State"]

logger = logging.getLogger("aiocb")

State = Literal["new", "starting", "running", "stopping", "stopped", "dead", "destroyed"]

_DROPS: dict[State, str] = {
    "stopping": "the manager is stopping",
    "stopped": "the manager has been stopped; call start() for another session",
    "dead": "the manager's worker has died; call start() to try again",
    "destroyed": "the manager has been destroyed",
}


class Lifecycle:
    """Owns at most one session (a worker thread and its core) at a time, and the requests that wait for one.

    Args:
        source: builds the runner.
        config: the engine's settings.

    Attributes:
        router: where results wait.
        session: the one that is there, kept ones included.
        last: the latest one, for its thread and its choices.
        warmed_up: `warmup` has been called and a session is there.
    """

    def __init__(self, source: Source, config: EngineConfig) -> None:
        self.router = Router(self.is_running, self._went_idle)
        self.session: ThreadSession | None = None
        self.last: ThreadSession | None = None
        self.warmed_up = False
        self._source = source
        self._config = config
        self._lock = self.router.lock
        self._opening = threading.Lock()
        self._pausing: list[int] = []  # threads, once for each pause that they are in
        self._state: State = "new"
        self._keeps_session = False
        self._buffered: deque[Ticket] = deque()

    def __str__(self) -> str:
        return f"{self._source.name} {self._state} [{self.router.num_live} requests]"

    def is_running(self) -> bool:
        """True from `start` until the last request of a stopped session has ended."""
        return self._state in ("running", "stopping") and not self.is_foreign

    @property
    def is_foreign(self) -> bool:
        """True in a process that was forked from the one in which the session runs."""
        session = self.session
        return session is not None and session.is_foreign

    @property
    def follows(self) -> bool:
        """True where another process takes the requests and gives the results."""
        session = self.session
        return session is not None and session.follows

    def raise_if_foreign(self) -> None:
        """Refuse to be used in a forked process.

        Raises:
            EngineClosed: the session's thread is in another process.
        """
        session = self.session
        if session is not None:
            session.raise_if_foreign()

    # ── life: see the manager's methods ──────────────────────────────────────────────────────────────────────────

    def warmup(self) -> None:
        """Open a session and hold it."""
        session, is_new = self._open(is_held=True)
        self.warmed_up = True
        if is_new:
            session.held.wait()

    def start(self) -> None:
        """Open a session, or let go of the one that is held, and submit what was kept for it."""
        self.raise_if_foreign()
        with self._lock:
            if self._state == "stopping":
                self._raise_if_pausing("start")
                # The earlier session still finishes its requests.
                self.router.moved.wait_for(lambda: self._state != "stopping")
            if self._state in ("starting", "running"):
                logger.warning("the manager has already been started")
                return
            self._check_not_destroyed()
            before, self._state = self._state, "starting"
        try:
            session, is_new = self._open(is_held=False)
        except BaseException:
            with self._lock:
                if not self._is_destroyed:
                    self._set_state(before)
            raise
        while True:
            with self._lock:
                if session is not self.session:
                    return  # it has died already, or was destroyed
                if not self._buffered:
                    if not is_new:
                        session.unhold()
                    self._set_state("running")
                    return
                ticket = self._buffered.popleft()
            prepared = self._prepare(session, ticket)
            with self._lock:
                if prepared is not None and ticket.replies[0].is_live:  # it may have been cancelled meanwhile
                    session.submit(ticket, prepared)

    def stop(self, block: bool, timeout: float | None, keep_for_next_session: bool, hard_stop: bool) -> None:
        """Accept nothing more; the session ends, or is held, when nothing is left."""
        self._raise_if_pausing("stop")
        if self.is_foreign:
            return
        with self._lock:
            session = self.session
            if self._state == "dead":
                self._set_state("stopped")
            elif not self.is_running() or session is None:
                logger.warning("the manager has not been started")
                return
            else:
                if self._state == "running":
                    self._state, self._keeps_session = "stopping", keep_for_next_session
                if hard_stop and self._keeps_session:
                    session.put((EngineCore.end_all, _stop_error))
                elif hard_stop:
                    session.worker.stop(_stop_error)
                if self.router.num_live == 0:
                    self._went_idle()
        if block:
            self.join(timeout)

    def join(self, timeout: float | None) -> None:
        """Wait until there is no session, or one that is held."""
        if self.is_foreign:
            return
        with self._lock:
            if not self.router.moved.wait_for(lambda: not self.is_running(), timeout):
                logger.warning("the manager is still finishing its requests after %s s", timeout)
                return
            last, is_kept = self.last, self.last is self.session
        if last is not None and is_kept:
            last.held.wait(timeout)  # the model is free from here on
        elif last is not None:
            last.worker.join(timeout)

    def destroy(self) -> None:
        """End the session for good."""
        self._raise_if_pausing("destroy")
        if self.is_foreign:
            self._state, self.session = "destroyed", None
            return
        if self.is_running():
            self.stop(True, None, False, False)
        with self._lock:
            session, self.session = self.session, None
            self.last = session or self.last
            self._set_state("destroyed")
            while self._buffered:
                self.fail(self._buffered.popleft(), StoppedError("the manager was destroyed before this request ran"))
        if self.last is not None:
            self.last.worker.stop(_stop_error)
            self.last.worker.join()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the session; holds of several threads add up."""
        self.raise_if_foreign()
        with self._lock:
            session = self.session
            if not self.is_running() or session is None:
                raise RuntimeError("there is nothing to pause: the manager is not running")
            held = session.hold()
            self._pausing.append(threading.get_ident())
        try:
            held.wait()
            if session is not self.session:
                raise RuntimeError("the manager has ended before it could be paused")
            yield
        finally:
            with self._lock:
                self._pausing.remove(threading.get_ident())
                session.unhold()
                if self.router.num_live == 0:
                    self._went_idle()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, ticket: Ticket, timeout: float | None) -> bool:
        """Hand a request to the session, or keep it for the start. False when it is dropped: a warning says why.

        A request that cannot run as asked is taken: its outputs say so.

        Args:
            ticket: the request.
            timeout: seconds to wait for room in the bounded queue; None has no bound.

        Raises:
            RequestQueueFull: there was no room.
            EngineClosed: this process was forked from the one in which the session runs.
        """
        self.raise_if_foreign()
        count = len(ticket.replies)
        while True:
            with self._lock:
                if self.drops():
                    return False
                session = self.session if self._state == "running" else None
                if session is None:
                    # Before the start nothing leaves the queue: to wait for room would be of no use.
                    limit, buffered = self._config.max_queue_size, sum(len(one.replies) for one in self._buffered)
                    if limit and buffered + count > limit:
                        raise RequestQueueFull(f"the queue is full (max_queue_size={limit}); start the manager")
                    self.router.register(ticket.replies)
                    self._buffered.append(ticket)
                    for reply in ticket.replies:
                        reply.cancel = functools.partial(self._drop, ticket)
                    return True
            prepared = self._prepare(session, ticket)
            if prepared is None:
                return True
            with self._lock:

                def is_over(session: ThreadSession = session) -> bool:
                    return self._state != "running" or self.session is not session

                if not session.wait_for_room(count, is_over, timeout):
                    raise RequestQueueFull(f"the queue is full (max_queue_size={self._config.max_queue_size})")
                if not is_over():
                    self.router.register(ticket.replies)
                    session.submit(ticket, prepared)
                    return True

    def drops(self) -> bool:
        """Whether requests are dropped now; if so, a warning says why."""
        self.raise_if_foreign()
        reason = _DROPS.get(self._state)
        if reason is not None:
            logger.warning("%s: the request is dropped", reason)
        return reason is not None

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """End a request that the engine has not seen."""
        with self._lock:
            self.router.register(ticket.replies)
            self.router.end(ticket.replies, End("error", error=error))

    def cancel(self, request_id: str) -> None:
        """End a request, and the other samples of its prompt."""
        self.raise_if_foreign()
        self.router.cancel(request_id)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, *, is_held: bool) -> tuple[ThreadSession, bool]:
        """The session that is there, or a new one (True). While nothing is started, a session is held."""
        self.raise_if_foreign()
        with self._opening:
            self._check_not_destroyed()
            if self.session is not None:
                return self.session, False
            session = ThreadSession(self._source, self._config, self.router, self._exited)
            session.open()
            with self._lock:
                if is_held:
                    session.hold()
                self.last = session
                if self._is_destroyed:
                    session.worker.stop(_stop_error)
                else:
                    self.session = session
            self._check_not_destroyed()
            return session, True

    def _prepare(self, session: ThreadSession, ticket: Ticket) -> Prepared | None:
        """Check a request; one that cannot run has ended."""
        try:
            session.raise_if_following()
            return session.prepare(ticket)
        except (InvalidRequest, EngineError) as error:
            self.fail(ticket, error)
            return None

    def _drop(self, ticket: Ticket) -> None:
        """End a request that waits for the start (lock held)."""
        self._buffered = deque(other for other in self._buffered if other is not ticket)
        self.router.end(ticket.replies, End("cancelled"))

    def _went_idle(self) -> None:
        """No request is left (lock held): a session that was told to stop, and that nobody pauses, is at its end."""
        session = self.session
        if self._state != "stopping" or session is None or self._pausing:
            return
        if self._keeps_session:
            session.hold()
            self._set_state("stopped")
        elif not session.follows:  # else rank 0 ends it
            session.worker.stop(_stop_error)

    def _exited(self, session: ThreadSession) -> None:
        """The worker's last act."""
        with self._lock:
            if session is self.session:
                self.session = None
                self.warmed_up = False
                if self._state != "destroyed":
                    self._set_state("dead" if session.worker.state == "dead" else "stopped")

    def _set_state(self, state: State) -> None:
        with self._lock:
            self._state = state
            self.router.notify_all()

    @property
    def _is_destroyed(self) -> bool:
        return self._state == "destroyed"  # at any time, by other threads

    def _check_not_destroyed(self) -> None:
        if self._is_destroyed:
            raise RuntimeError("the manager has been destroyed; make a new one")

    def _raise_if_pausing(self, what: str) -> None:
        if threading.get_ident() in self._pausing:
            raise RuntimeError(f"{what} from inside a pause would wait for ever: leave the pause first")


def _stop_error() -> Exception:
    return StoppedError("the manager was stopped (hard_stop=True) before this request was complete")
