"""Requests that make text, on their way through: checked, submitted, read, written. Event loop only.

```
body ─► wire model ─► Asked (prompts, keywords, Answer) ─► Engine.stream ─► Answer ─► JSON, or events
```

Whatever can be refused is refused before the first byte of the response: a stream begins when the engine has taken its
request. What fails later is an event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aiocb.errors import AiocbError
from aiocb.outputs import Chunk, Completion
from aiocb.serve.body import ClientGone, Receive, Scope, Send, parse, read_body
from aiocb.serve.errors import ApiError, error_of
from aiocb.serve.respond import Endpoint, send_json
from aiocb.serve.resume import Replay
from aiocb.serve.service import Call, Service
from aiocb.serve.sse import EventStream, Heartbeats
from aiocb.serve.tracing import caller_span
from aiocb.serve.wire import GenerationRequest

if TYPE_CHECKING:
    from aiocb.engine.stream import Stream

__all__ = ["Answer", "Asked", "Generation", "Resume"]

log = logging.getLogger("aiocb.serve")

Request = TypeVar("Request", bound=GenerationRequest)


class Answer(ABC):
    """Writes one answer in the words of one interface; frames are bytes of an event stream, ready to be sent.

    Attributes:
        call_id: of the answer on the wire.
    """

    call_id: str

    @abstractmethod
    def begin(self) -> bytes:
        """Frames before the first token."""

    @abstractmethod
    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        """Frames of what a choice has got."""

    @abstractmethod
    def end(self) -> bytes:
        """Frames behind the last token."""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """Frames of an answer that ends with an error."""

    @abstractmethod
    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer as one object; completions in the order of their choices."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request comes down to.

    Attributes:
        prompts: one stream of the engine for each.
        options: keywords of `Engine.stream`; `n` among them.
        answer: who writes.
        left_out: kinds of tools that there are not here; a header of the response names them.
    """

    prompts: Sequence[Any]
    options: dict[str, Any]
    answer: Answer
    left_out: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        return {"x-ignored-tools": ", ".join(sorted(set(self.left_out)))} if self.left_out else {}


class Generation(Endpoint, Generic[Request]):
    """An endpoint that makes text.

    Args:
        service: the server's state.
        heartbeats: who writes comments in silence.
        model: of the bodies.
    """

    def __init__(self, service: Service, heartbeats: Heartbeats, model: type[Request]) -> None:
        self.service = service
        self._heartbeats = heartbeats
        self._model = model

    @abstractmethod
    def ask(self, request: Request, call_id: str, name: str) -> Asked:
        """Say what a checked request comes down to.

        Raises:
            ApiError: it cannot be.
        """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        with caller_span(scope):
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, config = self.service, self.service.config
        service.check_open()
        request = await parse(await read_body(scope, receive, config), self._model, config)
        name = service.name_of(request.model)
        asked = self.ask(request, uuid.uuid4().hex, name)
        options = {**self.bounded(request, asked), "adapter": service.adapter_of(name)}
        if not request.stream:
            options["stream_interval"] = None  # one delivery: nobody reads deltas
        streams = [service.engine.stream(prompt, on_full="refuse", **options) for prompt in asked.prompts]
        call = Call(streams)
        service.add(call)
        watcher = asyncio.create_task(_watch(receive, call.leave))
        is_handed_over = False
        try:
            async with contextlib.AsyncExitStack() as stack:
                for stream in streams:
                    await stack.enter_async_context(stream)
                if call.is_gone:
                    raise ClientGone
                if not request.stream:
                    await self._whole(call, asked, send)
                elif not request.resume:
                    await self._stream(call, asked, send)
                else:
                    replay = self._replay(call, asked)
                    watcher.cancel()
                    service.spawn(self._keep(call, asked, replay, stack.pop_all()))
                    is_handed_over = True
                    await _play(replay, None, receive, send, self._heartbeats)
        finally:
            watcher.cancel()
            if not is_handed_over:
                service.remove(call)

    def bounded(self, request: Request, asked: Asked) -> dict[str, Any]:
        """The options within the server's bounds.

        Raises:
            ApiError: more choices than this server makes.
        """
        config, options = self.service.config, asked.options
        if request.resume and not (config.resume_window and request.stream):
            raise ApiError(
                400,
                "resume needs a stream, and a server with --resume-window",
                param="resume",
                code="unsupported_parameter",
            )
        if request.n * len(asked.prompts) > config.max_n:
            raise ApiError(
                400, f"n={request.n} for {len(asked.prompts)} prompts is more than {config.max_n} choices", param="n"
            )
        if config.request_timeout:
            options["timeout"] = min(options.get("timeout", config.request_timeout), config.request_timeout)
        if config.max_queue_time:
            options["queue_timeout"] = min(options.get("queue_timeout", config.max_queue_time), config.max_queue_time)
        return options

    async def _whole(self, call: Call, asked: Asked, send: Send) -> None:
        completions: list[Completion] = []
        if len(call.streams) == 1:
            completions = await call.streams[0].completions()
        else:
            async with _first_failure(), asyncio.TaskGroup() as group:
                tasks = [group.create_task(stream.completions()) for stream in call.streams]
            completions = [completion for task in tasks for completion in task.result()]
        if call.is_gone:
            raise ClientGone
        if call.error is not None:
            raise call.error
        await send_json(send, asked.answer.whole(completions), headers=asked.headers)

    async def _stream(self, call: Call, asked: Asked, send: Send) -> None:
        output = EventStream(send, self._heartbeats)
        await output.start([(name.encode(), value.encode()) for name, value in asked.headers.items()])
        try:
            last = await _pump(call, asked, output.write)
        finally:
            output.close()
        if not call.is_gone:
            await output.end(last)

    def _replay(self, call: Call, asked: Asked) -> Replay:
        """Where the events of a stream are kept that is to be resumed."""
        service, config = self.service, self.service.config

        def abandon() -> None:
            service.replays.remove(replay)
            call.leave()

        replay = Replay(asked.answer.call_id, config.resume_buffer, config.resume_window, abandon)
        service.replays.add(replay)
        return replay

    async def _keep(self, call: Call, asked: Asked, replay: Replay, stack: contextlib.AsyncExitStack) -> None:
        """Read a stream to its end, whether or not somebody listens."""

        async def write(frames: bytes) -> None:
            replay.write(frames)

        try:
            async with stack:
                replay.write(await _pump(call, asked, write))
        finally:
            replay.end()
            self.service.remove(call)


