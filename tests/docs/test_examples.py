"""The examples run: as programs where they are programs, over their own ASGI apps where they are servers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from starlette.testclient import TestClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved through it
    spec.loader.exec_module(module)
    return module


def test_concurrent_chats() -> None:
    path = EXAMPLES / "concurrent_chats.py"
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.count("tokens)") == 3


def test_server_sent_events() -> None:
    module = load("server_sent_events")
    with TestClient(module.app) as client:
        lines = [line for line in client.get("/", params={"prompt": "One two"}).text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["text"] for line in lines[:-1]).strip()
        assert module.engine.stats().num_requests_running == 0


def test_websocket_chat() -> None:
    module = load("websocket_chat")
    with TestClient(module.app) as client, client.websocket_connect("/chat") as websocket:
        websocket.send_json({"content": "What is the capital of France?"})
        text = ""
        while not (message := websocket.receive_json()).get("done"):
            text += message["text"]
        assert text.strip()  # it is sampled: what it says may vary
