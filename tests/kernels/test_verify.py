"""Drafts that are verified row by row by a sampler, and what is kept where a row fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aiocb.errors import RequestFailed
from aiocb.model.native.verify import accepted, sample_verified
from aiocb.records import Record
from aiocb.sampling_params import SamplingParams
from aiocb.step import OpenedRequest, StepEntry, StepResult

BAD = 9


def _record(number: int, guesses: tuple[int, ...]) -> Record:
    record = Record(OpenedRequest(number, (1, 2, *guesses), 2, SamplingParams(), 0), 0, 1)
    record.guesses = guesses
    return record


def _argmax(logits: torch.Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
    """A row's largest; nine is a failure. What it is asked with is what a step of its own would know."""
    tokens = logits.argmax(-1).tolist()
    failed = {e.request_id: RequestFailed("bad") for e, token in zip(entries, tokens, strict=True) if token == BAD}
    return StepResult([() if token == BAD else (token,) for token in tokens], errors=failed or None)


def _sampled(rows: list[list[int]], guesses: list[tuple[int, ...]]) -> tuple[StepResult, list[Record]]:
    records = [_record(number, guess) for number, guess in enumerate(guesses)]
    entries = [StepEntry(number, 1, len(row), len(row), True) for number, row in enumerate(rows)]
    logits = torch.nn.functional.one_hot(torch.tensor([token for row in rows for token in row]), 10).float()
    return sample_verified(_argmax, logits, entries, records), records


def test_tokens_count_up_to_the_first_that_differs() -> None:
    assert [accepted((5, 6), chosen) for chosen in ((5, 6, 7), (5, 4, 7), (3, 6, 7))] == [3, 2, 1]
    result, records = _sampled([[5, 6, 7], [5, 4, 7], [3, 6, 7], [8]], [(5, 6), (5, 6), (5, 6), ()])
    assert result.token_ids == [(5, 6, 7), (5, 4), (3,), (8,)]
    assert all(record.tokens == [1, 2] and not record.guesses for record in records)


def test_a_row_that_fails_behind_accepted_ones_is_left_to_the_next_step() -> None:
    result, records = _sampled([[5, BAD, 7], [BAD, 6, 7], [5, 6, 7]], [(5, 6), (5, 6), (5, 6)])
    assert result.token_ids == [(5,), (), (5, 6, 7)]
    assert result.errors is not None and set(result.errors) == {1}
    assert all(record.tokens == [1, 2] for record in records)
