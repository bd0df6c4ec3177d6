"""What changes logits before selection: penalties, bans, biases and a request's own processors.

Each request that needs any of it has one `RequestState`: its counts and n-grams, brought up to date with the new
tokens only. The token list of an open request only ever grows, so the state never has to be rebuilt.

`process` works on all rows of a step at once: what the rows want is joined into flat indices of the logits (sparse:
only the tokens that a request has seen are read and written, where a dense mask would cost V per row), and one
gather, one arithmetic operation and one scatter serve every row. All arithmetic is element by element, so that a row
does not depend on its batch. Order of the stages: as `SamplingParams` documents it;
structures come last, so that nothing can allow again what they forbid.

Legend: N rows, V vocabulary, L tokens of a request, U flat indices of one stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aiocb.errors import RequestFailed, explain
from aiocb.sampling.grammar import Matcher, apply_masks
from aiocb.sampling.history import BannedSequences, NGrams, TokenCounts
from aiocb.sampling_params import SamplingParams

__all__ = ["RequestState", "StaticStage", "process"]

_BOUND = 1e30
"""Penalties beyond this act as this: infinity times 0, or minus infinity, would be NaN in float32."""


class _Processor:
    """A processor of one request, called in its own convention."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._wants_tensor = _is_transformers_processor(call)
        self._name = type(call).__name__ if self._wants_tensor else getattr(call, "__name__", type(call).__name__)

    def __call__(self, state: RequestState, logits: Tensor) -> None:
        """Change a row of logits, [V] float32.

        Raises:
            RequestFailed: the processor raised, or returned something that is no row of logits.
        """
        # A copy: a processor may write to its argument, or keep it, but may not reach the rows beside it.
        copy = logits.clone()
        try:
            if self._wants_tensor:
                result = self._call(state.token_tensor(logits.device), copy[None])
            else:
                result = self._call(state.token_list, copy)
            flaw = _flaw(result, logits)
            if flaw is None:
                logits.copy_(result.detach().reshape(logits.shape))
        except BaseException as error:  # in this thread, SystemExit and its like are only exceptions
            raise RequestFailed(f"logits processor {self._name} raised {explain(error)}") from error
        if flaw is None and logits.isnan().any():
            flaw = "NaN"
        if flaw is not None:
            raise RequestFailed(f"logits processor {self._name} returned {flaw}")


