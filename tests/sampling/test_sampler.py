"""The sampler as runners use it: mixed batches, seeds, log-probabilities, state."""

from __future__ import annotations

import gc
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aiocb.errors import RequestFailed
from aiocb.sampling import Sampler, SelectionParams
from aiocb.sampling.random import as_seeds, uniforms
from tests.sampling.helpers import Request, Sampled, params, peaked_logits, run, step


def forbid_seven(token_ids: list[int], logits: Tensor) -> Tensor:
    logits[7] = -math.inf
    return logits


MENU: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.4, "logprobs": 0, "logprobs_mode": "processed"},
    {"temperature": 1.0},
    {"temperature": 1},
    {"temperature": 0.7, "logprobs": 3, "logprobs_mode": "processed"},
    {"temperature": 1.3, "top_p": 0.9, "logprobs": 3, "logprobs_mode": "processed"},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3},
    {"temperature": 1.0, "typical_p": 0.8},
    {"temperature": 2.5, "top_p": 0.97, "top_k": 700, "logprobs": 1},
    {"temperature": 1e-9, "top_p": 0.5},
    {"temperature": 1e6, "top_p": 0.6},
    {"temperature": 0.9, "logit_bias": {3: 4.0, 4: -1.0}},
    {"temperature": 0.9, "allowed_token_ids": list(range(3, 30))},
    {"temperature": 0.9, "bad_words_ids": [[3], [1, 5]], "no_repeat_ngram_size": 2},
    {"temperature": 0.9, "min_new_tokens": 3, "stop_token_ids": [5]},
    {"temperature": 0.9, "logits_processors": (forbid_seven,)},
]


def outcome(result: Sampled, row: int) -> tuple[Any, Any]:
    return result.token_ids[row], None if result.logprobs is None else result.logprobs[row]


@pytest.mark.parametrize("vocab_size", [64, 4099, 20_000])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_a_row_does_not_depend_on_its_batch(vocab_size: int, data: st.DataObject) -> None:
    """Bit for bit (log-probabilities are compared exactly), for several steps with a growing history."""
    choices = data.draw(st.lists(st.integers(0, len(MENU) - 1), min_size=2, max_size=14))
    seed = data.draw(st.integers(0, 2**30))
    quantised = data.draw(st.booleans())
    source = random.Random(seed)
    requests = [
        Request(
            number,
            params(vocab_size, **MENU[choice]),
            [source.randrange(vocab_size) for _ in range(source.randrange(1, 9))],
            source.randrange(-(2**63), 2**64),
        )
        for number, choice in enumerate(choices)
    ]
    together, apart = Sampler(vocab_size), [Sampler(vocab_size) for _ in requests]
    for number in range(3):
        logits = peaked_logits(len(requests), vocab_size, seed + number, scale=source.choice([0.5, 3.0, 9.0]))
        if quantised:  # many equal values, as a model in bfloat16 gives
            logits = logits.to(torch.bfloat16).to(torch.float32)
        order = source.sample(range(len(requests)), len(requests))
        result = step(together, [requests[at] for at in order], logits[order])
        assert result.errors is None
        for row, at in enumerate(order):
            alone = step(apart[at], [requests[at]], logits[at : at + 1])
            assert outcome(alone, 0) == outcome(result, row), MENU[choices[at]]
        for row, at in enumerate(order):
            token = result.token_ids[row]
            assert token is not None
            requests[at].tokens.append(token)


def test_threads_do_not_change_a_row() -> None:
    """Where torch.sum splits a single wide row among threads, and rounds otherwise than in a batch."""
    vocab_size = 40_000
    menu = [MENU[number] for number in (0, 1, 4, 7, 8, 11, 14, 15)]
    logits = peaked_logits(len(menu), vocab_size, scale=2.0)
    requests = [Request(number, params(vocab_size, **values), seed=number) for number, values in enumerate(menu)]
    want = step(Sampler(vocab_size), requests, logits)
    torch.set_num_threads(2)
    for row, request in enumerate(requests):
        alone = step(Sampler(vocab_size), [request], logits[row : row + 1])
        assert outcome(alone, 0) == outcome(want, row), menu[row]


