"""`WS /v1/ws/chat`: several chats, stop and cancel, malformed frames, keys and origins, clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from aiocb.testing import FakeRunner, assert_quiescent, byte_tokenizer, fake_engine

from .helpers import ENDLESS, MESSAGES, Served, gated, serving

pytestmark = pytest.mark.asyncio


def opened(served: Served, **options: Any) -> connect:
    return connect(f"ws://127.0.0.1:{served.port}/v1/ws/chat", max_size=None, **options)


async def say(socket: ClientConnection, **frame: Any) -> None:
    await socket.send(json.dumps(frame))


async def hear(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(20):
        frame: dict[str, Any] = json.loads(await socket.recv())
    return frame


async def until(socket: ClientConnection, kind: str, chat_id: str | None = None) -> list[dict[str, Any]]:
    """Everything up to a frame of a kind."""
    frames = [await hear(socket)]
    while frames[-1]["type"] != kind or (chat_id is not None and frames[-1]["id"] != chat_id):
        frames.append(await hear(socket))
    return frames


def text_of(frames: list[dict[str, Any]], chat_id: str) -> str:
    return "".join(f.get("content", "") for f in frames if f["type"] == "delta" and f["id"] == chat_id)


async def test_several_chats_over_one_socket() -> None:
    async with serving(fake_engine(reply=lambda prompt: f"To {len(prompt)}: ok")) as served, opened(served) as socket:
        names = [f"chat-{number}" for number in range(5)]
        for number, name in enumerate(names):
            await say(socket, type="start", id=name, messages=[{"role": "user", "content": "x" * number}])
        frames: list[dict[str, Any]] = []
        while sum(frame["type"] == "done" for frame in frames) < 5:
            frames.append(await hear(socket))
        texts = [text_of(frames, name) for name in names]
        assert len(set(texts)) == 5
        assert all(text.startswith("To ") and text.endswith("ok") for text in texts)
        for name in names:
            kinds = [frame["type"] for frame in frames if frame["id"] == name]
            assert (kinds[0], kinds[-1]) == ("started", "done")
        last = frames[-1]
        assert last["finish_reasons"] == ["stop"]
        assert last["usage"]["completion_tokens"] > 5


async def test_stop_keeps_and_cancel_drops() -> None:
    engine, _runner, gate = gated(is_open=True)
    async with serving(engine) as served, opened(served) as socket:
        await say(socket, type="start", id="a", **ENDLESS)
        await until(socket, "delta")
        await say(socket, type="stop", id="a")
        frames = await until(socket, "done")
        assert frames[-1]["finish_reasons"] == ["cancelled"]
        await say(socket, type="start", id="a", **ENDLESS)  # the id is free again
        await until(socket, "delta")
        await say(socket, type="cancel", id="a")
        frames = await until(socket, "error")
        assert frames[-1]["error"]["code"] == "cancelled"
        await say(socket, type="stop", id="a")  # has ended: nothing happens
        await assert_quiescent(engine)
        gate.open()


MALFORMED: list[tuple[Any, str | None]] = [
    ("{", None), ("[]", None), ("[" * 100_000, None), (b"\xff\xfe", None), ({}, None), ({"type": "start"}, None),
    ({"type": "start", "id": ""}, None), ({"type": "start", "id": "x" * 500}, None),
    ({"type": "dance", "id": "a"}, "a"), ({"type": "start", "id": "a"}, "a"),
    ({"type": "start", "id": "a", "messages": []}, "a"),
    ({"type": "start", "id": "a", "messages": MESSAGES, "temprature": 1}, "a"),
    ({"type": "start", "id": "a", "messages": MESSAGES, "stream": True}, "a"),
    ({"type": "start", "id": "a", "messages": MESSAGES, "temperature": -1}, "a"),
    ({"type": "start", "id": "a", "messages": MESSAGES, "model": "other"}, "a"),
]  # fmt: skip


async def test_what_is_malformed_is_answered_and_the_socket_stays() -> None:
    async with serving() as served, opened(served) as socket:
        for frame, chat_id in MALFORMED:
            await socket.send(frame if isinstance(frame, (str, bytes)) else json.dumps(frame))
            answer = await hear(socket)
            assert (answer["type"], answer["id"]) == ("error", chat_id), (frame, answer)
            assert answer["error"]["message"]
        await say(socket, type="start", id="a", messages=MESSAGES)
        assert text_of(await until(socket, "done"), "a") == "Hello there"


async def test_an_id_is_one_chat_at_a_time() -> None:
    engine, _runner, gate = gated()
    async with serving(engine) as served, opened(served) as socket:
        await say(socket, type="start", id="a", **{**ENDLESS, "max_tokens": 3})
        await until(socket, "started")
        await say(socket, type="start", id="a", messages=MESSAGES)
        assert (await hear(socket))["error"]["param"] == "id"
        gate.open()
        await until(socket, "done")


async def test_a_client_that_leaves_frees_all_its_chats() -> None:
    engine, runner, gate = gated()
    async with serving(engine) as served:
        socket = await opened(served)
        for number in range(3):
            await say(socket, type="start", id=str(number), **ENDLESS)
        for _ in range(3):
            await hear(socket)
        await gate.held()
        await gate.step()
        socket.transport.abort()  # without a close frame, as browsers do
        while served.service.num_calls:
            await asyncio.sleep(0.002)
        before = runner.num_steps
        gate.open()
        await assert_quiescent(engine)
        assert runner.num_steps <= before + 1


async def test_keys_in_a_header_or_in_the_first_frame() -> None:
    async with serving(api_key=("sesame",), waits=False) as served:
        while (await served.client.get("/health")).status_code != 200:
            await asyncio.sleep(0.005)
        async with opened(served, additional_headers={"authorization": "Bearer sesame"}) as socket:
            await say(socket, type="start", id="a", messages=MESSAGES)
            await until(socket, "done")
        async with opened(served) as socket:
            await say(socket, type="auth", api_key="sesame")
            await say(socket, type="start", id="a", messages=MESSAGES)
            await until(socket, "done")
        for frame in ({"type": "auth", "api_key": "wrong"}, {"type": "start", "id": "a", "messages": MESSAGES}, {}):
            async with opened(served) as socket:
                await socket.send(json.dumps(frame))
                with pytest.raises(ConnectionClosed) as caught:
                    await hear(socket)
                assert caught.value.rcvd is not None and caught.value.rcvd.code == 1008


async def test_who_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiocb.serve.websocket._AUTH_S", 0.05)
    async with serving(api_key=("sesame",), waits=False) as served, opened(served) as socket:
        with pytest.raises(ConnectionClosed):
            await hear(socket)


async def test_pages_of_others_are_refused() -> None:
    async with serving(cors_origin=("http://friend",)) as served:
        own = f"http://127.0.0.1:{served.port}"
        for origin in (own, "http://friend", None):
            async with opened(served, origin=origin) as socket:
                await say(socket, type="start", id="a", messages=MESSAGES)
                await until(socket, "done")
        with pytest.raises((InvalidStatus, ConnectionClosed)):
            async with opened(served, origin="http://evil") as socket:
                await hear(socket)


async def test_a_server_that_stops_ends_chats_with_an_error() -> None:
    engine, _runner, gate = gated(is_open=True)
    async with serving(engine, drain=0.0, checks=False) as served:
        async with opened(served) as socket:
            await say(socket, type="start", id="a", **ENDLESS)
            await until(socket, "delta")
            served.server._stop()
            frames = await until(socket, "error")
            assert frames[-1]["error"]["code"] == "draining"
        gate.open()


async def test_an_error_inside_ends_its_own_chat() -> None:
    def fail(step: int, record: Any) -> Exception | None:
        return ValueError("no") if step == 6 and record.num_prompt_tokens > 40 else None

    engine = fake_engine(runner=FakeRunner(fail=fail), tokenizer=byte_tokenizer())
    async with serving(engine) as served, opened(served) as socket:
        long = [{"role": "user", "content": "x" * 60}]
        await say(socket, type="start", id="bad", **{**ENDLESS, "messages": long})
        frames = await until(socket, "error")
        assert frames[-1]["id"] == "bad"
        await say(socket, type="start", id="good", **{**ENDLESS, "max_tokens": 4})
        await until(socket, "done", "good")
