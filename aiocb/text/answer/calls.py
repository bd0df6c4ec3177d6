"""What every parser of calls is given, and how it reads a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aiocb.text.answer.reader import Reader, Steps

__all__ = ["Calls", "Parser", "take_name"]

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


def take_name(reader: Reader, calls: Calls) -> Steps[str | None]:
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
