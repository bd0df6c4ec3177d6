"""One thread per engine life in which requests are prepared: parameters, templates, token ids, stop strings.

```
event loop                    │ encoder thread      │ event loop
submit() ─► queue of jobs ────┼─► call() ─► Mailbox ┼─ call_soon_threadsafe ─► futures resolved, in order
                              │   one after another │  one call for all that are ready
```

Neither a loop nor the step is held up by a long prompt, a slow template or twenty thousand stop strings, and requests
reach the worker in the order in which they were made. A tokenizer in Rust works without the GIL; what is Python shares
it. `submit` runs in a loop, `start` and `stop` in any thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from aiocb.engine.bridge import Mailbox, Signal, resolve
from aiocb.errors import EngineError

__all__ = ["Encoder"]

_SLICE_S = 0.001

T = TypeVar("T")
_Result = tuple[asyncio.Future[Any], Any]


class _Job(NamedTuple):
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    outbox: Mailbox[_Result]


class Encoder:
    """A daemon thread that does jobs in order of submission.

    Args:
        name: of the thread.

    Attributes:
        exited: set as the thread's last act.
    """

    def __init__(self, name: str = "aiocb encoder") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._outboxes: dict[asyncio.AbstractEventLoop, Mailbox[_Result]] = {}
        self._make_error: Callable[[], Exception] | None = None
        self._thread: threading.Thread | None = None
        self._let_in_at = 0.0
        self.exited = Signal()

    def start(self) -> None:
        """Start the thread.

        Raises:
            EngineError: the system has none to give.
        """
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise EngineError(
                f"no thread can be started ({error}): raise the limit of processes (ulimit -u)"
            ) from error
        self._thread = thread

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T | Exception]:
        """Queue a job; return the future of its result, which belongs to the running loop.

        An exception is a result, too: nobody has to look at a future that is left. Cancelling it is all that it takes
        to leave: a job whose future is done is not begun.
        """
        loop = asyncio.get_running_loop()
        outbox = self._outboxes.get(loop)
        if outbox is None:
            for closed in [other for other in tuple(self._outboxes) if other.is_closed()]:
                self._outboxes.pop(closed, None)
            outbox = self._outboxes[loop] = Mailbox(loop, _take)
        future: asyncio.Future[T | Exception] = loop.create_future()
        outbox.distrust()
        self._jobs.put(_Job(call, future, outbox))
        if self._make_error is not None:  # looked at last: the thread may have ended before the job was queued
            self._refuse(self._make_error)
        return future

    def stop(self, make_error: Callable[[], Exception]) -> None:
        """End the thread after the job that it is at, and everything that waits with an error of its own."""
        self._make_error = make_error
        self._refuse(make_error)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def is_started(self) -> bool:
        """True once there is, or was, a thread."""
        return self._thread is not None

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while self._make_error is None:
            self._do_next()
        self.exited.set()

    def _do_next(self) -> None:
        # A method of its own, so that an idle thread keeps nothing of the last request.
        job = self._jobs.get()
        if job is None or job.future.done() or job.outbox.loop.is_closed():
            return
        try:
            result = job.call()
        except Exception as error:
            result = error
        job.outbox.post((job.future, result))
        # Lets the loop and the step in now, and not when the interpreter's 5 ms are over; of many small jobs, once for
        # as many as are done in a millisecond: each time costs the loop more than what it does with a result.
        now = time.perf_counter()
        if now - self._let_in_at > _SLICE_S or self._jobs.empty():
            time.sleep(0)
            self._let_in_at = now

    def _refuse(self, make_error: Callable[[], Exception]) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.outbox.post((job.future, make_error()))
        self._jobs.put(None)  # the thread wakes and sees that it is over


def _take(item: _Result) -> None:
    resolve(*item)  # unless it was cancelled or withdrawn
