"""Selection: argmax, truncation against transformers' own warpers, distributions, extremes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from aiocb.sampling.rows import parts, row_argmax
from aiocb.sampling.selection import EMPTY_ROW, INVALID_ROW, select
from aiocb.sampling.truncation import SelectionParams, iterate_kept, sorted_candidates
from aiocb.sampling_params import SamplingParams
from tests.sampling.helpers import params, peaked_logits

CPU = torch.device("cpu")


def kept_sets(logits: Tensor, samplings: list[SamplingParams]) -> list[dict[int, float]]:
    """For each row the kept tokens and their probabilities."""
    build = SelectionParams.build(samplings, CPU)
    result: list[dict[int, float]] = [{} for _ in samplings]
    seen: list[int] = []
    for rows, kept in iterate_kept(logits, row_argmax(logits)[1], build):
        assert bool(kept.is_complete.all())
        for at, row in enumerate(rows.tolist()):
            seen.append(row)
            weights = kept.weights[at]
            present = weights > 0
            values = (weights[present] / weights.sum()).tolist()
            result[row] = dict(zip(kept.ids[at][present].tolist(), values, strict=True))
    assert sorted(seen) == list(range(len(samplings)))
    return result


def reference(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The same stages by transformers' warpers, in the documented order, in float64; probabilities [V]."""
    none: Any = torch.zeros(1, 0, dtype=torch.long)
    scores = logits[None].to(torch.float64)
    assert sampling.temperature and sampling.top_k is not None and sampling.top_p is not None
    assert sampling.typical_p is not None
    scores = TemperatureLogitsWarper(float(sampling.temperature))(none, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(none, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(none, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(none, scores)
    if sampling.typical_p < 1:
        scores = TypicalLogitsWarper(sampling.typical_p)(none, scores)
    return scores.softmax(-1)[0]


CASES: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_k": 50},
    {"top_k": 300},
    {"top_k": 1500},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-6},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 1000, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.01},
    {"top_p": 0.95, "min_p": 1e-5},
    {"top_p": 0.9, "typical_p": 0.5},
    {"top_k": 100, "min_p": 0.01, "top_p": 0.8, "typical_p": 0.7},
]


@pytest.mark.parametrize("vocab_size", [17, 1000, 5003, 32768])
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_truncation_equals_transformers(vocab_size: int, scale: float) -> None:
    cases = [{"temperature": t, **case} for t in (0.7, 1.5) for case in CASES]
    logits = peaked_logits(len(cases), vocab_size, seed=int(scale * 10), scale=scale)
    samplings = [params(vocab_size, **case) for case in cases]
    for row, (sampling, kept) in enumerate(zip(samplings, kept_sets(logits, samplings), strict=True)):
        want = reference(logits[row], sampling)
        expected = set(want.nonzero()[:, 0].tolist())
        # A boundary may fall on the other side of one token: the reference sums in the other direction.
        difference = expected ^ set(kept)
        assert len(difference) <= 1, (sampling, len(expected), len(kept))
        if not difference:
            got = torch.zeros(vocab_size, dtype=torch.float64)
            got[list(kept)] = torch.tensor(list(kept.values()), dtype=torch.float64)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)
        else:
            assert sum(float(want[token]) + kept.get(token, 0.0) for token in difference) < 0.1


def test_top_k_keeps_ties_as_the_reference_but_one_means_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]])
    assert set(kept_sets(logits, [params(6, temperature=1.0, top_k=3)])[0]) == {1, 2, 3, 4}
    assert set(kept_sets(logits, [params(6, temperature=1.0, top_k=1)])[0]) == {1}


def test_ties_at_the_edge_of_a_nucleus_go_to_the_smaller_id() -> None:
    logits = torch.zeros(1, 8)
    assert set(kept_sets(logits, [params(8, temperature=1.0, top_p=0.5)])[0]) == {0, 1, 2, 3}
    wide = torch.zeros(1, 40_000)
    assert set(kept_sets(wide, [params(40_000, temperature=1.0, top_p=0.25)])[0]) == set(range(10_000))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 3000), st.integers(0, 2**20), st.sampled_from([1, 3, 1000]))
def test_argmax_is_the_first_maximum(num_rows: int, vocab_size: int, seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (num_rows, vocab_size), generator=generator).float()
    token_ids, maxima = row_argmax(logits)
    for row in range(num_rows):
        values = logits[row].tolist()
        assert values[int(token_ids[row])] == max(values) == float(maxima[row])
        assert int(token_ids[row]) == values.index(max(values))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.sampled_from([1, 40, 2000, 9001]), st.integers(0, 2**20), st.integers(1, 600))
