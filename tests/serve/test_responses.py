"""`POST /v1/responses`: events in order, items that agree, histories, refusals; the OpenAI client's own helpers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from aiocb.testing import FakeRunner, byte_tokenizer, fake_engine

from .helpers import gated, serving
from .test_structure import CALL, caller, model
from .test_structure import TOOLS as CHAT_TOOLS

pytestmark = pytest.mark.asyncio
URL = "/v1/responses"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function", "name": "weather", "description": "of a city",
        "parameters": CHAT_TOOLS[0]["function"]["parameters"],
    }
]  # fmt: skip


def events_of(text: str) -> list[dict[str, Any]]:
    """Every event; its name has to be its type, its number its place."""
    events: list[dict[str, Any]] = []
    for frame in text.split("\n\n"):
        if frame:
            first, second = frame.split("\n")
            event = json.loads(second.removeprefix("data: "))
            assert first == f"event: {event['type']}"
            assert event["sequence_number"] == len(events)
            events.append(event)
    return events


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


async def test_events_come_in_order_and_add_up() -> None:
    async with serving(fake_engine(reply="Hello there")) as served:
        whole = (await served.client.post(URL, json={"input": "Hi", "instructions": "Be kind."})).json()
        assert whole["status"] == "completed"
        assert whole["output"][0]["content"][0]["text"] == "Hello there"
        assert whole["instructions"] == "Be kind."
        text = (await served.client.post(URL, json={"input": "Hi", "instructions": "Be kind.", "stream": True})).text
        events = events_of(text)
        kinds = [event["type"].removeprefix("response.") for event in events]
        before = ["created", "in_progress", "output_item.added", "content_part.added"]
        after = ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert kinds[:4] == before
        assert kinds[-4:] == after
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert events[0]["response"]["output"] == []
        assert events[2]["item"]["content"] == []
        assert "".join(event["delta"] for event in events[4:-4]) == "Hello there"
        final = events[-1]["response"]
        assert final["output"] == [events[-2]["item"]]
        assert {event["item_id"] for event in events if "item_id" in event} == {final["output"][0]["id"]}
        assert final["usage"] == {**whole["usage"], "input_tokens_details": final["usage"]["input_tokens_details"]}
        assert without_ids(final["output"]) == without_ids(whole["output"])


async def test_calls_are_items_of_their_own() -> None:
    async with serving(caller(f"So: {CALL}{CALL}")) as served:
        fields = {"input": "Hi", "tools": TOOLS}
        whole = (await served.client.post(URL, json=fields)).json()
        events = events_of((await served.client.post(URL, json={**fields, "stream": True})).text)
        final = events[-1]["response"]
        assert [item["type"] for item in final["output"]] == ["message", "function_call", "function_call"]
        assert without_ids(final["output"]) == without_ids(whole["output"])
        assert [e["output_index"] for e in events if e["type"] == "response.output_item.done"] == [0, 1, 2]
        for index, item in enumerate(final["output"]):
            added = next(e for e in events if e["type"] == "response.output_item.added" and e["output_index"] == index)
            assert added["item"]["id"] == item["id"]
            if item["type"] == "function_call":
                assert added["item"]["arguments"] == ""
                deltas = [
                    event["delta"]
                    for event in events
                    if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == index
                ]
                assert "".join(deltas) == item["arguments"]
                assert json.loads(item["arguments"]) == {"city": "a</tool_call>{"}
        history = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            *final["output"],
            *({"type": "function_call_output", "call_id": i["call_id"], "output": "ok"} for i in final["output"][1:]),
            {"role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
            {"type": "message", "role": "developer", "content": "Now."},
        ]
        answer = await served.client.post(URL, json={"input": history, "tools": TOOLS})
        assert answer.status_code == 200, answer.text


async def test_what_ends_early_says_so() -> None:
    async with serving() as served:
        fields = {"input": "Hi", "max_output_tokens": 3, "stream": True}
        events = events_of((await served.client.post(URL, json=fields)).text)
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        whole = (await served.client.post(URL, json={"input": "Hi", "max_output_tokens": 3})).json()
        assert whole["status"] == "incomplete"
    runner = FakeRunner(fail=lambda step, _: ValueError("no") if step == 4 else None)
    async with serving(fake_engine(runner=runner, tokenizer=byte_tokenizer())) as served:
        events = events_of((await served.client.post(URL, json={"input": "Hi", "stream": True})).text)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["message"]


async def test_an_answer_without_tokens_has_a_message() -> None:
    async with serving(fake_engine(reply="")) as served:
        whole = (await served.client.post(URL, json={"input": "Hi"})).json()
        assert [item["type"] for item in whole["output"]] == ["message"]


async def test_log_probabilities_where_they_are_included() -> None:
    async with serving() as served:
        fields: dict[str, Any] = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        part = (await served.client.post(URL, json=fields)).json()["output"][0]["content"][0]
        assert [entry["token"] for entry in part["logprobs"]][:5] == list("Hello")
        assert (await served.client.post(URL, json={"input": "Hi"})).json()["output"][0]["content"][0]["logprobs"] == []


async def test_tools_of_free_text_and_tools_that_are_not_here() -> None:
    reply = '<tool_call>\n{"name": "shell_line", "arguments": {"input": "ls \\"a\\""}}\n</tool_call>'
    tools = [{"type": "custom", "name": "shell_line"}, {"type": "web_search"}, {"type": "namespace", "name": "x"}]
    async with serving(caller(reply)) as served:
        response = await served.client.post(URL, json={"input": "Hi", "tools": tools})
        item = response.json()["output"][0]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "shell_line", 'ls "a"')
        assert response.headers["x-ignored-tools"] == "namespace, web_search"
        events = events_of((await served.client.post(URL, json={"input": "Hi", "tools": tools, "stream": True})).text)
        assert events[-1]["response"]["output"][0]["input"] == 'ls "a"'
        history = ["Hi", item]
        back = [
            {"role": "user", "content": "Hi"},
            item,
            {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "b"},
        ]
        assert (await served.client.post(URL, json={"input": back, "tools": tools})).status_code == 200
        assert (await served.client.post(URL, json={"input": history})).status_code == 400


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"tools": [{"type": "unheard_of"}]}, "tools[0]"),
    ({"include": ["everything"]}, "include"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
]


async def test_refusals_name_the_field() -> None:
    async with serving() as served:
        for fields, param in REFUSED:
            response = await served.client.post(URL, json={"input": "Hi", "stream": True, **fields})
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"] == param
        inert = {
            "store": True, "metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "k", "truncation": "disabled",
            "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "reasoning": {"summary": "auto"},
            "service_tier": "auto", "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": 3
        }  # fmt: skip
        answer = (await served.client.post(URL, json={"input": "Hi", **inert})).json()
        assert (answer["store"], answer["metadata"], answer["user"]) == (False, {"a": "b"}, "me")


async def test_the_openai_client_streams_and_parses() -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        x: bool

    async with serving(model()) as served:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
        async with client:
            parsed = await client.responses.parse(model="fake", input="Hi", text_format=City, max_output_tokens=60)
            assert isinstance(parsed.output_parsed, City)
            arguments: Any = {
                "model": "fake", "input": "Hi", "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 120,
                "parallel_tool_calls": False,
            }  # fmt: skip
            async with client.responses.stream(**arguments) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert final.output[0].type == "function_call"
            assert "response.function_call_arguments.done" in kinds


async def test_a_client_that_leaves_frees_its_slot() -> None:
    engine, runner, gate = gated()
    async with serving(engine) as served:
        async with served.client.stream("POST", URL, json={"input": "Hi", "ignore_eos": True, "stream": True}):
            await gate.held()
        while served.service.num_calls:
            await asyncio.sleep(0.002)
        before = runner.num_steps
        gate.open()
    assert runner.num_steps <= before + 1