def test_mixed_batches_with_a_random_finish_order_equal_solo_runs() -> None:
    vocab_size = 500
    source = random.Random(5)

    def model(request: Request) -> Tensor:
        return peaked_logits(1, vocab_size, hash((request.request_id, len(request.tokens))) % 2**31)

    def make(number: int) -> Request:
        return Request(number, params(vocab_size, **MENU[number % len(MENU)]), [1, 2, number % 50], number * 31)

    num_requests = 2 * len(MENU)
    lengths = [source.randrange(1, 25) for _ in range(num_requests)]
    solo = []
    for number in range(num_requests):
        request, sampler = make(number), Sampler(vocab_size)
        for _ in range(lengths[number]):
            token = step(sampler, [request], model(request)).token_ids[0]
            assert token is not None
            request.tokens.append(token)
        solo.append(request.tokens)

    sampler = Sampler(vocab_size)
    waiting = [make(number) for number in range(num_requests)]
    running: list[Request] = []
    done: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and (not running or source.random() < 0.6):
            running.insert(source.randrange(len(running) + 1), waiting.pop())
        part = [request for request in running if source.random() < 0.8] or running[:1]
        result = step(sampler, part, torch.cat([model(request) for request in part]))
        for request, token in zip(part, result.token_ids, strict=True):
            assert token is not None
            request.tokens.append(token)
            if len(request.tokens) == 3 + lengths[request.request_id]:
                running.remove(request)
                done[request.request_id] = request.tokens
                sampler.forget()
    assert [done[number] for number in range(num_requests)] == solo


def test_seeds() -> None:
    vocab_size = 3000
    sampling = params(vocab_size, temperature=5.0)
    logits = torch.zeros(6, vocab_size)
    requests = [Request(number, sampling, seed=seed) for number, seed in enumerate([1, 1, 2, 3, -1, 2**64 - 1])]
    sampler = Sampler(vocab_size)
    seen: list[list[int]] = []
    for _ in range(5):
        result = step(sampler, requests, logits)
        seen.append([token for token in result.token_ids if token is not None])
        for request, token in zip(requests, seen[-1], strict=True):
            request.tokens.append(token)
    columns = list(zip(*seen, strict=True))
    assert columns[0] == columns[1]  # the same seed twice in one batch
    assert columns[4] == columns[5]  # the same 64 bits
    assert len(set(columns)) == 4
    assert len(set(columns[0])) == 5  # the position moves the stream on
    again = [Request(number, sampling, seed=seed) for number, seed in enumerate([3, 1])]
    assert step(Sampler(vocab_size), again, logits[:2]).token_ids == [seen[0][3], seen[0][0]]


