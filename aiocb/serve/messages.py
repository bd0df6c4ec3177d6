"""Messages of the wire to those of the engine: texts joined, roles and histories as templates know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiocb.serve.errors import ApiError
from aiocb.serve.wire import Message

__all__ = ["messages_of"]

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def messages_of(messages: Sequence[Message], place: str = "messages") -> list[dict[str, Any]]:
    """The messages as the engine takes them; nothing of them is dropped.

    Raises:
        ApiError: a part that is no text, or a message that lacks something, by its place.
    """
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"{place}[{number}]"
        fields = {name: value for name, value in message.model_dump().items() if value is not None}
        if fields["role"] == "developer":
            fields["role"] = "system"
        if "content" in fields:
            fields["content"] = _text_of(fields["content"], where)
        elif not fields.get("tool_calls") and fields["role"] != "assistant":
            raise ApiError(400, f"{where}.content is missing", param=f"{where}.content")
        else:
            fields["content"] = ""
        if fields.get("tool_calls") == []:
            del fields["tool_calls"]
        made.append(fields)
    return _system_first(made)


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise ApiError(
                400, f"{place}: parts of type {kind!r} are not supported, only text", param=place, code="invalid_value"
            )
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise ApiError(400, f"{place}.{_TEXT_PARTS[kind]} must be a text", param=place, code="invalid_value")
        texts.append(text)
    return "".join(texts)


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several system messages as one at the front, where all templates look for it."""
    systems = [message for message in messages if message["role"] == "system"]
    if len(systems) < 2 and (not systems or messages[0] is systems[0]):
        return messages
    merged = {**systems[0], "content": "\n\n".join([message["content"] for message in systems])}
    return [merged, *[message for message in messages if message["role"] != "system"]]
