"""How a model writes reasoning and calls, told by its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiocb.errors import ConfigError
from aiocb.text.answer.formats import FORMATS, CallFormat
from aiocb.text.answer.parser import AnswerParser, ThoughtMarks

__all__ = ["THOUGHTS", "AnswerPlan", "Dialect", "check_parsers", "find_dialect"]

THOUGHTS: Mapping[str, ThoughtMarks] = {
    "think": ThoughtMarks("<think>", "</think>"),
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "seed": ThoughtMarks("<seed:think>", "</seed:think>"),
    "cohere": ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""Marks of reasoning, by the name that a setting has for them."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is looked for in the answers of a model.

    Attributes:
        call_format: of tool calls; None where nothing is known.
        thoughts: the marks of reasoning.
        thought_key: the field of an assistant's message that the template takes its reasoning from; `parts` where it
            is a part of the content; None where it takes none.
        knows_developer: the template treats the role `developer` in its own way.
        is_asked_for: the format of calls is a setting, not a guess.
        has_other_form: of the two ways in which a family has written calls, the template has that with `[ARGS]`
            (Mistral's later one), or with a fence (DeepSeek's earlier one).
    """

    call_format: CallFormat | None = None
    thoughts: ThoughtMarks | None = None
    thought_key: str | None = None
    knows_developer: bool = False
    is_asked_for: bool = False
    has_other_form: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """What the settings call the format of calls and the marks of reasoning."""
        calls = self.call_format
        if calls is not None and calls.has_messages:
            return calls.name, calls.name
        marks = next((name for name, marks in THOUGHTS.items() if marks == self.thoughts), "none")
        return "none" if calls is None else calls.name, marks


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Check settings.

    Raises:
        ConfigError: a name is unknown.
    """
    for name, value, known in (
        ("tool_parser", tool_parser, ("auto", "none", *FORMATS)),
        ("reasoning_parser", reasoning_parser, ("auto", "none", *THOUGHTS)),
    ):
        if value not in known:
            raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}")


def find_dialect(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Dialect:
    """Read from a template what its model writes, or take what is asked for.

    Args:
        template: the source of a chat template.
        tool_parser, reasoning_parser: see `EngineConfig`.
    """
    call_format = FORMATS.get(tool_parser)
    if tool_parser == "auto":
        call_format = next((each for each in FORMATS.values() if _has_signs(template, each)), None)
    thoughts = THOUGHTS.get(reasoning_parser)
    if reasoning_parser == "auto":
        thoughts = next((marks for marks in THOUGHTS.values() if any(mark in template for mark in marks)), None)
    return Dialect(
        call_format,
        thoughts,
        next((key for key, sign in _THOUGHT_KEYS if sign.search(template)), None),
        "developer" in template,
        tool_parser != "auto",
        "[ARGS]" in template or "```json" in template,
    )


def _has_signs(template: str, call_format: CallFormat) -> bool:
    return any(all(sign in template for sign in signs) for signs in call_format.signs)


def _key(name: str) -> re.Pattern[str]:
    return re.compile(rf"""\.{name}\b|\[\s*['"]{name}['"]\s*\]|['"]{name}['"]\s+in\s|get\(\s*['"]{name}['"]""")


_THOUGHT_KEYS = (
    ("reasoning_content", _key("reasoning_content")),
    ("parts", re.compile(r"""==\s*['"]thinking['"]""")),
    ("thinking", _key("thinking")),
    ("reasoning", _key("reasoning")),
)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What has to be found in the answers to one prompt.

    Attributes:
        dialect: how it is written.
        is_thinking: the prompt has opened a block of reasoning.
        is_thought_over: the prompt ends with the end of such a block: none is to follow.
        schemas: of the parameters of the functions that may be called, by name.
        looks_for_calls: there are tools.
        ends_after_call: a second call is not wanted.
    """

    dialect: Dialect
    is_thinking: bool = False
    is_thought_over: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)
    looks_for_calls: bool = False
    ends_after_call: bool = False

    @property
    def call_format(self) -> CallFormat | None:
        """The format of calls, where they are looked for."""
        found = self.dialect.call_format
        return found if found is not None and (self.looks_for_calls or found.has_messages) else None

    @property
    def is_plain(self) -> bool:
        """True where everything is content."""
        return self.dialect.thoughts is None and self.call_format is None

    @property
    def markers(self) -> tuple[str, ...]:
        """What must reach the parser even where it is a special token."""
        found = self.call_format
        return (*(self.dialect.thoughts or ()), *(() if found is None else found.markers))

    def parser(self) -> AnswerParser:
        """A fresh one for one answer."""
        return AnswerParser(
            self.dialect.thoughts,
            is_thinking=self.is_thinking,
            call_format=self.call_format,
            names=frozenset(self.schemas),
            schemas=self.schemas,
        )
