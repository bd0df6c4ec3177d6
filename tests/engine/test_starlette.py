"""Behind Starlette: both ways in which it lets go of a response whose client has gone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aiocb.testing import assert_quiescent

from .helpers import ENDLESS, Setup, running, solo, spin

pytestmark = pytest.mark.slow

Message = MutableMapping[str, Any]
Body = Callable[[Setup], AsyncIterator[str]]


async def inside_async_with(setup: Setup) -> AsyncIterator[str]:
    async with setup.endless() as stream:
        async for chunk in stream:
            yield f"data: {list(chunk.token_ids)}\n\n"


async def bare_loop(setup: Setup) -> AsyncIterator[str]:
    async for chunk in setup.endless():
        yield f"data: {list(chunk.token_ids)}\n\n"


def app(setup: Setup, body: Body) -> Starlette:
    async def stream(_: Request) -> Response:
        return StreamingResponse(body(setup), media_type="text/event-stream")

    async def whole(request: Request) -> Response:
        completion = await setup.engine.generate([1, 2], max_new_tokens=int(request.query_params["count"]))
        return JSONResponse(list(completion.token_ids))

    return Starlette(routes=[Route("/stream", stream), Route("/whole", whole)])


class Client:
    """One request, spoken to the application directly. It goes away after some body messages."""

    def __init__(
        self, path: str, spec_version: str, leave_after: int, query: str = "", *, is_slow: bool = False
    ) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.leave_after = leave_after
        self.is_slow = is_slow
        self.is_gone = asyncio.Event()
        self.bodies: list[bytes] = []
        self._was_asked = False

    async def receive(self) -> Message:
        if not self._was_asked:
            self._was_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.is_gone.is_set() and self.scope["asgi"]["spec_version"] >= "2.4":  # type: ignore[index]
            raise OSError("the client has gone")
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])
            if len(self.bodies) == self.leave_after:
                self.is_gone.set()
        if self.is_slow:
            await asyncio.sleep(0)


@pytest.mark.parametrize("body", [inside_async_with, bare_loop], ids=lambda body: body.__name__)
async def test_disconnect_by_level_cancellation(body: Body) -> None:
    """Before ASGI 2.4: an anyio task group whose scope is cancelled, here while the next token is waited for."""
    gc.disable()
    try:
        async with running() as setup:
            client = Client("/stream", "2.3", 3)
            await app(setup, body)(client.scope, client.receive, client.send)
            assert len(client.bodies) >= 3
            await assert_quiescent(setup.engine)
    finally:
        gc.enable()


@pytest.mark.parametrize("body", [inside_async_with, bare_loop], ids=lambda body: body.__name__)
async def test_level_cancellation_inside_send(body: Body) -> None:
    """Cancelled in `send`, Starlette leaves the generator suspended, in a cycle with its own traceback: for the
    garbage collector, and not for us, to find. (A response that closes its body iterator is freed at once.)"""
    async with running() as setup:
        client = Client("/stream", "2.3", 3, is_slow=True)
        await app(setup, body)(client.scope, client.receive, client.send)
        gc.collect()
        await passes_of_the_loop()
        await assert_quiescent(setup.engine)


@pytest.mark.parametrize("body", [inside_async_with, bare_loop], ids=lambda body: body.__name__)
async def test_disconnect_by_an_iterator_that_is_never_closed(body: Body) -> None:
    """From ASGI 2.4 on: `send` raises, and the body iterator is left to the garbage collector."""
    from starlette.requests import ClientDisconnect

    async with running() as setup:
        client = Client("/stream", "2.4", 3)
        try:
            await app(setup, body)(client.scope, client.receive, client.send)
        except (ClientDisconnect, OSError):
            pass
        assert len(client.bodies) == 3
        gc.collect()
        await passes_of_the_loop()
        await assert_quiescent(setup.engine)


async def test_disconnect_while_queued() -> None:
    async with running(is_open=False) as setup:
        client = Client("/stream", "2.3", 0)
        task = asyncio.create_task(call(setup, client))
        await setup.gate.held()
        client.is_gone.set()
        await task
        await passes_of_the_loop()
        setup.gate.open()
        await assert_quiescent(setup.engine)


async def test_a_whole_answer_and_its_cancellation() -> None:
    async with running() as setup:
        client = Client("/whole", "2.3", -1, "count=5")
        await call(setup, client)
        assert client.bodies[0] == str(solo([1, 2], 5)).replace(" ", "").encode()
        other = Client("/whole", "2.3", -1, f"count={ENDLESS['max_new_tokens']}")
        task = asyncio.create_task(call(setup, other))
        await spin(lambda: setup.runner.num_steps > 8)
        task.cancel()
        await asyncio.wait([task])
        await assert_quiescent(setup.engine)


async def test_many_clients_come_and_go() -> None:
    async with running() as setup:
        tasks = []
        for index in range(60):
            version = "2.3" if index % 2 else "2.4"
            client = Client("/stream", version, 1 + index % 5, is_slow=index % 3 == 0)
            tasks.append(asyncio.create_task(call(setup, client)))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or type(result).__name__ in ("ClientDisconnect", "OSError") for result in results)
        del results, tasks
        gc.collect()
        await passes_of_the_loop()
        await assert_quiescent(setup.engine)


async def call(setup: Setup, client: Client) -> None:
    await app(setup, inside_async_with)(client.scope, client.receive, client.send)


async def passes_of_the_loop() -> None:
    """Async generators that were dropped are closed by tasks that the loop makes for them."""
    for _ in range(5):
        await asyncio.sleep(0)
