"""The per-request side of detokenization, from pieces of text and bytes to text.

token id ─► piece ─► code points ─► strip ─► replacements (clean-up) ─► text that is certain
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Self

__all__ = [
    "MAX_BYTE_RUN",
    "CleaningDetokenizer",
    "Detokenizer",
    "MarkingDetokenizer",
    "Piece",
    "PieceDetokenizer",
    "Pieces",
    "Replacer",
    "WindowDetokenizer",
]

MAX_BYTE_RUN = 64
"""Byte tokens held back at most. `decode` turns a whole run of byte tokens into U+FFFD when one of them breaks it, so
a run has to be held until it ends; a script that a vocabulary lacks altogether would never be shown without a bound."""

_MAX_WINDOW = 16
_REPLACEMENT = "\ufffd"

Piece = str | bytes | int | None
"""Text; bytes that are no text on their own; a byte of a run (byte fallback); or None for a token that is left out."""


class Pieces(dict[int, Piece]):
    """Id to piece, filled on first use."""

    __slots__ = ("_compute",)

    def __init__(self, compute: Callable[[int], Piece]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._compute(token_id)
        return piece


class Replacer:
    """`str.replace` on a text that arrives in parts; holds back only what may still become the pattern."""

    __slots__ = ("_held", "_new", "_old")

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._held = old, new, ""

    def push(self, text: str) -> str:
        """Return what is certain."""
        parts = (self._held + text).split(self._old)
        text = self._new.join(parts)
        tail = parts[-1]
        length = min(len(self._old) - 1, len(tail))
        while length and not tail.endswith(self._old[:length]):
            length -= 1
        self._held = tail[len(tail) - length :]
        return text[: len(text) - length]

    def flush(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """Text of one request, token by token. This base is for engines without a tokenizer: it yields nothing.

    `"".join(every push) + flush()` equals `tokenizer.decode(all ids, skip_special_tokens=...)`. No delta ends within
    a code point, and no more than a few tokens are held back (`MAX_BYTE_RUN` at the very most: a longer run of byte
    tokens is released as far as it is valid, even though `decode` would take it back if the run broke later).
    """

    __slots__ = ()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take further tokens and return the text that is certain now."""
        return ""

    def flush(self) -> str:
        """Return what is still held, as `decode` renders it at the end of a sequence; no `push` may follow."""
        return ""

    def fork(self) -> Self:
        """Return another one that goes on from here by itself."""
        return copy.copy(self)


class PieceDetokenizer(Detokenizer):
    """Joins pieces: O(1) per token and, when nothing is pending, one dictionary look-up."""

    __slots__ = ("_bytes", "_first", "_is_direct", "_is_first", "_pieces", "_run", "_strip")

    def __init__(self, pieces: Pieces, first: Pieces, strip: tuple[str, int]) -> None:
        self._pieces = pieces
        self._first = first
        self._strip = strip
        self._is_first = True
        self._is_direct = False
        self._bytes = b""  # not shown yet: part of a code point, or of a run of byte tokens
        self._run: Literal["held", "released", "broken"] | None = None  # what has become of a run of byte tokens

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        if self._is_direct and len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            if type(piece) is str:
                return piece
        parts: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if piece is None:
                continue
            if self._is_first:
                self._is_first = False
                piece = self._first[token_id]
            if isinstance(piece, str):
                parts += self._end_bytes(), piece
            elif isinstance(piece, bytes):
                parts.append(self._push_bytes(piece))
            elif piece is not None:
                parts.append(self._push_byte(piece))
        text = self._stripped("".join(parts))
        self._is_direct = not (self._is_first or self._bytes or self._run or self._strip[1])
        return text

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._stripped(self._end_bytes())

    def _push_bytes(self, piece: bytes) -> str:
        # Byte-level vocabularies: bytes join across tokens; a broken sequence costs one U+FFFD and no more.
        data = self._bytes + piece
        text, length = codecs.utf_8_decode(data, "replace")
        self._bytes = data[length:]
        return text

    def _push_byte(self, byte: int) -> str:
        # Byte fallback: a run of byte tokens is text if the whole run is valid, else each of its bytes is a U+FFFD.
        if self._run == "broken":
            return _REPLACEMENT
        data = self._bytes + bytes((byte,))
        try:
            text, length = codecs.utf_8_decode(data)
        except UnicodeDecodeError:
            self._bytes, self._run = b"", "broken"
            return _REPLACEMENT * len(data)
        if self._run != "released" and len(data) < MAX_BYTE_RUN:
            self._bytes, self._run = data, "held"
            return ""
        self._bytes, self._run = data[length:], "released"
        return text

    def _end_bytes(self) -> str:
        data, run = self._bytes, self._run
        self._bytes, self._run = b"", None
        if run is None:
            return data.decode(errors="replace")
        text, length = codecs.utf_8_decode(data)
        return text if length == len(data) else _REPLACEMENT * len(data)

    def _stripped(self, text: str) -> str:
        content, count = self._strip
        if not (count and text):
            return text
        rest = text[:count].lstrip(content) + text[count:]
        self._strip = (content, 0 if rest else count - len(text))
        return rest


class WindowDetokenizer(Detokenizer):
    """Decodes a window of the latest tokens: for tokenizers whose pieces are not independent."""

    __slots__ = ("_decode", "_ids", "_parts", "_read", "_start")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._parts: list[str] = []
        self._start = 0
        self._read = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        ids = self._ids
        ids.extend(token_ids)
        before = self._decode(ids[self._start : self._read])
        text = self._decode(ids[self._start :])
        is_full = len(ids) - self._read >= _MAX_WINDOW
        if not is_full and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        self._start, self._read = self._read, len(ids)
        self._parts.append(text[len(before) :])
        return self._parts[-1]

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        # Once per request the whole is decoded, so that what the window got wrong at the end comes right.
        text = self._decode(self._ids)
        emitted = "".join(self._parts)
        return text[len(emitted) :] if text.startswith(emitted) else ""

    def fork(self) -> Self:
        """See `Detokenizer.fork`."""
        other = copy.copy(self)
        other._ids, other._parts = self._ids.copy(), self._parts.copy()
        return other


class CleaningDetokenizer(Detokenizer):
    """Another detokenizer's text, with replacements: one pass over the whole text each, in their order."""

    __slots__ = ("_inner", "_stages")

    def __init__(self, inner: Detokenizer, stages: Iterable[Replacer]) -> None:
        self._inner, self._stages = inner, list(stages)

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        text = self._inner.push(token_ids)
        for stage in self._stages:
            text = stage.push(text)
        return text

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        text = self._inner.flush()
        for stage in self._stages:
            text = stage.push(text) + stage.flush()
        return text

    def fork(self) -> Self:
        """See `Detokenizer.fork`."""
        return type(self)(self._inner.fork(), map(copy.copy, self._stages))


class MarkingDetokenizer(Detokenizer):
    """Another detokenizer's text with a mark for some tokens; text that the other one holds back follows its mark."""

    __slots__ = ("_inner", "_marks")

    def __init__(self, inner: Detokenizer, marks: Mapping[int, str]) -> None:
        self._inner, self._marks = inner, marks

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        return "".join([self._inner.push((token_id,)) + self._marks.get(token_id, "") for token_id in token_ids])

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._inner.flush()

    def fork(self) -> Self:
        """See `Detokenizer.fork`."""
        return type(self)(self._inner.fork(), self._marks)
