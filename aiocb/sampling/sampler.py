"""From a step's logits to its tokens: `Sampler`, used by every runner, in the worker thread only.

    logits of the step ──► rows that sample ──► process ──────────► select ──► tokens
                      │      (penalties, bans, processors)   (temperature, truncation, draw)
                      ├──► raw log-probabilities                    └──► processed log-probabilities
                      └──► rows of prompts ──► prompt log-probabilities

A step whose requests all take the plain argmax has nothing but the one in the middle.

Legend: N rows that sample, A all rows of the step's logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aiocb.errors import RequestFailed
from aiocb.outputs import TokenLogprobs
from aiocb.records import Record
from aiocb.sampling.logprobs import processed_logprobs, raw_logprobs
from aiocb.sampling.processors import RequestState, StaticStage, process
from aiocb.sampling.random import as_seeds, uniforms
from aiocb.sampling.rows import take
from aiocb.sampling.selection import INVALID_ROW, select
from aiocb.sampling.truncation import SelectionParams
from aiocb.step import StepEntry, StepResult

__all__ = ["Sampler", "failure_of"]


class _Batch:
    """What is constant while the same requests sample in the same order."""

    def __init__(self, records: Sequence[Record], stage: StaticStage | None, device: torch.device) -> None:
        samplings = [record.sampling for record in records]
        self.records = records
        self.stage = stage
        self.is_plain = all(record.is_plain for record in records)
        self.keys = as_seeds(record.seed for record in records)
        self.params = SelectionParams.build(samplings, device)
        self.logprob_rows = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
        self.wants_raw = any(samplings[row].logprobs_mode == "raw" for row in self.logprob_rows)


class Sampler:
    """Samples all requests of a step. What their processing needs is kept in `Record.state`.

    A row's result is, bit for bit on the CPU, the same whatever the other rows are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """Args:
        vocab_size: columns of the logits.
        device: where the logits are.
        """
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._batch: _Batch | None = None
        self._buffer: Tensor | None = None

    def forget(self) -> None:
        """Drop what is kept of the last step's requests: some of them are closed."""
        self._batch = None

    def select(self, logits: Tensor, params: SelectionParams, uniforms: Tensor | None) -> Tensor:
        """Choose one token id for each row; the seam for a native selection.

        Args:
            logits: processed, not yet divided by the temperature, [N, V] float32. Must not be changed.
            params: aligned with the rows; a temperature of 0 is greedy.
            uniforms: in [0, 1), [N] float64; None when all rows are greedy.

        Returns:
            Token ids, [N] int64; `INVALID_ROW` for a row with NaN, `EMPTY_ROW` for one of nothing but -inf.
        """
        return select(logits, params, uniforms)

    def raw_logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Look up some rows of the model's logits, [A, V]; a seam, too. See `logprobs.raw_logprobs`."""
        return raw_logprobs(take(logits, rows), token_ids, num_top)

    def processed_logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        params: SelectionParams,
        is_truncated: Tensor,
        token_ids: Sequence[int],
        num_top: Sequence[int],
    ) -> list[TokenLogprobs]:
        """Look up some rows of processed logits, [N, V]; a seam that goes with `select`.

        All but `logits` is aligned with `rows`. See `logprobs.processed_logprobs`.
        """
        return processed_logprobs(take(logits, rows), params, is_truncated, token_ids, num_top)

    @torch.no_grad()
    def __call__(self, logits: Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        """Sample the step.

        Args:
            logits: for each entry in order the rows of its last `num_logits` positions, [A, V] of any float type.
                Not changed.
            entries: of the step.
            records: of their requests.

        Raises:
            ValueError: the logits do not fit the entries. Failures of single requests are in `StepResult.errors`.
        """
        sampling = [record for entry, record in zip(entries, records, strict=True) if entry.is_sampled]
        num_rows, vocab_size = logits.shape
        if vocab_size != self._vocab_size:
            raise ValueError(f"the logits have {vocab_size} columns, the sampler was made for {self._vocab_size}")
        errors: dict[int, Exception] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
        sampled = logits
        # Every sampled entry has at least one row: equal numbers mean one each, and none of another kind.
        if num_rows != len(sampling):
            rows, prompts = _split_rows(entries, records, num_rows)
            if prompts:
                prompt_logprobs = self._prompt_logprobs(logits, prompts, errors)
            sampled = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]  # [N, V]
        if not sampling:
            return StepResult([()] * len(entries), None, prompt_logprobs, errors or None)

        batch = self._batch_of(sampling)
        chosen, logprobs = self._sample(sampled, batch, errors)
        tokens: list[tuple[int, ...]] = [(token,) for token in chosen]
        follows = None
        if batch.stage is not None and batch.stage.matchers:
            self._add_drafts(logits, entries, records, tokens, logprobs)
            follows = _follows(batch, chosen, errors)
        if errors:
            tokens = [() if one.request_id in errors else token for one, token in zip(sampling, tokens, strict=True)]
        if len(sampling) != len(entries):
            given = iter(tokens)
            tokens = [next(given) if entry.is_sampled else () for entry in entries]
            if logprobs is not None:
                found = iter(logprobs)
                logprobs = [next(found) if entry.is_sampled else None for entry in entries]
        return StepResult(tokens, logprobs, prompt_logprobs, errors or None, follows)

    def _add_drafts(
        self,
        logits: Tensor,
        entries: Sequence[StepEntry],
        records: Sequence[Record],
        tokens: list[tuple[int, ...]],
        logprobs: list[tuple[TokenLogprobs, ...] | None] | None,
    ) -> None:
        """Put the tokens that had to come, and what is known of them, before those that were sampled behind them."""
        start = at = 0
        for entry, record in zip(entries, records, strict=True):
            count = record.num_drafts
            if entry.is_sampled:
                if count:
                    drafts = tuple(record.tokens[-count:])
                    tokens[at] = (*drafts, *tokens[at])
                    found = None if logprobs is None else logprobs[at]
                    if found is not None and logprobs is not None:
                        logprobs[at] = (*self._draft_logprobs(logits[start : start + count], record, drafts), *found)
                at += 1
            start += entry.num_logits

    def _draft_logprobs(self, logits: Tensor, record: Record, drafts: tuple[int, ...]) -> list[TokenLogprobs]:
        """Of tokens that had to come; logits: of the positions before them, [D, V]."""
        num_top = record.sampling.logprobs or 0
        if record.sampling.logprobs_mode == "processed":  # all else is forbidden
            return [TokenLogprobs(token, 0.0, 1, ((token, 0.0),) if num_top else ()) for token in drafts]
        return self.raw_logprobs(
            logits, torch.arange(len(drafts), device=logits.device), drafts, [num_top] * len(drafts)
        )

    def _batch_of(self, records: list[Record]) -> _Batch:
        """What is constant for these requests, kept from the last step where they are the same."""
        if self._batch is None or self._batch.records != records:
            for record in records:
                if record.state is None and record.sampling.needs_processing:
                    record.state = RequestState(record.sampling, record.num_prompt_tokens, self._vocab_size)
            states = [record.state for record in records]
            stage = StaticStage(states, self._vocab_size, self._device) if any(states) else None
            self._batch = _Batch(records, stage, self._device)
        return self._batch

    def _sample(
        self, logits: Tensor, batch: _Batch, errors: dict[int, Exception]
    ) -> tuple[list[int], list[tuple[TokenLogprobs, ...] | None] | None]:
        """Process, select and look up log-probabilities; failures go to `errors`."""
        records = batch.records
        if batch.stage is not None:
            work = self._workspace(logits, batch.wants_raw)
            for row, error in process(work, batch.stage, [record.tokens for record in records]).items():
                errors[records[row].request_id] = error
        else:
            work = logits if batch.is_plain else logits.to(torch.float32)
        numbers = None
        if batch.params.has_samples:
            # The counter is the position of the token that is sampled now.
            drawn = uniforms(batch.keys, np.array([len(record.tokens) for record in records], dtype=np.uint64))
            numbers = torch.from_numpy(drawn).to(self._device)  # [N]
        chosen: list[int] = self.select(work, batch.params, numbers).tolist()
        if min(chosen) < 0:
            for record, token_id in zip(records, chosen, strict=True):
                if token_id < 0:
                    errors.setdefault(record.request_id, failure_of(token_id))
        return chosen, self._logprobs(logits, work, batch, chosen, errors) if batch.logprob_rows else None

    def _workspace(self, logits: Tensor, is_read_later: bool) -> Tensor:
        """Logits that may be changed, [N, V] float32, valid until the next step: a copy, here in any case."""
        num_rows, vocab_size = logits.shape
        if self._buffer is None or len(self._buffer) < num_rows:
            # Kept, because fresh pages for it would cost more than all of the processing. An ordinary tensor, because
            # one that was made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._buffer = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
        return self._buffer[:num_rows].copy_(logits)

    def _logprobs(
        self,
        logits: Tensor,
        work: Tensor,
        batch: _Batch,
        chosen: Sequence[int],
        errors: dict[int, Exception],
    ) -> list[tuple[TokenLogprobs, ...] | None]:
        """Log-probabilities of the rows that asked, aligned with all rows that sample."""
        records = batch.records
        result: list[tuple[TokenLogprobs, ...] | None] = [None] * len(records)
        for mode in ("raw", "processed"):
            rows = [
                row
                for row in batch.logprob_rows
                if records[row].sampling.logprobs_mode == mode and records[row].request_id not in errors
            ]
            if not rows:
                continue
            index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
            token_ids = [chosen[row] for row in rows]
            num_top = [records[row].sampling.logprobs or 0 for row in rows]
            if mode == "raw":
                found = self.raw_logprobs(logits, index, token_ids, num_top)
            else:
                params = batch.params.subset(index)
                found = self.processed_logprobs(work, index, params, params.is_truncated, token_ids, num_top)
            for row, one in zip(rows, found, strict=True):
                result[row] = (one,)
        return result

    def _prompt_logprobs(
        self, logits: Tensor, prompts: Sequence[tuple[Record, int, list[int]]], errors: dict[int, Exception]
    ) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that this step's rows predict, by request."""
        result = {}
        for record, start, targets in prompts:
            part = logits[start : start + len(targets)]
            if bool(part.isnan().any()):
                errors[record.request_id] = failure_of(INVALID_ROW)
                continue
            num_top = int(record.sampling.prompt_logprobs or 0)
            rows = torch.arange(len(targets), device=logits.device)
            result[record.request_id] = self.raw_logprobs(part, rows, targets, [num_top] * len(targets))
        return result


