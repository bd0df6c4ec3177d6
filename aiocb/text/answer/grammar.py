"""Grammars for answers that have to be calls, or may be calls with valid arguments; in llguidance's Lark syntax.

```
start: [reasoning] calls          required, or by name
start: [reasoning] (calls | schema)   a choice of the model's, beside a schema for the answer
start: [reasoning] text [calls]   a choice of the model's, with strict functions
```
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from aiocb.errors import InvalidRequest
from aiocb.structure import Structure, schema_text
from aiocb.text.answer.dialect import AnswerPlan
from aiocb.text.answer.formats import DEEPSEEK_SEP

__all__ = ["answer_grammar"]

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""No room for white space: small models fill it to the last token."""
_ANY = "/(?s:.*)/"

Symbol = Callable[[str], str]
"""A marker as the grammar's symbol: a token of its own, or text."""


def answer_grammar(
    plan: AnswerPlan,
    marker: Callable[[str], int | None],
    *,
    forced: bool,
    structure: Structure | None = None,
) -> str:
    """The grammar of an answer.

    Args:
        plan: what is looked for; its functions, unless there are none to call, are what may be called.
        marker: the id of the token that is this marker, if there is one.
        forced: the answer has to be a call.
        structure: of the answer where it is no call, but not a whole grammar; None where it may be any text.

    Raises:
        InvalidRequest: nothing is known about how this model writes calls, or a schema is wrong.
    """

    def symbol(text: str) -> str:
        token_id = marker(text)
        return _text(text) if token_id is None else f"<[{token_id}]>"

    rules: list[str] = []
    answer = "" if structure is None else _structured(structure)
    if plan.schemas and plan.looks_for_calls:
        calls = _Calls(plan, symbol, rules).rule()
        if forced:
            answer = calls
        elif structure is not None:
            answer = f"({calls} | {answer})"
        else:
            answer = _text_then_calls(plan, calls, symbol, rules)
    return "\n".join([f"start: {_reasoning(plan, symbol, rules)}{answer}", *rules])


def _structured(structure: Structure) -> str:
    if structure.kind == "json_schema":
        return _json(json.loads(structure.text))
    if structure.kind == "choice":
        return "(" + " | ".join(map(_text, json.loads(structure.text))) + ")"
    pattern = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], structure.text, flags=re.DOTALL)
    return f"/{pattern}/"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT}, ensure_ascii=False)


def _reasoning(plan: AnswerPlan, symbol: Symbol, rules: list[str]) -> str:
    """What may come before the part that is constrained: the rest of a block, or a block if the model begins one."""
    marks = plan.dialect.thoughts
    found = plan.call_format
    if found is not None and found.has_messages:
        rules.append(
            f'reasoning: {symbol("<|channel|>")} "analysis" {symbol("<|message|>")} {_up_to("<|end|>", symbol, rules)} '
            f'{symbol("<|start|>")} "assistant"'
        )
        return "reasoning? "
    if marks is None or plan.is_thought_over:
        return ""
    rules.append(f"thoughts: {_up_to(marks.closer, symbol, rules)} /[ \\n]{{0,4}}/")
    return "thoughts " if plan.is_thinking else f"({symbol(marks.opener)} thoughts)? "


def _up_to(marker: str, symbol: Symbol, rules: list[str]) -> str:
    """Any text, and the first marker in it. No text holds a token that is a marker of its own."""
    if symbol(marker).startswith("<["):
        return f"{_ANY} {symbol(marker)}"
    rules.append(f"up_to[suffix={_text(marker)}]: {_ANY}")
    return "up_to"


def _text_then_calls(plan: AnswerPlan, calls: str, symbol: Symbol, rules: list[str]) -> str:
    """Any text, which a call may follow; what begins a call is one."""
    found = plan.call_format
    assert found is not None
    opener = next(iter(found.openers), "")
    if not opener:
        rules.append('text: "" | /[^\\s{\\[`](?s:.*)/')
        return f"(text | {calls})"
    if symbol(opener).startswith("<["):
        return f"{_ANY} ({calls})?"
    within = re.escape(opener).replace("/", "\\/")
    rules += ["text: NO_CALL", f"NO_CALL: {_ANY} & ~/(?s:.*){within}(?s:.*)/"]
    return f"(text | {calls})"  # a lexer is greedy: it cannot leave a text where the mark begins


