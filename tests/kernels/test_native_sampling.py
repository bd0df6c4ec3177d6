"""Native selection and log-probabilities against the torch sampler, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from aiocb.kernels import Library, NativeModel
from aiocb.model.native.sampling import NativeSampler
from aiocb.sampling import EMPTY_ROW, INVALID_ROW, Sampler, SelectionParams
from tests.kernels.helpers import native
from tests.sampling.helpers import Request, params, step

V = 5003  # no multiple of anything

GRID: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 2.0, "top_k": 2000},
    {"temperature": 1.0, "top_k": V},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 1e-6, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "min_p": 0.001, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 0.9, "top_k": 200, "typical_p": 0.5},
]


@pytest.fixture(scope="module")
def models(library: Library) -> Iterator[Mapping[str, NativeModel]]:
    made = {
        instruction_set: native(library, instruction_set, "float32") for instruction_set in library.instruction_sets()
    }
    yield made
    for model in made.values():
        model.close()


@pytest.fixture(scope="module")
def model(library: Library, models: Mapping[str, NativeModel]) -> NativeModel:
    return models[library.instruction_sets()[0]]


def like_a_model(rows: int, vocab: int = V, *, seed: int = 0, spread: float = 2.4) -> Tensor:
    """Rows with the shape of a language model's: a bulk, and a few tokens far above it."""
    generator = torch.Generator().manual_seed(seed)
    bulk = torch.randn(rows, vocab, generator=generator) * spread
    peaks = torch.rand(rows, vocab, generator=generator).pow_(300) * 12
    return bulk + peaks + 8


def build(values: Sequence[Mapping[str, Any]], vocab: int = V) -> SelectionParams:
    return SelectionParams.build([params(vocab, **one) for one in values], torch.device("cpu"))


def uniforms(rows: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["model", "flat", "normal", "tied", "banned"])
def test_chooses_what_the_torch_sampler_chooses(
    models: Mapping[str, NativeModel], instruction_set: str, kind: str
) -> None:
    rows = 3 * len(GRID)
    logits = like_a_model(rows)
    if kind == "flat":
        logits *= 0.01
    elif kind == "normal":
        logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(1))
    elif kind == "tied":
        logits = (logits * 2).round() / 2
        logits[logits.abs() < 1] *= 0.0  # both zeros
    elif kind == "banned":
        logits[:, 7:] = -torch.inf
        logits[1::2, 3000:3040] = torch.randn(rows // 2, 40)
    chosen = build(GRID * 3)
    theirs, ours = Sampler(V), NativeSampler(V, models[instruction_set])
    for seed in range(3):
        expected = theirs.select(logits, chosen, uniforms(rows, seed))
        actual = ours.select(logits, chosen, uniforms(rows, seed))
        different = (expected != actual).nonzero()[:, 0].tolist()
        assert not different, [(GRID[row % len(GRID)], expected[row].item(), actual[row].item()) for row in different]


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 100, 257, 769, 1024, 1025])
def test_any_vocabulary(models: Mapping[str, NativeModel], instruction_set: str, vocab: int) -> None:
    values = [{**one, "top_k": min(one.get("top_k", 0), vocab)} for one in GRID]
    logits = like_a_model(len(values), vocab, seed=vocab)
    chosen, numbers = build(values, vocab), uniforms(len(values), vocab)
    expected = Sampler(vocab).select(logits, chosen, numbers)
    assert NativeSampler(vocab, models[instruction_set]).select(logits, chosen, numbers).tolist() == expected.tolist()


def test_agrees_on_a_large_vocabulary(model: NativeModel) -> None:
    """More than 99.99 % of the draws; where they differ, the draw is on an edge within float's resolution."""
    vocab, rows = 49152, 48
    logits = like_a_model(rows, vocab)
    different = total = 0
    for values in ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.95}, {"temperature": 0.8, "top_k": 50}):
        chosen = build([values] * rows, vocab)
        theirs, ours = Sampler(vocab), NativeSampler(vocab, model)
        for seed in range(8):
            numbers = uniforms(rows, seed)
            different += int((theirs.select(logits, chosen, numbers) != ours.select(logits, chosen, numbers)).sum())
            total += rows
    assert different <= total * 1e-4, f"{different} of {total}"


def test_failures_are_the_samplers(models: Mapping[str, NativeModel], instruction_set: str) -> None:
    logits = like_a_model(6)
    logits[0] = -torch.inf
    logits[1, V - 1] = torch.nan
    logits[2, [5, 9]] = torch.inf
    logits[3, 0], logits[3, 1] = torch.inf, torch.nan
    logits[4] = -torch.finfo(torch.float32).max
    for values in GRID:
        chosen, numbers = build([values] * 6), uniforms(6)
        expected = Sampler(V).select(logits, chosen, numbers).tolist()
        assert expected[0] == EMPTY_ROW
        assert expected[1] == expected[3] == INVALID_ROW
        assert expected[2] in (5, 9)
        assert NativeSampler(V, models[instruction_set]).select(logits, chosen, numbers).tolist() == expected, values


def test_denormal_logits_are_not_zero(models: Mapping[str, NativeModel], instruction_set: str) -> None:
    logits = torch.zeros(2, V)
    logits[:, 4000] = 1e-40
    chosen = build([{"temperature": 0.0}, {"temperature": 1e-44, "top_k": 5}])
    assert NativeSampler(V, models[instruction_set]).select(logits, chosen, uniforms(2)).tolist() == [4000, 4000]