def test_uniforms_are_uniform_and_independent() -> None:
    seeds = np.arange(200)
    keys = as_seeds(seeds.tolist())
    table = np.stack([uniforms(keys, np.full(200, position, dtype=np.uint64)) for position in range(500)])
    assert table.min() >= 0.0
    assert table.max() < 1.0
    assert len(np.unique(table)) == table.size
    counts, _ = np.histogram(table, bins=100, range=(0, 1))
    expected = table.size / 100
    assert ((counts - expected) ** 2 / expected).sum() < 160  # 99 degrees of freedom
    for left, right in ((table[:, :-1], table[:, 1:]), (table[:-1], table[1:])):
        correlation = np.corrcoef(left.ravel(), right.ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(left.size)


def test_plain_greedy_is_the_argmax_of_any_type() -> None:
    vocab_size = 1000
    requests = [Request(number, params(vocab_size)) for number in range(4)]
    logits = peaked_logits(4, vocab_size)
    assert step(Sampler(vocab_size), requests, logits).token_ids == logits.argmax(-1).tolist()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        typed = logits.to(dtype)
        assert step(Sampler(vocab_size), requests, typed).token_ids == typed.argmax(-1).tolist()


def test_nan_logits_end_their_own_request() -> None:
    vocab_size = 800
    logits = peaked_logits(3, vocab_size)
    logits[1] = math.nan
    for values in MENU:
        requests = [Request(number, params(vocab_size, **values), seed=number) for number in range(3)]
        result = step(Sampler(vocab_size), requests, logits)
        assert result.errors is not None
        assert list(result.errors) == [1]
        assert isinstance(result.errors[1], RequestFailed)
        assert result.token_ids[1] is None
        for row in (0, 2):
            alone = step(Sampler(vocab_size), [requests[row]], logits[row : row + 1])
            assert outcome(alone, 0) == outcome(result, row)


def test_entries_that_do_not_sample_are_skipped() -> None:
    vocab_size = 300
    sampling = params(vocab_size, temperature=0.5, logprobs=0)
    requests = [Request(number, sampling, [1, 2, 3, 4], number) for number in range(4)]
    logits = peaked_logits(2, vocab_size)
    entries = [
        requests[0].entry(0, is_sampled=False, num_computed=0),
        requests[1].entry(),
        requests[2].entry(0, is_sampled=False, num_computed=0),
        requests[3].entry(num_computed=0),
    ]
    result = run(Sampler(vocab_size), logits, entries)
    want = step(Sampler(vocab_size), [requests[1], requests[3]], logits)
    assert result.token_ids == [None, want.token_ids[0], None, want.token_ids[1]]
    assert result.logprobs is not None and want.logprobs is not None
    assert list(result.logprobs) == [None, want.logprobs[0], None, want.logprobs[1]]
    nothing = run(Sampler(vocab_size), logits[:0], entries[:1])
    assert nothing.token_ids == [None]
    with pytest.raises(ValueError, match="rows"):
        run(Sampler(vocab_size), logits[:1], entries)
    with pytest.raises(ValueError, match="columns"):
        run(Sampler(vocab_size + 1), logits, entries)


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_raw_logprobs(vocab_size: int) -> None:
    requests = [
        Request(0, params(vocab_size, logprobs=5)),
        Request(1, params(vocab_size, temperature=3.0, logprobs=True, repetition_penalty=2.0), seed=3),
        Request(2, params(vocab_size, temperature=9.0, logprobs=vocab_size if vocab_size < 1024 else 900), seed=4),
    ]
    logits = peaked_logits(3, vocab_size)
    logits[2, :3] = -math.inf
    result = step(Sampler(vocab_size), requests, logits)
    reference = logits.log_softmax(-1)
    assert result.logprobs is not None
    for row, one in enumerate(result.logprobs):
        assert one is not None
        token = result.token_ids[row]
        assert token is not None
        assert one.token_id == token
        assert one.logprob == pytest.approx(float(reference[row, token]), abs=1e-5)
        assert one.rank == int((reference[row] > reference[row, token]).sum()) + 1
        asked = int(requests[row].sampling.logprobs or 0)
        assert token in dict(one.top)
        order = reference[row].argsort(descending=True, stable=True)[:asked].tolist()
        possible = [other for other in order if reference[row, other] > -math.inf]
        assert [other for other, _ in one.top][: len(possible)] == possible
        assert len(one.top) <= asked + 1
        assert "Infinity" not in json.dumps(one)


@pytest.mark.parametrize("vocab_size", [40, 5000])
@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.5},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 4.0, "top_p": 0.99},
        {"temperature": 1.0, "typical_p": 0.5},
        {"temperature": 1e-9},
        {"temperature": 1.0, "min_p": 0.2, "logit_bias": {3: 2.0}},
    ],
)
def test_processed_logprobs_are_those_of_the_draw(vocab_size: int, values: dict[str, Any]) -> None:
    """The values of all kept tokens sum to 1, and a tried seed never draws one that is not kept."""
    sampling = params(vocab_size, **values, logprobs=1000, logprobs_mode="processed")
    requests = [Request(seed, sampling, [1, 2, 3], seed) for seed in range(16)]
    logits = peaked_logits(1, vocab_size, 7).expand(16, -1).contiguous()
    result = step(Sampler(vocab_size), requests, logits)
    assert result.logprobs is not None
    for token, one in zip(result.token_ids, result.logprobs, strict=True):
        assert one is not None
        top = dict(one.top)
        assert one.token_id == token
        assert top[one.token_id] == one.logprob
        assert one.rank == 1 + sum(value > one.logprob for value in top.values()) or len(top) >= 1000
        total = sum(math.exp(value) for value in top.values())
        if len(top) < 1000:
            assert total == pytest.approx(1.0, abs=1e-5)
        assert one.logprob > -100.0
        assert "Infinity" not in json.dumps(one)


