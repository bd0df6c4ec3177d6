"""Processing before selection: equality with transformers, history, a request's own processors, failures."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from aiocb.errors import RequestFailed
from aiocb.sampling import Sampler
from aiocb.sampling.processors import RequestState, StaticStage, process
from tests.sampling.helpers import EOS, Request, params, peaked_logits, run, sample, step

V = 60
CPU = torch.device("cpu")


def processed(logits: Tensor, tokens: list[int], num_prompt: int, **values: Any) -> Tensor:
    """One row after all stages, by a fresh state."""
    state = RequestState(params(logits.shape[-1], **values), num_prompt, logits.shape[-1])
    work = logits.clone()[None]
    assert process(work, StaticStage([state], logits.shape[-1], CPU), [tokens]) == {}
    return work[0]


def history(seed: int, length: int = 40, vocab_size: int = V) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(min(vocab_size, 12)) for _ in range(length)]


@pytest.mark.parametrize("seed", range(4))
def test_each_stage_equals_transformers(seed: int) -> None:
    tokens = history(seed)
    ids = torch.tensor([tokens])
    row = peaked_logits(1, V, seed)[0]
    bad = [[3], [EOS], [tokens[-1], 9], [tokens[-2], tokens[-1], 11], [50, 51, 7], [8] * 50 + [1]]
    for values, reference in (
        ({"repetition_penalty": 1.3}, RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.7}, RepetitionPenaltyLogitsProcessor(0.7)),
        ({"no_repeat_ngram_size": 1}, NoRepeatNGramLogitsProcessor(1)),
        ({"no_repeat_ngram_size": 2}, NoRepeatNGramLogitsProcessor(2)),
        ({"no_repeat_ngram_size": 3}, NoRepeatNGramLogitsProcessor(3)),
        ({"no_repeat_ngram_size": 100}, NoRepeatNGramLogitsProcessor(100)),
        ({"bad_words_ids": bad}, NoBadWordsLogitsProcessor(bad, eos_token_id=EOS)),
        ({"min_new_tokens": 31}, MinNewTokensLengthLogitsProcessor(10, 31, EOS)),
        ({"min_new_tokens": 30}, MinNewTokensLengthLogitsProcessor(10, 30, EOS)),
    ):
        assert isinstance(reference, LogitsProcessor)
        want = reference(ids, row.clone()[None])[0]
        torch.testing.assert_close(processed(row, tokens, 10, **values), want, rtol=0, atol=0)


def test_presence_and_frequency_count_the_output_only() -> None:
    row = peaked_logits(1, V)[0]
    tokens = [4, 4, 5] + [6, 6, 6, 7]
    got = processed(row, tokens, 3, presence_penalty=0.5, frequency_penalty=0.25)
    want = row.clone()
    want[6] -= 0.5 + 3 * 0.25
    want[7] -= 0.5 + 0.25
    torch.testing.assert_close(got, want)
    assert torch.equal(processed(row, tokens, 7, presence_penalty=0.5, frequency_penalty=0.25), row)


def test_bias_allowed_and_banned() -> None:
    row = peaked_logits(1, V)[0]
    got = processed(row, [1], 1, logit_bias={3: 2.5, 4: -math.inf, 5: 1e308}, allowed_token_ids=[3, 4, 6])
    assert (got > -math.inf).nonzero()[:, 0].tolist() == [3, 6]
    assert got[3] == row[3] + 2.5
    assert got[6] == row[6]
    assert sample(V, row, logit_bias={17: 1000.0}) == 17
    assert sample(V, row, temperature=1.0, top_p=0.5, logit_bias={17: 1e38, 18: -1e308}) == 17


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": 1e308, "frequency_penalty": -1e308},
        {"presence_penalty": -1e308},
        {"repetition_penalty": 1e-308},
        {"repetition_penalty": 1e308},
        {"repetition_penalty": 5e-324, "presence_penalty": 1e308},
        {"logit_bias": {5: -1.7e308, 6: 1.7e308}, "repetition_penalty": 1e308},
    ],
)
def test_huge_penalties_make_no_nan(values: dict[str, Any]) -> None:
    row = peaked_logits(1, V)[0]
    row[5] = 0.0
    assert not processed(row, [5, 6, 5, 6], 1, **values).isnan().any()
    more: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9})
    for extra in more:
        assert 0 <= sample(V, row, tokens=[5, 6, 5, 6], **values, **extra) < V


def test_stop_ids_wait_for_min_new_tokens() -> None:
    row = torch.zeros(V)
    row[EOS], row[7], row[8], row[9] = 9.0, 8.0, 7.0, 6.0
    sampler = Sampler(V)
    request = Request(0, params(V, min_new_tokens=2, stop_token_ids=[7], eos_token_id=[EOS, 8]))
    for want in (9, 9, EOS):
        token = step(sampler, [request], row[None]).token_ids[0]
        assert token == want
        request.tokens.append(want)


def test_placeholders_outside_the_vocabulary_touch_no_neighbour() -> None:
    sampler = Sampler(V)
    values = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "presence_penalty": 1.0}
    requests = [Request(0, params(V, **values), [V + 3, -1, 2**40, 5]), Request(1, params(V, repetition_penalty=1.5))]
    logits = peaked_logits(2, V)
    both = step(sampler, requests, logits)
    assert both.errors is None
    alone = step(Sampler(V), requests[1:], logits[1:])
    assert both.token_ids[1] == alone.token_ids[0]


HISTORY_PARAMETERS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[1, 2], [3, 4, 5], [6]]},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "no_repeat_ngram_size": 3, "min_new_tokens": 12},
]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**20), st.sampled_from(HISTORY_PARAMETERS), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_state_grown_in_any_strides_equals_a_fresh_one(seed: int, values: dict[str, Any], strides: list[int]) -> None:
    """Speculation and resumed requests grow by several tokens."""
    tokens = history(seed, 80)
    state = RequestState(params(V, **values), 7, V)
    stage = StaticStage([state], V, CPU)
    lengths = [7]
    for stride in strides:
        lengths.append(lengths[-1] + stride)
    for length in lengths:
        row = peaked_logits(1, V, seed + length)
        work = row.clone()
        process(work, stage, [tokens[:length]])
        assert torch.equal(work[0], processed(row[0], tokens[:length], 7, **values))


class Recorder(LogitsProcessor):
    """A transformers processor that remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64
        assert input_ids.shape[0] == 1
        assert scores.shape == (1, V)
        assert scores.dtype == torch.float32
        self.seen.append(input_ids[0].tolist())
        return scores


