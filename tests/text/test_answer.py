"""Answers of every family, cut at every place: content, reasoning and calls come out the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiocb.text.answer.formats import FORMATS
from aiocb.text.answer.parser import AnswerParser, ThoughtMarks
from aiocb.text.answer.reader import Part

THINK = ThoughtMarks("<think>", "</think>")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}

Found = list[tuple[str, ...]]


def joined(parts: Iterable[Part]) -> Found:
    """Parts without the places where they were cut; every call with its arguments, and whether it is whole."""
    found: list[Part] = []
    for part in parts:
        assert part.text or part.kind == "end", "an empty part says nothing"
        last = found[-1] if found else None
        if last is not None and last.kind == part.kind and part.kind in ("content", "reasoning", "arguments"):
            assert last.number == part.number
            found[-1] = last._replace(text=last.text + part.text)
        else:
            found.append(part)
    calls = [part.number for part in found if part.kind == "call"]
    assert calls == list(range(len(calls))), "every call begins once, in order"
    return [(part.kind, part.text) for part in found]


def parse(name: str | None, cuts: Iterable[str], *, is_thinking: bool = False) -> Found:
    parser = AnswerParser(
        THINK, is_thinking=is_thinking, call_format=FORMATS[name] if name else None, names=SCHEMAS, schemas=SCHEMAS
    )
    parts: list[Part] = []
    for text in cuts:
        parts += parser.push(text)
    parts += parser.flush()
    assert parser.num_held == 0
    return joined(parts)


def call(name: str, arguments: str) -> Found:
    return [("call", name), ("arguments", arguments), ("end", "")]


def cut_call(name: str, *arguments: str) -> Found:
    return [("call", name), *(("arguments", text) for text in arguments)]


def content(text: str) -> Found:
    return [("content", text)]


def reasoning(text: str) -> Found:
    return [("reasoning", text)]


PARIS = '{"city": "Paris"}'
HARD = '{"city": "</tool_call> {\\"a\\": [\\\\", "days": [{"x": {}}, "}"]}'
SEP = "<\uff5ctool\u2581sep\uff5c>"
BEGIN, END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
ALL_BEGIN, ALL_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SAMPLES: list[tuple[str | None, str, Found]] = [
    # A10: text before, between and after
    (
        "hermes",
        f"I look.\n{tagged('weather', PARIS)} and\n{tagged('now', '{}')}\nDone.",
        [
            *content("I look.\n"),
            *call("weather", PARIS),
            *content("and\n"),
            *call("now", "{}"),
            *content("Done."),
        ],
    ),
    ("hermes", f"{tagged('weather', PARIS)}\n{tagged('now', '{}')}", [*call("weather", PARIS), *call("now", "{}")]),
    # A8: what looks like an end within a text
    ("hermes", tagged("weather", HARD), call("weather", HARD)),
    # A7: no arguments, in every way
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', call("now", "{}")),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', call("now", "{}")),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', call("now", "{}")),
    # the other key, the other order, JSON within a string, other keys, a list, a missing bracket
    ("hermes", '<tool_call>{"name": "weather", "parameters": {"days": 1}}</tool_call>', call("weather", '{"days": 1}')),
    ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>', call("weather", PARIS)),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        call("weather", PARIS),
    ),
    ("hermes", f'<tool_call>{{"id": [1], "name": "weather", "arguments": {PARIS}, "x": 1}}', call("weather", PARIS)),
    (
        "smollm",
        f'<tool_call>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
        [*call("weather", PARIS), *call("now", "{}")],
    ),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {PARIS}</tool_call>', call("weather", PARIS)),
    # what models get wrong in strings
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\\d\x01\\u00e9\\ux"}}</tool_call>',
        call("weather", '{"city": "a\\nb\\\\d\\u0001\\u00e9\\\\ux"}'),
    ),
    # A3: cut where it is cut
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Par', cut_call("weather", '{"city": "Par')),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "\\u00', cut_call("weather", '{"city": "\\u00')),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"days": 12', cut_call("weather", '{"days": 12')),
    ("hermes", '<tool_call>\n{"name": "wea', content('\n{"name": "wea')),
    ("hermes", "<tool_call>", []),
    ("hermes", "a <tool_ca", content("a <tool_ca")),
    # malformed or undeclared: text, without the marks (A12, A13)
    ("hermes", f"x {tagged('other', '{}')} y", content('x \n{"name": "other", "arguments": {}}\ny')),
    ("hermes", "<tool_call>{'name': 'now'}</tool_call>", content("{'name': 'now'}")),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        content('{"name": "now", "arguments": [1]}'),
    ),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', content('{"name": 1}')),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', content('{"arguments": {}}')),
    # spoiled when it had begun: delivered as it is
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"days": 1,, "x"}}</tool_call> then',
        [*cut_call("weather", '{"days": 1,, "x"}}'), *content("then")],
    ),
    ("hermes", "The mark `<tool_call>` begins one.", content("The mark `<tool_call>` begins one.")),
    ("hermes", '{"name": "now", "arguments": {}}', content('{"name": "now", "arguments": {}}')),
    # reasoning
    ("hermes", f"<think>\nNow {{</think>\n\n{tagged('now', '{}')}", [*reasoning("Now {"), *call("now", "{}")]),
    (
        "hermes",
        "<think>a</think>b<think>\nc\n\nd\n</think>\n\ne<think>f ",
        [
            *reasoning("a"),
            *content("b"),
            *reasoning("c\n\nd"),
            *content("e"),
            *reasoning("f"),
        ],
    ),
    (None, "<think>\n\n</think>\n\nHello <b>", content("Hello <b>")),
    (None, "no thoughts</think> at all", content("no thoughtsat all")),
    (None, "1 < 2 <thin", content("1 < 2 <thin")),
    # Qwen3-Coder
    (
        "qwen3_coder",
        (
            "Ok\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        [*content("Ok\n"), *call("weather", '{"city": "Paris", "days": 3}')],
    ),
    (
        "qwen3_coder",
        (
            '<function=weather>\n<parameter=city>\na "b"\n</parameter> <i>\n</parameter>\n<parameter=other>{"x": [1]}'
            "</parameter>\n<parameter=more>\nword\n</parameter>\n</function>"
        ),
        call("weather", '{"city": "a \\"b\\"\\n</parameter> <i>", "other": {"x": [1]}, "more": "word"}'),
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", call("now", "{}")),
    ("qwen3_coder", "<function=weather>\n<parameter=days>\nTrue\n</parameter>", cut_call("weather", '{"days": true')),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\nPar", cut_call("weather", '{"city": "Par')),
    ("qwen3_coder", "<function=weather>\n<parameter=days>\n1", cut_call("weather", '{"days": 1')),
    ("qwen3_coder", "a <function=other> b", content("a <function=other> b")),
    # Llama 3
    (
        "llama3",
        f'{{"name": "weather", "parameters": {PARIS}}}; {{"type": "function", "name": "now", "parameters": {{}}}}',
        [*call("weather", PARIS), *call("now", "{}")],
    ),
    (
        "llama3",
        f' <|python_tag|>{{"name": "weather", "parameters": {PARIS}}}',
        [*content(" "), *call("weather", PARIS)],
    ),
    ("llama3", '<|python_tag|>weather.call(city="Paris")', content('weather.call(city="Paris")')),
    # A12: an answer in JSON is no call, and neither is what follows it
    (
        "llama3",
        '{"name": "Anna", "age": 3}\n{"name": "now", "parameters": {}}',
        content('{"name": "Anna", "age": 3}\n{"name": "now", "parameters": {}}'),
    ),
    ("llama3", '{"name": "weather", "in": "Paris"}', content('{"name": "weather", "in": "Paris"}')),
    ("llama3", '{"name": "weather"}', content('{"name": "weather"}')),
    ("llama3", '  ["name"]', content('  ["name"]')),
    # Mistral
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        [*call("weather", PARIS), *call("now", "{}")],
    ),
    (
        "mistral",
        f"I look.[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{{}}",
        [*content("I look."), *call("weather", PARIS), *call("now", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]weather{PARIS}", call("weather", PARIS)),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}", content("other{}")),
    # Granite
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]', call("weather", PARIS)),
    ("granite", f"<tool_call>{tagged('now', '{}')[11:]}", call("now", "{}")),
    # DeepSeek, both ways
    (
        "deepseek",
        (
            f"Hm.{ALL_BEGIN}{BEGIN}function{SEP}weather\n```json\n{PARIS}\n```{END}\n"
            f"{BEGIN}function{SEP}now\n```json\n{{}}\n```{END}{ALL_END}"
        ),
        [*content("Hm."), *call("weather", PARIS), *call("now", "{}")],
    ),
    ("deepseek", f"{ALL_BEGIN}{BEGIN}weather{SEP}{PARIS}{END}{ALL_END}", call("weather", PARIS)),
    # JSON alone, for models that were told so
    ("json", f'```json\n{{"name": "weather", "arguments": {PARIS}}}\n```', call("weather", PARIS)),
    ("json", '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', 2 * call("now", "{}")),
    ("json", '<think>\nx</think>\n{"name": "now", "arguments": {}}', [*reasoning("x"), *call("now", "{}")]),
    ("json", "```python\nx\n```", content("```python\nx\n```")),
    # gpt-oss
    (
        "harmony",
        (
            "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            f"<|constrain|>json<|message|>{PARIS}<|call|>"
        ),
        [*reasoning("Hm <b>."), *call("weather", PARIS)],
    ),
    ("harmony", "<|channel|>final<|message|>Hello<|return|>", content("Hello")),
    (
        "harmony",
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
            "<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>x"
        ),
        [*content("I look."), *call("now", "{}"), *content("x")],
    ),
    # A14: headers that nobody expects
    ("harmony", "<|channel|><|channel|>odd<|end|>x<|message|>y<|end|>z", content("yz")),
    ("harmony", "<|start|><|start|>tool to=me<|channel|><|constrain|><|message|>x", content("x")),
    ("harmony", "<|channel|>commentary to=functions.other<|message|>{}<|call|>", content("{}")),
    ("harmony", "Hello", content("Hello")),
    ("harmony", "<|channel|>" + 300 * "x", content(300 * "x")),
    ("harmony", "<|channel|>fin", []),
]
IDS = [f"{name}-{number}" for number, (name, _, _) in enumerate(SAMPLES)]


@pytest.mark.parametrize(("name", "text", "found"), SAMPLES, ids=IDS)
def test_samples_at_every_cut(name: str | None, text: str, found: Found) -> None:
    assert parse(name, [text]) == found
    for place in range(1, len(text)):
        assert parse(name, [text[:place], text[place:]]) == found, place
    for size in range(1, 9):
        assert parse(name, [text[start : start + size] for start in range(0, len(text), size)]) == found, size


@pytest.mark.parametrize(("name", "text", "found"), SAMPLES, ids=IDS)
def test_no_marks_are_shown_and_whole_calls_are_json(name: str | None, text: str, found: Found) -> None:
    for (kind, shown), (following, _) in zip(found, [*found, ("", "")][1:], strict=True):
        if kind == "content" and "mark" not in shown and "function=" not in shown:
            markers = (*THINK, *(FORMATS[name].markers if name else ()))
            assert not any(marker in shown for marker in markers)
        if kind == "arguments" and following == "end":
            assert isinstance(json.loads(shown), dict)


PIECES = sorted({piece for _, text, _ in SAMPLES for piece in text.replace(">", ">\0").split("\0")}, key=repr)


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PIECES) | st.text(max_size=4)), st.data())
@settings(max_examples=300, deadline=None)
def test_any_text_at_any_cuts(name: str, pieces: list[str], data: st.DataObject) -> None:
    """Nothing raises, nothing is taken back, and cuts change nothing."""
    text = "".join(pieces)
    is_thinking = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(name, parts, is_thinking=is_thinking) == parse(name, [text], is_thinking=is_thinking)
