"""What changes logits before selection: penalties, bans, biases and a request's own processors.

Each request that needs any of it has one `RequestState`: its counts and n-grams, brought up to date with the new
tokens only. Its token list only ever grows, also over a preemption, so the state never has to be rebuilt; if it is
shown a shorter history it starts again.

`process` works on all rows of a step at once: what the rows want is joined into flat indices of the logits (sparse:
only the tokens that a request has seen are read and written, where a dense mask would cost V per row), and one
gather, one arithmetic operation and one scatter serve every row. All arithmetic is element by element, so that a row
does not depend on its batch. Order of the stages: as `SamplingParams` documents it.

Legend: N rows, V vocabulary, L tokens of a request, U flat indices of one stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aiocb.errors import RequestFailed, explain
from aiocb.sampling.history import BannedSequences, NGrams, TokenCounts
from aiocb.sampling_params import SamplingParams

__all__ = ["RequestState", "StaticStage", "process"]

_BOUND = 1e30
"""Penalties beyond this act as this: infinity times 0, or minus infinity, would be NaN in float32."""


class _Processor:
    """A processor of one request, called in its own convention."""

    __slots__ = ("_call", "name", "wants_tensor")

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.wants_tensor = _is_transformers_processor(call)
        self.name = type(call).__name__ if self.wants_tensor else getattr(call, "__name__", type(call).__name__)

    def __call__(self, state: RequestState, logits: Tensor) -> Tensor:
        """Return the new logits, [V] float32.

        Raises:
            RequestFailed: the processor raised, or returned something that is no row of logits.
        """
        try:
            if self.wants_tensor:
                result = self._call(state.token_tensor(logits.device), logits[None])
            else:
                result = self._call(state.token_list, logits)
        except BaseException as error:  # in this thread, SystemExit and its like are only exceptions
            raise RequestFailed(f"logits processor {self.name} raised {explain(error)}") from error
        if not isinstance(result, Tensor):
            raise RequestFailed(f"logits processor {self.name} returned {type(result).__name__}, not a tensor")
        if result.shape not in (logits.shape, (1, *logits.shape)):
            raise RequestFailed(
                f"logits processor {self.name} returned shape {tuple(result.shape)}, not {tuple(logits.shape)}"
            )
        if result.dtype.is_complex or result.dtype == torch.bool:
            raise RequestFailed(f"logits processor {self.name} returned {result.dtype}, not real numbers")
        result = result.detach().reshape(logits.shape).to(device=logits.device, dtype=torch.float32)
        if result.isnan().any():
            raise RequestFailed(f"logits processor {self.name} returned NaN")
        return result


def _is_transformers_processor(call: object) -> bool:
    """Whether an object follows transformers' convention; an instance exists only if the module was imported."""
    module = sys.modules.get("transformers.generation.logits_process")
    return module is not None and isinstance(call, (module.LogitsProcessor, module.LogitsProcessorList))


