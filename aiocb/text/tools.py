"""The functions that a request offers: as schemas, as what may be chosen, and in words where a template has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiocb.errors import InvalidRequest, explain, show_value

__all__ = ["ToolSet", "check_tool_choice", "describe_tools", "take_tools"]

_CHOICES = ("auto", "none", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools as a template takes them, and how they may be called.

    Attributes:
        tools: in OpenAI's shape.
        choice: `auto`, `none`, `required`, or the name of a function.
        is_parallel: several calls in one answer are wanted.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    is_parallel: bool = True
    is_named: bool = False

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of the parameters of every function that may be called, by its name."""
        if self.choice == "none":
            return {}
        return {
            each["function"]["name"]: each["function"]["parameters"]
            for each in self.tools
            if not self.is_named or each["function"]["name"] == self.choice
        }

    @property
    def strict(self) -> frozenset[str]:
        """Functions whose arguments must be valid."""
        return frozenset(each["function"]["name"] for each in self.tools if each["function"].get("strict") is True)

    @property
    def is_forced(self) -> bool:
        """The answer has to be a call."""
        return self.is_named or self.choice == "required"


def check_tool_choice(choice: Any, is_parallel: Any, has_tools: bool) -> None:
    """Check what can be seen without looking at the tools.

    Raises:
        InvalidRequest: it is none of the choices, or there is nothing to choose from.
    """
    if not isinstance(is_parallel, bool):
        raise InvalidRequest(f"parallel_tool_calls must be True or False, not {show_value(is_parallel)}")
    if choice is None:
        return
    if not (isinstance(choice, str) and choice in _CHOICES) and _named(choice) is None:
        raise InvalidRequest(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}, not "
            f"{show_value(choice)}"
        )
    if not has_tools and choice not in ("auto", "none"):
        raise InvalidRequest(f"tool_choice={show_value(choice)} needs tools: pass the functions that may be called")


def _named(choice: Any) -> str | None:
    if not isinstance(choice, Mapping) or choice.get("type", "function") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


def take_tools(tools: Sequence[Any] | None, choice: Any = None, is_parallel: bool = True) -> ToolSet:
    """Read tools: JSON schemas in OpenAI's shape, with or without its wrapper, or documented functions.

    Args:
        tools: plain values and functions; not changed.
        choice, is_parallel: as `check_tool_choice` has passed them.

    Raises:
        InvalidRequest: one is no function, has no name or another one's, or the choice is not among them.
    """
    taken = tuple([_take_tool(number, tool) for number, tool in enumerate(tools or ())])
    names = [tool["function"]["name"] for tool in taken]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"two tools have the name {show_value(twice)}: a call must say which one it means")
    named = _named(choice)
    if named is None:
        return ToolSet(taken, choice or "auto", is_parallel)
    if named not in names:
        raise InvalidRequest(f"tool_choice names {show_value(named)}, which is not among the tools: {', '.join(names)}")
    return ToolSet(taken, named, is_parallel=False, is_named=True)


def _take_tool(number: int, tool: Any) -> dict[str, Any]:
    where = f"tool {number}"
    if callable(tool):
        tool = _schema_of(where, tool)
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"{where} must be a JSON schema or a function, not {show_value(tool)}")
    kind = tool.get("type", "function")
    function = tool.get("function", tool)
    if kind not in ("function", None) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{where} has the type {show_value(kind)}: only functions can be called here")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise InvalidRequest(f"{where} must have a 'name', not {show_value(name)}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = dict(_NO_PARAMETERS)
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"the 'parameters' of {where} must be a JSON schema, not {show_value(parameters)}")
    kept = {key: value for key, value in function.items() if key != "type" and value is not None}
    return {"type": "function", "function": {**kept, "parameters": parameters}}


def _schema_of(where: str, function: Callable[..., Any]) -> Any:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # it reads docstrings and type hints of a user's function
        raise InvalidRequest(f"{where} needs type hints and a docstring that describes it: {explain(error)}") from error


def describe_tools(tools: Sequence[Mapping[str, Any]], *, in_json: bool) -> str:
    """Words about tools for a model whose template has none.

    Args:
        tools: as `take_tools` returns them.
        in_json: say that a call is written as JSON; a model that has a way of its own knows it.
    """
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    how = 'To call one, answer with JSON alone: {"name": <function>, "arguments": {<parameter>: <value>}}'
    return "\n".join(["You can call these functions:", *lines, *([how] if in_json else [])])
