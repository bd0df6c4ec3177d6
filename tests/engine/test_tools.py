"""Tool calls and reasoning from end to end, over a runner that answers what a test wants."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tokenizers import AddedToken

import aiocb
from aiocb.testing import assert_quiescent, byte_tokenizer, fake_engine

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }} <tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>\n{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = [{"role": "user", "content": "How is it in Paris?"}]
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'


def tokenizer(template: str = TEMPLATE, specials: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<think>")) -> Any:
    """Bytes, and some markers that are special tokens: decoded text leaves them out."""
    made: Any = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [AddedToken(text, special=True) for text in specials]})
    made.chat_template = template
    return made


@asynccontextmanager
async def answering(reply: str | Callable[[str], str], **options: Any) -> AsyncIterator[aiocb.Engine]:
    options.setdefault("tokenizer", tokenizer())
    engine = fake_engine(reply, vocab_size=len(options["tokenizer"]), **options)
    async with engine:
        yield engine
        await assert_quiescent(engine)


async def read(stream: aiocb.Stream) -> list[aiocb.Chunk]:
    return [chunk async for chunk in stream]


def calls_of(completion: aiocb.Completion) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in completion.tool_calls]


def outcome(completion: aiocb.Completion) -> tuple[Any, ...]:
    return completion.text, completion.reasoning_content, calls_of(completion), completion.finish_reason


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_call_is_streamed_in_pieces() -> None:
    reply = f"I look.\n{CALL}\n{CALL}"
    async with answering(reply) as engine:
        chunks = await read(engine.stream(ASKED, tools=[WEATHER]))
        deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
        heads = [delta for delta in deltas if delta.id is not None]
        assert [(head.index, head.name, head.arguments) for head in heads] == [(0, "weather", ""), (1, "weather", "")]
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", head.id or "") for head in heads) and heads[0].id != heads[1].id
        for index in (0, 1):
            own = [delta for delta in deltas if delta.index == index]
            assert own[0].id is not None, "the head comes first"
            assert all(delta.id is None and delta.name is None for delta in own[1:])
            assert "".join(delta.arguments for delta in own) == PARIS and len(own) > 1
        assert "".join(chunk.text for chunk in chunks) == "I look.\n"
        assert chunks[-1].finish_reason == "stop"
        whole = await engine.generate(ASKED, tools=[WEATHER])
        assert outcome(whole) == ("I look.\n", "", [("weather", PARIS)] * 2, "stop")


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 8, 1000])
async def test_tokens_go_with_what_shows_them(interval: int) -> None:
    """D11: every token once, with its log-probabilities, on the chunk that shows it or the next."""
    reply = f"<think>Hm </thin</think>Well <tool {CALL} end"
    async with answering(reply) as engine:
        stream = engine.stream(ASKED, tools=[WEATHER], logprobs=0, stream_interval=interval)
        tokens: list[int] = []
        shown = ""
        async for chunk in stream:
            assert chunk.logprobs is not None or not chunk.token_ids
            assert len(chunk.logprobs or ()) == len(chunk.token_ids)
            tokens += chunk.token_ids
            shown += chunk.reasoning_content + chunk.text + "".join(delta.arguments for delta in chunk.tool_calls)
            passed = engine_text(tokens)
            # Nothing of a token is shown before it has come.
            assert not Counter(shown) - Counter(passed)
        assert engine_text(tokens) == reply + "<|end|>"
        whole = await engine.generate(ASKED, tools=[WEATHER])
        assert outcome(whole) == ("Well <tool end", "Hm </thin", [("weather", PARIS)], "stop")


def engine_text(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens, skip_special_tokens=False))


async def test_a_slow_reader_gets_one_merged_chunk() -> None:
    reply = f"<think>a b</think>x {CALL} {CALL}"
    async with answering(reply) as engine, engine.stream(ASKED, tools=[WEATHER]) as stream:
        await engine.generate(ASKED, tools=[WEATHER])  # it began later, so that it ends later
        (merged,) = await read(stream)
    assert merged.text == "x " and merged.reasoning_content == "a b"
    assert [(delta.index, delta.name, delta.arguments) for delta in merged.tool_calls] == [
        (0, "weather", ""),
        (0, None, PARIS),
        (1, "weather", ""),
        (1, None, PARIS),
    ]


async def test_functions_are_tools() -> None:
    def weather(city: str, days: int = 1) -> str:
        """The weather of a place.

        Args:
            city: which one.
            days: how many.
        """
        return city + str(days)

    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return CALL

    async with answering(reply) as engine:
        assert calls_of(await engine.generate(ASKED, tools=[weather])) == [("weather", PARIS)]
    assert '"description": "which one."' in seen[0]


async def test_without_tools_nothing_is_a_call() -> None:
    async with answering(CALL) as engine:
        found = await engine.generate(ASKED)
        assert not found.tool_calls and '"weather"' in found.text
        plain = await engine.generate("a text", max_new_tokens=100)
        assert not plain.tool_calls and '"weather"' in plain.text


async def test_none_keeps_the_tools_from_the_model() -> None:
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return f"no {CALL}"

    async with answering(reply) as engine:
        found = await engine.generate(ASKED, tools=[WEATHER], tool_choice="none")
        assert not found.tool_calls
        assert "<tool_call>" not in found.text and "weather" not in seen[0]


async def test_only_one_call_when_that_is_asked_for() -> None:
    async with answering(f"{CALL}{CALL}") as engine:
        found = await engine.generate(ASKED, tools=[WEATHER], parallel_tool_calls=False)
        assert calls_of(found) == [("weather", PARIS)] and found.finish_reason == "stop" and found.stop_reason is None
        # It ends with the token that completes the arguments: nothing is computed for a second one.
        assert engine_text(list(found.token_ids)).endswith(PARIS)
        assert found.usage.num_output_tokens == len(found.token_ids)


async def test_a_call_that_is_cut_is_delivered_as_it_is() -> None:
    async with answering(CALL) as engine:
        size = len(CALL.split("Paris")[0]) - len("<tool_call>") + 1 + 2
        found = await engine.generate(ASKED, tools=[WEATHER], max_new_tokens=size)
        assert outcome(found) == ("", "", [("weather", '{"city": "Pa')], "length")
        found = await engine.generate(ASKED, tools=[WEATHER], max_new_tokens=6)
        assert outcome(found) == ('\n{"na', "", [], "length")


async def test_samples_have_their_own() -> None:
    async with answering(f"<think>a</think>{CALL}") as engine:
        found = await engine.generate(ASKED, tools=[WEATHER], n=3)
        assert [outcome(each) for each in found] == [("", "a", [("weather", PARIS)], "stop")] * 3
        assert len({each.tool_calls[0].id for each in found}) == 3


# ── stop strings ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("Paris", ("x END y", "Paris", [("weather", PARIS)], "stop")),
        ("END", ("x ", "Paris", [], "stop")),
        ("END y", ("x ", "Paris", [], "stop")),
        ("y<tool", ("x END y", "Paris", [("weather", PARIS)], "stop")),
        ("<tool_call>", ("x END y", "Paris", [("weather", PARIS)], "stop")),
        ("x ", ("", "Paris", [], "stop")),
        ("y\n", ("x END y", "Paris", [("weather", PARIS)], "stop")),
    ],
)
@pytest.mark.parametrize("interval", [1, 3, 1000])
async def test_stop_strings_are_of_the_content(stop: str, expected: tuple[Any, ...], interval: int) -> None:
    """C4, D13: never in reasoning or calls, never shown in part; what is no stop string comes."""
    async with answering(f"<think>Paris</think>x END y{CALL}") as engine:
        chunks = await read(engine.stream(ASKED, tools=[WEATHER], stop=[stop], stream_interval=interval))
        whole = await engine.generate(ASKED, tools=[WEATHER], stop=[stop])
        assert outcome(whole) == expected
        assert "".join(chunk.text for chunk in chunks) == expected[0]
        assert chunks[-1].stop_reason == whole.stop_reason == (None if expected[2] else stop)


async def test_a_stop_string_may_name_a_special_token() -> None:
    reply = "<think>a<|user|>b</think>c<|user|>d"
    async with answering(reply) as engine:
        found = await engine.generate(ASKED, stop=["<|user|>"])
        assert outcome(found) == ("c", "ab", [], "stop") and found.stop_reason == "<|user|>"
        found = await engine.generate(ASKED, stop=["<|user|>"], min_new_tokens=50)
        assert outcome(found)[0] == "cd"


# ── reasoning ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("thinking", [True, False])
async def test_the_prompt_says_whether_it_begins_with_reasoning(thinking: bool) -> None:
    async with answering("one</think>\n\ntwo<think>three") as engine:
        options: Any = {"chat_template_kwargs": {"thinking": thinking}}
        found = await engine.generate(ASKED, **options)
        expected = ("two", "onethree") if thinking else ("onetwo", "three")
        assert (found.text, found.reasoning_content) == expected
        chunks = await read(engine.stream(ASKED, **options))
        assert "".join(chunk.text for chunk in chunks) == expected[0]
        assert "".join(chunk.reasoning_content for chunk in chunks) == expected[1]


async def test_what_was_never_closed_is_reasoning_and_counted() -> None:
    async with answering("<think>one two") as engine:
        found = await engine.generate(ASKED, max_new_tokens=4)
        assert outcome(found) == ("", "one", [], "length")
        assert found.usage.num_reasoning_tokens == 4
    async with answering("<think>one</think>two") as engine:
        found = await engine.generate(ASKED)
        assert found.usage.num_reasoning_tokens == 1 + 3 + len("</think>")
        assert (await engine.generate("text", max_new_tokens=9)).usage.num_reasoning_tokens == 0


async def test_reasoning_may_stay_in_the_text() -> None:
    config = aiocb.EngineConfig(reasoning_parser="none", debug_checks=True)
    async with answering("a</think>b", config=config) as engine:
        found = await engine.generate(ASKED)
        assert outcome(found) == ("a</think>b", "", [], "stop")
        assert ("reasoning_parser", "none", "set by the user") in engine.describe()


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_template_chooses() -> None:
    async with answering("x") as engine:
        chosen = {choice.name: (choice.value, choice.reason) for choice in engine.describe()}
        assert chosen["tool_parser"] == ("hermes", "by the marks in the chat template")
        assert chosen["reasoning_parser"] == ("think", "by the marks in the chat template")


async def test_a_parser_may_be_chosen() -> None:
    config = aiocb.EngineConfig(tool_parser="mistral", debug_checks=True)
    async with answering(f"[TOOL_CALLS]weather[ARGS]{PARIS}", config=config) as engine:
        assert calls_of(await engine.generate(ASKED, tools=[WEATHER])) == [("weather", PARIS)]
        assert ("tool_parser", "mistral", "set by the user") in engine.describe()
    config = aiocb.EngineConfig(tool_parser="none", debug_checks=True)
    async with answering(CALL, config=config) as engine:
        assert not (await engine.generate(ASKED, tools=[WEATHER])).tool_calls


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused(name: str) -> None:
    options: Any = {name: "other"}
    with pytest.raises(aiocb.ConfigError, match=f"{name} 'other' is unknown; choose one of auto, none"):
        fake_engine("x", config=aiocb.EngineConfig(**options))


async def test_a_template_without_tools_refuses_them_unless_json_is_asked_for() -> None:
    bare = byte_tokenizer()
    async with fake_engine("x", tokenizer=bare) as engine:
        with pytest.raises(aiocb.InvalidRequest, match="leaves tools out.*tool_parser='json'"):
            await engine.generate(ASKED, tools=[WEATHER])
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return f'{{"name": "weather", "arguments": {PARIS}}}'

    config = aiocb.EngineConfig(tool_parser="json", debug_checks=True)
    async with fake_engine(reply, tokenizer=bare, config=config) as engine:
        found = await engine.generate(ASKED, tools=[WEATHER])
        assert calls_of(found) == [("weather", PARIS)]
        result = {"role": "tool", "tool_call_id": found.tool_calls[0].id, "content": "sunny"}
        await engine.generate([*ASKED, found.message, result], tools=[WEATHER])
    assert "The weather of a place." in seen[0]
    assert 'Paris?<|end|><|assistant|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|end|>' in seen[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_choice": "any"}, "tool_choice must be"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be"),
        ({"tool_choice": {"type": "custom", "function": {"name": "weather"}}}, "tool_choice must be"),
        ({"tool_choice": 5}, "tool_choice must be"),
        ({"tool_choice": "required", "tools": None}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "names 'other'.*weather"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [WEATHER, WEATHER]}, "two tools have the name 'weather'"),
        ({"tools": [{"type": "web_search"}]}, "tool 0 has the type 'web_search'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "must have a 'name'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "'parameters' of tool 0"),
        ({"tools": [lambda x: x]}, "type hints and a docstring"),
    ],
)
async def test_wrong_tools_are_refused(options: dict[str, Any], says: str) -> None:
    async with answering("x") as engine:
        with pytest.raises(aiocb.InvalidRequest, match=says):
            await engine.generate(ASKED, **{"tools": [WEATHER], **options})


# ── the next turn ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_conversation_of_three_turns() -> None:
    """A17, C1: the answer is fed back as it is, and is what the model has written."""
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return f"<think>hm</think>{CALL}" if "sunny" not in prompt else "It is sunny."

    async with answering(reply) as engine:
        first = await engine.generate(ASKED, tools=[WEATHER])
        assert first.message == {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": first.tool_calls[0].id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": PARIS},
                }
            ],
        }
        assert json.loads(json.dumps(first.to_dict()))["tool_calls"] == [
            {"id": first.tool_calls[0].id, "name": "weather", "arguments": PARIS}
        ]
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
        second = await engine.generate([*ASKED, first.message, result], tools=[WEATHER])
        assert second.message == {"role": "assistant", "content": "It is sunny."}
        third = await engine.generate([*ASKED, first.message, result, second.message, *ASKED], tools=[WEATHER])
        assert third.text == "It is sunny."
    assert '<think>hm</think><tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in seen[2]
