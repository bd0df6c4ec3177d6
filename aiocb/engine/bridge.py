"""The way from the worker thread to one event loop. The only file with loop-specific lines.

```
worker thread                    │ event loop
core.step() ─► Bridge.post() ────┼─ call_soon_threadsafe ─► send_nowait ─►[anyio channel]─► dispatcher ─► Lane.push
               one batch a step, │                                        one batch per step
               one call at most  │
```

One anyio memory channel per event loop carries one batch per step. Tokens are never in a hand-off to a reader: the
dispatcher puts them into the reader's `Lane` and only then wakes it. The dispatcher is a task that this object owns;
it lives while streams of its loop are open, so nothing is left behind in an idle loop, and cancelling it (as
`asyncio.run` does at its end) ends the streams of that loop and nothing else.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from aiocb.engine.slot import Delta, End, Lane, Slot
from aiocb.errors import EngineClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiocb.engine.room import Line

__all__ = ["LoopBridge", "Mailbox", "Signal", "Withdrawn", "fail", "next_part", "resolve"]

T = TypeVar("T")

_PASS_S = 0.0015
"""How long a pass of the loop is to take while a step's readers are woken. All of them at once would let nothing else
run before the last one has: milliseconds, where each writes to a socket."""
_FEWEST, _FIRST, _MOST = 8, 32, 256
"""Readers that are woken in one pass: at least, at first, and at most."""


def next_part(limit: int, count: int, seconds: float) -> int:
    """How many readers to wake in one pass, after `count` of the `limit` that there might be have taken so long."""
    if seconds > 1.5 * _PASS_S:
        return max(count // 2, _FEWEST)
    return min(2 * limit, _MOST) if count == limit and seconds < 0.5 * _PASS_S else limit


class Withdrawn(Exception):
    """A stream was closed while it was being submitted (internal)."""


class Mailbox(Generic[T]):
    """Items on their way from any thread into one event loop, in order.

    A call is made only when the one before it has run. asyncio empties the socket that wakes it in a loop that gives up
    the GIL each time; steps that hold the GIL and post a call each would refill it each time, and the loop would never
    get on.

    Args:
        loop: where the items go.
        take: called there with one item after the other.

    Attributes:
        num_calls: how often the loop was called for items.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self.loop = loop
        self.num_calls = 0
        self.context = contextvars.Context()
        self._take = take
        self._items: deque[T] = deque()
        self._is_called = False  # a call of `_arrived` is under way; set by who posts, cleared by the loop

    def post(self, item: T) -> bool:
        """Hand over an item and make sure that the loop will look; False when the loop is closed (any thread)."""
        self._items.append(item)
        if self._is_called and not self.loop.is_closed():
            return True
        self._is_called = True
        if self.call(self._arrived):
            return True
        self.clear()
        return False

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Call something in the loop, from any thread; False when the loop is closed: nobody waits in it."""
        try:
            self.loop.call_soon_threadsafe(function, *args, context=self.context)
        except RuntimeError:
            return False
        return True

    def distrust(self) -> None:
        """Call for the next item in any case: an interrupted loop may have lost a call; one too many is harmless."""
        self._is_called = False

    def clear(self) -> None:
        """Forget what is there."""
        self._items.clear()

    def _arrived(self) -> None:
        self.num_calls += 1
        self._is_called = False  # before looking: what is posted from here on makes a call of its own
        items, take = self._items, self._take
        try:
            while items:
                take(items.popleft())
        finally:
            if items:  # interrupted
                self.loop.call_soon(self._arrived, context=self.context)


class LoopBridge:
    """A `Bridge` to an asyncio or uvloop event loop.

    Args:
        loop: the event loop that the streams belong to.
        line: of this loop, for the bounded queue.
        abandon: called with a slot whose readers can no longer be served.

    Attributes:
        waiters: what those in line wait for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, line: Line, abandon: Callable[[Slot], None]) -> None:
        self.loop = loop
        self.line = line
        self.outbox: list[Delta] = []
        self._abandon = abandon
        self._open: set[Lane] = set()
        self.waiters: set[asyncio.Future[None]] = set()
        self._channel: tuple[MemoryObjectSendStream[list[Delta]], MemoryObjectReceiveStream[list[Delta]]] | None
        self._channel = None
        self._dispatcher: asyncio.Task[None] | None = None
        self._mailbox = Mailbox(loop, self._arrived)
        self._part = _FIRST

    # ── worker thread ────────────────────────────────────────────────────────────────────────────────────────────

    def post(self, batch: list[Delta]) -> bool:
        """Hand over a batch; False when the loop is closed."""
        if self._mailbox.post(batch):
            return True
        self.discard()
        return False

    def discard(self) -> None:
        """Forget everything: the loop is closed without having ended its streams, nobody reads any more."""
        channel, self._channel, self._dispatcher = self._channel, None, None
        for end in channel or ():
            try:
                end.close()
            except RuntimeError:
                pass  # it cannot wake its reader in a closed loop
        self._open.clear()
        self.waiters.clear()
        self._mailbox.clear()

    def wake(self, slot: Slot) -> None:
        """Wake a parked reader from any thread; in the loop's own thread at once."""
        if asyncio._get_running_loop() is self.loop:
            slot.wake()
        else:
            self._mailbox.call(slot.wake)

    @property
    def num_wakeups(self) -> int:
        """Calls of the loop for batches."""
        return self._mailbox.num_calls

    @property
    def is_waiting_for_room(self) -> bool:
        """True when a submission waits for the queue (read by the worker without a lock)."""
        return self.line.is_waiting

    # ── loop thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def register(self, lanes: tuple[Lane, ...]) -> None:
        """Count lanes as open and make sure that their deltas are read."""
        self._open.update(lanes)
        self._mailbox.distrust()
        if self._dispatcher is None:
            self._channel = anyio.create_memory_object_stream[list[Delta]](math.inf)
            self._dispatcher = self.loop.create_task(
                self._dispatch(self._channel[1]), name="aiocb dispatcher", context=self._mailbox.context.copy()
            )
            # A task that is cancelled before its first step never enters its coroutine: no `finally` of it runs.
            self._dispatcher.add_done_callback(self._dispatcher_done)

    def lane_ended(self, lane: Lane) -> None:
        """Forget a lane that has had its end."""
        self._open.discard(lane)

    @property
    def open_lanes(self) -> int:
        """Lanes that have not ended yet."""
        return len(self._open)

    def withdraw(self, future: asyncio.Future[Any]) -> None:
        """Raise `Withdrawn` where a submission waits for this future, from any thread."""
        self._mailbox.call(fail, future, Withdrawn())

    def fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        """End everybody who waits for room, because the engine is closed or dead (any thread)."""
        self._mailbox.call(self._fail_waiting, make_error)

    def _fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        self.line.clear()
        for future in tuple(self.waiters):
            fail(future, make_error())

    def _arrived(self, batch: list[Delta]) -> None:
        if self._channel is not None:
            self._channel[0].send_nowait(batch)
        else:
            self._deliver(batch)

    def _deliver(self, batch: list[Delta]) -> None:
        for lane, token_ids, text, logprobs, end, answer in batch:
            lane.push(token_ids, text, logprobs, end, answer)
        self.line.let_in()

    async def _dispatch(self, receive: MemoryObjectReceiveStream[list[Delta]]) -> None:
        try:
            while self._open:
                try:
                    batch = receive.receive_nowait()
                except anyio.WouldBlock:
                    batch = await receive.receive()
                start = 0
                while start < len(batch):
                    part = batch[start : start + self._part]
                    self._deliver(part)
                    start += len(part)
                    if len(part) >= min(self._part, _FIRST):  # let its readers run before others are woken
                        began = time.perf_counter()
                        await asyncio.sleep(0)
                        self._part = next_part(self._part, len(part), time.perf_counter() - began)
        finally:
            self._undispatch()

    def _undispatch(self) -> None:
        channel, self._channel, self._dispatcher = self._channel, None, None
        if channel is not None:
            channel[0].close()
            channel[1].close()
        if self._open:
            self._end_all()

    def _dispatcher_done(self, task: asyncio.Task[None]) -> None:
        if self._dispatcher is task:
            self._undispatch()

    def _end_all(self) -> None:
        """The loop is shutting down: end its streams, abort their requests."""
        for lane in tuple(self._open):
            self._abandon(lane.slot)
            lane.push((), "", None, End("cancelled", error=EngineClosed("the event loop of this stream has shut down")))


class Signal:
    """A one-way latch from a thread to any number of event loops.

    `threading.Event` would block a loop, `asyncio.Event` is bound to one.
    """

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    def set(self) -> None:
        """Wake every waiter, now and later (any thread)."""
        self._is_set = True
        while True:
            try:
                loop, future = self._waiters.popleft()
            except IndexError:
                return
            try:
                loop.call_soon_threadsafe(resolve, future, None)
            except RuntimeError:
                pass  # that loop is closed

    async def wait(self) -> None:
        """Return once set."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiters.append((loop, future))
        if self._is_set:  # looked at last: set() may run in another thread at any time
            self.set()
        await future


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Give a future its result, unless it has one (in its loop)."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Give a future an exception, unless it is done (in its loop)."""
    if not future.done():
        future.set_exception(error)
