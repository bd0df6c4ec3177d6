"""Structured output by llguidance: `Compiler` makes a `Grammar` of a `Structure`, a `Matcher` follows one output.

```
Structure ─► Compiler (any thread, kept by content) ─► Grammar ─► Matcher, one per request ─► bits of the next token
```

llguidance and not xgrammar: on the public collection of schemas (MaskBench) it accepted nothing that a schema forbids,
where the other let a tenth through; what it does not support it says. Its masks are bounded by limits of its own (lexer
fuel, states, items), its compilation by those and by `grammar_trial`. A mask costs microseconds: that of a whole batch
is made by the worker alone.

A matcher's state is a function of the tokens that the output has; it is made anew when a request is resumed.

Legend: N rows, V vocabulary, W 32-bit words of a mask.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aiocb.errors import InvalidRequest, RequestFailed, explain
from aiocb.sampling.grammar_trial import try_out
from aiocb.structure import Structure, walk

__all__ = ["Compiler", "Grammar", "Matcher", "apply_masks"]

_MAX_KEPT_BYTES = 64 << 20
_MAX_KEPT_IDS = 1 << 20  # of the masks of one structure: 8 MiB
_BYTES_PER_CHARACTER = 100  # what a compiled grammar takes, roughly, by the length of its source
_BYTES_PER_GRAMMAR = 200_000
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""No room for whitespace: small models fill it to the last token."""
_QUOTED = re.compile(r"""["'`]([\w$-]+)["'`]""")
_TEXTUAL = ("type", "format", "pattern", "$ref")
"""Keywords that a message names by their value."""


class Grammar:
    """A compiled structure: whoever has it can begin to follow an output.

    Attributes:
        structure: what it was made from.
    """

    __slots__ = ("_end_ids", "_initial", "_lock", "_masks", "structure", "vocab_size")

    def __init__(self, structure: Structure, initial: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        self.structure = structure
        self.vocab_size = vocab_size
        self._initial = initial
        self._end_ids = frozenset(end_ids)
        self._masks = Masks()
        self._lock = threading.Lock()

    def matcher(self, end_ids: Collection[int]) -> Matcher:
        """A matcher at the beginning of an output.

        Args:
            end_ids: tokens that may end this request's output once the structure is complete.
        """
        with self._lock:
            return Matcher(self._initial.deep_copy(), self._end_ids, frozenset(end_ids), self._masks)

    def __repr__(self) -> str:
        return f"<Grammar {self.structure.kind} of {len(self.structure.text)} characters>"


class Masks:
    """The masks of one structure, as the ids that they allow or forbid. Worker thread only.

    Outputs of one structure meet the same few masks (within a text, behind a number) again and again; to read one costs
    more than to look it up.
    """

    __slots__ = ("_known", "_num_ids")

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[bool, np.ndarray[Any, Any]]] = {}
        self._num_ids = 0

    def apply(self, row: np.ndarray[Any, Any], bits: np.ndarray[Any, Any]) -> None:
        """Forbid what is not set.

        Args:
            row: [V] float32; changed.
            bits: [W] int32
        """
        key = bits.tobytes()
        found = self._known.get(key)
        if found is None:
            found = self._read(bits, len(row))
            if self._num_ids + len(found[1]) > _MAX_KEPT_IDS:
                self._known.clear()
                self._num_ids = 0
            self._known[key] = found
            self._num_ids += len(found[1]) + len(bits)
        allows, ids = found
        if allows:
            kept = row[ids]
            row.fill(-np.inf)
            row[ids] = kept
        else:
            row[ids] = -np.inf

    @staticmethod
    def _read(bits: np.ndarray[Any, Any], vocab_size: int) -> tuple[bool, np.ndarray[Any, Any]]:
        """What a mask allows, or else what it forbids: whichever is less to write."""
        words = np.flatnonzero(bits)
        if 2 * len(words) < len(bits):
            return True, _ids_of(bits, words)
        flipped = ~bits
        ids = _ids_of(flipped, np.flatnonzero(flipped))
        return False, ids[ids < vocab_size]


