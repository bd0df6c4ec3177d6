"""How families of models write a tool call: one table, and a parser for each way.

A parser stands behind the marker that opened it. It looks ahead until it knows whether this is a call; if it is none,
it says so, the cursor goes back, and the text stays text. From the first piece of the arguments on there is no way
back: what a model breaks off or spoils later is delivered as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aiocb.text.answer.json_text import scan_value, take_string
from aiocb.text.answer.reader import Reader, Steps

__all__ = ["DEEPSEEK_SEP", "FORMATS", "HARMONY_MARKERS", "CallFormat", "Calls", "Parser"]

_NAME_KEYS = frozenset({"name", "function", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_LABEL_KEYS = frozenset({"type", "id", "index", "tool_call_id"})
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
_XML_PLAIN = re.compile(r"[^\n<]+")
_XML_NEXT = ("<parameter=", "</function>", "</tool_call>")
_NAME_CHARACTER = re.compile(r"[^\s\"'{}<>\[\](),]+")


@dataclass(frozen=True, slots=True)
class Calls:
    """What a parser is given.

    Attributes:
        names: of the functions that may be called.
        schemas: the JSON schema of each one's parameters.
    """

    names: Collection[str]
    schemas: Mapping[str, Any]


Parser = Callable[[Reader, Calls], Steps[bool]]
"""Reads what follows an opener. False: it is no call. Calls that it finds are begun and, if whole, ended."""


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


def _take_name(reader: Reader, calls: Calls) -> Steps[str | None]:
    """A declared function's name, up to what cannot be part of one."""
    yield from reader.skip_space()
    parts: list[str] = []
    while True:
        found = _NAME_CHARACTER.match(reader.text, reader.at)
        if found is not None:
            parts.append(found.group())
            reader.at = found.end()
        if reader.at < len(reader.text) or reader.has_ended:
            name = "".join(parts)
            return name if name in calls.names else None
        yield


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
    name = yield from _take_name(reader, calls)
    if name is None:
        return False
    yield from reader.skip_space()
    if (yield from reader.take("[CALL_ID]")):
        yield from _take_name(reader, calls)
    yield from reader.take("[ARGS]")
    return (yield from _arguments(reader, name))


def _deepseek(reader: Reader, calls: Calls) -> Steps[bool]:
    """`function<sep>name`, a fence and JSON; or, since 3.1, `name<sep>{...}`."""
    yield from reader.skip_space()
    if (yield from reader.take("function" + DEEPSEEK_SEP)):
        name = yield from _take_name(reader, calls)
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


# ── parameters as XML ────────────────────────────────────────────────────────────────────────────────────────────────


def _xml_call(reader: Reader, calls: Calls) -> Steps[bool]:
    """`<function=name><parameter=key>value</parameter>...</function>`, of which the first mark is read."""
    name = yield from _take_name(reader, calls)
    if name is None or not (yield from reader.take(">")):
        return False
    reader.begin_call(name)
    properties = _properties(calls.schemas.get(name))
    before = "{"
    while True:
        yield from reader.skip_space()
        if not (yield from reader.take("<parameter=")):
            break
        key = yield from _until(reader, ">")
        if key is None:
            return True
        reader.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        if not (yield from _xml_value(reader, properties.get(key))):
            return True
    if not (yield from reader.take("</function>")) and reader.at >= len(reader.text):
        return True  # cut
    reader.add_arguments("{}" if before == "{" else "}")
    reader.end_call()
    return True


def _xml_in_tag(reader: Reader, calls: Calls) -> Steps[bool]:
    """The same within `<tool_call>`."""
    yield from reader.skip_space()
    return (yield from reader.take("<function=")) and (yield from _xml_call(reader, calls))


def _until(reader: Reader, end: str) -> Steps[str | None]:
    """The text up to a character, and go behind it."""
    parts: list[str] = []
    while (character := (yield from reader.peek())) != end:
        if not character:
            return None
        parts.append(character)
        reader.at += 1
    reader.at += 1
    return "".join(parts)


def _xml_value(reader: Reader, schema: Any) -> Steps[bool]:
    """One value: a text is passed on as it comes, what may be anything else when it is whole. False where it is cut."""
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    yield from reader.take("\n")
    reader.commit()
    parts: list[str] = []
    if is_text:
        reader.add_arguments('"')

    def put(text: str) -> None:
        if is_text:
            reader.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            parts.append(text)

    while character := (yield from reader.peek()):
        if character in "\n<":
            if (yield from _xml_end(reader)):
                reader.add_arguments('"' if is_text else _as_json("".join(parts)))
                return True
            reader.at += 1
            put(character)
        else:
            found = _XML_PLAIN.match(reader.text, reader.at)
            assert found is not None
            reader.at = found.end()
            put(found.group())
    reader.add_arguments("".join(parts))
    return False


def _xml_end(reader: Reader) -> Steps[bool]:
    """Go behind the end of a value. It is one only where another mark follows; the cursor stays where it is none."""
    start = reader.place
    yield from reader.take("\n")
    if (yield from reader.take("</parameter>")):
        end = reader.place
        if not (yield from reader.skip_space()) or (yield from reader.take_one(_XML_NEXT)) is not None:
            reader.go_back(end)
            return True
    reader.go_back(start)
    return False


def _as_json(text: str) -> str:
    """A value whose type is not a text: JSON, or what Python writes for it; else a text after all."""
    text = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        json.loads(word)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return word


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────

_ALL = (
    CallFormat("harmony", {}, HARMONY_MARKERS, has_messages=True, signs=(("<|channel|>", "<|message|>"),)),
    CallFormat(
        "qwen3_coder",
        {"<tool_call>": _xml_in_tag, "<function=": _xml_call},
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