def test_a_forced_token_of_probability_zero_is_json_ready() -> None:
    vocab_size = 50
    row = torch.zeros(1, vocab_size)
    row[0, 9] = -math.inf

    def force(token_ids: list[int], logits: Tensor) -> Tensor:
        return torch.where(torch.arange(vocab_size) == 9, 0.0, -math.inf)

    result = step(Sampler(vocab_size), [Request(0, params(vocab_size, logits_processors=force, logprobs=2))], row)
    assert result.logprobs is not None
    one = result.logprobs[0]
    assert one is not None
    assert one.logprob == -9999.0
    assert one.top[-1] == (9, -9999.0)
    assert "Infinity" not in json.dumps(one)


def test_prompt_logprobs_over_chunks() -> None:
    vocab_size = 700
    tokens = [5, 9, 2, 600, 31, 7, 8]
    request = Request(0, params(vocab_size, prompt_logprobs=3), tokens)
    other = Request(1, params(vocab_size), [4, 4])
    logits = peaked_logits(7, vocab_size)
    reference = logits.log_softmax(-1)
    sampler = Sampler(vocab_size)
    found = []
    for start, end in ((0, 3), (3, 4), (4, 7)):
        entry = request.entry(end - start, is_sampled=end == 7, num_computed=start, num_new=end - start)
        rows = torch.cat((peaked_logits(1, vocab_size, 9), logits[start:end]))
        result = run(sampler, rows, [other.entry(), entry])
        assert result.token_ids[0] == int(rows[0].argmax())
        assert result.token_ids[1] == (int(logits[6].argmax()) if end == 7 else None)
        assert result.prompt_logprobs is not None
        found += list(result.prompt_logprobs[0])
    assert [one.token_id for one in found] == tokens[1:]
    for position, one in enumerate(found):
        assert one.logprob == pytest.approx(float(reference[position, tokens[position + 1]]), abs=1e-5)
        assert one.token_id in dict(one.top)
        assert len(one.top) in (3, 4)
    # After the prompt only the sampled row is left, and decoding reports nothing of it.
    request.tokens.append(1)
    assert run(sampler, logits[:1], [request.entry()]).prompt_logprobs is None
    bad = logits.clone()
    bad[1, 0] = math.nan
    result = run(
        Sampler(vocab_size),
        torch.cat((logits[:1], bad)),
        [other.entry(), Request(0, request.sampling, tokens[:7]).entry(7, num_computed=0)],
    )
    assert result.errors is not None
    assert list(result.errors) == [0]
    assert result.token_ids == [int(logits[0].argmax()), None]


@pytest.mark.slow
def test_state_goes_with_its_request() -> None:
    vocab_size = 200
    sampling = params(vocab_size, repetition_penalty=1.2, no_repeat_ngram_size=3, logits_processors=forbid_seven)
    sampler = Sampler(vocab_size)
    sizes = []
    for number in range(300):
        step(sampler, [Request(number, sampling, list(range(100)))], peaked_logits(1, vocab_size))
        sampler.forget()
        if number in (100, 299):
            gc.collect()
            sizes.append(sum(1 for one in gc.get_objects() if type(one).__name__ == "RequestState"))
    assert sizes == [0, 0]


