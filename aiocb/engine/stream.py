"""The stream object: what `Engine.stream()` returns. Runs in the task (or thread) of its user.

A class and not an async generator, so that a timeout around one `anext` does not finish it, `break` aborts at once
(an async generator's cleanup runs later, in another task), and `yield` inside `async with` is safe: it opens no task
group and no cancel scope (PEP 789). No cleanup path awaits; `CancelledError` is never swallowed or delayed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import anyio

from aiocb.engine.bridge import Withdrawn
from aiocb.engine.core import EngineCore
from aiocb.engine.session import Intent
from aiocb.engine.slot import End
from aiocb.errors import EngineError, QueueFull, RequestError, RequestTimeout
from aiocb.outputs import Chunk, Completion, RequestMetrics, Usage, joined_calls
from aiocb.text.output import merge_answers

if TYPE_CHECKING:
    from aiocb.engine.core import Command
    from aiocb.engine.engine import Engine
    from aiocb.engine.prepare import Prepared, StreamSpec
    from aiocb.engine.session import Session
    from aiocb.engine.slot import Lane, Slot

__all__ = ["Stream"]

_NO_END = (None, None, None)


class Stream:
    """One request's output: an async iterator of `Chunk`, an async (and plain) context manager, and an awaitable.

    Nothing is submitted before the first `anext`, `async with` or `await`. Made by `Engine.stream()`.

    How it is left, and what follows:

    - `async for chunk in stream`, and the task is cancelled, or `break`, or an exception: aborted at once.
    - `async with stream`, any way out: the same, on every Python implementation.
    - A timeout around one `anext` inside `async with`: the stream lives on, no token is lost.
    - `await stream`, cancelled: aborted.
    - `stream.close()` from any task or thread: aborted; a parked reader wakes and its iteration ends.
    - `stream.finish()`: ends at the next step and delivers what is there.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_engine",
        "_entered",
        "_intent",
        "_lanes",
        "_loop",
        "_prompt_token_ids",
        "_reading",
        "_session",
        "_slot",
        "_spec",
        "_state",
    )

    def __init__(self, engine: Engine, spec: StreamSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._intent = Intent()
        self._begun: asyncio.Future[Prepared | Exception] | None = None
        self._prompt_token_ids: Sequence[int] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._slot: Slot | None = None
        self._lanes: tuple[Lane, ...] = ()
        self._entered = False
        self._reading = False
        self._state = "new"

    def __repr__(self) -> str:
        return f"<Stream {self.request_id!r} {'closed' if self.is_closed else self._state}>"

    @property
    def request_id(self) -> str:
        """The label of this request."""
        return self._spec.request_id

    @property
    def is_closed(self) -> bool:
        """True after `close()`."""
        return self._state == "closed" or (self._slot is not None and self._slot.is_closed)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        """Return everything that has arrived since the last chunk, waiting if nothing has.

        Raises:
            StopAsyncIteration: the output is complete, or the stream was closed.
            InvalidRequest: the request was refused (on the first call).
            QueueFull: there is no room in the waiting queue.
            RequestTimeout: a deadline has passed.
            RequestFailed: something inside this request raised.
            EngineClosed: the engine is not running, or runs in another process.
            EngineDead: the engine's worker has died.
            EngineError: the stream was opened in another event loop.
            anyio.BusyResourceError: another task is reading this stream.
        """
        slot = self._slot
        if slot is not None and slot.num_open and asyncio.get_running_loop() is not self._loop:
            self._raise_if_foreign()
            raise EngineError("a stream is read in the event loop that it was opened in: open it where it is read")
        if slot is not None and slot.ready and not slot.is_closed:
            chunk = self._take(slot)
            if chunk is not None:
                return chunk
        if self._reading:
            raise anyio.BusyResourceError("reading from")
        self._reading = True
        try:
            if slot is None:
                slot = await self._submit()
            while True:
                if slot.is_closed:
                    raise StopAsyncIteration
                if slot.ready:
                    chunk = self._take(slot)
                    if chunk is not None:
                        return chunk
                if slot.num_open == 0 and not slot.ready:
                    raise StopAsyncIteration
                self._raise_if_foreign()
                # The data stays in the slot: a cancelled wait loses nothing.
                waiter = asyncio.get_running_loop().create_future()
                slot.waiter = waiter
                try:
                    await waiter
                finally:
                    if slot.waiter is waiter:
                        slot.waiter = None
        except (StopAsyncIteration, GeneratorExit):
            raise
        except BaseException:
            if not self._entered:
                self.close()
            raise
        finally:
            self._reading = False

    def _take(self, slot: Slot) -> Chunk | None:
        """The first ready lane's unread output as one chunk, or its error."""
        lane = slot.ready.popleft()
        lane.is_ready = False
        token_ids, texts, end, answers = lane.token_ids, lane.texts, lane.end, lane.answers
        if token_ids:
            lane.token_ids = ()
            slot.num_read += len(token_ids)
            if slot.is_paused:
                self._put((EngineCore.resume, slot))
        if texts:
            lane.texts = []
        elif not token_ids and end is None and not answers:
            return None
        if end is not None and end.error is not None:
            if not token_ids and not texts and not answers:
                # One error ends the whole stream: what its other samples do is of no use to anyone.
                self.close()
                raise end.error
            # What came before the error is delivered first; the error follows on the next read.
            lane.is_ready = True
            slot.ready.appendleft(lane)
            end = None
        logprobs = lane.logprobs
        if logprobs is not None:
            lane.logprobs = None
            logprobs = tuple(logprobs)
        text = texts[0] if len(texts) == 1 else "".join(texts)
        if type(token_ids) is not tuple:
            token_ids = tuple(token_ids)
        if end is None and not answers:
            return Chunk(slot.request_id, lane.index, text, token_ids, logprobs)
        reason, stop_reason, usage, *_ = end or _NO_END
        lane.answers = []
        return Chunk(
            slot.request_id, lane.index, text, token_ids, logprobs, reason, stop_reason, usage, *merge_answers(answers)
        )

    # ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Abort the request now and drop what was not read. Synchronous, idempotent, lock-free, from any thread."""
        slot = self._slot
        if slot is None:
            if self._state == "new":
                self._state = "closed"
                leave = self._intent.withdraw or self._intent.abandon
                if leave is not None:
                    leave()
                elif self._begun is not None:
                    self._begun.cancel()  # nobody waits for it
            return
        if slot.is_closed:
            return
        slot.is_closed = True
        if slot.num_open:
            self._put((EngineCore.abort, slot))
            slot.bridge.wake(slot)

    def finish(self) -> None:
        """End generation at the next step and deliver what is there (a chat's stop button). Idempotent, any thread.

        A stream that has not been submitted yet, or waits for room in the queue, ends without output.
        """
        self._intent.is_finishing = True  # first: who submits it meanwhile looks at this last
        slot, withdraw = self._slot, self._intent.withdraw
        if slot is None:
            if withdraw is not None:
                withdraw()
        elif slot.num_open:
            self._put((EngineCore.finish_early, slot))

    async def aclose(self) -> None:
        """The same as `close()`, for `contextlib.aclosing`; never waits."""
        self.close()

    async def __aenter__(self) -> Stream:
        """Submit the request; see `__anext__` for what is raised."""
        self._entered = True
        if self._slot is None and not self.is_closed:
            if self._reading:
                raise anyio.BusyResourceError("reading from")
            self._reading = True
            try:
                await self._submit()
            except StopAsyncIteration:
                pass  # closed meanwhile: the body runs with a stream that has ended
            finally:
                self._reading = False
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __enter__(self) -> Stream:
        self._entered = True
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run in any thread and while locks are held: only a SimpleQueue.put, which is safe in destructors.
        slot = getattr(self, "_slot", None)
        if slot is None:
            begun = getattr(self, "_begun", None)
            if begun is not None:
                begun.cancel()  # nobody waits for it
        elif slot.num_open and not slot.is_closed:
            slot.is_closed = True
            self._put((EngineCore.abort, slot))

    # ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────

    def __await__(self) -> Generator[object, None, Completion]:
        """Wait for the whole output (sample 0 when `n` > 1; see `Engine.generate` for all of them)."""
        return self._first().__await__()

    async def _first(self) -> Completion:
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Wait for the whole output of every parallel sample, in order of their index.

        Raises:
            RequestError, EngineError: as iterating does.
        """
        if self._slot is None:
            self._spec = dataclasses.replace(self._spec, stream_interval=None)  # one delivery: nobody reads deltas
        chunks: dict[int, list[Chunk]] = {}
        try:
            async for chunk in self:
                chunks.setdefault(chunk.index, []).append(chunk)
        except BaseException as error:
            self.close()
            if isinstance(error, RequestError):
                error.partial = self._completions(chunks)
            raise
        return self._completions(chunks)

    def _completions(self, chunks: Mapping[int, Sequence[Chunk]]) -> list[Completion]:
        # A stream that was closed before it was submitted has no lanes.
        lanes = self._lanes or [None] * int(self._spec.sampling.n)
        return [self._completion(index, lane, chunks.get(index, ())) for index, lane in enumerate(lanes)]

    def _completion(self, index: int, lane: Lane | None, chunks: Sequence[Chunk]) -> Completion:
        end = (None if lane is None else lane.end) or End("cancelled")
        prompt_token_ids = tuple(self._prompt_token_ids)
        token_ids = tuple(chain.from_iterable([chunk.token_ids for chunk in chunks]))
        has_logprobs = any(chunk.logprobs is not None for chunk in chunks)
        return Completion(
            self.request_id,
            index,
            "".join([chunk.text for chunk in chunks]),
            token_ids,
            tuple(chain.from_iterable([chunk.logprobs or () for chunk in chunks])) if has_logprobs else None,
            end.finish_reason,
            end.stop_reason,
            end.usage or Usage(len(prompt_token_ids), len(token_ids)),
            prompt_token_ids,
            end.metrics or RequestMetrics(None, None, 0.0),
            end.prompt_logprobs,
            reasoning_content="".join([chunk.reasoning_content for chunk in chunks]),
            tool_calls=joined_calls(chain.from_iterable([chunk.tool_calls for chunk in chunks])),
        )

    def _failed(self, error: RequestError) -> Completion:
        """The completion that stands for this stream where its failure is not raised."""
        return dataclasses.replace(
            (error.partial or self._completions({}))[0],
            finish_reason="timeout" if isinstance(error, RequestTimeout) else "error",
            stop_reason=None,
            prompt_logprobs=None,
            error=error,
        )

    async def _open(self, on_end: Callable[[], object], on_full: Literal["wait", "refuse"] | None = None) -> None:
        """Submit now, for one delivery at the end, and call `on_end` on the loop when there is something to collect."""
        self._entered = True
        spec = self._spec
        self._spec = dataclasses.replace(spec, stream_interval=None, on_full=on_full or spec.on_full)
        try:
            slot = await self._submit()
        finally:
            self._spec = spec
        if slot.num_open == 0:
            on_end()
        else:
            slot.on_end = on_end

    def _raise_if_foreign(self) -> None:
        assert self._session is not None
        self._session.raise_if_foreign()

    def _put(self, command: Command) -> None:
        assert self._session is not None
        self._session.put(command)

    def _begin(self) -> None:
        """Have the request prepared; called ahead where many are submitted one after the other."""
        if self._begun is None and self._state == "new":
            self._session = self._engine._running()
            self._begun = self._session.begin(self._spec)

    async def _submit(self) -> Slot:
        if self._state == "closed":
            raise StopAsyncIteration
        self._begin()
        session, begun = self._session, self._begun
        assert session is not None and begun is not None
        try:
            submitted = await session.submit(self._spec, begun, self._intent)
        except Withdrawn:
            if not self._intent.is_finishing or self._state == "closed":
                raise StopAsyncIteration from None
            submitted = await session.submit(self._spec, begun, self._intent)
        except QueueFull:
            raise  # it may be tried again as it is
        except BaseException:
            self._begun = None
            raise
        # From the registration in `submit` to here there is no await: a cancelled submission leaves nothing behind.
        self._begun = None
        self._loop = asyncio.get_running_loop()
        self._slot, self._lanes, self._prompt_token_ids = submitted
        slot = submitted.slot
        if self._intent.is_finishing and slot.num_open:
            self._put((EngineCore.finish_early, slot))
        if self.is_closed:
            # Closed by somebody else while the prompt was encoded: the engine has to hear of it all the same.
            slot.is_closed = True
            self._put((EngineCore.abort, slot))
            raise StopAsyncIteration
        self._state = "open"
        return slot
