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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiocb.errors import AiocbError
from aiocb.outputs import Chunk, Completion
from aiocb.serve.body import ClientGone, Receive, Scope, Send, parse, read_body
from aiocb.serve.errors import ApiError, error_of
from aiocb.serve.respond import Endpoint, send_json
from aiocb.serve.service import Call, Service
from aiocb.serve.sse import EventStream, Heartbeats
from aiocb.serve.wire import GenerationRequest

__all__ = ["Answer", "Asked", "Generation"]

log = logging.getLogger("aiocb.serve")

Request = TypeVar("Request", bound=GenerationRequest)


class Answer(ABC):
    """Writes one answer in the words of one interface; frames are bytes of an event stream, ready to be sent."""

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
    """

    prompts: Sequence[Any]
    options: dict[str, Any]
    answer: Answer


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
        service, config = self.service, self.service.config
        service.check_open()
        request = await parse(await read_body(scope, receive, config), self._model, config)
        name = service.name_of(request.model)
        asked = self.ask(request, uuid.uuid4().hex, name)
        options = self._bounded(request, asked)
        if not request.stream:
            options["stream_interval"] = None  # one delivery: nobody reads deltas
        streams = [service.engine.stream(prompt, on_full="refuse", **options) for prompt in asked.prompts]
        call = Call(streams)
        service.add(call)
        watcher = asyncio.create_task(_watch(receive, call))
        try:
            async with contextlib.AsyncExitStack() as stack:
                for stream in streams:
                    await stack.enter_async_context(stream)
                if call.is_gone:
                    raise ClientGone
                if request.stream:
                    await self._stream(call, asked, send)
                else:
                    await self._whole(call, asked, send)
        finally:
            service.remove(call)
            watcher.cancel()

    def _bounded(self, request: Request, asked: Asked) -> dict[str, Any]:
        """The options within the server's bounds.

        Raises:
            ApiError: more choices than this server makes.
        """
        config, options = self.service.config, asked.options
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
        await send_json(send, asked.answer.whole(completions))

    async def _stream(self, call: Call, asked: Asked, send: Send) -> None:
        answer, n = asked.answer, asked.options.get("n", 1)
        output = EventStream(send, self._heartbeats)
        await output.start()
        try:
            await output.write(answer.begin())
            if len(call.streams) == 1:
                async for chunk in call.streams[0]:
                    await output.write(answer.chunk(chunk.index, chunk))
            else:
                async with _first_failure(), asyncio.TaskGroup() as group:
                    for number, stream in enumerate(call.streams):
                        group.create_task(_read(stream, number * n, answer, output))
            if call.is_gone:
                return
            last = answer.end() if call.error is None else answer.fail(call.error)
        except AiocbError as error:
            if call.is_gone:
                return
            last = answer.fail(call.error or error_of(error))
        finally:
            output.close()
        await output.end(last)


async def _read(stream: Any, first: int, answer: Answer, output: EventStream) -> None:
    async for chunk in stream:
        await output.write(answer.chunk(first + chunk.index, chunk))


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


async def _watch(receive: Receive, call: Call) -> None:
    """Free what a call holds when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.leave()