def test_plain_requests_keep_no_state() -> None:
    sampler = Sampler(100)
    values: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "logprobs": 3})
    requests = [Request(number, params(100, **one)) for number, one in enumerate(values)]
    step(sampler, requests, peaked_logits(3, 100))
    assert all(request.record.state is None for request in requests)


def test_a_request_that_is_opened_again_starts_from_its_tokens() -> None:
    """After a preemption the counts are those of the whole history, whoever had the id before."""
    sampling = params(200, repetition_penalty=1.5, presence_penalty=0.5, no_repeat_ngram_size=2)
    logits = peaked_logits(1, 200)
    sampler = Sampler(200)
    first = Request(0, sampling, [1, 2, 3], num_prompt_tokens=2)
    for _ in range(4):
        first.tokens.append(step(sampler, [first], logits).token_ids[0] or 0)
    again = Request(0, sampling, list(first.tokens), num_prompt_tokens=2)
    assert step(sampler, [again], logits).token_ids == step(Sampler(200), [first], logits).token_ids


def test_batch_constants_are_built_once_and_cost_nothing_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = SelectionParams.build

    def counting(*args: Any) -> SelectionParams:
        nonlocal calls
        calls += 1
        return original(*args)

    monkeypatch.setattr(SelectionParams, "build", counting)
    sampler = Sampler(100)
    requests = [Request(number, params(100, temperature=1.0, repetition_penalty=1.1)) for number in range(3)]
    for _ in range(5):
        result = step(sampler, requests, peaked_logits(3, 100))
        for request, token in zip(requests, result.token_ids, strict=True):
            assert token is not None
            request.tokens.append(token)
    assert calls == 1
    step(sampler, requests[:2], peaked_logits(2, 100))
    assert calls == 2


class Watched(list[int]):
    """A token list that counts how many elements are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Watched.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        raise AssertionError("a walk over the whole history")


def test_a_step_reads_only_new_tokens() -> None:
    vocab_size = 100
    sampling = params(
        vocab_size,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        no_repeat_ngram_size=4,
        bad_words_ids=[[1, 2, 3]],
        logits_processors=forbid_seven,
    )
    request = Request(0, sampling, [1, 2])
    request.tokens = Watched([token % 100 for token in range(5000)])
    sampler = Sampler(vocab_size)
    step(sampler, [request], peaked_logits(1, vocab_size))
    Watched.reads = 0
    for token in range(20):
        request.tokens.append(token)
        step(sampler, [request], peaked_logits(1, vocab_size))
    assert Watched.reads < 20 * 10


def test_the_native_seam_gets_processed_rows_and_decides() -> None:
    class Native(Sampler):
        def select(self, logits: Tensor, params: SelectionParams, uniforms: Tensor | None) -> Tensor:
            assert logits.dtype == torch.float32
            assert logits.is_contiguous()
            assert params.temperature.tolist() == [0.0, 0.5]
            assert uniforms is not None and uniforms.dtype == torch.float64
            assert float(logits[0, 3]) == 100.0
            return torch.tensor([3, -1])

    requests = [Request(0, params(50, logit_bias={3: 100.0})), Request(1, params(50, temperature=0.5))]
    result = step(Native(50), requests, torch.zeros(2, 50, dtype=torch.bfloat16))
    assert result.token_ids == [3, None]
    assert result.errors is not None
    assert list(result.errors) == [1]


def test_inference_mode_may_change_between_steps() -> None:
    requests = [Request(number, params(2000, **values)) for number, values in enumerate(MENU)]
    for first in (True, False):
        sampler = Sampler(2000)
        for mode in (first, not first, first):
            with torch.inference_mode(mode):
                logits = peaked_logits(len(MENU), 2000)
                assert step(sampler, requests, logits).errors is None
            assert step(sampler, requests, logits).errors is None
