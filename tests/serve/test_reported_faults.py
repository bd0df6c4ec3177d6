"""Faults that users of other servers report, where no other file has them: docs/server-faults.md."""

from __future__ import annotations

import asyncio
import math
import re
import time
from typing import Any

import openai
import pytest

from aiocb.outputs import TokenLogprobs
from aiocb.serve import ServeConfig
from aiocb.serve.logprobs import chat_logprobs
from aiocb.serve.run import uvicorn_config
from aiocb.testing import byte_tokenizer, fake_engine
from aiocb.text.processor import TextProcessor

from .helpers import CHAT, MESSAGES, serving

pytestmark = pytest.mark.asyncio

STRICT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


def _templated(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return fake_engine(reply="Hello", tokenizer=tokenizer)


async def test_a_role_that_the_template_does_not_know_is_the_clients_fault() -> None:
    async with serving(_templated(STRICT_TEMPLATE)) as served:
        response = await served.chat(messages=[{"role": "system", "content": "Be kind"}, *MESSAGES])
        assert response.status_code == 400
        assert "System role not supported" in response.json()["error"]["message"]
        assert (await served.chat()).status_code == 200


async def test_an_empty_turn_of_the_assistant_is_taken() -> None:
    history = [*MESSAGES, {"role": "assistant", "content": ""}, {"role": "user", "content": "And?"}]
    async with serving() as served:
        assert (await served.chat(messages=history)).status_code == 200


async def test_results_of_tools_may_come_in_another_order_than_the_calls() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call("first"), call("second")]},
        {"role": "tool", "tool_call_id": "second", "content": "2"},
        {"role": "tool", "tool_call_id": "first", "content": "1"},
    ]
    async with serving() as served:
        assert (await served.chat(messages=history)).status_code == 200


async def test_both_names_of_the_longest_answer() -> None:
    """The newer one counts."""
    async with serving(fake_engine(reply="a long answer")) as served:
        response = await served.chat(max_tokens=9, max_completion_tokens=2)
        assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("letter", "count"), [("a", 900_000), (" ", 900_000), ("\n", 3_000_000), ("\u00e9", 3_000_000)]
)
async def test_megabytes_of_one_letter_hold_nobody_up(letter: str, count: int) -> None:
    """Encoded off the loop, or beyond a bound refused unread: another request is answered meanwhile."""
    async with serving() as served:
        messages = [{"role": "user", "content": letter * count}]
        task = asyncio.create_task(served.client.post(CHAT, json={"messages": messages, "max_tokens": 1}))
        slowest = 0.0
        while not task.done():
            began = time.perf_counter()
            assert (await served.client.get("/health")).status_code == 200
            slowest = max(slowest, time.perf_counter() - began)
        response = await task
        assert response.status_code == 400
        words = "positions|context|tokens" if count < 1_000_000 else "characters"
        assert re.search(words, response.json()["error"]["message"])
        assert slowest < 5.0


async def test_clients_find_the_id_of_a_request_that_failed() -> None:
    async with serving() as served:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
        done = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}])
        assert done._request_id
        with pytest.raises(openai.NotFoundError) as error:
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
        assert error.value.request_id
        await client.close()


async def test_what_is_impossible_has_a_logarithm_that_json_can_hold() -> None:
    impossible = TokenLogprobs(65, -math.inf, 3, ((66, -0.1), (67, -math.inf)))
    (entry,) = chat_logprobs(TextProcessor(byte_tokenizer()), [impossible], 2)["content"]
    assert entry["logprob"] == -9999.0
    assert [each["logprob"] for each in entry["top_logprobs"]] == [-0.1, -9999.0]


async def test_idle_connections_live_longer_than_those_of_proxies_and_sockets_are_asked() -> None:
    plain = uvicorn_config(None, ServeConfig())
    assert plain.timeout_keep_alive == 75
    assert uvicorn_config(None, ServeConfig(keep_alive=120.0)).timeout_keep_alive == 120
    assert plain.ws_ping_interval and plain.ws_ping_timeout
    assert plain.ws_ping_timeout > plain.ws_ping_interval  # a busy process answers late, and is alive


async def test_a_stream_ends_wherever_its_client_leaves_it() -> None:
    """Cut after any number of events: nothing goes on, and the next request is answered."""
    engine = fake_engine(reply="abcdefgh")
    async with serving(engine) as served:
        for count in range(8):
            body = {"messages": MESSAGES, "stream": True, "max_tokens": 500, "ignore_eos": True}
            async with served.client.stream("POST", CHAT, json=body) as response:
                lines = response.aiter_lines()
                for _ in range(count):
                    await anext(lines)
        while engine.stats().num_requests_running or engine.stats().num_requests_waiting:
            await asyncio.sleep(0.001)
        assert (await served.chat(max_tokens=2)).status_code == 200
