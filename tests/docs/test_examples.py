"""The examples run: as programs where they are programs, over their own ASGI apps where they are servers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from aiocb.testing import fake_engine

from .helpers import EXAMPLES, load_example, read_events

pytestmark = pytest.mark.timeout(300)


@pytest.mark.model
def test_concurrent_chats() -> None:
    path = EXAMPLES / "concurrent_chats.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.count("tokens)") == 3


@pytest.mark.model
def test_servers_with_the_real_model() -> None:
    module = load_example("fastapi_chat")
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0.0}
    with TestClient(module.app) as client:
        events = read_events(client.post("/stream", json=question).text)
        assert "Paris" in "".join(json.loads(data)["text"] for _, data in events)
        assert module.engine.stats().num_requests_running == 0


def test_server_sent_events() -> None:
    module = load_example("server_sent_events")
    module.engine = fake_engine(reply="One\n\ntwo\r\nthree")
    with TestClient(module.app) as client:
        *pieces, last = read_events(client.get("/", params={"prompt": "One two"}).text)
        assert last == ("message", "[DONE]")
        assert "".join(json.loads(data)["text"] for _, data in pieces) == "One\n\ntwo\r\nthree"
        assert client.get("/", params={"prompt": "x" * 20_000}).status_code == 400
        assert module.engine.stats().num_requests_running == 0


def test_websocket_chat() -> None:
    module = load_example("websocket_chat")
    module.engine = fake_engine(reply="Hello!")
    with TestClient(module.app) as client, client.websocket_connect("/chat") as websocket:
        for content, expected in (("Hi", "Hello!"), ("x" * 20_000, None), ("And?", "Hello!")):
            websocket.send_json({"content": content})
            text = ""
            while "text" in (message := websocket.receive_json()):
                text += message["text"]
            if expected is None:
                assert "shorten it" in message["error"]
            else:
                assert text == expected and message == {"done": True}
