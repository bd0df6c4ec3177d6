"""Calls whose parameters are written as XML, as Qwen3-Coder does; their arguments come out as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from aiocb.text.answer.calls import Calls, take_name
from aiocb.text.answer.reader import Reader, Steps

__all__ = ["tagged_xml_call", "xml_call"]

_XML_PLAIN = re.compile(r"[^\n<]+")
_XML_NEXT = ("<parameter=", "</function>", "</tool_call>")


def xml_call(reader: Reader, calls: Calls) -> Steps[bool]:
    """`<function=name><parameter=key>value</parameter>...</function>`, of which the first mark is read."""
    name = yield from take_name(reader, calls)
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


def tagged_xml_call(reader: Reader, calls: Calls) -> Steps[bool]:
    """The same within `<tool_call>`."""
    yield from reader.skip_space()
    return (yield from reader.take("<function=")) and (yield from xml_call(reader, calls))


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
