"""Structured output and tool calls over HTTP: shapes, deltas, refusals; the OpenAI client's own helpers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

import aiocb
from aiocb.testing import byte_tokenizer, fake_engine
from tests.model.helpers import tiny

from .helpers import CHAT, MESSAGES, events_of, serving

pytestmark = pytest.mark.asyncio
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }} as <tool_call>{...}</tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] if m['role'] != 'tool' else 'user' }}|>{{ m['content'] }}"
    "{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a</tool_call>{"}}\n</tool_call>'


def caller(reply: str) -> aiocb.Engine:
    """A scripted model whose template knows tools."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return fake_engine(reply=reply, tokenizer=tokenizer)


def model(**settings: Any) -> aiocb.Engine:
    """A tiny random model, which obeys grammars."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    network = tiny("llama", vocab_size=300, max_position_embeddings=4096)
    network.generation_config.eos_token_id = 256
    return aiocb.Engine(network, tokenizer, config=aiocb.EngineConfig(debug_checks=True, **settings))


def joined(events: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason that the chunks of a stream add up to."""
    content, reason = "", ""
    calls: list[dict[str, Any]] = []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert "name" not in call["function"]
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return content, calls, reason


async def test_calls_are_the_same_streamed_and_whole() -> None:
    async with serving(caller(f"Let me see. {CALL}{CALL} Done.")) as served:
        whole = (await served.chat(tools=TOOLS)).json()["choices"][0]
        *events, done = events_of((await served.chat(tools=TOOLS, stream=True)).text)
        assert done == "[DONE]"
        content, calls, reason = joined(events)
        assert reason == whole["finish_reason"] == "tool_calls"
        assert content == whole["message"]["content"]
        named = [(call["function"]["name"], call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
        assert named == [(call["name"], call["arguments"]) for call in calls]
        assert [json.loads(arguments) for _, arguments in named] == [{"city": "a</tool_call>{"}] * 2
        assert "tool_call" not in content


async def test_without_calls_there_is_no_field_of_calls() -> None:
    async with serving(caller("No.")) as served:
        choice = (await served.chat(tools=TOOLS)).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "No.", "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_what_is_cut_is_no_call_that_has_ended() -> None:
    async with serving(caller(CALL)) as served:
        whole = (await served.chat(tools=TOOLS, max_tokens=50)).json()["choices"][0]
        assert whole["finish_reason"] == "length"


async def test_parallel_calls_can_be_forbidden() -> None:
    async with serving(caller(CALL + CALL)) as served:
        choice = (await served.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1
        choice = (await served.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]
        assert "tool_calls" not in choice["message"]


async def test_calls_can_be_demanded_and_schemas_asked_for() -> None:
    async with serving(model()) as served:
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            for stream in (False, True):
                response = await served.chat(
                    tools=TOOLS, tool_choice=choice, stream=stream, seed=3, max_tokens=200, parallel_tool_calls=False
                )
                if stream:
                    *events, _done = events_of(response.text)
                    _, calls, reason = joined(events)
                    found = [(call["name"], call["arguments"]) for call in calls]
                else:
                    body = response.json()["choices"][0]
                    reason = body["finish_reason"]
                    found = [(c["function"]["name"], c["function"]["arguments"]) for c in body["message"]["tool_calls"]]
                assert reason == "tool_calls"
                assert [name for name, _ in found] == ["weather"]
                assert list(json.loads(found[0][1])) == ["city"]
        schema = {
            "type": "object",
            "properties": {"x": {"enum": [1, 2]}},
            "required": ["x"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        answer = (await served.chat(response_format=form, max_tokens=50)).json()["choices"][0]
        assert json.loads(answer["message"]["content"])["x"] in (1, 2)
        assert answer["finish_reason"] == "stop"
        either = await served.chat(response_format=form, tools=TOOLS, max_tokens=200, seed=5, parallel_tool_calls=False)
        message = either.json()["choices"][0]["message"]
        assert message.get("tool_calls") or json.loads(message["content"])["x"] in (1, 2)
        assert (await served.chat(regex="[ab]{3}")).json()["choices"][0]["message"]["content"].strip("ab") == ""
        done = await served.client.post("/v1/completions", json={"prompt": "x", "choice": ["yes", "no"]})
        assert done.json()["choices"][0]["text"] in ("yes", "no")


async def test_formats_that_mean_nothing_are_taken() -> None:
    async with serving() as served:
        assert (await served.chat(response_format={"type": "text"})).status_code == 200
        assert (await served.chat(tool_choice="none")).status_code == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "some"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
]


async def test_refusals_name_the_place() -> None:
    async with serving(caller("x")) as served:
        for fields, param in REFUSED:
            response = await served.chat(stream=True, **fields)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"] == param
        broken = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": {"a": {"not": {}}}}}}
        response = await served.chat(stream=True, response_format=broken)
        assert response.status_code == 400
        assert "#/properties/a/not" in response.json()["error"]["message"]
        unknown = {"type": "function", "function": {"name": "other"}}
        assert (await served.chat(tools=TOOLS, tool_choice=unknown)).status_code == 400


class City(BaseModel):
    x: bool


async def test_the_openai_client_parses_and_calls() -> None:
    async with serving(model()) as served:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
        async with client:
            parsed = await client.chat.completions.parse(
                model="fake", messages=MESSAGES, response_format=City, max_tokens=60  # type: ignore[arg-type]
            )  # fmt: skip
            assert isinstance(parsed.choices[0].message.parsed, City)
            strict = {**TOOLS[0]["function"], "strict": True}
            arguments: Any = {
                "model": "fake", "messages": MESSAGES, "tools": [{"type": "function", "function": strict}],
                "tool_choice": "required", "max_tokens": 120, "parallel_tool_calls": False,
            }  # fmt: skip
            async with client.chat.completions.stream(**arguments) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
            calls = final.choices[0].message.tool_calls
            assert calls and calls[0].function.parsed_arguments is not None
            assert "tool_calls.function.arguments.done" in kinds


async def test_an_answer_with_calls_can_be_sent_back() -> None:
    async with serving(caller(CALL)) as served:
        message = (await served.chat(tools=TOOLS)).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        for content in (None, "", "text"):
            history = [*MESSAGES, {**message, "content": content}, result]
            response = await served.client.post(CHAT, json={"messages": history, "tools": TOOLS})
            assert response.status_code == 200, response.text