def _flaw(result: object, logits: Tensor) -> str | None:
    """Why this is no row of logits; None when it is one."""
    if not isinstance(result, Tensor):
        return f"{type(result).__name__}, not a tensor"
    if result.shape not in (logits.shape, (1, *logits.shape)):
        return f"shape {tuple(result.shape)}, not {tuple(logits.shape)}"
    if result.dtype.is_complex or result.dtype == torch.bool:
        return f"{result.dtype}, not real numbers"
    return None


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
        matcher: of the structure that the output has to have, or None.
        can_jump: tokens that the structure forces are the ones that would be sampled.
        token_list: the history for processors, only kept up when there are any.
    """

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
        self.sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._num_taken = self._num_buffered = 0
        self._token_buffer: Tensor | None = None
        self.token_list: list[int] = []
        self.processors = [_Processor(call) for call in sampling.logits_processors or ()]
        has_penalty = sampling.presence_penalty or sampling.frequency_penalty
        self.seen = TokenCounts(vocab_size) if sampling.repetition_penalty != 1.0 else None
        self.produced = TokenCounts(vocab_size) if has_penalty else None
        self.ngrams = NGrams(sampling.no_repeat_ngram_size) if sampling.no_repeat_ngram_size else None
        eos: Any = sampling.eos_token_id  # resolved: a tuple
        self.bad_words = BannedSequences(sampling.bad_words_ids, eos) if sampling.bad_words_ids else None
        # As arrays, once: a request may ban a whole vocabulary, and rows are joined whenever the batch changes.
        bias = sampling.logit_bias
        self.bias = (_ids(bias), np.fromiter(bias.values(), np.float64, len(bias))) if bias else None
        self.allowed_ids = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
        self.end_ids = _ids((*eos, *(sampling.stop_token_ids or ())) if sampling.min_new_tokens else ())
        self.matcher: Matcher | None = None
        if sampling.grammar is not None:
            grammar: Any = sampling.grammar  # resolved: compiled
            self.matcher = grammar.matcher(eos)
        # What else may forbid tokens has to be asked about each.
        bans = bool(self.ngrams or self.bad_words or self.allowed_ids is not None or len(self.end_ids))
        if self.bias is not None and self.bias[1].min() == -np.inf:
            bans = True
        self.can_jump = self.matcher is not None and not bans and not self.processors

    def update(self, tokens: Sequence[int]) -> None:
        """Take in the request's tokens; costs only what is new since the last call.

        Raises:
            RequestFailed: its structure does not allow them.
        """
        start = self._num_taken
        new = tokens[start:]
        self._num_taken = len(tokens)
        if self.seen is not None:
            self.seen.extend(new)
        if self.produced is not None:
            self.produced.extend(tokens[max(start, self._num_prompt_tokens) :])
        if self.ngrams is not None:
            self.ngrams.extend(new)
        if self.processors:
            self.token_list.extend(new)
        if self.matcher is not None:
            self.matcher.extend(tokens[self._num_prompt_tokens + self.matcher.num_taken :])

    def banned_late(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """Tokens banned at this position only: ends of bad words, stop tokens before `min_new_tokens`."""
        words = _ids(self.bad_words.banned(tokens) if self.bad_words is not None else ())
        if len(tokens) - self._num_prompt_tokens >= (self.sampling.min_new_tokens or 0):
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


class StaticStage:
    """What is constant while the rows of a step are the same requests: who wants what, and the joined indices."""

    def __init__(self, states: Sequence[RequestState | None], vocab_size: int, device: torch.device) -> None:
        """Sort the rows by what they want; a row that wants nothing has no state."""
        self.states = states
        present = [(row, state) for row, state in enumerate(states) if state is not None]
        self.seen = [(row, state.seen) for row, state in present if state.seen is not None]
        self.repetition = _bounded(
            [state.sampling.repetition_penalty for _, state in present if state.seen is not None], 1 / _BOUND
        )
        produced = [(row, state.produced, state.sampling) for row, state in present if state.produced is not None]
        self.produced = [(row, counts) for row, counts, _ in produced]
        self.frequency = _bounded([sampling.frequency_penalty for _, _, sampling in produced], -_BOUND)
        self.presence = _bounded([sampling.presence_penalty for _, _, sampling in produced], -_BOUND)
        self.ngrams = [(row, state.ngrams) for row, state in present if state.ngrams is not None]
        self.processing = [(row, state) for row, state in present if state.processors]
        structured = [(row, state, state.matcher) for row, state in present if state.matcher is not None]
        self.structured_rows = [row for row, _, _ in structured]
        self.structured_states = [state for _, state, _ in structured]
        self.matchers = [matcher for _, _, matcher in structured]
        self.late = [
            (row, state) for row, state in present if state.bad_words is not None or state.sampling.min_new_tokens
        ]
        biases = [(row, *state.bias) for row, state in present if state.bias is not None]
        self.bias_index = _joined([(row, ids) for row, ids, _ in biases], vocab_size, device)
        values = [values for _, _, values in biases] or [np.empty(0)]
        self.bias_values = torch.from_numpy(np.concatenate(values)).to(torch.float32).to(device)
        banning = [(row, state.bad_words.single_ids) for row, state in present if state.bad_words is not None]
        self.banned_index = _joined(banning, vocab_size, device)
        allowing = [(row, ids) for row, state in present if (ids := state.allowed_ids) is not None]
        self.allowed_rows = torch.tensor([row for row, _ in allowing], dtype=torch.int64, device=device)
        self.allowed_index = _joined(allowing, vocab_size, device)


def process(logits: Tensor, stage: StaticStage, histories: Sequence[Sequence[int]]) -> dict[int, Exception]:
    """Run all stages before the temperature on all rows, in place.

    Args:
        logits: contiguous, [N, V] float32; changed.
        stage: of these rows.
        histories: for each row the tokens of its request.

    Returns:
        By row, the failure of that row's own processor or structure; such a row then holds zeros.
    """
    vocab_size, device = logits.shape[1], logits.device
    strays: dict[int, Exception] = {}
    for row, (some_state, tokens) in enumerate(zip(stage.states, histories, strict=True)):
        if some_state is not None:
            try:
                some_state.update(tokens)
            except RequestFailed as error:
                strays[row] = error
    flat = logits.view(-1)  # [N * V]
    if stage.seen:
        # Positive logits are divided and negative ones multiplied (CTRL, Keskar et al., 2019).
        index, sizes = _touched(stage.seen, vocab_size, device)
        by = torch.from_numpy(np.repeat(stage.repetition, sizes)).to(device)  # [U]
        values = flat.index_select(0, index)
        flat.index_copy_(0, index, torch.where(values < 0, values * by, values / by))
    if stage.produced:
        # frequency * count + presence, as OpenAI defines both.
        index, sizes = _touched(stage.produced, vocab_size, device)
        counts = np.concatenate([counts.counts for _, counts in stage.produced])
        amount = np.repeat(stage.frequency, sizes) * counts + np.repeat(stage.presence, sizes)
        flat.index_add_(0, index, torch.from_numpy(amount).to(device), alpha=-1)
    if stage.ngrams:
        banned = [
            row * vocab_size + token
            for row, ngrams in stage.ngrams
            for token in ngrams.banned()
            if 0 <= token < vocab_size  # a prompt may hold placeholders, which would reach into the next row
        ]
        flat.index_fill_(0, torch.tensor(banned, dtype=torch.int64, device=device), -torch.inf)
    failures = _run_processors(logits, stage)
    if len(stage.bias_index):
        flat.index_add_(0, stage.bias_index, stage.bias_values)
    if len(stage.allowed_rows):
        values = flat.index_select(0, stage.allowed_index)
        logits.index_fill_(0, stage.allowed_rows, -torch.inf)
        flat.index_copy_(0, stage.allowed_index, values)
    if len(stage.banned_index):
        flat.index_fill_(0, stage.banned_index, -torch.inf)
    if stage.late:
        late = [(row, state.banned_late(histories[row])) for row, state in stage.late]
        flat.index_fill_(0, _joined(late, vocab_size, device), -torch.inf)
    if stage.structured_rows:
        strays |= apply_masks(logits, stage.structured_rows, stage.matchers)
        for row in strays:
            logits[row] = 0.0
    return failures | strays


def _run_processors(logits: Tensor, stage: StaticStage) -> dict[int, Exception]:
    """Run each request's own processors on its own row."""
    failures: dict[int, Exception] = {}
    for row, state in stage.processing:
        try:
            for processor in state.processors:
                processor(state, logits[row])
        except RequestFailed as error:
            failures[row] = error
            logits[row] = 0.0
    return failures


def _touched(
    rows: Sequence[tuple[int, TokenCounts]], vocab_size: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Flat indices of the counted tokens of all rows, [U], and how many each row has."""
    ids = [(row, counts.ids) for row, counts in rows]
    return _joined(ids, vocab_size, device), [len(each) for _, each in ids]


def _joined(rows: Sequence[tuple[int, npt.NDArray[np.int64]]], vocab_size: int, device: torch.device) -> Tensor:
    """Flat indices of the logits of some tokens of some rows, [U]."""
    parts = [ids + row * vocab_size for row, ids in rows] or [_ids(())]
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _bounded(values: Sequence[float | None], low: float) -> npt.NDArray[np.float32]:
    return np.clip(np.array(values, dtype=np.float64), low, _BOUND).astype(np.float32)
