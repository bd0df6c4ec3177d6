"""`aiocb serve` as a program: it answers, drains on a signal, fails in one line, and can be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]
CHAT = "/v1/chat/completions"
UNKNOWN = ["smollm2", "--kv-cache-dtype", "fp8"]
LONG = {
    "messages": [{"role": "user", "content": "Tell a long story."}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "stream": True,
}


class Program:
    """A server in a process."""

    def __init__(self, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "aiocb", "serve", "smollm2", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.port}"

    def until_ready(self) -> None:
        """Wait for the model; a server that ends fails the test."""
        statuses = set()
        while self.process.poll() is None:
            try:
                body = httpx.get(f"{self.url}/health").json()
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            statuses.add(body["status"])
            if body["ready"]:
                assert statuses <= {"loading", "ok"}
                return
            time.sleep(0.05)
        raise AssertionError(self.process.communicate()[1])


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_it_answers_and_drains_on_a_signal(programs: list[Program]) -> None:
    programs.append(program := Program("--served-model-name", "small", "--drain", "0.5"))
    program.until_ready()
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    answer = httpx.post(f"{program.url}{CHAT}", json={**question, "max_tokens": 20}, timeout=60).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["model"] == "small"
    with httpx.stream("POST", f"{program.url}{CHAT}", json=LONG, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        program.process.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert last["error"]["code"] == "draining"
    _, errors = program.process.communicate(timeout=30)
    assert program.process.returncode == 0
    assert "Traceback" not in errors
    logged = [json.loads(line.partition("aiocb.serve.access: ")[2]) for line in errors.splitlines() if CHAT in line]
    assert [line["status"] for line in logged] == [200, 200]


def test_killed_in_the_middle_and_started_again(programs: list[Program]) -> None:
    programs.append(program := Program())
    program.until_ready()
    with (
        pytest.raises(httpx.TransportError),
        httpx.stream("POST", f"{program.url}{CHAT}", json=LONG, timeout=60) as response,
    ):
        for number, _ in enumerate(response.iter_lines()):
            if number == 6:
                program.process.kill()
    programs.append(again := Program())
    again.until_ready()
    assert httpx.post(f"{again.url}{CHAT}", json={**LONG, "max_tokens": 3, "stream": False}).status_code == 200


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for arguments in (["nobody/nothing"], ["smollm2", "--host", "0.0.0.0", "--cors-origin", "*"], UNKNOWN):
        command = [sys.executable, "-m", "aiocb", "serve", *arguments, "--port", "0"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path, check=False
        )
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert done.stderr.strip().splitlines()[-1]
