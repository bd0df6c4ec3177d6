"""What clients ask of an answer's shape and of its tools, in the engine's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiocb.serve.errors import ApiError

__all__ = ["schema_of_format", "template_arguments", "tool_choice_of", "tools_of"]

_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NOT_FROM_REQUESTS = frozenset({"chat_template", "add_generation_prompt", "continue_final_message"})


def schema_of_format(form: Any, place: str) -> Any:
    """`json_schema` of the engine for a `response_format` (or `text.format`); None where the answer is free.

    Args:
        form: as sent; the schema may stand under `json_schema` (chats) or beside the type (responses).
        place: for messages.

    Raises:
        ApiError: it is none of `text`, `json_object` and `json_schema`, or has no schema.
    """
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return True
    if kind != "json_schema":
        raise ApiError(
            400, f"{place}.type must be text, json_object or json_schema", param=f"{place}.type", code="invalid_value"
        )
    given = form.get("json_schema")
    held, where = (given, f"{place}.json_schema") if isinstance(given, Mapping) else (form, place)
    schema = held.get("schema")
    if not isinstance(schema, (Mapping, bool)):
        raise ApiError(400, f"{where}.schema must be a JSON schema", param=f"{where}.schema", code="invalid_value")
    return dict(schema) if isinstance(schema, Mapping) else schema


def tools_of(tools: Sequence[Any] | None, place: str = "tools") -> list[dict[str, Any]] | None:
    """Functions as the engine takes them; None where there are none.

    Raises:
        ApiError: a tool of another kind, or without a name, by its place.
    """
    made = []
    for number, tool in enumerate(tools or ()):
        where = f"{place}[{number}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise ApiError(
                400, f"{where}: tools of type {kind!r} are not supported, only functions", param=f"{where}.type",
                code="unsupported_parameter",
            )  # fmt: skip
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(
                400, f"{where}.function needs a name", param=f"{where}.function.name", code="missing_required_parameter"
            )
        function = {key: value for key, value in function.items() if value is not None}
        function.setdefault("description", "")
        function.setdefault("parameters", {"type": "object", "properties": {}})
        made.append({"type": "function", "function": function})
    return made or None


def tool_choice_of(choice: Any, tools: Sequence[Any] | None) -> Any:
    """`tool_choice` as the engine takes it; None where nothing was chosen.

    Raises:
        ApiError: it names no tool of the request, or there are none.
    """
    if choice is None or (choice in ("auto", "none") and not tools):
        return None
    if not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice", code="invalid_value")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if choice.get("type") != "function" or not isinstance(name, str):
            raise ApiError(
                400,
                "tool_choice must be auto, none, required, or name one function",
                param="tool_choice",
                code="invalid_value",
            )
        return {"type": "function", "function": {"name": name}}
    return choice


def template_arguments(
    given: Mapping[str, Any] | None, effort: str | None, template: Any, place: str = "reasoning_effort"
) -> dict[str, Any]:
    """Arguments of the chat template: those of the request, and how much is to be thought.

    Raises:
        ApiError: a request may not bring a template, or ask for an effort that this model does not know.
    """
    arguments = dict(given or {})
    for name in _NOT_FROM_REQUESTS & arguments.keys():
        raise ApiError(
            400, f"chat_template_kwargs.{name} is not taken from requests", param=f"chat_template_kwargs.{name}"
        )
    if effort is None:
        return arguments
    if effort not in _LEVELS:
        raise ApiError(400, f"{place} must be one of {', '.join(_LEVELS)}", param=place, code="invalid_value")
    text = str(template)
    if "reasoning_effort" in text:
        arguments.setdefault("reasoning_effort", effort)
    elif "enable_thinking" in text:
        arguments.setdefault("enable_thinking", effort not in ("none", "minimal"))
    elif effort not in ("none", "minimal"):
        raise ApiError(
            400, f"{place}: the chat template of this model knows no effort; leave it out", param=place,
            code="unsupported_parameter",
        )  # fmt: skip
    return arguments
