"""Where results wait for their readers: plain threads, or callbacks on event loops.

The worker thread calls `deliver` once per step; every other method is called in a user's thread. One lock, held for
as long as it takes to append what one step produced. Results wait in order of arrival and can be taken from the
front or by request, both in O(1); a reader that waits for one request is woken for that request only.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiocb.compat.transformers.results import GenerationOutput, Prefix, RequestStatus, StoppedError

if TYPE_CHECKING:
    from aiocb.engine.slot import End
    from aiocb.outputs import TokenLogprobs

__all__ = ["Callback", "Reply", "Router"]

Callback = Callable[[GenerationOutput], object]


@dataclass(slots=True, eq=False)
class Reply:
    """One sequence that was asked for, and what it has produced.

    Attributes:
        prompt_ids: the prompt, as far as it can be read without checking it.
        timestamps: of every token; None when nobody wants them.
        sink: takes the outputs instead of the queue and of handlers.
        is_live: it has not ended.
        cancel: ends it, and the other samples of its prompt; None when there is nothing to end.
        unread: numbers of its outputs that wait in the queue.
        waiter: readers that wait for this request.
    """

    request_id: str
    prompt_ids: list[int]
    is_streaming: bool = False
    timestamps: list[float] | None = None
    sink: Callback | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    created_time: float = field(default_factory=time.perf_counter)
    first_token_time: float = -1.0
    is_live: bool = True
    cancel: Callable[[], object] | None = None
    unread: deque[int] = field(default_factory=deque)
    waiter: threading.Condition | None = None

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, end: End | None
    ) -> list[GenerationOutput]:
        """Take one delivery; return the outputs that it makes: one per token when streaming."""
        now = time.perf_counter()
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        if logprobs is not None:
            self.logprobs.extend(one.logprob for one in logprobs)
        if self.timestamps is not None:
            self.timestamps.extend([now] * len(token_ids))
        if token_ids and start == 0:
            self.first_token_time = now
        outputs = []
        if self.is_streaming:
            stop = len(self.tokens) + (1 if end is None else 0)
            outputs = [self._snapshot(length) for length in range(start + 1, stop)]
        if end is not None:
            self.is_live, self.cancel = False, None
            outputs.append(self._last(end, now))
        return outputs

    def _snapshot(self, length: int) -> GenerationOutput:
        return GenerationOutput(
            self.request_id,
            self.prompt_ids,
            Prefix(self.tokens, length),
            Prefix(self.logprobs, length) if self.logprobs else [],
            None,
            RequestStatus.DECODING,
            self.created_time,
            (self.first_token_time, -1),
            None if self.timestamps is None else Prefix(self.timestamps, length),
        )

    def _last(self, end: End, now: float) -> GenerationOutput:
        error = end.error
        if error is None and end.finish_reason == "cancelled":
            error = StoppedError("the request was cancelled")
        queue_s = None if end.metrics is None else end.metrics.queue_s
        # A stream's earlier outputs look into the same lists, which now belong to the reader: copy them once.
        return GenerationOutput(
            self.request_id,
            self.prompt_ids,
            self.tokens[:] if self.is_streaming else self.tokens,
            self.logprobs[:] if self.is_streaming else self.logprobs,
            None if error is None else str(error),
            RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
            self.created_time,
            (-1 if queue_s is None else self.created_time + queue_s, now),
            self.timestamps and self.timestamps[:],
            error,
        )


class Router:
    """Outputs between the worker and their readers.

    Attributes:
        lock: reentrant; also guards the state of the manager that owns this router.
        moved: notified when that state has changed, or the bounded queue has moved on.
        num_live: registered sequences that have not ended.

    Args:
        is_running: whether results of live requests can come.
        on_idle: called, with the lock held, when the last live sequence has ended.
    """

    def __init__(self, is_running: Callable[[], bool], on_idle: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.num_live = 0
        self._is_running = is_running
        self._on_idle = on_idle
        self._numbers = itertools.count()
        self._outputs: OrderedDict[int, tuple[Reply, GenerationOutput]] = OrderedDict()
        self._replies: dict[str, deque[Reply]] = {}
        self._handlers: dict[str, tuple[Callback, asyncio.AbstractEventLoop]] = {}
        self._any = threading.Condition(self.lock)

    # ── the writing side ─────────────────────────────────────────────────────────────────────────────────────────

    def register(self, replies: Iterable[Reply]) -> None:
        """Make sequences known before they are submitted; idempotent.

        A label may be in use: the outputs of the requests that share it are then read one request after the other.
        """
        with self.lock:
            for reply in replies:
                known = self._replies.setdefault(reply.request_id, deque())
                if reply not in known:
                    known.append(reply)
                    self.num_live += 1
            self._any.notify_all()

    def cancel(self, request_id: str) -> None:
        """End the sequences of this label, and the other samples of their prompts."""
        with self.lock:
            for reply in tuple(self._replies.get(request_id, ())):
                if reply.cancel is not None:
                    reply.cancel()

    def deliver(
        self, deliveries: Iterable[tuple[Reply, Sequence[int], Sequence[TokenLogprobs] | None, End | None]]
    ) -> None:
        """Take what one step produced."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Callback, Reply, GenerationOutput]]] = {}
        with self.lock:
            num_ended = 0
            for reply, token_ids, logprobs, end in deliveries:
                if not reply.is_live:
                    continue
                num_ended += end is not None
                handler = self._handlers.get(reply.request_id)
                for output in reply.add(token_ids, logprobs, end):
                    if reply.sink is not None:
                        reply.sink(output)
                    elif handler is None:
                        self._put(reply, output)
                    else:
                        calls.setdefault(handler[1], []).append((handler[0], reply, output))
                if end is not None and reply.sink is not None:
                    self._forget(reply)
            for loop, items in calls.items():
                self._call(loop, items)
            if num_ended:
                self.num_live -= num_ended
                if self.num_live == 0:
                    self._any.notify_all()
                    self._on_idle()

    def end(self, replies: Iterable[Reply], end: End) -> None:
        """End sequences of which the engine has not heard."""
        self.deliver([(reply, (), None, end) for reply in replies])

    def notify_all(self) -> None:
        """Wake everybody to look at the state again."""
        with self.lock:
            self.moved.notify_all()
            self._any.notify_all()
            for replies in self._replies.values():
                for reply in replies:
                    if reply.waiter is not None:
                        reply.waiter.notify_all()

    def _put(self, reply: Reply, output: GenerationOutput) -> None:
        number = next(self._numbers)
        self._outputs[number] = (reply, output)
        reply.unread.append(number)
        if reply.waiter is not None:
            reply.waiter.notify_all()
        self._any.notify_all()

    def _call(self, loop: asyncio.AbstractEventLoop, items: list[tuple[Callback, Reply, GenerationOutput]]) -> None:
        """Post one step's outputs to one loop. A closed loop ends its own requests and no others."""
        try:
            loop.call_soon_threadsafe(_call_all, loop, [(callback, output) for callback, _, output in items])
        except RuntimeError:
            for _, reply, output in items:
                self._handlers.pop(reply.request_id, None)
                self._put(reply, output)
                if reply.cancel is not None:
                    reply.cancel()
            return
        for _, reply, output in items:
            if output.is_finished():
                self._handlers.pop(reply.request_id, None)
                self._forget(reply)

    def _forget(self, reply: Reply) -> None:
        replies = self._replies[reply.request_id]
        replies.remove(reply)
        if not replies:
            del self._replies[reply.request_id]
        if reply.waiter is not None:
            reply.waiter.notify_all()

    # ── the reading side ─────────────────────────────────────────────────────────────────────────────────────────

    def take(
        self, request_id: str | None = None, timeout: float | None = None, *, ends_when_idle: bool = False
    ) -> GenerationOutput | None:
        """Return the next output, of one request or of any.

        Args:
            request_id: whose; None takes what came first.
            timeout: seconds to wait; None waits as long as one can come.
            ends_when_idle: do not wait when no request is alive.

        Returns:
            None when the time is over or nothing can come: nothing runs, or (without a timeout) no such request is
            alive.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            while True:
                output = self._pop(request_id)
                if output is not None:
                    return output
                remaining = None if deadline is None else deadline - time.monotonic()
                is_late = remaining is not None and remaining <= 0
                if not self._is_running() or is_late or (ends_when_idle and self.num_live == 0):
                    return None
                condition, replies = self._any, () if request_id is None else self._replies.get(request_id)
                if replies:
                    condition = replies[0].waiter = replies[0].waiter or threading.Condition(self.lock)
                elif request_id is not None and timeout is None:
                    return None
                condition.wait(remaining)

    def set_handler(self, request_id: str, callback: Callback, loop: asyncio.AbstractEventLoop) -> None:
        """Send the outputs of a request, those that wait included, to a callback on a loop."""
        with self.lock:
            self._handlers[request_id] = (callback, loop)
            waiting = []
            while (output := self._pop(request_id)) is not None:
                waiting.append((callback, output))
                if output.is_finished():
                    self._handlers.pop(request_id, None)
                    break
            if waiting:
                loop.call_soon_threadsafe(_call_all, loop, waiting)

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        if request_id is None:
            if not self._outputs:
                return None
            _, (reply, output) = self._outputs.popitem(last=False)
            reply.unread.popleft()
        else:
            replies = self._replies.get(request_id)
            if not replies or not replies[0].unread:
                return None
            reply = replies[0]
            _, output = self._outputs.pop(reply.unread.popleft())
        if output.is_finished():
            self._forget(reply)
        return output


def _call_all(loop: asyncio.AbstractEventLoop, items: list[tuple[Callback, GenerationOutput]]) -> None:
    """Give each its own turn of the loop, which deals with whatever one raises."""
    for callback, output in items:
        loop.call_soon(callback, output)
