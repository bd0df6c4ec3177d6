"""Many prompts at once: all results in order, or each as it finishes. Runs in the caller's task, opens no other."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING

from aiocb.errors import QueueFull, RequestError
from aiocb.outputs import Completion

if TYPE_CHECKING:
    from aiocb.engine.stream import Stream

__all__ = ["CompletionIterator", "run_batch"]

_AHEAD = 64
"""Prompts that are prepared while those before them are submitted."""


class _Board:
    """Which streams have ended. Slots refer to it, and it refers to no stream: dropping the iterator aborts at once."""

    __slots__ = ("_waiter", "ended")

    def __init__(self) -> None:
        self.ended: deque[int] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def add(self, index: int) -> None:
        self.ended.append(index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when a stream has ended that has not been taken out."""
        while not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


async def run_batch(streams: list[Stream], *, progress: bool, return_exceptions: bool) -> list[Completion]:
    """Submit all streams and return what they yield, in their order.

    What has finished waits in its slot and is collected here, so no task per prompt is needed, and one failure or
    cancellation aborts the rest at once.

    Raises:
        RequestError, EngineError: the first failure, unless `return_exceptions`.
    """
    bar = None
    if progress:
        from tqdm.auto import tqdm

        bar = tqdm(total=len(streams), unit="request")
    board = _Board()
    results: dict[int, list[Completion]] = {}

    def put(index: int, completions: list[Completion]) -> None:
        results[index] = completions
        if bar is not None:
            bar.update()

    async def collect() -> None:
        while board.ended:
            index = board.ended.popleft()
            try:
                put(index, await streams[index].completions())
            except RequestError as error:
                if not return_exceptions:
                    raise
                put(index, [streams[index]._failed(error)])

    try:
        for index, stream in enumerate(streams):
            for ahead in streams[index : index + _AHEAD] if index % _AHEAD == 0 else ():
                ahead._begin()
            try:
                await stream._open(partial(board.add, index))
            except RequestError as error:
                if not return_exceptions:
                    raise
                put(index, [stream._failed(error)])
            await collect()
        while len(results) < len(streams):
            await board.wait()
            await collect()
    finally:
        for stream in streams:
            stream.close()
        if bar is not None:
            bar.close()
    return [completion for index in range(len(streams)) for completion in results[index]]


class CompletionIterator:
    """An async iterator of `Completion`, each as it finishes. Leaving it aborts what is still running."""

    def __init__(self, streams: list[Stream], *, return_exceptions: bool) -> None:
        self._waiting = deque(enumerate(streams))
        self._open: dict[int, Stream] = {}
        self._board = _Board()
        self._ready: deque[Completion] = deque()
        self._return_exceptions = return_exceptions

    def __aiter__(self) -> CompletionIterator:
        return self

    async def __anext__(self) -> Completion:
        """Return the next completion that is there.

        Raises:
            StopAsyncIteration: all have been returned.
            RequestError, EngineError: a request failed (unless `return_exceptions`); the rest is aborted.
        """
        board = self._board
        try:
            await self._submit_more()
            while not board.ended and not self._ready:
                if not self._open:
                    raise StopAsyncIteration
                await board.wait()
            if self._ready:
                return self._ready.popleft()
            stream = self._open.pop(board.ended.popleft())
            try:
                first, *others = await stream.completions()
            except RequestError as error:
                if not self._return_exceptions:
                    raise
                return stream._failed(error)
            self._ready.extend(others)  # of n parallel samples
            return first
        except StopAsyncIteration:
            raise
        except BaseException:
            self.close()
            raise

    async def _submit_more(self) -> None:
        """Submit what the queue takes; wait for room only when nothing runs that could end first."""
        for _, ahead in islice(self._waiting, _AHEAD):
            ahead._begin()
        while self._waiting:
            index, stream = self._waiting[0]
            try:
                await stream._open(partial(self._board.add, index), "refuse" if self._open else None)
            except RequestError as error:
                if isinstance(error, QueueFull) and self._open and stream._spec.on_full == "wait":
                    return
                if not self._return_exceptions:
                    raise
                self._ready.append(stream._failed(error))
            else:
                self._open[index] = stream
            self._waiting.popleft()

    def close(self) -> None:
        """Abort everything that has not been returned. Synchronous, idempotent."""
        self._waiting.clear()
        for stream in self._open.values():
            stream.close()
        self._open.clear()
        self._ready.clear()
        self._board.ended.clear()

    async def aclose(self) -> None:
        """The same as `close()`; never waits."""
        self.close()

    async def __aenter__(self) -> CompletionIterator:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