class _Calls:
    """The rule of one family's calls."""

    def __init__(self, plan: AnswerPlan, symbol: Symbol, rules: list[str]) -> None:
        self._plan = plan
        self._symbol = symbol
        self._rules = rules
        self._names = sorted(plan.schemas)

    def rule(self) -> str:
        """The symbols that stand for one call, or several where that is wanted."""
        found = self._plan.call_format
        make = None if found is None else _MAKERS.get(found.name)
        if make is None:
            raise InvalidRequest(
                "how this model writes tool calls is not known, so that it cannot be made to call one: set "
                "EngineConfig(tool_parser=...), with 'json' for any model"
            )
        return make(self)

    def _several(self, call: str, between: str) -> str:
        if self._plan.ends_after_call:
            return call
        return f"{call} ({between} {call})*" if between else f"{call}+"

    def _one_of(self, rule: str, make: Callable[[str, Any], str]) -> str:
        """A rule with an alternative for each function."""
        self._rules.append(f"{rule}: " + " | ".join([make(name, self._parameters(name)) for name in self._names]))
        return rule

    def _parameters(self, name: str) -> dict[str, Any]:
        """The schema of a function's parameters, an object whatever it says."""
        schema: Mapping[str, Any] = self._plan.schemas[name]
        try:
            kept: dict[str, Any] = json.loads(schema_text(schema))
        except InvalidRequest as error:
            raise InvalidRequest(f"the parameters of the function {name!r}: {error}") from error
        kept.setdefault("type", "object")
        if "properties" in kept:
            kept.setdefault("additionalProperties", False)
        return kept

    def _object(self, key: str = "arguments") -> str:
        def make(name: str, schema: Any) -> str:
            head = _text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
            return f'{head} {_json(schema)} "}}"'

        return self._one_of("call", make)

    def _list(self) -> str:
        return f'"[" {self._several(self._object(), _text(", "))} "]"'

    def hermes(self) -> str:
        opener, closer = self._symbol("<tool_call>"), self._symbol("</tool_call>")
        self._rules.append(f'tagged: {opener} "\\n" {self._object()} "\\n" {closer}')
        return self._several("tagged", _text("\n"))

    def smollm(self) -> str:
        return f"{self._symbol('<tool_call>')} {self._list()} {self._symbol('</tool_call>')}"

    def granite(self) -> str:
        return f"{self._symbol('<|tool_call|>')} {self._list()}"

    def llama3(self) -> str:
        return self._several(self._object("parameters"), _text("; "))

    def json(self) -> str:
        one = self._object()
        if self._plan.ends_after_call:
            return one
        return f'({one} | "[" {one} (", " {one})* "]")'

    def mistral(self) -> str:
        opener = self._symbol("[TOOL_CALLS]")
        if not self._plan.dialect.has_other_form:
            return f"{opener} {self._list()}"
        mark = self._symbol("[ARGS]")
        call = self._one_of("call", lambda name, schema: f"{opener} {_text(name)} {mark} {_json(schema)}")
        return self._several(call, "")

    def deepseek(self) -> str:
        begin, end, all_begin, all_end, sep = map(self._symbol, _DEEPSEEK)

        def make(name: str, schema: Any) -> str:
            if self._plan.dialect.has_other_form:
                head = _text(f"{name}\n```json\n")
                return f'{begin} "function" {sep} {head} {_json(schema)} "\\n```" {end}'
            return f"{begin} {_text(name)} {sep} {_json(schema)} {end}"

        calls = self._several(self._one_of("call", make), '"\\n"?')
        return f"{all_begin} {calls} {all_end}"

    def harmony(self) -> str:
        # Without the mark that ends a call: models have it among the tokens that end everything.
        channel, constrain, message = map(self._symbol, ("<|channel|>", "<|constrain|>", "<|message|>"))

        def make(name: str, schema: Any) -> str:
            head = _text(f"commentary to=functions.{name} ")
            return f'{channel} {head} {constrain} "json" {message} {_json(schema)}'

        return self._one_of("call", make)

    def qwen3_coder(self) -> str:
        opener, closer = self._symbol("<tool_call>"), self._symbol("</tool_call>")

        def make(name: str, schema: Any) -> str:
            parts = [opener, _text(f"\n<function={name}>\n")]
            required = schema.get("required", ())
            end = _text("\n</parameter>\n")
            for number, (key, each) in enumerate(schema.get("properties", {}).items()):
                rule = f"value_{self._names.index(name)}_{number}"
                is_text = isinstance(each, Mapping) and each.get("type") == "string" and "enum" not in each
                if is_text:
                    value = f"{rule}_text"
                    self._rules.append(f"{value}[suffix={end}]: {_ANY}")
                elif isinstance(each, Mapping) and each.get("type") == "string":
                    choices = " | ".join(_text(str(choice)) for choice in each["enum"])
                    value = f"({choices}) {end}"
                else:
                    within = {**each, **{k: schema[k] for k in ("$defs", "definitions") if k in schema}}
                    value = f"{_json(within)} {end}"
                head = _text(f"<parameter={key}>\n")
                self._rules.append(f"{rule}: {head} {value}")
                parts.append(rule if key in required else f"{rule}?")
            return " ".join([*parts, f'"</function>\\n" {closer}'])

        return self._several(self._one_of("call", make), _text("\n"))


_DEEPSEEK = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    DEEPSEEK_SEP,
)
_MAKERS: Mapping[str, Callable[[_Calls], str]] = {
    "hermes": _Calls.hermes,
    "smollm": _Calls.smollm,
    "granite": _Calls.granite,
    "llama3": _Calls.llama3,
    "json": _Calls.json,
    "mistral": _Calls.mistral,
    "deepseek": _Calls.deepseek,
    "harmony": _Calls.harmony,
    "qwen3_coder": _Calls.qwen3_coder,
}