class RequestState:
    """What processing remembers of one request.

    Attributes:
        sampling: resolved parameters.
        seen: counts of prompt and output (repetition penalty), or None.
        produced: counts of the output (presence and frequency penalty), or None.
        ngrams: or None.
        bad_words: or None.
        bias: token ids and what is added to their logits, or None.
        allowed_ids: or None.
        end_ids: what may not come before `min_new_tokens`, empty without them.
        processors: the request's own.
        token_list: the history for processors, only kept up when there are any.
    """

    __slots__ = (
        "_num_buffered",
        "_num_prompt_tokens",
        "_num_seen",
        "_token_buffer",
        "_vocab_size",
        "allowed_ids",
        "bad_words",
        "bias",
        "end_ids",
        "ngrams",
        "processors",
        "produced",
        "sampling",
        "seen",
        "token_list",
    )

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
        self.sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self.bad_words = BannedSequences(sampling.bad_words_ids, _eos_ids(sampling)) if sampling.bad_words_ids else None
        # As arrays, once: a request may ban a whole vocabulary, and rows are joined whenever the batch changes.
        bias = sampling.logit_bias
        self.bias = (_ids(bias), np.fromiter(bias.values(), np.float64, len(bias))) if bias else None
        self.allowed_ids = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
        self.end_ids = _ids((*_eos_ids(sampling), *(sampling.stop_token_ids or ())) if sampling.min_new_tokens else ())
        self.processors = [_Processor(call) for call in sampling.logits_processors or ()]
        self._reset()

    def _reset(self) -> None:
        sampling = self.sampling
        self._num_seen = self._num_buffered = 0
        self.token_list: list[int] = []
        self._token_buffer: Tensor | None = None
        self.seen = TokenCounts(self._vocab_size) if sampling.repetition_penalty != 1.0 else None
        self.produced = (
            TokenCounts(self._vocab_size) if sampling.presence_penalty or sampling.frequency_penalty else None
        )
        self.ngrams = NGrams(sampling.no_repeat_ngram_size) if sampling.no_repeat_ngram_size else None

    def update(self, tokens: Sequence[int], length: int) -> None:
        """Take in `tokens[:length]`; costs only what is new since the last call."""
        start = self._num_seen
        if length < start:
            self._reset()
            start = 0
        if length == start:
            return
        self._num_seen = length
        new = tokens[start:length]
        if self.seen is not None:
            self.seen.extend(new)
        if self.produced is not None:
            self.produced.extend(tokens[max(start, self._num_prompt_tokens) : length])
        if self.ngrams is not None:
            self.ngrams.extend(new)
        if self.processors:
            self.token_list.extend(new)

    def banned_ngrams(self) -> Iterable[int]:
        """Tokens that would repeat an n-gram."""
        return () if self.ngrams is None else self.ngrams.banned()

    def banned_late(self, tokens: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """Tokens banned at this position only: ends of bad words, stop tokens before `min_new_tokens`."""
        words = _ids(self.bad_words.banned(tokens, length) if self.bad_words is not None else ())
        if length - self._num_prompt_tokens >= (self.sampling.min_new_tokens or 0):
            return words
        return np.concatenate((words, self.end_ids)) if len(words) else self.end_ids

    def token_tensor(self, device: torch.device) -> Tensor:
        """The history as transformers wants it, [1, L] int64; a view of a buffer that grows by doubling."""
        length, filled = len(self.token_list), self._num_buffered
        buffer = self._token_buffer
        if buffer is None or len(buffer) < length:
            grown = torch.empty(2 * length, dtype=torch.int64, device=device)
            if buffer is not None:
                grown[:filled] = buffer[:filled]
            self._token_buffer = buffer = grown
        buffer[filled:length] = torch.tensor(self.token_list[filled:], dtype=torch.int64)
        self._num_buffered = length
        return buffer[None, :length]


def _ids(values: Collection[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64, count=len(values))


def _eos_ids(sampling: SamplingParams) -> tuple[int, ...]:
    """The resolved end-of-sequence ids."""
    eos = sampling.eos_token_id
    return (eos,) if isinstance(eos, int) else tuple(eos or ())


class StaticStage:
    """What is constant while the rows of a step are the same requests: who wants what, and the joined indices."""

    __slots__ = (
        "allowed_index",
        "allowed_rows",
        "banned_index",
        "bias_index",
        "bias_values",
        "late_rows",
        "ngram_rows",
        "processor_rows",
        "produced_rows",
        "seen_rows",
        "states",
    )

    def __init__(self, states: Sequence[RequestState | None], vocab_size: int, device: torch.device) -> None:
        """Sort the rows by what they want; a row that wants nothing has no state."""
        self.states = states
        present = [(row, state) for row, state in enumerate(states) if state is not None]
        self.seen_rows = [
            (row, state, _bounded(state.sampling.repetition_penalty, 1 / _BOUND))
            for row, state in present
            if state.seen is not None
        ]
        self.produced_rows = [
            (
                row,
                state,
                _bounded(state.sampling.frequency_penalty, -_BOUND),
                _bounded(state.sampling.presence_penalty, -_BOUND),
            )
            for row, state in present
            if state.produced is not None
        ]
        self.ngram_rows = [(row, state) for row, state in present if state.ngrams is not None]
        self.processor_rows = [(row, state) for row, state in present if state.processors]
        self.late_rows = [
            (row, state) for row, state in present if state.bad_words is not None or state.sampling.min_new_tokens
        ]
        biases = [(row, *state.bias) for row, state in present if state.bias is not None]
        self.bias_index = _joined([(row, ids) for row, ids, _ in biases], vocab_size, device)
        values = [values for _, _, values in biases] or [np.empty(0)]
        self.bias_values = torch.from_numpy(np.concatenate(values)).to(torch.float32).to(device)
        banning = [(row, state.bad_words.single_ids) for row, state in present if state.bad_words is not None]
        self.banned_index = _joined(banning, vocab_size, device)
        allowing = [(row, ids) for row, state in present if (ids := state.allowed_ids) is not None]
        self.allowed_rows = _index([row for row, _ in allowing], device)
        self.allowed_index = _joined(allowing, vocab_size, device)


def process(logits: Tensor, stage: StaticStage, histories: Sequence[tuple[Sequence[int], int]]) -> dict[int, Exception]:
    """Run all stages before the temperature on all rows, in place.

    Args:
        logits: contiguous, [N, V] float32; changed.
        stage: of these rows.
        histories: for each row the tokens of its request and how many of them count.

    Returns:
        By row, the failure of that row's own processor; such a row then holds zeros.
    """
    vocab_size = logits.shape[1]
    device = logits.device
    for some_state, (tokens, length) in zip(stage.states, histories, strict=True):
        if some_state is not None:
            some_state.update(tokens, length)
    flat = logits.view(-1)  # [N * V]
    if stage.seen_rows:
        _penalise_repetition(flat, stage, vocab_size)
    if stage.produced_rows:
        _penalise_produced(flat, stage, vocab_size)
    if stage.ngram_rows:
        banned = [
            row * vocab_size + token
            for row, state in stage.ngram_rows
            for token in state.banned_ngrams()
            if 0 <= token < vocab_size  # a prompt may hold placeholders, which would reach into the next row
        ]
        _ban(flat, banned, device)
    failures = _run_processors(logits, stage)
    if len(stage.bias_index):
        flat.index_add_(0, stage.bias_index, stage.bias_values)
    if len(stage.allowed_rows):
        values = flat.index_select(0, stage.allowed_index)
        logits.index_fill_(0, stage.allowed_rows, -torch.inf)
        flat.index_copy_(0, stage.allowed_index, values)
    if len(stage.banned_index):
        flat.index_fill_(0, stage.banned_index, -torch.inf)
    if stage.late_rows:
        late = [(row, state.banned_late(*histories[row])) for row, state in stage.late_rows]
        flat.index_fill_(0, _joined(late, vocab_size, device), -torch.inf)
    return failures


def _run_processors(logits: Tensor, stage: StaticStage) -> dict[int, Exception]:
    """Run each request's own processors on its own row."""
    failures: dict[int, Exception] = {}
    for row, state in stage.processor_rows:
        try:
            # A copy: a processor may write to its argument, or keep it, but may not reach the rows beside it.
            values = logits[row].clone()  # [V]
            for processor in state.processors:
                values = processor(state, values)
            logits[row] = values
        except RequestFailed as error:
            failures[row] = error
            logits[row] = 0.0
        except BaseException as error:  # of what it returned
            failures[row] = RequestFailed(f"the result of a logits processor raised {explain(error)}")
            failures[row].__cause__ = error
            logits[row] = 0.0
    return failures


def _penalise_repetition(flat: Tensor, stage: StaticStage, vocab_size: int) -> None:
    """Divide the positive and multiply the negative logits of seen tokens (CTRL, Keskar et al., 2019)."""
    rows = stage.seen_rows
    index, sizes = _touched([(row, state.seen) for row, state, _ in rows], vocab_size, flat.device)
    penalty = np.repeat(np.array([value for _, _, value in rows], dtype=np.float32), sizes)  # [U]
    by = torch.from_numpy(penalty).to(flat.device)
    values = flat.index_select(0, index)
    flat.index_copy_(0, index, torch.where(values < 0, values * by, values / by))


def _penalise_produced(flat: Tensor, stage: StaticStage, vocab_size: int) -> None:
    """Subtract frequency * count + presence from the tokens of the output, as OpenAI defines both."""
    rows = stage.produced_rows
    index, sizes = _touched([(row, state.produced) for row, state, _, _ in rows], vocab_size, flat.device)
    frequency = np.repeat(np.array([value for _, _, value, _ in rows], dtype=np.float32), sizes)
    presence = np.repeat(np.array([value for _, _, _, value in rows], dtype=np.float32), sizes)
    counts = np.concatenate([state.produced.counts for _, state, _, _ in rows if state.produced is not None])
    amount = torch.from_numpy(frequency * counts + presence).to(flat.device)  # [U]
    flat.index_copy_(0, index, flat.index_select(0, index) - amount)


def _touched(
    rows: Sequence[tuple[int, TokenCounts | None]], vocab_size: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Flat indices of the counted tokens of all rows, [U], and how many each row has."""
    parts = [counts.ids + row * vocab_size for row, counts in rows if counts is not None]
    return torch.from_numpy(np.concatenate(parts)).to(device), [len(part) for part in parts]


def _ban(flat: Tensor, index: Sequence[int], device: torch.device) -> None:
    if index:
        flat.index_fill_(0, _index(index, device), -torch.inf)


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _joined(rows: Sequence[tuple[int, npt.NDArray[np.int64]]], vocab_size: int, device: torch.device) -> Tensor:
    """Flat indices of the logits of some tokens of some rows, [U]."""
    parts = [ids + row * vocab_size for row, ids in rows] or [_ids(())]
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _bounded(value: float | None, low: float) -> float:
    assert value is not None
    return min(max(value, low), _BOUND)
