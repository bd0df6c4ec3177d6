"""The routes of the server behind a generator, as a replica of Ray has them; without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiocb import Engine
from aiocb.contrib.ray_asgi import respond, scope_of
from aiocb.serve import ServeConfig, create_app
from aiocb.testing import Gate, assert_quiescent, fake_engine

pytestmark = pytest.mark.asyncio


def post(path: str = "/v1/chat/completions") -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"host", b"x")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, "app": object()}
    return scope_of(scope)


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


@contextlib.asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[Any]:
    app = create_app(engine, ServeConfig(served_model_name=("fake",), heartbeat=0))
    async with engine, app.router.lifespan_context(app):
        await app.state.service.loaded.wait()
        yield app


async def test_a_stream_and_a_document() -> None:
    engine = fake_engine("abc" * 30)
    async with served(engine) as app:
        pieces: list[Any] = [piece async for piece in respond(app, post(), chat(stream=True))]
        status, headers = pieces[0]
        assert status == 200 and dict(headers)[b"content-type"].startswith(b"text/event-stream")
        text = b"".join(piece for piece in pieces[1:] if isinstance(piece, bytes))
        assert text.endswith(b"data: [DONE]\n\n") and text.count(b"finish_reason") > 2
        document: list[Any] = [piece async for piece in respond(app, post(), chat())]
        assert document[0][0] == 200 and json.loads(document[1])["choices"][0]["message"]["content"] == "abc" * 30
        refusal: list[Any] = [piece async for piece in respond(app, post(), b"{")]
        assert refusal[0][0] == 400 and b"no JSON" in refusal[1]
        await assert_quiescent(engine)


async def test_what_came_meanwhile_is_one_piece() -> None:
    has_sent = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0)
        has_sent.set()

    pieces = respond(app, post(), b"")
    await anext(pieces)
    await has_sent.wait()  # its reader was busy elsewhere
    rest: list[Any] = [piece async for piece in pieces]
    assert len(rest) <= 2 and b"".join(rest) == b"x" * 50


async def test_pieces_keep_their_distance() -> None:
    engine = fake_engine("a" * 200, step_time=0.001)
    async with served(engine) as app:
        started = asyncio.get_running_loop().time()
        pieces: list[Any] = [piece async for piece in respond(app, post(), chat(stream=True), lambda: 0.05)]
        took = asyncio.get_running_loop().time() - started
        assert len(pieces) - 1 <= took / 0.05 + 2 and b"".join(pieces[1:]).endswith(b"data: [DONE]\n\n")
        started = asyncio.get_running_loop().time()
        assert [piece async for piece in respond(app, post(), b"{", lambda: 60.0)]
        assert asyncio.get_running_loop().time() - started < 30  # the end waits for nothing


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("way", ["cancelled", "closed"])
async def test_leaving_frees_the_slot(is_stream: bool, way: str) -> None:
    gate = Gate()
    engine = fake_engine("a" * 1000, gate=gate)
    async with served(engine) as app:
        pieces = respond(app, post(), chat(stream=is_stream))
        reader = asyncio.create_task(_read(pieces))
        await gate.held()
        await gate.step(3)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        if way == "closed":
            await pieces.aclose()
        gate.open()
        await assert_quiescent(engine)


async def _read(pieces: Any) -> None:
    async for _ in pieces:
        pass


async def test_an_application_waits_for_its_reader() -> None:
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        assert await receive() == {"type": "http.request", "body": b"body", "more_body": False}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": bytes(64 << 10), "more_body": True})
            sent += 1

    pieces = respond(app, post(), b"body")
    assert await anext(pieces) == (200, [])
    for _ in range(50):
        await asyncio.sleep(0)
    assert sent < 10
    assert sum(len(piece) for piece in [piece async for piece in pieces]) == 100 * (64 << 10)


async def test_what_an_application_raises_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("it fell over")

    pieces = respond(app, post(), b"")
    assert [await anext(pieces), await anext(pieces)] == [(200, []), b"half"]
    with pytest.raises(RuntimeError, match="it fell over"):
        await anext(pieces)
