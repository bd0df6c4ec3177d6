"""The recipes run, over engines that answer from a script; each is short, and each is in the index."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient as AiohttpClient
from aiohttp.test_utils import TestServer
from starlette.testclient import TestClient

from aiocb.testing import Gate, assert_quiescent, byte_tokenizer, fake_engine
from tests.serve.helpers import serving
from tests.serve.test_structure import TEMPLATE, model

from .helpers import DOCS, EXAMPLES, load_example, read_events

pytestmark = pytest.mark.timeout(120)


def test_each_is_short_and_in_the_index() -> None:
    index = (DOCS / "recipes.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert f"`examples/{path.name}`" in index, path.name
            if path.name != "fastapi_chat.py":  # a page of its own explains it
                assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path.name


def test_the_openai_client() -> None:
    async def main() -> None:
        async with serving(model()) as served:
            module = load_example("openai_client")
            text, call, parsed = await module.main(f"http://127.0.0.1:{served.port}/v1")
            assert text
            assert call.startswith('weather({"city":')
            assert parsed.warm in (True, False)

    asyncio.run(main())


def test_sse_starlette() -> None:
    module = load_example("sse_starlette_chat")
    module.engine = fake_engine(reply="One\ntwo")
    with TestClient(module.app) as client:
        events = read_events(client.get("/ask", params={"question": "Hi"}).text)
        assert "".join(json.loads(data)["text"] for _, data in events) == "One\ntwo"
        assert client.get("/ask", params={"question": "x" * 20_000}).status_code == 400
        assert module.engine.stats().num_requests_running == 0


def test_aiohttp() -> None:
    async def main() -> None:
        module = load_example("aiohttp_chat")
        engine = fake_engine(reply="Blue, red.")
        async with AiohttpClient(TestServer(module.make_app(engine))) as client:
            response = await client.get("/ask", params={"question": "Colours?"})
            assert await response.text() == "Blue, red."
            assert (await client.get("/ask", params={"question": "x" * 30_000})).status == 400
            await assert_quiescent(engine)

    asyncio.run(main())


def test_a_bot() -> None:
    async def main() -> list[tuple[str, str]]:
        module = load_example("chat_bot")
        sent: list[tuple[str, str]] = []
        gate = Gate()

        async def send(channel: str, text: str) -> None:
            sent.append((channel, text))

        inbox: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
        async with fake_engine(reply=lambda prompt: f"{prompt.count('<|user|>')} so far", gate=gate) as engine:
            task = asyncio.create_task(module.Bot(engine, send).run(inbox))
            inbox.put_nowait(("a", "one"))
            await gate.held()
            inbox.put_nowait(("a", "two"))  # stops the first answer
            inbox.put_nowait(("b", "three"))
            inbox.put_nowait(None)
            gate.open()
            await task
            await assert_quiescent(engine)
        return sent

    assert sorted(asyncio.run(main())) == [("a", "2 so far"), ("b", "1 so far")]


def test_an_interruption() -> None:
    async def main() -> None:
        module = load_example("barge_in")
        heard = asyncio.Event()
        spoken: list[str] = []

        async def say(sentence: str) -> None:
            spoken.append(sentence)
            if len(spoken) == 2:
                heard.set()
                await asyncio.sleep(0)

        history = [{"role": "user", "content": "Go on."}]
        async with fake_engine(reply="One. Two! Three? " * 500, step_time=0.0005) as engine:
            said = await module.speak(engine, history, heard, say)
            await assert_quiescent(engine)
        assert said.startswith("One. Two!")
        assert len(said) < 4000
        assert history[-1] == {"role": "assistant", "content": said}

    asyncio.run(main())


def test_an_agent() -> None:
    def reply(prompt: str) -> str:
        if "42" in prompt:
            return "It is 42."
        return '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'

    async def main() -> list[dict[str, Any]]:
        tokenizer: Any = byte_tokenizer()
        tokenizer.chat_template = TEMPLATE
        async with fake_engine(reply=reply, tokenizer=tokenizer) as engine:
            messages: list[dict[str, Any]] = await load_example("agent_loop").run(engine, "17 + 25?")
            return messages

    messages = asyncio.run(main())
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "42"
    assert messages[3]["content"] == "It is 42."


def test_a_batch_job(tmp_path: Path) -> None:
    async def main() -> int:
        async with fake_engine(reply="fine") as engine:
            prompts = ["a", "b", "x" * 30_000, "c"]
            failed: int = await load_example("batch_job").run(engine, prompts, tmp_path / "out.jsonl")
            return failed

    assert asyncio.run(main()) == 1
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["prompt"] for row in rows) == [0, 1, 2, 3]
    assert [row["text"] for row in rows if row["end"] == "stop"] == ["fine"] * 3


def test_tests_of_an_app() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_my_app.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_a_notebook() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 3

    async def main() -> dict[str, Any]:
        import ast

        import aiocb

        names: dict[str, Any] = {}
        original = aiocb.Engine.from_pretrained
        try:
            aiocb.Engine.from_pretrained = lambda *_, **__: fake_engine(reply="Blue.")  # type: ignore[method-assign]
            for source in code:  # as a notebook runs them: with await at the top
                result = eval(compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
                if result is not None:
                    await result
        finally:
            aiocb.Engine.from_pretrained = original  # type: ignore[method-assign]
        return names

    names = asyncio.run(main())
    assert names["answers"] == ["Blue."] * 3
