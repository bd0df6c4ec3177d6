"""Tool calls and reasoning of earlier turns, in the form that a chat template takes them; found out by rendering."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiocb.errors import InvalidRequest, show_value
from aiocb.text.answer.dialect import Dialect

__all__ = ["HistoryForm", "find_history_form", "merge_messages", "shape_history"]

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Any]], str | None]
"""Messages and tools to text; None where the template refuses."""

_FUNCTION, _KEY, _VALUE, _RESULT = "Xq7f", "Xq7k", "Xq7v", "Xq7r"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ID_CHARACTERS = string.digits + string.ascii_letters
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": ""}}},
    },
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class HistoryForm(NamedTuple):
    """What a template renders of calls in earlier turns.

    Attributes:
        renders_calls: it has words for them; else they have to be part of the content.
        has_mappings: arguments are a mapping, not JSON text.
        empty: the content of a message that has none: "" or None.
        has_short_ids: an id is nine letters and digits.
    """

    renders_calls: bool = False
    has_mappings: bool = True
    empty: str | None = ""
    has_short_ids: bool = False


def find_history_form(render: Render) -> HistoryForm:
    """Render a conversation with a call in all forms that templates ask for; the first that comes out right counts."""
    is_refused = True
    for empty in ("", None):
        for has_mappings in (True, False):
            for call_id in ("call_0123456789", "012345678"):
                arguments: Any = {_KEY: _VALUE}
                call = {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": _FUNCTION,
                        "arguments": arguments if has_mappings else json.dumps(arguments),
                    },
                }
                result = {"role": "tool", "tool_call_id": call_id, "name": _FUNCTION, "content": _RESULT}
                calling = {"role": "assistant", "content": empty, "tool_calls": [call]}
                text = render([{"role": "user", "content": "x"}, calling, result], [_PROBE_TOOL])
                is_refused = is_refused and text is None
                # In Python's own notation it is no call that a model could learn from.
                if text is not None and _VALUE in text and f"'{_KEY}'" not in text:
                    return HistoryForm(True, has_mappings, empty, call_id == "012345678")
    return HistoryForm(renders_calls=is_refused)  # refused throughout: nothing is known


def shape_history(messages: Sequence[Message], form: Callable[[], HistoryForm], dialect: Dialect) -> list[Message]:
    """Messages as the template takes them; those that need no change are passed on.

    Args:
        messages: as `take_prompt` returns them.
        form: found out only when there are calls.
        dialect: of the template.

    Raises:
        InvalidRequest: calls that are none.
    """
    names: dict[str, str] = {}
    shaped: list[Message] = []
    has_tools = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
    wanted = form() if has_tools else HistoryForm()
    for number, message in enumerate(messages):
        where = f"message {number} ({show_value(message['role'])})"
        if message["role"] == "developer" and not dialect.knows_developer:
            message = {**message, "role": "system"}
            if shaped and shaped[-1]["role"] == "system" and len(shaped) == 1:
                shaped[0] = merge_messages(shaped[0], message)
                continue
        if message["role"] == "assistant":
            if message.get("tool_calls"):
                message = _with_calls(message, wanted, dialect, where, names)
            elif "tool_calls" in message:
                message = {key: value for key, value in message.items() if key != "tool_calls"}
            message = _with_thoughts(message, dialect)
        elif message["role"] == "tool":
            message = _result(message, wanted, names)
        shaped.append(message)
    return shaped


def merge_messages(first: Message, second: Message) -> Message:
    """One system message of two: most templates take one, at the beginning."""
    parts: list[Any] = [content for content in (first.get("content"), second.get("content")) if content]
    if all(isinstance(content, str) for content in parts):
        return {**first, "content": "\n\n".join(parts)}
    listed: list[Any] = []
    for content in parts:
        between = [{"type": "text", "text": "\n\n"}] if listed else []
        listed += [*between, *(content if isinstance(content, list) else [{"type": "text", "text": content}])]
    return {**first, "content": listed}


def _with_calls(
    message: Message, wanted: HistoryForm, dialect: Dialect, where: str, names: dict[str, str]
) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise InvalidRequest(f"the tool_calls of {where} must be a list, not {show_value(calls)}")
    shaped: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if function is None or not isinstance(name, str) or not name:
            raise InvalidRequest(
                f"the tool_calls of {where} must be of the form {{'id': ..., 'function': {{'name': ..., 'arguments': "
                f"...}}}}, not {show_value(call)}"
            )
        call_id = call.get("id")
        call_id = _shaped_id(call_id if isinstance(call_id, str) and call_id else f"{len(names):09}", wanted)
        names[call_id] = name
        arguments = _arguments(function.get("arguments"), wanted.has_mappings, f"the call of {name!r} in {where}")
        shaped.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    kept = {**message, "tool_calls": shaped}
    content = message.get("content")
    if not wanted.renders_calls:
        del kept["tool_calls"]
        kept["content"] = _as_text(content, [call["function"] for call in shaped], dialect)
    elif not content:
        kept["content"] = wanted.empty
    return kept


def _arguments(arguments: Any, as_mapping: bool, where: str) -> Any:
    """Arguments in the form that is wanted. What is no JSON object (a model can write anything) is wrapped in one."""
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            found = arguments
        if found is None:
            found = {}
        if not as_mapping:
            return arguments if isinstance(found, dict) and arguments.strip() not in ("", "null") else json.dumps(found)
        return found if isinstance(found, dict) else {"arguments": arguments}
    if arguments is not None and not isinstance(arguments, Mapping):
        raise InvalidRequest(f"the arguments of {where} must be JSON text or a mapping, not {show_value(arguments)}")
    return (arguments or {}) if as_mapping else json.dumps(arguments or {}, ensure_ascii=False)


def _as_text(content: Any, functions: Sequence[Mapping[str, Any]], dialect: Dialect) -> Any:
    """A content with calls as the model writes them, for templates that have no words for them."""
    opener = next(iter(dialect.call_format.openers), "") if dialect.call_format is not None else ""
    closer = "</tool_call>" if opener == "<tool_call>" else ""
    text = opener + json.dumps(list(functions), ensure_ascii=False) + closer
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n{text}" if content else text


def _shaped_id(call_id: str, wanted: HistoryForm) -> str:
    """The same id always becomes the same one."""
    if not wanted.has_short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
    return "".join([_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in digest[:9]])


def _result(message: Message, wanted: HistoryForm, names: Mapping[str, str]) -> Message:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str):
        return message
    call_id = _shaped_id(call_id, wanted)
    name = message.get("name") or names.get(call_id)
    return {**message, "tool_call_id": call_id, **({} if name is None else {"name": name})}


def _with_thoughts(message: Message, dialect: Dialect) -> Message:
    """Reasoning under the name that the template uses; left out where it takes none."""
    thoughts = next((message[key] for key in _THOUGHTS if isinstance(message.get(key), str)), None)
    if thoughts is None:
        return message
    kept = {key: value for key, value in message.items() if key not in _THOUGHTS}
    key = dialect.thought_key
    if key == "parts":
        content = kept.get("content")
        rest = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        kept["content"] = [{"type": "thinking", "thinking": thoughts}, *rest]
    elif key is not None:
        kept[key] = thoughts
    return kept
