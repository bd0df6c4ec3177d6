"""Checks of what users pass: a value of the wanted type, or an `InvalidRequest` that names the argument. Torch-free."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from aiocb.errors import InvalidRequest, show_value

__all__ = [
    "check_bias",
    "check_boolean",
    "check_callables",
    "check_choice",
    "check_eos",
    "check_id_set",
    "check_ids",
    "check_integer",
    "check_logprobs",
    "check_real",
    "check_sequences",
    "check_strings",
    "is_deep_json",
    "items_of",
]

_MAX_LOGPROBS = 1024
_MARKS = r'"(?:[^"\\]|\\.)*+"|[\[\]{}]'
_TEXT_MARKS = re.compile(_MARKS, re.DOTALL)
_BYTE_MARKS = re.compile(_MARKS.encode(), re.DOTALL)


def items_of(value: Any) -> Sequence[Any] | None:
    """The elements of a sequence, or of an array or tensor of one dimension; None for everything else.

    Text is no sequence of elements here; sets and mappings have no order; iterators can be read only once.
    """
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return None
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        items = value.tolist()
        return items if isinstance(items, list) else None
    return None


def is_deep_json(text: str | bytes, most: int) -> bool:
    """True when a JSON text has more levels of lists and objects than `most`; whether it is JSON is not asked.

    Counted without recursion: how deep Python's own parser goes differs by version, from an error to a crash.
    """
    depth = 0
    marks: Iterator[re.Match[Any]] = _TEXT_MARKS.finditer(text) if isinstance(text, str) else _BYTE_MARKS.finditer(text)
    for found in marks:
        mark = found[0]
        if mark in ("[", "{", b"[", b"{"):
            depth += 1
            if depth > most:
                return True
        elif mark in ("]", "}", b"]", b"}"):
            depth -= 1
    return False


def check_real(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False
) -> float:
    """Return `value` as a finite float between two bounds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequest(f"{name} must be a number, not {show_value(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
        left = "(" if open_low or low == -math.inf else "["
        right = ")" if high == math.inf else "]"
        raise InvalidRequest(
            f"{name} must be a finite number in {left}{low:g}, {high:g}{right}, not {show_value(value)}"
        )
    return number


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int between two bounds.

    Raises:
        InvalidRequest: it is none.
    """
    is_integer = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_integer:
        raise InvalidRequest(f"{name} must be an integer, not {show_value(value)}")
    number = int(value)
    if number < low or (high is not None and number > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bound}, not {show_value(number)}")
    return number


def check_boolean(name: str, value: Any) -> bool:
    """Return `value`, which has to be a bool."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, not {show_value(value)}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, which has to be one of some words."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequest(f"{name} must be {' or '.join(map(repr, choices))}, not {show_value(value)}")
    return value


def check_logprobs(name: str, value: Any) -> int | None:
    """Return how many log-probabilities are asked for; False is none, True those of the chosen tokens only."""
    if isinstance(value, bool):
        return 0 if value else None
    return check_integer(name, value, 0, _MAX_LOGPROBS)


def check_ids(name: str, values: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """Return `values` as a tuple of ids below `vocab_size`.

    Raises:
        InvalidRequest: one of them is not an integer or not in the vocabulary.
    """
    result: list[int] = []
    if isinstance(values, (list, tuple)) and set(map(type, values)) == {int}:  # passes in C for the usual case
        least, most = min(values), max(values)
        if least >= 0 and most < vocab_size:
            return tuple(values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise InvalidRequest(f"{name} must hold token ids (integers), not {show_value(value)}")
        number = int(value)
        if not 0 <= number < vocab_size:
            raise InvalidRequest(
                f"{name} holds {show_value(number)}, which is not in the vocabulary (0 .. {vocab_size - 1})"
            )
        result.append(number)
    return tuple(result)


def check_id_set(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Checked ids, each once."""
    if isinstance(value, numbers.Integral):
        value = (value,)
    values = items_of(value)
    if values is None:
        raise InvalidRequest(f"{name} must be a list of token ids, not {show_value(value)}")
    return tuple(dict.fromkeys(check_ids(name, values, vocab_size)))


def check_sequences(name: str, value: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return checked sequences of ids, each once."""
    values = items_of(value)
    if values is None:
        raise InvalidRequest(f"{name} must be a list of lists of token ids, not {show_value(value)}")
    sequences = [items_of(sequence) for sequence in values]
    if any(not sequence for sequence in sequences):
        raise InvalidRequest(f"{name} must hold lists of at least one token id each")
    # All at once: one call each would take half a second for the longest list that is taken.
    check_ids(name, list(chain.from_iterable([sequence for sequence in sequences if sequence])), vocab_size)
    return tuple(dict.fromkeys([tuple(map(int, sequence)) for sequence in sequences if sequence]))


def check_eos(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return checked end-of-sequence ids."""
    # transformers' continuous batching uses -1 for "no end of sequence".
    if isinstance(value, numbers.Integral) and int(value) == -1:
        return ()
    return check_id_set(name, value, vocab_size)


def check_strings(name: str, value: Any) -> tuple[str, ...]:
    """Return non-empty strings, each once."""
    values = items_of(value)
    if values is None or any(not isinstance(each, str) or not each for each in values):
        raise InvalidRequest(f"{name} must be a list of non-empty strings, not {show_value(value)}")
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds half of a surrogate pair, which no text contains; remove it") from None
    return tuple(dict.fromkeys(values))


def check_bias(name: str, value: Any, vocab_size: int) -> dict[int, float]:
    """Return checked ids with finite numbers, or minus infinity."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must map token ids to numbers, not {show_value(value)}")
    ids = check_ids(name, value.keys(), vocab_size)
    # -inf is the one infinity that means something here: never this token.
    is_never = [isinstance(bias, numbers.Real) and bias == -math.inf for bias in value.values()]
    biases = [-math.inf if never else check_real(name, bias) for never, bias in zip(is_never, value.values())]
    return dict(zip(ids, biases, strict=True))


def check_callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """Return processors."""
    processors = (value,) if callable(value) else items_of(value)
    if processors is None or any(not callable(processor) for processor in processors):
        raise InvalidRequest(f"{name} must be a list of callables (token_ids, logits) -> logits")
    return tuple(processors)