def _follows(
    batch: _Batch, chosen: Sequence[int], errors: dict[int, Exception]
) -> dict[int, tuple[int, ...] | None] | None:
    """Bring the structures up to date with what was chosen; see `StepResult.follows`."""
    assert batch.stage is not None
    follows: dict[int, tuple[int, ...] | None] = {}
    for row, state, matcher in zip(batch.stage.structured_rows, batch.stage.structured_states, batch.stage.matchers):
        record = batch.records[row]
        if record.request_id in errors:
            continue
        try:
            matcher.extend((chosen[row],))
        except RequestFailed as error:
            errors[record.request_id] = error
            continue
        if matcher.is_complete:
            follows[record.request_id] = None
        record.follows = matcher.forced() if state.can_jump and not matcher.is_complete else ()
        if record.follows:
            follows[record.request_id] = record.follows
    return follows or None


def _split_rows(
    entries: Sequence[StepEntry], records: Sequence[Record], num_rows: int
) -> tuple[list[int], list[tuple[Record, int, list[int]]]]:
    """The rows that sample, and for each prompt its record, first row and the tokens that its rows predict.

    Raises:
        ValueError: the entries have another number of rows.
    """
    rows = []
    prompts = []
    start = 0
    for entry, record in zip(entries, records, strict=True):
        end = start + entry.num_logits
        if entry.is_sampled:
            rows.append(end - 1)
        if entry.num_logits and record.sampling.prompt_logprobs is not None:
            # The row of position p predicts token p + 1; the last rows of a prompt's end predict its output.
            last = entry.num_computed_tokens + entry.num_new_tokens
            first = last - entry.num_logits
            targets = record.tokens[first + 1 : min(last + 1, record.num_prompt_tokens)]
            if targets:
                prompts.append((record, start, targets))
        start = end
    if start != num_rows:
        raise ValueError(f"the logits have {num_rows} rows, the plan asks for {start}")
    return rows, prompts


def failure_of(code: int) -> RequestFailed:
    """The error of a request whose selection gave `INVALID_ROW` or `EMPTY_ROW`."""
    if code == INVALID_ROW:
        return RequestFailed("the model's logits hold NaN")
    return RequestFailed(
        "every token is banned: no id is left by allowed_token_ids, bad words, biases, min_new_tokens, n-gram "
        "blocking, logits processors and the output's structure together"
    )
