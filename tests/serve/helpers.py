"""A server in this process, on a port of its own, and readers of what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import uvicorn

import aiocb
from aiocb.serve import ServeConfig, create_app
from aiocb.serve.run import Protocol, Server
from aiocb.testing import FakeRunner, Gate, assert_quiescent, fake_engine

MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 10_000, "ignore_eos": True}
CHAT = "/v1/chat/completions"


class _Server(Server):
    """One that leaves the signals of the tests alone."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


class Served:
    """A running server.

    Attributes:
        client: speaks to it.
        server: uvicorn's.
        port: where it listens.
    """

    def __init__(
        self, engine: aiocb.Engine, server: _Server, service: Any, client: httpx.AsyncClient, port: int
    ) -> None:
        self.engine = engine
        self.server = server
        self.service = service
        self.client = client
        self.port = port

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post(CHAT, json={"messages": MESSAGES, **fields})

    async def until_ready(self) -> None:
        while (await self.client.get("/health")).status_code != 200:
            await asyncio.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True


@contextlib.asynccontextmanager
async def serving(
    engine: aiocb.Engine | None = None, *, waits: bool = True, checks: bool = True, **settings: Any
) -> AsyncIterator[Served]:
    """Serve an engine; leaving checks that nothing is left of any request."""
    engine = engine or fake_engine(reply="Hello there")
    settings.setdefault("served_model_name", ("fake",))
    app = create_app(engine, ServeConfig(port=0, **settings))
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=Protocol,
        ws="websockets-sansio",
        log_config=None,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config, app.state.service)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0)
        if task.done():
            task.result()
    async with httpx.AsyncClient(timeout=30.0) as client:
        served = Served(engine, server, app.state.service, client, port)
        client.base_url = httpx.URL(f"http://127.0.0.1:{served.port}")
        try:
            if waits:
                await served.until_ready()
            yield served
            if checks and engine.state == "running":
                await assert_quiescent(engine)
        finally:
            server.should_exit = True
            await task
    assert not served.service.num_calls


def gated(*, is_open: bool = False, **options: Any) -> tuple[aiocb.Engine, FakeRunner, Gate]:
    """An engine whose steps wait for a gate."""
    from aiocb.testing import byte_tokenizer

    gate = Gate(is_open=is_open)
    runner = FakeRunner(gate=gate, eos_token_id=256, **options)
    config = aiocb.EngineConfig(debug_checks=True, max_queue_size=options.pop("max_queue_size", None))
    return fake_engine(runner=runner, tokenizer=byte_tokenizer(), config=config), runner, gate


def events_of(text: str) -> Iterator[Any]:
    """The data of every event: parsed, or `[DONE]`."""
    for frame in text.split("\n\n"):
        for line in frame.split("\n"):
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


def content_of(events: list[Any], index: int = 0) -> str:
    """The text that the chunks of a choice add up to."""
    deltas = [choice["delta"] for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join([delta.get("content") or "" for delta in deltas])