class Resume(Endpoint):
    """`GET /v1/streams/{id}`: goes on with a stream whose connection has broken, behind `Last-Event-ID`."""

    def __init__(self, service: Service, heartbeats: Heartbeats) -> None:
        self._service = service
        self._heartbeats = heartbeats

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events that follow."""
        replay = self._service.replays.find(scope["path_params"]["id"])
        last = dict(scope["headers"]).get(b"last-event-id")
        await _play(replay, None if last is None else last.decode("latin-1"), receive, send, self._heartbeats)


async def _play(replay: Replay, last: str | None, receive: Receive, send: Send, heartbeats: Heartbeats) -> None:
    """Send the events of a kept stream while its client listens."""
    reader, number = replay.attach(last)
    watcher = asyncio.create_task(_watch(receive, lambda: replay.detach(reader)))
    output = EventStream(send, heartbeats)
    try:
        await output.start([(b"x-stream-id", replay.stream_id.encode())])
        while (found := await replay.read(reader, number)) is not None:
            frames, number = found
            await output.write(frames)
        await output.end(b"")
    finally:
        output.close()
        replay.detach(reader)
        watcher.cancel()


async def _pump(call: Call, asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> bytes:
    """Write what an answer's streams bring; return its last frames. What fails is told in them."""
    answer, n = asked.answer, asked.options.get("n", 1)
    try:
        await write(answer.begin())
        if len(call.streams) == 1:
            async for chunk in call.streams[0]:
                await write(answer.chunk(chunk.index, chunk))
        else:
            async with _first_failure(), asyncio.TaskGroup() as group:
                for number, stream in enumerate(call.streams):
                    group.create_task(_read(stream, number * n, answer, write))
    except AiocbError as error:
        return answer.fail(call.error or error_of(error))
    return answer.end() if call.error is None else answer.fail(call.error)


async def _read(stream: Stream, first: int, answer: Answer, write: Callable[[bytes], Awaitable[None]]) -> None:
    async for chunk in stream:
        await write(answer.chunk(first + chunk.index, chunk))


@contextlib.asynccontextmanager
async def _first_failure() -> AsyncIterator[None]:
    """Of several streams, the first that failed stands for all."""
    try:
        yield
    except BaseExceptionGroup as group:
        for error in group.exceptions:
            if isinstance(error, AiocbError):
                raise error from None
        raise


async def _watch(receive: Receive, on_gone: Callable[[], object]) -> None:
    """Call when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
