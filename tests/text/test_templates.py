"""Published chat templates: what is read from them, and conversations with calls rendered by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiocb.errors import InvalidRequest
from aiocb.testing import byte_tokenizer
from aiocb.text.processor import TextProcessor
from aiocb.text.prompts import Messages, take_prompt
from aiocb.text.tools import take_tools

FOLDER = Path(__file__).parent / "templates"
LLAMA = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{% if tools and loop.first %}{{ tools | tojson }}<|python_tag|>{% endif %}{{ message.content }}"
    "{% endif %}<|eot_id|>{% endfor %}"
)
# Written for text: what is not a text cannot be joined to one.
JOINING = (
    "{{ tools | tojson }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% for c in m.tool_calls %}{{ '<tool_call>' + c['function']['name'] + c['function']['arguments'] }}{% endfor %}"
    "{% endfor %}"
)
ONLY_WITHOUT_CONTENT = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.content is none %}<tool_call>{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
    },
}


def call(arguments: Any, call_id: str = "call_abcdefghijk") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def turns(arguments: Any = '{"city": "Paris"}', **more: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "tool_calls": [call(arguments)], **more},
        {"role": "tool", "tool_call_id": "call_abcdefghijk", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "And now?"},
    ]


def template(name: str) -> str:
    own = {"llama": LLAMA, "joining": JOINING, "only_without_content": ONLY_WITHOUT_CONTENT}
    return own[name] if name in own else (FOLDER / f"{name}.jinja").read_text()


def processor(name: str) -> TextProcessor:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = template(name)
    made = TextProcessor(tokenizer)
    made.prepare()
    return made


def render(text: TextProcessor, messages: Any, *, tools: Any = (WEATHER,), **options: Any) -> str:
    taken = take_prompt(messages)
    assert isinstance(taken, Messages)
    parts = text._chat.render(taken.messages, take_tools(tools).tools, options, parses_specials=True).parts
    return "".join(parts)


KNOWN = {
    "HuggingFaceTB-SmolLM3-3B": ("none", "think"),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", "none"),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", "none"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", "think"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think"),
    "ibm-granite-granite-4.0": ("hermes", "none"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "none"),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "llama": ("llama3", "none"),
}


def test_every_template_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == KNOWN.keys() - {"llama"}


@pytest.mark.parametrize("name", KNOWN)
def test_the_family_is_read_from_the_template(name: str) -> None:
    dialect = processor(name).find_dialect(("auto", "auto"))
    assert dialect is not None and dialect.names == KNOWN[name]


CALLS = {
    "Qwen-QwQ-32B": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "Qwen-Qwen2.5-7B-Instruct": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "Qwen-Qwen3-0.6B": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "Qwen3-Coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    # It has no words for calls: they are a part of the content.
    "ibm-granite-granite-3.3-2B-Instruct": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]',
    "ibm-granite-granite-4.0": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "mistralai-Ministral-3-14B-Reasoning-2512": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}',
    "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": "',
    "openai-gpt-oss-120b": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
    "llama": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "joining": '<tool_call>weather{"city": "Paris"}',
    "only_without_content": '"arguments": {"city": "Paris"}',
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_three_turns_with_a_call(name: str, content: dict[str, Any], arguments: Any) -> None:
    """A17, A18, E1: whatever the form of the history, the template gets its own."""
    text = render(processor(name), turns(arguments, **content))
    assert CALLS[name] in text
    assert text.index("How is it?") < text.index(CALLS[name]) < text.index("sunny") < text.index("And now?")
    assert "None" not in text.partition("How is it?")[2]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("arguments", ["", "null", None, {}, "{}"])
def test_calls_without_arguments(name: str, arguments: Any) -> None:
    text = render(processor(name), turns(arguments))
    assert "null" not in text.partition("How is it?")[2] and "sunny" in text


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "mistralai-Mistral-Nemo-Instruct-2407", "joining"])
@pytest.mark.parametrize("arguments", ['{"city": "Par', "Paris", "[1]", "5"])
def test_what_a_model_has_spoiled_can_be_fed_back(name: str, arguments: str) -> None:
    text = render(processor(name), turns(arguments))
    assert arguments in text.replace('\\"', '"')


def test_ids_are_as_the_template_wants_them() -> None:
    strict, easy = processor("mistralai-Mistral-Nemo-Instruct-2407"), processor("llama")
    text = render(strict, turns())
    assert "call_abcdefghijk" not in text and text.count(text.partition('"id": "')[2][:9]) == 2
    assert text == render(strict, turns())
    own = turns()
    own[1]["tool_calls"][0]["id"] = own[2]["tool_call_id"] = "aB3dE6gH9"
    assert render(strict, own).count("aB3dE6gH9") == 2
    assert render(easy, turns())


def test_reasoning_is_fed_back_under_the_templates_name() -> None:
    """C1: both names that clients know are taken."""
    for key in ("reasoning_content", "reasoning"):
        asked = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So.", key: "I think."}]
        more: Any = {"add_generation_prompt": False}
        assert "<think>\nI think.\n</think>\n\nSo." in render(processor("Qwen-Qwen3-0.6B"), asked, **more)
        assert "[THINK]I think.[/THINK]So." in render(processor("mistralai-Ministral-3-14B-Reasoning-2512"), asked)
        assert "analysis<|message|>I think.<|end|>" in render(processor("openai-gpt-oss-120b"), asked, **more)
        assert "I think." not in render(processor("Qwen-Qwen2.5-7B-Instruct"), asked, **more)


def test_developers_are_heard() -> None:
    """E3."""
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "How?"}]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in render(processor("Qwen-Qwen3-0.6B"), asked, tools=None)
    assert "Be brief." in render(processor("openai-gpt-oss-120b"), asked, tools=None)
    both = [{"role": "system", "content": "You are kind."}, *asked]
    assert "system\nYou are kind.\n\nBe brief.<|im_end|>" in render(processor("Qwen-Qwen3-0.6B"), both, tools=None)
    listed = [{"role": "system", "content": [{"type": "text", "text": "You are kind."}]}, *asked]
    assert "You are kind.\n\nBe brief." in render(processor("Qwen-Qwen3-0.6B"), listed, tools=None)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, (True, False)),
        ("deepseek-ai-DeepSeek-V3.1", {}, (False, True)),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", {"enable_thinking": True}, (True, False)),
        ("Qwen-Qwen3-0.6B", {}, (False, False)),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, (False, True)),
    ],
)
def test_the_prompt_tells_where_reasoning_begins(
    name: str, options: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    """C2, B15."""
    plan = processor(name).take_chat([{"role": "user", "content": "How <think>?"}], chat_template_kwargs=options).plan
    assert (plan.is_thinking, plan.is_thought_over) == expected


def test_an_answer_that_is_continued_may_be_within_its_reasoning() -> None:
    text = processor("llama")
    thinking = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "<think>I"}]
    options = {"continue_final_message": True}
    plan = text.take_chat(thinking, chat_template_kwargs=options, parsers=("auto", "think")).plan
    assert plan.is_thinking
    thinking[1]["content"] += "</think>So"
    assert not text.take_chat(thinking, chat_template_kwargs=options, parsers=("auto", "think")).plan.is_thinking


@pytest.mark.parametrize("name", ["HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-V3.1"])
def test_templates_that_leave_tools_out(name: str) -> None:
    text = processor(name)
    with pytest.raises(InvalidRequest, match="leaves tools out"):
        text.take_chat(turns(), tools=take_tools([WEATHER]))
    own = [{"role": "system", "content": "Be brief."}, *turns()]
    for parser, says in (("json", True), ("deepseek", False)):
        ids = text.take_chat(own, tools=take_tools([WEATHER]), parsers=(parser, "auto")).token_ids
        tokenizer: Any = text.tokenizer
        prompt = tokenizer.decode(ids)
        assert "Be brief." in prompt and '"description": "The weather."' in prompt
        assert ("answer with JSON alone" in prompt) == says


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ("x", "must be a list"),
        ([5], "must be of the form"),
        ([{"id": "x"}], "must be of the form"),
        ([{"function": {"name": ""}}], "must be of the form"),
        ([{"function": {"name": "f", "arguments": 5}}], "arguments of the call of 'f' in message 1"),
    ],
)
def test_calls_that_are_none_are_refused(calls: Any, says: str) -> None:
    messages = turns()
    messages[1]["tool_calls"] = calls
    with pytest.raises(InvalidRequest, match=says):
        render(processor("llama"), messages)
    messages[1] = {"role": "assistant", "content": "No calls.", "tool_calls": []}
    assert "No calls." in render(processor("Qwen-Qwen3-0.6B"), [*messages[:2], *messages[4:]])
