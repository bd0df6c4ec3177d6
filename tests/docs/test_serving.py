"""The server of docs/serving.md keeps what the page promises, over engines that answer from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.requests import ClientDisconnect

import aiocb
from aiocb.testing import Gate, assert_quiescent, fake_engine

from .helpers import load_example, read_events

Message = MutableMapping[str, Any]
QUESTION = {"messages": [{"role": "user", "content": "Hi"}]}
LINES = "line one\n\nline two\r\n data: x\n\r: end  \n"


def server(engine: aiocb.Engine) -> Any:
    module = load_example("fastapi_chat")
    module.engine = engine
    return module


class Visitor:
    """One request, spoken to the application directly, by a client that may go away."""

    def __init__(self, path: str, spec_version: str = "2.3") -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.is_gone = asyncio.Event()
        self.has_body = asyncio.Event()
        self.status: int | None = None
        self._was_asked = False

    async def visit(self, module: Any) -> None:
        try:
            await module.app(self.scope, self.receive, self.send)
        except (OSError, ClientDisconnect):
            pass  # what `send` raises, from ASGI 2.4 on

    async def receive(self) -> Message:
        if not self._was_asked:
            self._was_asked = True
            return {"type": "http.request", "body": json.dumps(QUESTION).encode(), "more_body": False}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.is_gone.is_set():
            if self.scope["asgi"]["spec_version"] >= "2.4":  # type: ignore[index]
                raise OSError("the client has gone")
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.has_body.set()


def test_line_ends_survive() -> None:
    with TestClient(server(fake_engine(reply=LINES)).app) as client:
        response = client.post("/stream", json=QUESTION)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(data) for name, data in read_events(response.text) if name == "message"]
        assert "".join(each["text"] for each in events) == LINES
        assert [each["finish_reason"] for each in events if each["finish_reason"]] == ["stop"]
        assert client.post("/answer", json=QUESTION).json() == {"text": LINES, "finish_reason": "stop"}


@pytest.mark.parametrize("path", ["/stream", "/answer"])
def test_a_refusal_has_a_status_of_its_own(path: str) -> None:
    module = server(fake_engine(reply="x"))
    with TestClient(module.app) as client:
        for wrong in ({"temperature": -1.0}, {"max_new_tokens": 10**9}):
            response = client.post(path, json={**QUESTION, **wrong})
            assert response.status_code == 400
            assert next(iter(wrong)) in response.json()["error"]
        assert client.post(path, json={"messages": "Hi"}).status_code == 422
    closed = TestClient(module.app).post(path, json=QUESTION)  # without lifespan: nobody has entered the engine
    assert closed.status_code == 503
    assert closed.headers["retry-after"] == "5"


def test_a_failure_before_the_first_token_has_a_status_of_its_own() -> None:
    engine = fake_engine(reply="abc", fail=lambda step, record: ValueError("broken"))
    with TestClient(server(engine).app) as client:
        for path in ("/stream", "/answer"):
            response = client.post(path, json=QUESTION)
            assert response.status_code == 500
            assert "broken" in response.json()["error"]


def test_a_later_failure_is_told_in_the_stream() -> None:
    engine = fake_engine(reply="abcdef", fail=lambda step, record: ValueError("broken") if step == 3 else None)
    with TestClient(server(engine).app) as client:
        response = client.post("/stream", json=QUESTION)
        assert response.status_code == 200
        *pieces, (name, data) = read_events(response.text)
        assert "".join(json.loads(text)["text"] for _, text in pieces) == "ab"
        assert name == "error" and "broken" in json.loads(data)["error"]


def test_statuses_of_errors() -> None:
    status_of = load_example("fastapi_chat").status_of
    assert status_of(aiocb.RequestTimeout("too late", "queue")) == 503
    assert status_of(aiocb.RequestTimeout("too late", "run")) == 504
    assert status_of(aiocb.EngineDead("dead")) == 503
    assert status_of(aiocb.RequestFailed("failed")) == 500


async def end_of(visits: list[asyncio.Task[None]]) -> None:
    done, pending = await asyncio.wait(visits, timeout=20.0)
    assert not pending
    for task in done:
        task.result()


def test_a_full_queue_is_told_at_once() -> None:
    async def main() -> None:
        gate = Gate()
        config = aiocb.EngineConfig(max_queue_size=1, max_requests_per_batch=1)
        engine = fake_engine(reply="abc", gate=gate, config=config)
        module = server(engine)
        async with engine:
            running = Visitor("/stream")
            visits = [asyncio.create_task(running.visit(module))]
            await gate.held()
            others = [Visitor("/stream"), Visitor("/stream")]
            visits += [asyncio.create_task(visitor.visit(module)) for visitor in others]
            await asyncio.wait(visits, return_when=asyncio.FIRST_COMPLETED)  # nothing else can end: the gate is closed
            assert sorted(visitor.status or 0 for visitor in others) == [0, 429]
            gate.open()
            await end_of(visits)
            assert running.status == 200
            assert sorted(visitor.status or 0 for visitor in others) == [200, 429]
            await assert_quiescent(engine)

    asyncio.run(main())


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("path", ["/stream", "/answer"])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_client_that_leaves_frees_its_place(path: str, spec_version: str, num_steps: int) -> None:
    """Before the first token and between tokens, streaming or not."""

    async def main() -> None:
        gate = Gate()
        engine = fake_engine(reply="a" * 200, gate=gate)
        module = server(engine)
        async with engine:
            visitor = Visitor(path, spec_version)
            visit = asyncio.create_task(visitor.visit(module))
            await gate.held()
            if num_steps:
                await gate.step(num_steps)
                await gate.held()
                if path == "/stream":
                    await visitor.has_body.wait()
            visitor.is_gone.set()
            await end_of([visit])
            gate.open()
            await assert_quiescent(engine)
            assert engine.stats().generation_tokens < 20

    asyncio.run(main())


def test_silence_is_broken_by_comments() -> None:
    async def main() -> None:
        gate = Gate()
        engine = fake_engine(reply="abc", gate=gate)
        module = server(engine)
        module.HEARTBEAT_S = 0.01
        async with engine, engine.stream("x") as stream:
            await gate.step()
            parts = module.events(stream, await anext(stream))
            assert json.loads((await anext(parts)).split("data: ")[1])["text"] == "a"
            for _ in range(3):
                assert (await anext(parts)).startswith(":")
            gate.open()
            wire = "".join([part async for part in parts])
            assert "".join(json.loads(data)["text"] for _, data in read_events(wire)) == "bc"

    asyncio.run(main())


def read_answer(websocket: Any) -> str:
    text = ""
    while True:
        message = websocket.receive_json()
        text += str(message["text"])
        if message["finish_reason"]:
            return text


def test_a_conversation_over_a_websocket() -> None:
    engine = fake_engine(reply=lambda prompt: f"<{prompt.count('<|user|>')}>")
    with TestClient(server(engine).app) as client, client.websocket_connect("/chat") as websocket:
        for turn in (1, 2, 3):
            websocket.send_json({"content": "Hi"})
            assert read_answer(websocket) == f"<{turn}>"


def test_a_stop_button_and_a_question_too_many() -> None:
    gate = Gate()
    engine = fake_engine(reply="abcdef", gate=gate)
    with TestClient(server(engine).app) as client, client.websocket_connect("/chat") as websocket:
        websocket.send_json({"content": "Hi"})
        gate.release(2)
        text = ""
        while text != "ab":
            text += websocket.receive_json()["text"]
        websocket.send_json({"content": "And?"})
        assert "one question" in websocket.receive_json()["error"]
        websocket.send_json({"stop": True})
        gate.open()
        last = websocket.receive_json()
        while not last["finish_reason"]:
            last = websocket.receive_json()
        assert last["finish_reason"] in ("cancelled", "stop")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("no json", "send {"),
        ("[]", "send {"),
        ('"stop"', "send {"),
        ("{}", "has no content"),
        ('{"content": 1}', "must be a text"),
    ],
)
def test_a_websocket_message_that_is_none_is_answered(text: str, error: str) -> None:
    engine = fake_engine(reply="fine")
    with TestClient(server(engine).app) as client, client.websocket_connect("/chat") as websocket:
        websocket.send_text(text)
        assert error in websocket.receive_json()["error"]
        websocket.send_json({"content": "Hi"})
        assert read_answer(websocket) == "fine"


def test_a_websocket_that_closes_frees_its_place() -> None:
    gate = Gate()
    engine = fake_engine(reply="a" * 200, gate=gate)
    with TestClient(server(engine).app) as client:
        with client.websocket_connect("/chat") as websocket:
            websocket.send_json({"content": "Hi"})
            gate.release(3)
            assert websocket.receive_json()["text"]
        gate.open()
        assert client.portal is not None
        client.portal.call(assert_quiescent, engine)
        assert engine.stats().generation_tokens < 20


def test_health() -> None:
    engine = fake_engine(reply="abc", raise_at={2: RuntimeError("out of memory")})
    with TestClient(server(engine).app) as client:
        assert client.get("/health").status_code == 200
        assert client.post("/answer", json=QUESTION).status_code == 503
        response = client.get("/health")
        assert response.status_code == 503
        assert response.json() == {"state": "dead", "is_hung": False}
