"""Selection without a sort against a plain reference that sorts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aiocb.kernels import Library

Array = np.ndarray[Any, np.dtype[Any]]


def _reference(row: Array, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    order = np.lexsort((np.arange(len(row)), -row))
    if temperature <= 0:
        return int(order[0])
    scaled = row[order].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled[0])
    if top_k > 0:
        weights[top_k:] = 0
    weights /= weights.sum()
    keep = np.cumsum(weights) - weights < top_p if top_p < 1 else np.ones(len(row), bool)
    keep &= weights >= min_p * weights[0]
    weights = np.where(keep, weights, 0.0)
    cumulative = np.cumsum(weights) / weights.sum()
    return int(order[np.searchsorted(cumulative, uniform, side="right")])


@pytest.mark.parametrize("vocab", [1, 17, 5000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1),
     (0.8, 40, 0.5, 0.05), (1.0, 1, 1.0, 0.0), (2.0, 100000, 0.999, 0.0), (1.0, 0, 0.001, 0.0)],
)  # fmt: skip
def test_sample(
    library: Library, vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = np.random.default_rng(0)
    rows = 12
    logits = (generator.standard_normal((rows, vocab)) * spread).astype(np.float32)
    uniform = generator.random(rows)
    ids = library.sample(
        logits,
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
        uniform=uniform,
    )
    expected = [_reference(logits[i], temperature, top_k, top_p, min_p, uniform[i]) for i in range(rows)]
    # A draw that falls on a boundary may go to the neighbour in float32: at most one of a dozen does.
    assert sum(a != b for a, b in zip(ids.tolist(), expected)) <= (1 if vocab > 1000 else 0)


def test_ties_go_to_the_lower_id(library: Library) -> None:
    logits = np.zeros((3, 100), np.float32)
    ids = library.sample(
        logits, temperature=np.array([0, 1, 1], np.float32), top_k=np.array([0, 2, 3], np.int32),
        top_p=np.ones(3, np.float32), min_p=np.zeros(3, np.float32), uniform=np.array([0.5, 0.4, 0.99]),
    )  # fmt: skip
    assert ids.tolist() == [0, 0, 2]


def test_log_probabilities(library: Library) -> None:
    logits = torch.randn(4, 1000) * 5
    rows, ids = np.array([0, 3, 3, 1], np.int32), np.array([0, 999, 5, 77], np.int32)
    actual = library.log_probabilities(logits.numpy(), rows, ids)
    expected = logits.double().log_softmax(-1)[rows.tolist(), ids.tolist()]
    np.testing.assert_allclose(actual, expected.numpy(), rtol=2e-6, atol=2e-6)
