"""Drafts from what a request has said before."""

from __future__ import annotations

from typing import Any

import pytest

from aiocb.sampling_params import SamplingParams
from aiocb.scheduler.lookup import FIRST_DRAFTS, PromptLookup
from aiocb.scheduler.request import Request

from .helpers import Harness


def _request(tokens: list[int], **sampling: Any) -> Request:
    values = {"temperature": 0.0, "eos_token_id": (), "min_new_tokens": 0, **sampling}
    return Request(list(tokens), id=1, sampling=SamplingParams(**values), max_tokens=10_000)


def test_what_followed_the_last_tokens_is_proposed() -> None:
    lookup = PromptLookup(8)
    assert list(lookup(_request([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]))) == [5, 6, 9][:FIRST_DRAFTS]
    assert list(lookup(_request([1, 2, 3, 4, 5, 2, 3, 4, 7, 2, 3, 4]))) == [7, 2, 3]  # the last time counts
    assert not lookup(_request([1, 2, 3, 4, 5, 9, 9, 3, 4]))  # two tokens are too few
    assert not lookup(_request([1, 2]))


def test_a_request_learns_from_its_own_output() -> None:
    lookup, request = PromptLookup(8), _request([1, 2])
    for token in (3, 4, 5, 1, 2, 3):
        assert not lookup(request)
        request.tokens.append(token)
    assert list(lookup(request)) == [4, 5, 1]


def test_proposals_grow_while_they_are_right() -> None:
    lookup, request = PromptLookup(8), _request([*range(40), 0, 1, 2])
    sizes = []
    for _ in range(4):
        drafts = list(lookup(request))
        sizes.append(len(drafts))
        request.tokens += [*drafts, drafts[-1] + 1]
    assert sizes == [3, 6, 8, 8]


def test_a_short_period_is_gone_on_with_beyond_the_end() -> None:
    lookup = PromptLookup(8)
    request = _request([9, 4, 5, 4, 5, 4, 5])
    assert list(lookup(request)) == [4, 5, 4]
    request = _request([7, 7, 7, 7])
    assert list(lookup(request)) == [7, 7, 7]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiocb.scheduler.lookup._MOST_PLACES", 10)
    lookup, request = PromptLookup(8), _request([*range(100), 0, 1, 2])
    assert not lookup(request) and len(request.history.places) == 10  # forgotten
    request.tokens += [95, 96, 97]
    assert list(lookup(request))[:2] == [98, 99]


def test_a_request_whose_proposals_fail_is_left_alone_longer_and_longer() -> None:
    lookup, request = PromptLookup(8), _request([1, 1, 1, 1])
    proposed_at = []
    for step in range(300):
        # The three before have stood there often, and something new comes each time.
        request.tokens[-3:] = [1, 1, 1]
        if lookup(request):
            proposed_at.append(step)
        request.tokens.append(100 + step)
    gaps = [later - earlier for earlier, later in zip(proposed_at, proposed_at[1:], strict=False)]
    long = [gap for gap in gaps if gap > 4]
    assert long[:3] == sorted(long[:3]) and long[1] >= 1.8 * long[0]
    assert len(proposed_at) < 20


@pytest.mark.parametrize("sampling", [{"logits_processors": [lambda ids, logits: logits]}, {"regex": "a+"}])
def test_who_sees_each_row_by_itself_gets_none(sampling: Any) -> None:
    assert not PromptLookup(8)(_request([1, 2, 3, 4, 1, 2, 3], **sampling))


def test_beside_many_others_nothing_is_proposed() -> None:
    """A step has at most so many rows that decode or are drafted."""
    harness = Harness(draft_len=3, max_draft_rows=5)
    for number in range(5):
        harness.add([1 + number] * 6, 12 if number else 24)
    harness.run()
    rows = [sum(entry.num_new_tokens for entry in plan.entries) for plan in harness.plans]
    drafted = [sum(len(entry.draft_token_ids) for entry in plan.entries) for plan in harness.plans]
    decoding = [len(plan.entries) for plan in harness.plans]
    assert not any(drafts for drafts, count in zip(drafted, decoding, strict=True) if count >= 5)
    assert all(count <= 5 for count, drafts in zip(rows, drafted, strict=True) if drafts)
    assert any(drafted)  # when one is left
