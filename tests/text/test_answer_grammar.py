"""Grammars of forced calls: they take what a family writes, and its parser reads what they take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from aiocb.errors import InvalidRequest
from aiocb.sampling.grammar import Grammar
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.structure import Structure, schema_text, structure_of
from aiocb.testing import byte_tokenizer
from aiocb.text.answer.dialect import AnswerPlan, find_dialect
from aiocb.text.answer.formats import FORMATS
from aiocb.text.processor import TextProcessor
from aiocb.text.tools import take_tools

from .test_answer import ALL_BEGIN, ALL_END, BEGIN, END, PARIS, SEP, Found, call, content, joined, reasoning

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/count"}},
        "required": ["city"],
        "$defs": {"count": {"type": "integer"}},
    },
}
NOW = {"name": "now", "strict": True}
NAMED = {"type": "function", "function": {"name": "weather"}}
FULL = '{"city": "Paris", "days": 3}'
EOS_TOKEN_ID = 258
MARKERS = [
    *{marker: None for each in FORMATS.values() for marker in each.markers if marker != "<function="},
    "<think>",
    "</think>",
]


def processor(*, has_tokens: bool) -> TextProcessor:
    """Bytes; the markers are tokens of their own, some of them special ones, or just text."""
    tokenizer: Any = byte_tokenizer()
    if has_tokens:
        for number, marker in enumerate(MARKERS):
            tokenizer.add_tokens([AddedToken(marker, special=number % 2 == 0, normalized=False)])
    made = TextProcessor(tokenizer)
    made.prepare()
    return made


PROCESSORS = {True: processor(has_tokens=True), False: processor(has_tokens=False)}


def plan_of(template: str, *, name: str = "auto", choice: Any = "auto", parallel: bool = True, **more: Any) -> Any:
    tools = take_tools([WEATHER, NOW], choice, parallel)
    dialect = find_dialect(template, name)
    return AnswerPlan(
        dialect, schemas=tools.schemas, looks_for_calls=True, ends_after_call=not tools.is_parallel, **more
    ), tools


def accepted(text: TextProcessor, sampling: SamplingParams, answer: str) -> bool:
    """Whether an answer is taken from its beginning to its end."""
    tokenizer: Any = text.tokenizer
    grammar = sampling.grammar
    assert isinstance(grammar, Grammar)
    matcher = grammar.matcher([EOS_TOKEN_ID])
    ids = tokenizer.encode(answer, add_special_tokens=False)
    bits = np.zeros((len(tokenizer) + 31) // 32, dtype=np.int32)
    for token in [*ids, EOS_TOKEN_ID]:
        if matcher.is_complete:
            return bool(token == EOS_TOKEN_ID)
        matcher.fill(bits)
        if not (int(bits[token >> 5]) >> (token & 31)) & 1:
            return False
        matcher.extend([token])
    return True


def read(text: TextProcessor, plan: AnswerPlan, answer: str) -> Found:
    """What an engine makes of it."""
    tokenizer: Any = text.tokenizer
    parser = plan.parser()
    shown = text.make_outputs(SamplingParams().resolve(defaults(text)), [], 1, plan)[0].detokenizer
    parts = [
        part
        for token in tokenizer.encode(answer, add_special_tokens=False)
        for part in parser.push(shown.push((token,)))
    ]
    return joined([*parts, *parser.push(shown.flush()), *parser.flush()])


def defaults(text: TextProcessor) -> ModelDefaults:
    tokenizer: Any = text.tokenizer
    return ModelDefaults(len(tokenizer), 10_000, (EOS_TOKEN_ID,))


def make(text: TextProcessor, plan: AnswerPlan, tools: Any, structure: Structure | None = None) -> SamplingParams:
    sampling = SamplingParams().resolve(defaults(text))
    return text.with_answer(sampling, defaults(text), plan, tools, structure)


TWO = [*call("weather", FULL), *call("now", "{}")]

ANSWERS: dict[str, tuple[str, str, Found]] = {
    "hermes": (
        "<tool_call>",
        (
            f'<tool_call>\n{{"name": "weather", "arguments": {FULL}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        ),
        TWO,
    ),
    "smollm": (
        "",
        f'<tool_call>[{{"name": "weather", "arguments": {FULL}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
        TWO,
    ),
    "granite": (
        "<|tool_call|>",
        f'<|tool_call|>[{{"name": "weather", "arguments": {FULL}}}, {{"name": "now", "arguments": {{}}}}]',
        TWO,
    ),
    "llama3": (
        "<|python_tag|>",
        f'{{"name": "weather", "parameters": {FULL}}}; {{"name": "now", "parameters": {{}}}}',
        TWO,
    ),
    "json": ("", f'[{{"name": "weather", "arguments": {FULL}}}, {{"name": "now", "arguments": {{}}}}]', TWO),
    "mistral": ("[TOOL_CALLS][ARGS]", f"[TOOL_CALLS]weather[ARGS]{FULL}[TOOL_CALLS]now[ARGS]{{}}", TWO),
    "deepseek": (BEGIN, f"{ALL_BEGIN}{BEGIN}weather{SEP}{FULL}{END}\n{BEGIN}now{SEP}{{}}{END}{ALL_END}", TWO),
    "qwen3_coder": (
        "<function=<parameter=",
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nPa</b>ris\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
        [*call("weather", '{"city": "Pa</b>ris", "days": 3}'), *call("now", "{}")],
    ),
    "harmony": (
        "<|channel|><|message|>",
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{FULL}"
        ),
        [*reasoning("Hm."), *call("weather", FULL)],
    ),
}
OLDER: dict[str, tuple[str, str, Found]] = {
    "mistral": (
        "[TOOL_CALLS]",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {FULL}}}, {{"name": "now", "arguments": {{}}}}]',
        TWO,
    ),
    "deepseek": (
        f"{BEGIN}```json",
        f"{ALL_BEGIN}{BEGIN}function{SEP}weather\n```json\n{FULL}\n```{END}{ALL_END}",
        call("weather", FULL),
    ),
}
CASES = [(name, *case) for table in (ANSWERS, OLDER) for name, case in table.items()]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(("name", "template", "answer", "found"), CASES)
def test_a_call_is_forced(name: str, template: str, answer: str, found: Found, has_tokens: bool) -> None:
    text = PROCESSORS[has_tokens]
    plan, tools = plan_of(template, name=name, choice="required")
    sampling = make(text, plan, tools)
    assert accepted(text, sampling, answer) and read(text, plan, answer) == found
    assert not accepted(text, sampling, "I look.") and not accepted(text, sampling, "")
    assert not accepted(text, sampling, answer.replace("weather", "other"))
    assert not accepted(text, sampling, answer.replace("3", "3.5"))
    assert not accepted(text, sampling, answer[:-1])


@pytest.mark.parametrize(("name", "template", "answer", "found"), CASES)
def test_one_call_by_name(name: str, template: str, answer: str, found: Found) -> None:
    text = PROCESSORS[True]
    plan, tools = plan_of(template, name=name, choice=NAMED)
    sampling = make(text, plan, tools)
    if len([kind for kind, _ in found if kind == "call"]) == 2:
        assert not accepted(text, sampling, answer)
    else:
        assert accepted(text, sampling, answer)
    assert set(plan.schemas) == {"weather"} and plan.ends_after_call


def hermes(arguments: str = FULL, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("has_tokens", [True, False])
def test_strict_functions_leave_a_choice(has_tokens: bool) -> None:
    text = PROCESSORS[has_tokens]
    plan, tools = plan_of("<tool_call>")
    sampling = make(text, plan, tools)
    for answer in ("I look <b>.", hermes(), hermes("{}", "now")):
        assert accepted(text, sampling, answer), answer
    # Where the mark is text, a grammar cannot tell its beginning from text before it is whole.
    assert accepted(text, sampling, f"I look.\n{hermes()}") == has_tokens
    for answer in (hermes('{"a": 1}', "now"), f"x{hermes('{}', 'other')}", "<tool_call>x"):
        assert not accepted(text, sampling, answer), answer
    loose = take_tools([WEATHER])
    assert make(text, plan, loose).grammar is None, "without a strict function nothing is constrained"


def test_strict_functions_without_an_opener() -> None:
    text = PROCESSORS[True]
    plan, tools = plan_of("", name="json")
    sampling = make(text, plan, tools)
    assert accepted(text, sampling, "I look.") and accepted(text, sampling, '{"name": "now", "arguments": {}}')
    assert not accepted(text, sampling, '{"name": "now", "arguments": {"a": 1}}')


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"json_schema": schema_text(SCHEMA)}, '{"a": 1}'),
        ({"choice": ["yes", "no"]}, "yes"),
        ({"regex": "a+/b"}, "aa/b"),
    ],
)
def test_a_call_or_a_structure(given: dict[str, Any], taken: str) -> None:
    """A19: tools and a structure in one request."""
    text = PROCESSORS[True]
    plan, tools = plan_of("<tool_call>")
    structure = structure_of(given)
    sampling = make(text, plan, tools, structure)
    assert accepted(text, sampling, taken) and accepted(text, sampling, hermes())
    assert not accepted(text, sampling, "other") and not accepted(text, sampling, taken + hermes())
    plan, tools = plan_of("<tool_call>", choice="none")
    sampling = make(text, plan, tools, structure)
    assert accepted(text, sampling, taken) and not accepted(text, sampling, hermes())


def test_what_does_not_go_together_is_refused() -> None:
    text = PROCESSORS[True]
    for choice, structure in (
        ("required", Structure("json_schema", "{}")),
        ("auto", Structure("grammar", 'start: "x"')),
    ):
        plan, tools = plan_of("<tool_call>", choice=choice)
        with pytest.raises(InvalidRequest, match=f"{structure.kind} was given with tools"):
            make(text, plan, tools, structure)
    plan, tools = plan_of("no marks", choice="required")
    with pytest.raises(InvalidRequest, match="not known.*tool_parser"):
        make(text, plan, tools)
    bad = take_tools([{"name": "f", "parameters": {"$ref": "https://example.org/x"}}], "required")
    with pytest.raises(InvalidRequest, match="the function 'f'.*nothing is fetched"):
        make(text, AnswerPlan(find_dialect("<tool_call>"), schemas=bad.schemas, looks_for_calls=True), bad)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("state", "taken", "refused"),
    [
        ({}, ["<think>\nhm {</think>\n\n", ""], ["hm</think>"]),
        ({"is_thinking": True}, ["\nhm {</think>\n\n", "</think>"], ["", "<think>hm</think>"]),
        ({"is_thought_over": True}, [""], ["<think>hm</think>"]),
    ],
)
def test_it_begins_behind_the_reasoning(
    state: dict[str, Any], taken: Sequence[str], refused: Sequence[str], has_tokens: bool
) -> None:
    """A20, B15."""
    text = PROCESSORS[has_tokens]
    plan, tools = plan_of("<tool_call></think>", choice="required", **state)
    sampling = make(text, plan, tools)
    for before in taken:
        assert accepted(text, sampling, before + hermes()), before
        assert read(text, plan, before + hermes())[-3:] == call("weather", FULL)
    for before in refused if has_tokens else refused[:1]:
        assert not accepted(text, sampling, before + hermes()), before
    nothing = take_tools(None)
    plain = AnswerPlan(find_dialect("</think>"), **state)
    sampling = make(text, plain, nothing, Structure("json_schema", json.dumps(SCHEMA)))
    for before in taken:
        assert accepted(text, sampling, before + '{"a": 1}')
        assert read(text, plain, before + '{"a": 1}')[-1:] == content('{"a": 1}')


def test_without_a_choice_the_start_of_a_call_is_banned() -> None:
    """A16."""
    text = PROCESSORS[True]
    plan, tools = plan_of("<tool_call>", choice="none")
    tokenizer: Any = text.tokenizer
    assert make(text, plan, tools).bad_words_ids == ((tokenizer.convert_tokens_to_ids("<tool_call>"),),)
    assert plan.schemas == {} and PARIS


def test_strictness_of_schemas() -> None:
    """Properties that nobody has named are not made up; a schema without a type is that of an object."""
    text = PROCESSORS[True]
    plan, tools = plan_of("<tool_call>", choice="required")
    sampling = make(text, plan, tools)
    assert not accepted(text, sampling, hermes('{"city": "x", "more": 1}'))
    bare = take_tools([{"name": "f", "parameters": {}}], "required")
    sampling = make(text, AnswerPlan(find_dialect("<tool_call>"), schemas=bare.schemas, looks_for_calls=True), bare)
    assert accepted(text, sampling, hermes('{"x": 1}', "f")) and not accepted(text, sampling, hermes("[1]", "f"))
