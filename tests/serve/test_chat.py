"""`POST /v1/chat/completions`, on the wire."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from aiocb.testing import fake_engine

from .helpers import CHAT, MESSAGES, content_of, events_of, serving

pytestmark = pytest.mark.asyncio


async def test_a_whole_answer() -> None:
    async with serving() as served:
        response = await served.chat()
        body = response.json()
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hello there", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        usage = body["usage"]
        assert usage["completion_tokens"] == len("Hello there") + 1
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert (body["object"], body["model"]) == ("chat.completion", "fake")
        assert response.headers["x-request-id"]


async def test_a_stream_says_the_same_as_the_whole() -> None:
    async with serving() as served:
        whole = (await served.chat(seed=1)).json()
        response = await served.chat(seed=1, stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert response.text.endswith("data: [DONE]\n\n")
        *events, done = events_of(response.text)
        assert done == "[DONE]"
        assert content_of(events) == whole["choices"][0]["message"]["content"]
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == {**whole["usage"], "prompt_tokens_details": {"cached_tokens": 0}}


async def test_usage_comes_only_where_it_was_asked_for() -> None:
    async with serving() as served:
        for options in (None, {}, {"include_usage": False}):
            text = (await served.chat(stream=True, stream_options=options)).text
            assert all("usage" not in event for event in events_of(text) if event != "[DONE]")


async def test_choices_end_for_themselves() -> None:
    engine = fake_engine()
    async with serving(engine) as served:
        fields = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 9, "stop": ["a", "b", "c", "d", "e"]}
        whole = (await served.chat(**fields)).json()
        text = (await served.chat(**fields, stream=True, stream_options={"include_usage": True})).text
        *events, _done = events_of(text)
        for index, choice in enumerate(whole["choices"]):
            assert choice["index"] == index
            assert content_of(events, index) == choice["message"]["content"]
            ends = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == index]
            assert ends.count(None) == len(ends) - 1
            assert ends[-1] == choice["finish_reason"]
        assert len({len(choice["message"]["content"]) for choice in whole["choices"]}) > 1
        for field in ("prompt_tokens", "completion_tokens"):
            assert events[-1]["usage"][field] == whole["usage"][field]


async def test_text_of_all_kinds_arrives() -> None:
    reply = "a\u2028b\u0085c\r\n\n: d\ndata: x\U0001f600é"
    async with serving(fake_engine(reply=reply)) as served:
        response = await served.chat(stream=True)
        assert response.content.isascii()
        *events, _done = events_of(response.text)
        assert content_of(events) == reply


async def test_log_probabilities_cover_every_token_once() -> None:
    async with serving(fake_engine(reply="hé\U0001f600")) as served:
        whole = (await served.chat(logprobs=True, top_logprobs=2)).json()
        entries = whole["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode().startswith("hé\U0001f600")
        assert len(entries) == whole["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) >= 1 for entry in entries)
        *events, _done = events_of((await served.chat(logprobs=True, top_logprobs=2, stream=True)).text)
        streamed = [e for event in events for c in event["choices"] for e in (c["logprobs"] or {}).get("content", [])]
        assert streamed == entries


async def test_what_is_nothing_is_no_field() -> None:
    async with serving() as served:
        nulls = dict.fromkeys(
            ["stop", "n", "seed", "tools", "tool_choice", "logit_bias", "response_format", "temperature", "logprobs",
             "max_tokens", "stream_options", "user", "audio", "functions", "top_k", "metadata", "reasoning_effort"]
        )  # fmt: skip
        assert (await served.chat(**nulls)).status_code == 200
        assert (await served.chat(logit_bias={}, tools=[], functions=[])).status_code == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{}]}, "functions"),
    ({"n": 0}, "n"),
    ({"n": 100_000}, "n"),
    ({"n": "1"}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"stream": 1}, "stream"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"resume": True}, "resume"),
    ({"chat_template": "x"}, "chat_template"),
]


async def test_refusals_name_the_field() -> None:
    async with serving() as served:
        for fields, param in REFUSED:
            for stream in (False, True):
                response = await served.client.post(CHAT, json={"messages": MESSAGES, "stream": stream, **fields})
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert error["param"] == param
                assert error["type"] == "invalid_request_error"
                assert error["message"]


async def test_values_that_the_engine_refuses_are_400() -> None:
    async with serving() as served:
        wrong: list[dict[str, Any]] = [
            {"temperature": -1}, {"top_p": 7}, {"logit_bias": {"999999": 1}}, {"seed": 1 << 70}, {"max_tokens": -1},
            {"temperature": 1e308 * 10}, {"stop": [""] * 3}, {"min_tokens": 9, "max_tokens": 3},
        ]  # fmt: skip
        for fields in wrong:
            body = json.dumps({"messages": MESSAGES, "stream": True, **fields})
            response = await served.client.post(CHAT, content=body)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["message"]


async def test_what_is_too_long_has_a_code_of_its_own() -> None:
    async with serving(fake_engine(max_model_len=32)) as served:
        for fields in ({"messages": [{"role": "user", "content": "x" * 100}]}, {"max_tokens": 1000}):
            response = await served.chat(stream=True, **fields)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "32" in response.json()["error"]["message"]


async def test_roles_and_parts_that_templates_do_not_know() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "x"

    async with serving(fake_engine(reply=reply)) as served:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "developer", "content": "first"},
            {"role": "system", "content": "second"},
            {"role": "user", "content": ""},
        ]
        assert (await served.chat(messages=messages)).status_code == 200
        assert prompts[-1].startswith("<|system|>first\n\nsecond<|end|><|user|>ab<|end|><|assistant|><|end|>")


async def test_an_answer_can_be_continued() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return " and more"

    async with serving(fake_engine(reply=reply)) as served:
        messages = [*MESSAGES, {"role": "assistant", "content": "Once"}]
        answer = await served.chat(messages=messages, continue_final_message=True)
        assert prompts[-1].endswith("<|assistant|>Once")
        assert answer.json()["choices"][0]["message"]["content"] == " and more"


async def test_the_name_of_the_model_is_echoed_or_refused() -> None:
    async with serving(served_model_name=("big", "small")) as served:
        for name in ("big", "small"):
            assert (await served.chat(model=name)).json()["model"] == name
        assert (await served.chat()).json()["model"] == "big"
        response = await served.chat(model="other")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "big" in response.json()["error"]["message"]
        listed = (await served.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["big", "small"]
        assert (await served.client.get("/v1/models/small")).json()["id"] == "small"
        assert (await served.client.get("/v1/models/other")).status_code == 404


async def test_the_openai_client_streams() -> None:
    async with serving() as served:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
        async with client:
            completion = await client.chat.completions.create(model="fake", messages=MESSAGES)  # type: ignore[arg-type]
            assert completion.choices[0].message.content == "Hello there"
            assert completion._request_id
            async with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:  # type: ignore[arg-type]
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == "Hello there"
            assert {"chunk", "content.delta", "content.done"} <= set(kinds)
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=MESSAGES)  # type: ignore[arg-type]
