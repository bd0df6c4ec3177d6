"""What may be a prompt, and a copy of it that nobody changes. No tokenizer is needed here; nothing is rendered."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiocb.errors import InvalidRequest, explain, show_value

__all__ = ["Messages", "Refused", "TakenPrompt", "take_prompt", "take_values", "text_length", "texts_of"]

_MAX_DEPTH = 64
_MAX_VALUES = 200_000
_KINDS = "a prompt must be a text, a list of token ids, a list of chat messages, or a tokenizer's encoding"
_EMPTY = "the prompt is empty: give a text, at least one token id (say, the one that begins a text), or a chat message"


@dataclass(frozen=True, slots=True)
class Messages:
    """Chat messages as they were when they were taken: plain mappings, which are not changed."""

    messages: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A prompt that can be none; told to whoever waits for its output, not to whoever made a stream of it."""

    reason: str


TakenPrompt = str | tuple[Any, ...] | Messages | Refused
"""A text, token ids (their values unchecked), chat messages, or why it is none of these."""


def take_prompt(prompt: Any) -> TakenPrompt:
    """Copy a prompt, so that what its owner does to it afterwards does not matter. Cheap: text is not copied.

    Args:
        prompt: a text; token ids as a sequence, an array or tensor of one row, or a tokenizer's encoding (padding is
            dropped); chat messages as mappings, or as objects with the same fields (those of the OpenAI client, data
            classes); or what this function has returned before.
    """
    try:
        return _take(prompt)
    except InvalidRequest as error:
        return Refused(str(error))
    except Exception as error:  # of a user's own class
        return Refused(f"the prompt cannot be read: {explain(error)}")


def take_values(name: str, value: Any) -> Any:
    """Copy nested lists and mappings of plain values; objects with fields become mappings, others are kept.

    Raises:
        InvalidRequest: it is nested too deeply, contains itself, or is too large.
    """
    return None if value is None else _copy(name, value, _MAX_DEPTH, [_MAX_VALUES])


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a copied structure, keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Messages):
        yield from texts_of(value.messages)
    elif isinstance(value, Mapping):
        yield from texts_of(tuple(value.items()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from texts_of(each)


def text_length(value: Any) -> int:
    """Characters of all texts in a copied structure, keys of mappings included."""
    return sum(map(len, texts_of(value)))


def _take(prompt: Any) -> TakenPrompt:
    if isinstance(prompt, (str, Messages, Refused)):
        if not prompt:
            raise InvalidRequest(_EMPTY)
        return prompt
    if _is_message(prompt):
        return _take_messages([prompt])
    if isinstance(prompt, (list, tuple)) and prompt and (isinstance(prompt[0], Mapping) or _is_message(prompt[0])):
        return _take_messages(prompt)
    ids = _ids_of(prompt)
    if not ids:
        raise InvalidRequest(_EMPTY)
    return ids


def _is_message(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "role" in value
    return isinstance(getattr(value, "role", None), str)


def _take_messages(messages: Sequence[Any]) -> Messages:
    budget = [_MAX_VALUES]
    taken = []
    for message in messages:
        if not isinstance(message, Mapping) and not _is_message(message):
            raise InvalidRequest(
                f"a chat message must be a mapping with a 'role' and its 'content', not {show_value(message)}"
            )
        copied = _copy("a chat message", message, _MAX_DEPTH, budget)
        role = copied.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"a chat message must have a 'role', which is a text: {show_value(message)}")
        # What other programs write for "not there" would be rendered as the word None.
        taken.append({key: value for key, value in copied.items() if value is not None})
    return Messages(tuple(taken))


def _copy(name: str, value: Any, depth: int, budget: list[int]) -> Any:
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)  # an enumeration's member prints its name
    if isinstance(value, (int, float)) or value is None:
        return value
    if depth == 0:
        raise InvalidRequest(f"{name} is nested more than {_MAX_DEPTH} levels deep, or contains itself; flatten it")
    fields = value if isinstance(value, (Mapping, list, tuple)) else _fields_of(value)
    if fields is None:
        return value
    budget[0] -= len(fields)
    if budget[0] < 0:
        raise InvalidRequest(f"{name} holds more than {_MAX_VALUES} values; give fewer")
    if isinstance(fields, Mapping):
        return {key: _copy(name, each, depth - 1, budget) for key, each in fields.items()}
    return [_copy(name, each, depth - 1, budget) for each in fields]


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of an object that stands for a mapping; those that are None are not there."""
    if isinstance(value, type) or callable(value):
        return None
    dump = getattr(value, "model_dump", None)
    if callable(dump):  # pydantic's, without knowing it
        fields = dump()
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        fields = getattr(value, "__dict__", None)
    if not isinstance(fields, Mapping):
        return None
    return {key: each for key, each in fields.items() if each is not None and not str(key).startswith("_")}


def _ids_of(prompt: Any) -> tuple[Any, ...]:
    mask = None
    if isinstance(prompt, Mapping) or isinstance(getattr(prompt, "data", None), Mapping):
        # transformers' BatchEncoding is a UserDict.
        data = prompt if isinstance(prompt, Mapping) else prompt.data
        if "input_ids" not in data:
            raise InvalidRequest(
                "a mapping as a prompt must be a chat message with a 'role', or a tokenizer's encoding with 'input_ids'"
            )
        mask = data.get("attention_mask")
        prompt = data["input_ids"]
        if isinstance(prompt, (list, tuple)) and len(prompt) == 1 and isinstance(prompt[0], (list, tuple)):
            prompt, mask = prompt[0], mask and mask[0]
    elif hasattr(prompt, "ids") and hasattr(prompt, "attention_mask"):  # tokenizers.Encoding
        prompt, mask = prompt.ids, prompt.attention_mask
    ids, kept = _row(prompt), None if mask is None else _row(mask)
    if kept is not None and len(kept) == len(ids) and 0 in kept:
        ids = tuple([token_id for token_id, keep in zip(ids, kept, strict=True) if keep])
    return ids


def _row(values: Any) -> tuple[Any, ...]:
    """The elements of a sequence, or of a tensor or array of one row."""
    if isinstance(values, array.array):
        return tuple(values)
    if hasattr(values, "tolist") and hasattr(values, "dtype"):
        shape = tuple(values.shape)
        if len(shape) == 2 and shape[0] == 1:
            return tuple(values.tolist()[0])
        if len(shape) != 1:
            raise InvalidRequest(f"a prompt of token ids must have one dimension, not the shape {list(shape)}")
        return tuple(values.tolist())
    if isinstance(values, (list, tuple, range)):
        if values and isinstance(values[0], (str, list, tuple)):
            raise InvalidRequest("several prompts were given where one is expected; use generate_batch for many")
        return tuple(values)
    raise InvalidRequest(f"{_KINDS}, not {type(values).__name__}")