def test_processors_see_the_whole_history_after_a_preemption() -> None:
    recorder = Recorder()
    shown: list[list[int]] = []

    def plain(token_ids: list[int], logits: Tensor) -> Tensor:
        assert logits.shape == (V,)
        shown.append(list(token_ids))
        return logits

    sampler = Sampler(V)
    request = Request(0, params(V, logits_processors=[recorder, plain]), [3, 1, 4])
    other = Request(1, params(V, temperature=1.0))
    expected = []
    for number in range(40):
        logits = peaked_logits(2, V, number)
        if number % 7 == 3:  # preempted: a step without it, then recomputed from the start
            step(sampler, [other], logits[:1])
            result = run(sampler, logits[:1], [request.entry(num_computed=0)])
        else:
            result = step(sampler, [request, other], logits)
        expected.append(list(request.tokens))
        token = result.token_ids[0]
        assert token is not None
        request.tokens.append(token)
    assert recorder.seen == expected
    assert shown == expected


def test_lists_of_transformers_processors_are_taken() -> None:
    row = peaked_logits(1, V)[0]
    tokens = history(5)
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(0.5)])
    ids: Any = torch.tensor([tokens])
    for given_as in (chain, [chain], list(chain)):
        want = chain(ids, row.clone()[None])[0]
        assert torch.equal(processed(row, tokens, 4, logits_processors=given_as), want)
    assert torch.equal(processed(row, tokens, 4, logits_processors=LogitsProcessorList()), row)


def raises(token_ids: list[int], logits: Tensor) -> Tensor:
    raise KeyError("mine")


def writes_nan(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits.fill_(math.nan)


def bans_all(token_ids: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -math.inf)


FAULTY = {
    "raised KeyError": raises,
    "returned NaN": writes_nan,
    "every token is banned": bans_all,
    "returned NoneType": lambda token_ids, logits: None,
    "returned list": lambda token_ids, logits: logits.tolist(),
    "returned shape": lambda token_ids, logits: logits[:-1],
    "returned torch.bool": lambda token_ids, logits: logits > 0,
}


@pytest.mark.parametrize("message", FAULTY)
@pytest.mark.parametrize(
    "extra", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2, "logprobs_mode": "processed"}]
)
def test_a_faulty_processor_ends_its_own_request(message: str, extra: dict[str, Any]) -> None:
    logits = peaked_logits(3, V)
    requests = [
        Request(0, params(V, temperature=0.8, repetition_penalty=1.2, logprobs=1), seed=4),
        Request(1, params(V, logits_processors=[FAULTY[message]], **extra)),
        Request(2, params(V)),
    ]
    result = step(Sampler(V), requests, logits)
    assert result.token_ids[1] is None
    assert result.errors is not None
    assert list(result.errors) == [1]
    error = result.errors[1]
    assert isinstance(error, RequestFailed)
    assert message in str(error)
    assert (error.__cause__ is not None) == (message == "raised KeyError")
    assert result.logprobs is not None
    assert result.logprobs[1] is None
    for row in (0, 2):
        alone = step(Sampler(V), [requests[row]], logits[row : row + 1])
        assert alone.token_ids[0] == result.token_ids[row]


def test_a_processor_may_write_to_its_arguments() -> None:
    kept: list[Tensor] = []

    def rude(token_ids: list[int], logits: Tensor) -> Tensor:
        kept.append(logits)
        token_ids.clear()
        for tensor in kept:
            tensor.fill_(0.0)
        logits[11] = 1.0
        return logits

    sampler = Sampler(V)
    logits = peaked_logits(3, V)
    before = logits.clone()
    requests = [Request(0, params(V)), Request(1, params(V, logits_processors=rude)), Request(2, params(V))]
    for _ in range(3):
        result = step(sampler, requests, logits)
        assert result.token_ids[1] == 11
        assert [result.token_ids[0], result.token_ids[2]] == logits.argmax(-1)[[0, 2]].tolist()
        assert torch.equal(logits, before)
        for request, token in zip(requests, result.token_ids, strict=True):
            assert token is not None
            request.tokens.append(token)


def test_other_float_types_are_taken_from_processors() -> None:
    for dtype in (torch.float64, torch.float16, torch.int64):
        row = peaked_logits(1, V)[0]
        best = int(row.to(dtype).argmax())
        assert sample(V, row, logits_processors=lambda token_ids, logits, dtype=dtype: logits.to(dtype)) == best
    assert sample(
        V, peaked_logits(1, V)[0], logits_processors=lambda token_ids, logits: logits[None].sqrt().nan_to_num()
    )


def test_everything_banned_names_the_reason() -> None:
    request = Request(0, params(V, allowed_token_ids=[EOS], min_new_tokens=3))
    result = step(Sampler(V), [request], peaked_logits(1, V))
    assert result.errors is not None
    assert "allowed_token_ids" in str(result.errors[0])
