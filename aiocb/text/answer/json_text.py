"""JSON that arrives in parts: where a value ends is found by its own grammar, whatever its strings hold.

Two faults of models are mended, so that what was meant is valid: control characters in strings are escaped, and so is
a backslash that begins no escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from aiocb.text.answer.reader import Reader, Steps

__all__ = ["scan_value", "take_string"]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = frozenset({"true", "false", "null"})
_HEX = frozenset("0123456789abcdefABCDEF")

Out = Callable[[str], Any]
"""Takes the value's text, piece by piece, when the cursor is behind it."""


def scan_value(reader: Reader, out: Out) -> Steps[bool]:
    """Go through one value; False when it is none, or when the text ends within it: the cursor is at that place."""
    closers: list[str] = []
    expected = "value"
    while True:
        character = yield from reader.peek()
        if not character:
            return False
        if character in " \t\n\r":
            _step(reader, out)
            continue
        is_value = False
        if character in "}]":
            if not closers or closers[-1] != character or expected not in ("first", "more"):
                return False
            closers.pop()
            _step(reader, out)
            is_value = True
        elif expected == "more":
            if character != ",":
                return False
            _step(reader, out)
            expected = "key" if closers[-1] == "}" else "value"
        elif expected == "colon":
            if character != ":":
                return False
            _step(reader, out)
            expected = "value"
        elif expected == "key" or (expected == "first" and closers[-1] == "}"):
            if character != '"' or not (yield from _string(reader, out)):
                return False
            expected = "colon"
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
            _step(reader, out)
            expected = "first"
        elif not (yield from (_string(reader, out) if character == '"' else _word(reader, out))):
            return False
        else:
            is_value = True
        if is_value:
            if not closers:
                return True
            expected = "more"


def take_string(reader: Reader) -> Steps[str | None]:
    """Go behind a string and return what it stands for; None when it is none."""
    if (yield from reader.peek()) != '"':
        return None
    parts: list[str] = []
    if not (yield from _string(reader, parts.append)):
        return None
    text: str = json.loads("".join(parts))
    # Half of a surrogate pair is no text: who writes it to UTF-8 would fail.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _step(reader: Reader, out: Out, text: str | None = None, size: int = 1) -> None:
    start = reader.at
    reader.at += size
    out(reader.text[start : reader.at] if text is None else text)


def _string(reader: Reader, out: Out) -> Steps[bool]:
    _step(reader, out)
    while True:
        found = _PLAIN.match(reader.text, reader.at)
        if found is not None:
            _step(reader, out, size=found.end() - reader.at)
        character = yield from reader.peek()
        if not character:
            return False
        if character == '"':
            _step(reader, out)
            return True
        if character == "\\":
            size = yield from _escape_size(reader)
            if reader.at + size > len(reader.text):  # cut: as it is
                _step(reader, out, size=len(reader.text) - reader.at)
                return False
            _step(reader, out, *((None, size) if size > 1 else ("\\\\", 1)))
        elif character < " ":
            _step(reader, out, f"\\u{ord(character):04x}" if character not in "\n\t\r" else repr(character)[1:-1])


def _escape_size(reader: Reader) -> Steps[int]:
    """How long the escape at the cursor is; 1 for a backslash that begins none; beyond the text where that is cut."""
    while len(reader.text) < reader.at + 2:
        if reader.has_ended:
            return 2
        yield
    kind = reader.text[reader.at + 1]
    if kind != "u":
        return 2 if kind in '"\\/bfnrt' else 1
    while True:
        digits = reader.text[reader.at + 2 : reader.at + 6]
        if not _HEX.issuperset(digits):
            return 1
        if len(digits) == 4 or reader.has_ended:
            return 6
        yield


def _word(reader: Reader, out: Out) -> Steps[bool]:
    """A number, true, false or null."""
    parts: list[str] = []
    while True:
        found = _WORD.match(reader.text, reader.at)
        if found is not None:
            parts.append(found.group())
            _step(reader, out, size=len(parts[-1]))
        elif not parts:
            return False
        if reader.at < len(reader.text) or reader.has_ended:
            break
        yield
    word = "".join(parts)
    is_whole = reader.at < len(reader.text)  # a number at the end of the text may have been cut
    return is_whole and (word in _WORDS or _NUMBER.fullmatch(word) is not None)
