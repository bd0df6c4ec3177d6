"""Forced calls through a real model that calls nothing by itself."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any

import pytest

import aiocb
from aiocb.testing import assert_quiescent

pytestmark = pytest.mark.model

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "time", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
ASKED = [{"role": "user", "content": "How is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def check(completion: aiocb.Completion) -> None:
    jsonschema: Any = importlib.import_module("jsonschema")

    assert completion.tool_calls and not completion.text.strip(), completion
    for call in completion.tool_calls:
        schema = {"weather": WEATHER, "time": TIME}[call.name]["function"]["parameters"]
        jsonschema.validate(json.loads(call.arguments), schema)
    assert completion.finish_reason == "stop"


@pytest.mark.asyncio
@pytest.mark.parametrize("parser", ["json", "hermes"])
async def test_a_model_that_calls_nothing_is_made_to(parser: str) -> None:
    """A15, A16: `required` and by name, streamed and whole, greedy and sampled, beside plain neighbours."""
    config = aiocb.EngineConfig(tool_parser=parser, debug_checks=True)
    async with aiocb.Engine.from_pretrained("smollm2", config=config) as engine:
        options: dict[str, Any] = {"tools": [WEATHER, TIME], "max_new_tokens": 120, "parallel_tool_calls": False}
        ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}]
        calls = [
            engine.generate(ASKED, **{**options, **way, "tool_choice": choice})
            for way in ways
            for choice in ("required", NAMED)
        ]
        plain = engine.generate(ASKED, temperature=0, max_new_tokens=8)
        *found, beside = await asyncio.gather(*calls, plain)
        for completion in found:
            check(completion)
            assert len(completion.tool_calls) == 1
        assert all(completion.tool_calls[0].name == "weather" for completion in found[1::2])
        assert not beside.tool_calls and beside.text
        chunks = [chunk async for chunk in engine.stream(ASKED, **{**options, **ways[0], "tool_choice": "required"})]
        deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
        assert deltas[0].name == found[0].tool_calls[0].name
        assert "".join(delta.arguments for delta in deltas) == found[0].tool_calls[0].arguments
        # The next turn, with the answer as it is; and a call beside a schema for the answer.
        result = {"role": "tool", "tool_call_id": found[0].tool_calls[0].id, "content": "18 degrees, sunny"}
        turns = [*ASKED, found[0].message, result]
        second = await engine.generate(turns, tools=[WEATHER, TIME], tool_choice="none", max_new_tokens=12)
        assert second.text and not second.tool_calls
        third = await engine.generate(turns, tools=[WEATHER], json_schema=SCHEMA, max_new_tokens=120, temperature=0)
        if third.tool_calls:
            check(third)
        else:
            assert isinstance(json.loads(third.text)["ok"], bool)
        await assert_quiescent(engine)