def test_candidates_are_the_sorted_head_of_each_row(num_rows: int, vocab_size: int, seed: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 4).round() / 4
    logits[0, ::2] = -math.inf
    width = min(width, vocab_size)
    found = sorted_candidates(logits, width)
    for row in range(num_rows):
        values = logits[row].tolist()
        order = sorted(range(vocab_size), key=[-value for value in values].__getitem__)  # a stable sort
        count = int(found.counts[row])
        finite = int((logits[row] > -math.inf).sum())
        if count:
            assert count >= min(width, finite)
            assert found.ids[row, :count].tolist() == order[:count]
            assert bool(found.has_all[row]) <= (count == finite)


def test_rows_without_a_token_are_told_apart() -> None:
    samplings = [params(300, temperature=t, top_p=p) for t in (0.0, 1.0) for p in (1.0, 0.9)] * 3
    logits = peaked_logits(len(samplings), 300)
    logits[4:8] = -math.inf
    logits[8:, 17] = math.nan
    chosen = select(logits, SelectionParams.build(samplings, CPU), torch.full((12,), 0.5, dtype=torch.float64)).tolist()
    assert all(token >= 0 for token in chosen[:4])
    assert chosen[4:] == [EMPTY_ROW] * 4 + [INVALID_ROW] * 4


def test_plus_infinity_forces_a_token() -> None:
    samplings = [params(3000, temperature=t, **more) for t in (0.0, 1.0) for more in ({}, {"top_p": 0.9}, {"top_k": 3})]
    logits = peaked_logits(len(samplings), 3000)
    logits[:, 1234] = math.inf
    chosen = select(logits, SelectionParams.build(samplings, CPU), torch.full((6,), 0.999, dtype=torch.float64))
    assert chosen.tolist() == [1234] * 6


EXTREMES = list(
    itertools.product(
        [0, 1e-300, 1e-9, 1e-4, 1, 1.0, 1e6, 1e300],
        [0.0, 1e-9, 0.5, 1.0],
        [0, -1, 1, 2, 1500, 1501],
        [0.0, 1e-9, 1.0],
        [1e-9, 1.0],
    )
)


@pytest.mark.parametrize("scale", [1e-3, 3.0, 1e30])
def test_extreme_parameters_crossed(scale: float) -> None:
    """Every combination gives a token, and a tiny temperature or a truncation to one gives the most likely one."""
    vocab_size = 1500
    row = peaked_logits(1, vocab_size, scale=scale)
    row[0, 100:110] = -math.inf
    best = int(row.argmax())
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p")
    samplings = [params(vocab_size, **dict(zip(names, values, strict=True))) for values in EXTREMES]
    logits = row.expand(len(samplings), -1).contiguous()
    for draw in (0.0, 0.37, 1 - 2.0**-52):
        uniforms = torch.full((len(samplings),), draw, dtype=torch.float64)
        chosen = select(logits, SelectionParams.build(samplings, CPU), uniforms).tolist()
        assert all(0 <= token < vocab_size and not 100 <= token < 110 for token in chosen)
        for values, token in zip(EXTREMES, chosen, strict=True):
            temperature, top_p, top_k, min_p, _ = values
            if temperature < 1e-8 or top_p < 1e-8 or top_k == 1 or min_p == 1.0:
                assert token == best, values


def chi_square(observed: Tensor, expected: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom, small bins joined."""
    order = expected.argsort(descending=True)
    expected, observed = expected[order], observed[order]
    big = int((expected >= 5).sum())
    expected = torch.cat((expected[:big], expected[big:].sum()[None]))
    observed = torch.cat((observed[:big], observed[big:].sum()[None]))
    mask = expected > 1e-6
    assert int(observed[~mask].sum()) == 0
    return float(((observed[mask] - expected[mask]) ** 2 / expected[mask]).sum()), int(mask.sum()) - 1


@pytest.mark.parametrize("vocab_size", [50, 2000])
@pytest.mark.parametrize(
    "values", [{}, {"top_k": 10}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.6}, {"top_k": 30, "top_p": 0.9}]
)
def test_draws_follow_the_distribution(values: dict[str, Any], vocab_size: int) -> None:
    row = peaked_logits(1, vocab_size, seed=3, scale=2.0)
    sampling = params(vocab_size, temperature=0.9, **values)
    num_draws = 8_000
    generator = torch.Generator().manual_seed(11)
    uniforms = torch.rand(num_draws, dtype=torch.float64, generator=generator)
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for start in range(0, num_draws, 2000):
        part = uniforms[start : start + 2000]
        build = SelectionParams.build([sampling] * len(part), CPU)
        chosen = select(row.expand(len(part), -1).contiguous(), build, part)
        counts += chosen.bincount(minlength=vocab_size).to(torch.float64)
    statistic, freedom = chi_square(counts, reference(row[0], sampling) * num_draws)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("width", [1, 2**40])
def test_no_rows_have_no_parts(device: str, width: int) -> None:
    """On other devices than the CPU all rows are one part, of whatever number: none, too."""
    logits, rows = torch.empty(3, 8, device=device), torch.arange(3)
    assert list(parts(rows[:0], logits, width)) == []
    assert torch.cat([rows[part] for part in parts(rows, logits, width)]).tolist() == [0, 1, 2]
