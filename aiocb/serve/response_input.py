"""What `/v1/responses` is sent: items of a history to messages of a chat, tools to functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiocb.serve.errors import ApiError
from aiocb.serve.messages import messages_of
from aiocb.serve.wire import Message

__all__ = ["functions_of", "history_of"]

_ROLES = ("system", "developer", "user", "assistant")
HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
        "local_shell", "mcp", "namespace", "shell", "tool_search", "web_search", "web_search_preview",
    }
)  # fmt: skip
"""Tools that a service has beside its model; there are none here. They are left out, and the answer says so."""


def history_of(given: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Messages of a chat.

    Args:
        given: a text of the user's, or items: messages, calls and their outputs, reasoning; what an earlier answer
            holds can be sent back as it is.
        instructions: of the system.

    Raises:
        ApiError: an item of another kind, by its place.
    """
    made: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        made.append({"role": "user", "content": given})
    else:
        if not given:
            raise ApiError(400, "input has no items", param="input", code="invalid_value")
        for number, item in enumerate(given):
            _add(made, item, f"input[{number}]")
    for message in made:
        message.pop("_is_open", None)
    return messages_of([Message.model_validate(message) for message in made], "input")


def _add(made: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, Mapping):
        raise ApiError(400, f"{where} must be an object", param=where, code="invalid_value")
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise ApiError(400, f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
        content = item.get("content")
        if not isinstance(content, (str, list)):
            raise ApiError(400, f"{where}.content must be a text or a list of parts", param=f"{where}.content")
        last = made[-1] if made else {}
        if role == "assistant" and last.get("_is_open") and not last.get("content") and not last.get("tool_calls"):
            last["content"] = content  # behind its own reasoning
        else:
            made.append({"role": role, "content": content, "_is_open": role == "assistant"})
    elif kind in ("function_call", "custom_tool_call"):
        _add_call(made, item, where)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        if not isinstance(item.get("call_id"), str) or not isinstance(output, (str, list)):
            raise ApiError(400, f"{where} needs call_id, and output as a text or parts", param=where)
        made.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    elif kind == "reasoning":
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        thought = "".join([text for text in texts if isinstance(text, str)])
        if thought:
            made.append({"role": "assistant", "content": "", "reasoning_content": thought, "_is_open": True})
    else:
        raise ApiError(
            400, f"{where}: items of type {kind!r} are not supported", param=f"{where}.type",
            code="unsupported_parameter",
        )  # fmt: skip


def _add_call(made: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    name, call_id = item.get("name"), item.get("call_id")
    is_custom = item["type"] == "custom_tool_call"
    arguments = json.dumps({"input": item.get("input")}) if is_custom else item.get("arguments")
    if not all(isinstance(value, str) for value in (name, call_id, arguments)):
        raise ApiError(400, f"{where} needs name, call_id and {'input' if is_custom else 'arguments'}", param=where)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
    if made and made[-1].get("_is_open"):
        made[-1].setdefault("tool_calls", []).append(call)
    else:
        made.append({"role": "assistant", "content": "", "tool_calls": [call], "_is_open": True})


def functions_of(tools: Sequence[Any] | None) -> tuple[list[dict[str, Any]], frozenset[str], list[str]]:
    """Tools in the shape of chats, the names of those that take free text, and the kinds that were left out.

    Raises:
        ApiError: a kind that nobody knows, or one without a name.
    """
    made: list[dict[str, Any]] = []
    custom: set[str] = set()
    left_out: list[str] = []
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind in HOSTED:
            left_out.append(str(kind))
            continue
        if kind not in ("function", "custom") or not isinstance(tool.get("name"), str):
            raise ApiError(
                400, f"{where}: tools must be functions (or custom) with a name, not {kind!r}", param=where,
                code="unsupported_parameter",
            )  # fmt: skip
        parameters = tool.get("parameters")
        if kind == "custom":
            custom.add(tool["name"])
            parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
        if tool.get("strict") is not None and kind == "function":
            function["strict"] = tool["strict"]
        made.append({"type": "function", "function": function})
    return made, frozenset(custom), left_out