def test_a_row_does_not_depend_on_its_batch(models: Mapping[str, NativeModel], instruction_set: str) -> None:
    rows = len(GRID)
    logits, numbers = like_a_model(rows), uniforms(rows)
    sampler = NativeSampler(V, models[instruction_set])
    together = sampler.select(logits, build(GRID), numbers).tolist()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    shuffled = sampler.select(logits[order], build([GRID[at] for at in order]), numbers[order])
    assert shuffled[order.argsort()].tolist() == together
    tops = [at % 7 for at in range(rows)]
    index = torch.arange(rows)
    looked_up = sampler.raw_logprobs(logits, index, together, tops)
    for row, values in enumerate(GRID):
        alone = sampler.select(logits[row : row + 1], build([values]), numbers[row : row + 1])
        assert alone.tolist() == together[row : row + 1]
        one = sampler.raw_logprobs(logits, index[row : row + 1], together[row : row + 1], tops[row : row + 1])
        assert one == [looked_up[row]]


@pytest.mark.parametrize("values", [{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.05}], ids=str)
def test_draws_follow_the_distribution(model: NativeModel, values: dict[str, Any]) -> None:
    vocab, draws = 1200, 20000
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2.5
    sampler = NativeSampler(vocab, model)
    chosen = sampler.select(
        row.expand(draws, vocab), build([{"temperature": 0.9, **values}] * draws, vocab), uniforms(draws)
    )
    weights = (row.double() / 0.9).softmax(0)
    ordered, ids = weights.sort(descending=True)
    keep = torch.ones(vocab, dtype=torch.bool)
    if "top_k" in values:
        keep = torch.arange(vocab) < values["top_k"]
    elif "top_p" in values:
        keep = ordered.cumsum(0) - ordered < values["top_p"]
    elif "min_p" in values:
        keep = ordered >= values["min_p"] * ordered[0]
    weights[ids[~keep]] = 0
    expected = weights / weights.sum() * draws
    counts = chosen.bincount(minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    present = wanted > 0
    statistic = float(((observed - wanted)[present] ** 2 / wanted[present]).sum())
    freedom = int(present.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)


def test_raw_logprobs(models: Mapping[str, NativeModel], instruction_set: str) -> None:
    logits = like_a_model(12)
    logits[3] = (logits[3] * 2).round() / 2
    logits[4, 10:] = -torch.inf
    logits[5, [5, 9]] = torch.inf
    tokens = [int(at) for at in torch.randint(0, V, (12,), generator=torch.Generator().manual_seed(0))]
    tokens[0] = int(logits[0].argmax())
    tops = [0, 1, 5, 20, 20, 3, 5, 100, 5, 0, 2, V]
    expected = Sampler(V).raw_logprobs(logits, torch.arange(12), tokens, tops)
    actual = NativeSampler(V, models[instruction_set]).raw_logprobs(logits, torch.arange(12), tokens, tops)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.rank == pytest.approx(theirs.rank, abs=2)  # float rounding may tie neighbours
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)
        assert {token for token, _ in mine.top} == {token for token, _ in theirs.top}
    assert actual[0].rank == 1


def test_processed_logprobs_belong_to_the_kept_tokens(models: Mapping[str, NativeModel], instruction_set: str) -> None:
    rows = len(GRID)
    logits, numbers, chosen = like_a_model(rows), uniforms(rows), build(GRID)
    sampler = NativeSampler(V, models[instruction_set])
    tokens = sampler.select(logits, chosen, numbers).tolist()
    index = torch.arange(rows)
    truncated = torch.zeros(rows, dtype=torch.bool)
    truncated[chosen.truncated_rows] = True
    arguments = (logits, index, chosen.subset(index), truncated, tokens, [6] * rows)
    expected = Sampler(V).processed_logprobs(*arguments)
    actual = sampler.processed_logprobs(*arguments)
    for values, mine, theirs in zip(GRID, actual, expected, strict=True):
        assert mine[::2] == theirs[::2], values  # token and rank
        assert mine.logprob > -9999
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5), values
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)


def test_whole_steps_equal_the_torch_sampler(model: NativeModel) -> None:
    """Penalties, biases, bans and log-probabilities of both modes, through the sampler's own entry."""
    values: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "logit_bias": {7: 30.0}, "logprobs": 2, "logprobs_mode": "processed"},
        {"temperature": 0.9, "top_p": 0.8, "logprobs": 4, "logprobs_mode": "processed"},
        {"temperature": 0.9, "allowed_token_ids": [3, 4, 5], "top_k": 2},
        {"temperature": 0.9, "allowed_token_ids": [3], "bad_words_ids": [[3]]},
    ]
    logits = like_a_model(len(values))
    for with_raw in (True, False):
        some = [one if with_raw or one.get("logprobs") != 3 else {"temperature": 0.0} for one in values]
        requests = [Request(n, params(V, **one), seed=n) for n, one in enumerate(some)]
        expected = step(Sampler(V), requests, logits.clone())
        actual = step(NativeSampler(V, model), requests, logits.clone())
        assert actual.token_ids == expected.token_ids
        assert actual.errors is not None
        assert expected.errors is not None
        assert {at: str(error) for at, error in actual.errors.items()} == {
            at: str(error) for at, error in expected.errors.items()
        }
        assert actual.logprobs is not None
        assert expected.logprobs is not None
        for mine, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
            assert (mine is None) is (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                assert mine.rank == theirs.rank
