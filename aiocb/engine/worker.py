"""The worker thread: builds the core, runs its steps, blocks when idle, and tells everyone when it dies.

Life cycle, as a table; nothing outside this file changes the state:

| state    | event                | next     |
|----------|----------------------|----------|
| created  | start                | starting |
| starting | built / failed       | running / closed |
| running  | drain                | draining |
| running, draining | stop        | closed   |
| running, draining | step raised | dead     |

The thread keeps the core's runner until its last act: only then may another life have it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiocb.engine.core import EngineCore
from aiocb.errors import EngineClosed, EngineDead, EngineError, explain

if TYPE_CHECKING:
    from aiocb.engine.core import Command
    from aiocb.engine.stats import EngineState

__all__ = ["Worker"]

logger = logging.getLogger("aiocb")

_JOIN_AT_EXIT_S = 2.0


class Worker:
    """One daemon thread that owns an `EngineCore` from start to stop.

    Args:
        open: makes the core; runs in the thread (models are loaded and warmed up there, so that no other thread
            ever owns a pool of compute threads).
        close: called in the thread after the last step, also when `open` has failed.
        interrupt: called by `stop`, so that an `open` that waits looks at `is_stopping`.
    """

    def __init__(
        self,
        open: Callable[[], EngineCore],  # noqa: A002
        close: Callable[[], None],
        interrupt: Callable[[], None],
    ) -> None:
        self._open = open
        self._close = close
        self._interrupt = interrupt
        self._thread: threading.Thread | None = None
        self._make_stop_error: Callable[[], Exception] = _closed
        self._drain_listeners: deque[Callable[[], None]] = deque()
        self.is_draining = False
        self._state: EngineState = "created"
        self.is_stopping = False
        self.core: EngineCore | None = None
        self.error: BaseException | None = None
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, on_built: Callable[[BaseException | None], None], on_exit: Callable[[], None]) -> None:
        """Start the thread; returns at once.

        Args:
            on_built: called in the thread with None, or with what went wrong (the thread then ends).
            on_exit: called in the thread as its last act.

        Raises:
            EngineError: the system gives no thread.
        """
        assert self._state == "created", self._state
        self._state = "starting"
        # At interpreter exit a daemon thread inside native code could crash: stop it first, within a bound.
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=_run, args=(self, on_built, on_exit), name="aiocb worker", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._state = "closed"
            atexit.unregister(self._at_exit)
            raise EngineError(f"the engine's worker thread cannot be started: {error}; end other threads") from error

    def put(self, command: Command) -> None:
        """Hand a command to the core; safe in destructors and in any thread.

        After the thread has ended nobody reads the inbox: submissions are then ended here.
        """
        core = self.core
        if core is None:
            return
        core.inbox.put(command)
        if self._state in ("dead", "closed"):
            core.refuse_inbox(self.make_end_error)

    def stop(self, make_error: Callable[[], Exception] | None = None) -> None:
        """End all streams (with an error of their own each) and the thread at the next step boundary."""
        self._make_stop_error = make_error or _closed
        self.is_stopping = True
        self._interrupt()
        self._poke()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Finish what was submitted; `on_drained` is called in the thread when nothing is left."""
        self.is_draining = True
        self._drain_listeners.append(on_drained)
        if self._state in ("dead", "closed"):
            self._notify_drained()
        self._poke()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if not thread.is_alive():
                atexit.unregister(self._at_exit)

    @property
    def state(self) -> EngineState:
        """Where the worker is in its life. Derived: draining is a running worker that was told to drain."""
        state = self._state
        return "draining" if state == "running" and self.is_draining else state

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def make_dead_error(self) -> EngineDead:
        """A new `EngineDead` with the cause chained; one instance per stream."""
        assert self.error is not None
        error = EngineDead(f"the engine has died: {explain(self.error)}")
        error.__cause__ = self.error
        return error

    @property
    def make_end_error(self) -> Callable[[], Exception]:
        """Makes errors for those whom the end of the thread has met, one each."""
        return self.make_dead_error if self._state == "dead" else self._make_stop_error

    def _poke(self) -> None:
        core = self.core
        if core is not None:
            core.inbox.put((_nothing, None))

    # ── worker thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, on_built: Callable[[BaseException | None], None]) -> None:
        try:
            core = self._open()
        except BaseException as error:
            self.error = error
            self._state = "closed"
            self._notify_drained()
            self._give_back()
            on_built(error)
            return
        self.core = core
        self._state = "running"
        on_built(None)
        try:
            self._loop(core)
            core.end_all(self._make_stop_error)
        except BaseException as error:
            self.error = error
            self._state = "dead"
            core.end_all_dead(self.make_dead_error)
        else:
            self._state = "closed"
            core.refuse_inbox(self._make_stop_error)
        self._notify_drained()
        self._give_back()

    def _give_back(self) -> None:
        try:
            self._close()
        except BaseException:
            # What was served is served; whoever comes next gets a runner of its own, or an error of its own.
            logger.exception("the engine's runner could not be closed")

    def _loop(self, core: EngineCore) -> None:
        inbox = core.inbox
        while not self._must_stop():
            if not core.has_work:
                if self._drain_listeners and core.delivery.num_streams == 0 and inbox.empty():
                    self._notify_drained()
                # Nothing to do: sleep until a command or a deadline, without polling.
                deadline = core.next_deadline
                try:
                    command = inbox.get(timeout=None if deadline is None else _wait_s(deadline - core.clock()))
                except queue.Empty:
                    pass
                else:
                    command[0](core, command[1])
                if self._must_stop():
                    break
            core.step()

    def _must_stop(self) -> bool:
        return self.is_stopping  # set by other threads at any time

    def _notify_drained(self) -> None:
        while True:
            try:
                listener = self._drain_listeners.popleft()
            except IndexError:
                return
            listener()


def _run(worker: Worker, on_built: Callable[[BaseException | None], None], on_exit: Callable[[], None]) -> None:
    try:
        worker._run(on_built)
    finally:
        on_exit()


def _wait_s(seconds: float) -> float:
    # A deadline may lie as far off as infinity; what is too long for a lock is waited for in parts.
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


def _nothing(_core: EngineCore, _argument: Any) -> None:
    """Wake an idle worker."""


def _closed() -> Exception:
    return EngineClosed("the engine was closed while this request was alive or waited")


def _stop_at_exit(reference: weakref.ref[Worker]) -> None:
    worker = reference()
    if worker is not None and worker._thread is not None and worker.is_alive:
        worker.stop()
        worker._thread.join(_JOIN_AT_EXIT_S)