class Matcher:
    """Follows one output.

    Attributes:
        is_complete: nothing can follow: the structure is whole.
        masks: those that outputs of the same structure have met.
        num_taken: tokens of the output that it has been told.
    """

    __slots__ = ("_end_ids", "_matcher", "_moved_ends", "is_complete", "masks", "num_taken")

    def __init__(self, matcher: Any, model_end_ids: frozenset[int], end_ids: frozenset[int], masks: Masks) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        # The library allows the model's own ends where the structure is whole: those of a request may be others.
        self._moved_ends = None if end_ids == model_end_ids else (_ids(model_end_ids), _ids(end_ids))
        self.masks = masks
        self.is_complete = False
        self.num_taken = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what the output has got. A token that ends it may be the last one.

        Raises:
            RequestFailed: the structure does not allow it, or has become too complex to follow.
        """
        matcher = self._matcher
        self.num_taken += len(tokens)
        for token in tokens:
            if token in self._end_ids and matcher.is_accepting():
                self.is_complete = True
                return
            if self.is_complete or not matcher.consume_token(token):
                raise RequestFailed(f"the output cannot be followed any more: {self._reason()}")
        self.is_complete = bool(matcher.is_stopped())
        if matcher.is_error():
            raise RequestFailed(f"the output cannot be followed any more: {self._reason()}")

    def fill(self, bits: np.ndarray[Any, Any]) -> None:
        """Write which tokens may follow, [W] int32, bit by bit from the lowest.

        Raises:
            RequestFailed: it cannot be said.
        """
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise RequestFailed(f"the output cannot be followed any more: {self._reason()}")
        if self._moved_ends is not None:
            theirs, own = self._moved_ends
            _set(bits, theirs, False)
            if self._matcher.is_accepting():
                _set(bits, own, True)

    def forced(self) -> tuple[int, ...]:
        """The tokens that have to follow, each the only one that may; not one that completes the structure.

        That one is sampled like any other, so that the output ends with it.
        """
        tokens = self._matcher.compute_ff_tokens()
        if not tokens:
            return ()
        probe = self._matcher.deep_copy()
        probe.consume_tokens(tokens)
        return tuple(tokens[:-1] if probe.is_stopped() else tokens)

    def _reason(self) -> str:
        if self.is_complete:
            return "it was complete"
        return " ".join(str(self._matcher.get_error() or self._matcher.stop_reason()).partition("<state>")[0].split())


def _ids(values: Collection[int]) -> np.ndarray[Any, Any]:
    return np.array(sorted(values), dtype=np.int64)


def _set(bits: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], value: bool) -> None:
    words, places = ids >> 5, (ids & 31).astype(np.uint32)
    for word, place in zip(words.tolist(), places.tolist()):
        mask = np.uint32(1 << place)
        unsigned = bits.view(np.uint32)
        unsigned[word] = (unsigned[word] | mask) if value else (unsigned[word] & ~mask)


def apply_masks(logits: Tensor, rows: Sequence[int], matchers: Sequence[Matcher]) -> dict[int, Exception]:
    """Forbid what the structures of some rows do not allow, in place.

    Args:
        logits: [N, V] float32; changed.
        rows, matchers: aligned.

    Returns:
        By row, why its structure cannot be followed; such a row is left as it is.
    """
    vocab_size = logits.shape[1]
    bits = np.zeros((len(rows), (vocab_size + 31) // 32), dtype=np.int32)  # [N, W]
    failures: dict[int, Exception] = {}
    for at, (row, matcher) in enumerate(zip(rows, matchers, strict=True)):
        try:
            matcher.fill(bits[at])
        except RequestFailed as error:
            failures[row] = error
            bits[at] = -1
    if logits.device.type == "cpu":
        values = logits.numpy()
        for row, matcher, mask in zip(rows, matchers, bits, strict=True):
            matcher.masks.apply(values[row], mask)
        return failures
    banned = np.unpackbits(~bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    forbidden = torch.from_numpy(banned.view(np.bool_)).to(logits.device)  # [N, V]
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)
    return failures


def _ids_of(bits: np.ndarray[Any, Any], words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What is set in some words of a mask."""
    found, places = np.nonzero(np.unpackbits(bits[words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little"))
    ids: np.ndarray[Any, Any] = words[found] * 32 + places
    return ids


class Compiler:
    """Makes grammars for one tokenizer, and keeps them by their content, within a bound. Any thread.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: columns of the logits.
        end_ids: that the model ends with.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._flight = threading.Lock()  # single: who waits for the same structure finds it
        self._table = threading.Lock()  # held for moments: what is kept is found while something else is compiled
        self._own: Any = None
        self._kept: OrderedDict[Structure, Grammar] = OrderedDict()
        self._num_bytes = 0

    def find(self, structure: Structure) -> Grammar | None:
        """One that is kept; never waits for what is being compiled."""
        with self._table:
            grammar = self._kept.get(structure)
            if grammar is not None:
                self._kept.move_to_end(structure)
            return grammar

    def compile(self, structure: Structure) -> Grammar:
        """Compile a structure, or find it. Takes milliseconds; one that has to be tried first, up to some seconds.

        Raises:
            InvalidRequest: the package is missing, the tokenizer cannot be used, or the structure is wrong, not
                supported (by the name and place of what is not) or too complex.
        """
        grammar = self.find(structure)
        if grammar is not None:
            return grammar
        with self._flight:
            grammar = self.find(structure)
            if grammar is None:
                grammar = Grammar(structure, self._start(structure), self._vocab_size, self._end_ids)
                self._keep(structure, grammar)
            return grammar

    def _keep(self, structure: Structure, grammar: Grammar) -> None:
        with self._table:
            self._kept[structure] = grammar
            self._num_bytes += _size_of(structure)
            while self._num_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1:
                dropped, _ = self._kept.popitem(last=False)
                self._num_bytes -= _size_of(dropped)

    def _start(self, structure: Structure) -> Any:
        library = _library()
        if self._own is None:
            self._own = self._make_tokenizer()
        try:
            source = _source(library, structure)
            try_out(library, structure, source)
            matcher = library.LLMatcher(self._own, source, log_level=0)
        except InvalidRequest:
            raise
        except Exception as error:
            raise InvalidRequest(f"{structure.kind} cannot be compiled: {explain(error)}") from error
        if not matcher.is_error() and not any(matcher.compute_bitmask()):
            raise InvalidRequest(f"{structure.kind} cannot be fulfilled: nothing may be the first token")
        if matcher.is_error():
            raise InvalidRequest(_refusal(structure, str(matcher.get_error())))
        return matcher

    def _make_tokenizer(self) -> Any:
        library = _library()
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequest("structured output needs a fast tokenizer (tokenizer.json); this model has none")
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(
                self._tokenizer,
                n_vocab=self._vocab_size,
                eos_token=sorted(self._end_ids) or None,
                slices=library.LLTokenizer.json_slices(),
            )
        except Exception as error:
            raise InvalidRequest(f"structured output cannot use this model's tokenizer: {explain(error)}") from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequest("structured output needs the package llguidance: pip install 'aiocb[grammar]'") from None
    return llguidance


def _size_of(structure: Structure) -> int:
    return _BYTES_PER_GRAMMAR + _BYTES_PER_CHARACTER * len(structure.text)


def _source(library: Any, structure: Structure) -> str:
    """The structure as the library takes it."""
    kind, text = structure
    make = library.LLMatcher
    source: str
    if kind == "json_schema":
        source = make.grammar_from_json_schema(text, overrides=_COMPACT)
    elif kind == "regex":
        source = make.grammar_from_regex(text)
    elif kind == "choice":
        choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        source = make.grammar_from_lark(f"start: {choices}")
    else:
        source = make.grammar_from_lark(text)
    return source


def _refusal(structure: Structure, message: str) -> str:
    """What the library says, with the place in the schema of what it names."""
    message = " ".join(message.partition("<state>")[0].split())[:500]
    if structure.kind != "json_schema":
        return f"{structure.kind} is not supported: {message}"
    if "NoExtension" in message:
        return "json_schema cannot be fulfilled: nothing may be the first token"
    named, last = set(_QUOTED.findall(message)), message.rpartition(": ")[2]
    places = [
        pointer
        for pointer, _, name, value in walk(json.loads(structure.text))
        if name in named or (name in _TEXTUAL and value == last)
    ]
    where = f" (at {places[0]})" if places else ""
    return f"json_schema is not supported{where}: {message}"
