"""How families of models write a tool call: one table, and a parser for each way.

A parser stands behind the marker that opened it. It looks ahead until it knows whether this is a call; if it is none,
it says so, the cursor goes back, and the text stays text. From the first piece of the arguments on there is no way
back: what a model breaks off or spoils later is delivered as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from aiocb.text.answer.calls import Calls, Parser, take_name
from aiocb.text.answer.json_text import scan_value, take_string
from aiocb.text.answer.reader import Reader, Steps
from aiocb.text.answer.xml_calls import tagged_xml_call, xml_call

__all__ = ["DEEPSEEK_SEP", "FORMATS", "HARMONY_MARKERS", "CallFormat"]

_NAME_KEYS = frozenset({"name", "function", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_LABEL_KEYS = frozenset({"type", "id", "index", "tool_call_id"})
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One family's way to write calls.

    Attributes:
        name: in settings.
        openers: what begins a call, by parser.
        closers: what may follow one, and is never shown.
        starts: a parser for an answer that begins with a call, without any opener.
        has_messages: the answer is a row of messages with headers (`harmony.py`), reasoning included.
        signs: a template that holds all of these, or all of another row, is of this family.
    """

    name: str
    openers: Mapping[str, Parser]
    closers: tuple[str, ...] = ()
    starts: Parser | None = None
    has_messages: bool = False
    signs: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that is never shown."""
        return (*self.openers, *self.closers)


# ── calls in JSON ────────────────────────────────────────────────────────────────────────────────────────────────────


def _json_calls(reader: Reader, calls: Calls) -> Steps[bool]:
    """One call or several, one after the other or in a list: `{"name": ..., "arguments": {...}}`."""
    return (yield from _read_calls(reader, calls, is_bare=False))


def _bare_calls(reader: Reader, calls: Calls) -> Steps[bool]:
    """The same where nothing but its form tells a call from an answer in JSON."""
    return (yield from _read_calls(reader, calls, is_bare=True))


def _fenced_calls(reader: Reader, calls: Calls) -> Steps[bool]:
    """The same, perhaps in a fence of Markdown."""
    yield from reader.skip_space()
    is_fenced = yield from reader.take("```")
    if is_fenced:
        yield from reader.take("json")
    if not (yield from _read_calls(reader, calls, is_bare=True)):
        return False
    if is_fenced:
        yield from reader.skip_space()
        yield from reader.take("```")
    return True


def _read_calls(reader: Reader, calls: Calls, *, is_bare: bool) -> Steps[bool]:
    is_list = (yield from reader.skip_space()) == "["
    if is_list:
        reader.at += 1
    found = yield from _one_call(reader, calls, is_bare)
    if not found:
        return False
    while True:
        end = reader.place
        reader.commit()
        character = yield from reader.skip_space()
        if is_list and character == "]":
            reader.at += 1
            reader.commit()
            return True
        if character and character in ",;":
            reader.at += 1
            character = yield from reader.skip_space()
        if character != "{" or not (yield from _one_call(reader, calls, is_bare)):
            reader.go_back(end)
            return True


def _one_call(reader: Reader, calls: Calls, is_bare: bool) -> Steps[bool]:
    """One object. What is certain of its arguments is passed on at once if its name stands before them."""
    if (yield from reader.skip_space()) != "{":
        return False
    reader.at += 1
    name: str | None = None
    arguments: str | None = None
    is_begun = False
    while (character := (yield from reader.skip_space())) != "}":
        if is_begun and character != ",":  # a bracket is missing; the call itself is whole
            return True
        if character == ",":
            reader.at += 1
            yield from reader.skip_space()
        key = yield from take_string(reader)
        if key is None or (yield from reader.skip_space()) != ":":
            return is_begun
        reader.at += 1
        character = yield from reader.skip_space()
        if key in _NAME_KEYS and name is None:
            name = yield from take_string(reader)
            if name is None or name not in calls.names:
                return False
        elif key in _ARGUMENT_KEYS and arguments is None:
            if name is not None and character == "{":
                reader.begin_call(name)
                is_begun, arguments = True, ""
                if not (yield from scan_value(reader, reader.add_arguments)):
                    return (yield from _spoiled(reader))
                reader.end_call()
            else:
                arguments = yield from _whole_arguments(reader, character)
                if arguments is None:
                    return False
        else:
            if is_bare and not is_begun and key not in _LABEL_KEYS:
                return False
            if not (yield from scan_value(reader, _drop)):
                return is_begun
    reader.at += 1
    if is_begun:
        reader.commit()
        return True
    if name is None or (is_bare and arguments is None):
        return False
    _whole_call(reader, name, arguments or "{}")
    return True


def _whole_arguments(reader: Reader, character: str) -> Steps[str | None]:
    """Arguments that have to be known before they are passed on; None when they are none."""
    if character == '"':  # JSON within a string
        string = yield from take_string(reader)
        if string is None:
            return None
        return (string if _is_object(string) else None) if string.strip() else "{}"
    parts: list[str] = []
    if not (yield from scan_value(reader, parts.append)):
        return None
    text = "".join(parts)
    return text if character == "{" else "{}" if text == "null" else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _whole_call(reader: Reader, name: str, arguments: str) -> None:
    reader.begin_call(name)
    reader.add_arguments(arguments)
    reader.end_call()


def _spoiled(reader: Reader) -> Steps[bool]:
    """Arguments that are no JSON from the cursor on: as they are, until something closes the call."""
    while True:
        end, marker = reader.markers.find(reader)
        if end > reader.at:
            text = reader.text[reader.at : end]
            reader.at = end
            reader.add_arguments(text)
        if marker is not None or reader.has_ended:
            return True
        yield


def _drop(_: str) -> None:
    """For what nobody asks for."""


# ── a name, then JSON ────────────────────────────────────────────────────────────────────────────────────────────────


def _arguments(reader: Reader, name: str) -> Steps[bool]:
    """The JSON object that follows a name."""
    if (yield from reader.skip_space()) != "{":
        return False
    reader.begin_call(name)
    if not (yield from scan_value(reader, reader.add_arguments)):
        return (yield from _spoiled(reader))
    reader.end_call()
    return True


def _mistral(reader: Reader, calls: Calls) -> Steps[bool]:
    """`[{"name": ..., "arguments": {...}}, ...]`, or `name[CALL_ID]id[ARGS]{...}` with the marks left out at will."""
    character = yield from reader.skip_space()
    if character in ("[", "{"):
        return (yield from _read_calls(reader, calls, is_bare=False))
    name = yield from take_name(reader, calls)
    if name is None:
        return False
    yield from reader.skip_space()
    if (yield from reader.take("[CALL_ID]")):
        yield from take_name(reader, calls)
    yield from reader.take("[ARGS]")
    return (yield from _arguments(reader, name))


def _deepseek(reader: Reader, calls: Calls) -> Steps[bool]:
    """`function<sep>name`, a fence and JSON; or, since 3.1, `name<sep>{...}`."""
    yield from reader.skip_space()
    if (yield from reader.take("function" + DEEPSEEK_SEP)):
        name = yield from take_name(reader, calls)
        yield from reader.skip_space()
        if (yield from reader.take("```")):
            yield from reader.take("json")
    else:
        name = yield from _deepseek_name(reader, calls)
    if name is None or not (yield from _arguments(reader, name)):
        return False
    yield from reader.skip_space()
    if (yield from reader.take("```")):
        reader.commit()
    return True


def _deepseek_name(reader: Reader, calls: Calls) -> Steps[str | None]:
    for name in sorted(calls.names, key=len, reverse=True):
        if (yield from reader.take(name + DEEPSEEK_SEP)):
            return name
    return None


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────

_ALL = (
    CallFormat("harmony", {}, HARMONY_MARKERS, has_messages=True, signs=(("<|channel|>", "<|message|>"),)),
    CallFormat(
        "qwen3_coder",
        {"<tool_call>": tagged_xml_call, "<function=": xml_call},
        ("</tool_call>",),
        signs=(("<function=", "<parameter="),),
    ),
    CallFormat(
        "granite",
        {"<|tool_call|>": _json_calls, "<tool_call>": _json_calls},
        ("</tool_call>", "<|/tool_call|>"),
        signs=(("<|tool_call|>",),),
    ),
    CallFormat(
        "hermes",
        {"<tool_call>": _json_calls},
        ("</tool_call>",),
        signs=(("<tool_call>",),),
    ),
    CallFormat("smollm", {"<tool_call>": _json_calls}, ("</tool_call>",)),
    CallFormat("mistral", {"[TOOL_CALLS]": _mistral}, ("[ARGS]", "[CALL_ID]"), signs=(("[TOOL_CALLS]",),)),
    CallFormat(
        "deepseek",
        {"<\uff5ctool\u2581call\u2581begin\uff5c>": _deepseek},
        (
            "<\uff5ctool\u2581call\u2581end\uff5c>",
            "<\uff5ctool\u2581calls\u2581begin\uff5c>",
            "<\uff5ctool\u2581calls\u2581end\uff5c>",
            DEEPSEEK_SEP,
        ),
        signs=(("<\uff5ctool\u2581call\u2581begin\uff5c>",),),
    ),
    CallFormat(
        "llama3",
        {"<|python_tag|>": _json_calls},
        starts=_bare_calls,
        signs=(("<|python_tag|>",), ("<|eot_id|>", '"parameters"'), ("<|eot_id|>", '\\"parameters\\"')),
    ),
    CallFormat("json", {}, starts=_fenced_calls),
)

FORMATS: Mapping[str, CallFormat] = {each.name: each for each in _ALL}
"""By name, in the order in which templates are asked for them."""
