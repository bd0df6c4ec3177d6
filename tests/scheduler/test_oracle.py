"""The oracle itself: it notices each kind of mistake that it is there for."""

from __future__ import annotations

from typing import Any

import pytest

from aiocb.sampling_params import SamplingParams
from aiocb.step import BlockCopy, CacheLayout, StepEntry, StepPlan
from aiocb.testing.oracle import KVMismatch, KVOracle, simple_layout

SAMPLING = SamplingParams(temperature=0.0, eos_token_id=())
TOKENS = [5, 3, 8, 1, 9, 2, 7, 4, 6, 10]


def entry(start: int, count: int, *tables: list[int], request_id: int = 1, **changes: Any) -> StepEntry:
    is_sampled = start + count == len(TOKENS)
    plain = StepEntry(request_id, TOKENS, 8, start, count, tables, int(is_sampled), is_sampled, SAMPLING, 0)
    return plain._replace(**changes)


def plan(*entries: StepEntry, **changes: Any) -> StepPlan:
    return StepPlan(entries, sum(e.num_new_tokens for e in entries))._replace(**changes)


def written(layout: CacheLayout | None = None) -> KVOracle:
    oracle = KVOracle(layout or simple_layout(8))
    oracle.execute(plan(entry(0, 6, *([[1, 2]] * len(oracle.cache_layout.groups)))))
    return oracle


def test_a_right_plan_passes() -> None:
    oracle = written()
    result = oracle.execute(plan(entry(6, 4, [1, 2, 3])))
    assert result.token_ids[0] is not None and 0 <= result.token_ids[0] < oracle.vocab_size
    assert oracle.num_steps == 2 and oracle.num_tokens == 10 and oracle.num_tracked == 1
    assert oracle.max_model_len > 1000 and "KVOracle" in oracle.describe()["model"]
    oracle.close()
    assert oracle.is_closed


@pytest.mark.parametrize(
    "wrong",
    [
        entry(6, 4, [1, 4, 3]),  # another block than the one that was written
        entry(6, 4, [2, 2, 3]),
        entry(6, 4, [0, 2, 3]),  # given back, yet visible
        entry(6, 4, [1, 2]),  # no block for the new tokens
        entry(6, 4, [1, 2, 0]),
        entry(5, 5, [1, 5, 3]),
        entry(7, 3, [1, 2, 3]),  # a token was skipped
        entry(6, 5, [1, 2, 3]),  # more tokens than there are
        entry(6, 0, [1, 2, 3]),
        entry(6, 3, [1, 2, 3], is_sampled=True),
        entry(6, 4, [1, 2, 3], is_sampled=False),
        entry(6, 4, [1, 2, 3], num_logits=5),
        entry(6, 4, [1, 2, 3], num_logits=0),
        entry(6, 4, [1, 2, 3], tokens=[0, *TOKENS[1:]], request_id=2),  # another history
    ],
)
def test_wrong_entries_are_noticed(wrong: StepEntry) -> None:
    with pytest.raises(KVMismatch):
        written().execute(plan(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        plan(),
        plan(entry(6, 4, [1, 2, 3]), num_tokens=5),
        plan(entry(6, 4, [1, 2, 3]), entry(6, 4, [1, 2, 3])),
        plan(entry(6, 4, [1, 2, 3]), entry(6, 4, [1, 2, 3], request_id=2)),  # two write the same slots
        plan(entry(6, 4, [1, 2, 3]), released_ids=(1,)),
        plan(entry(6, 4, [1, 2, 3]), block_copies=(BlockCopy(0, 0, 3),)),
    ],
)
def test_wrong_plans_are_noticed(wrong: StepPlan) -> None:
    with pytest.raises(KVMismatch):
        written().execute(wrong)


def test_a_fork_needs_its_copy() -> None:
    fork = entry(6, 4, [1, 4, 5], request_id=2)
    with pytest.raises(KVMismatch, match="other KV"):
        written().execute(plan(fork))
    written().execute(plan(fork, block_copies=(BlockCopy(0, 2, 4),)))


def test_a_window_may_lose_what_nobody_sees_and_nothing_else() -> None:
    layout = simple_layout(8, windows=(None, 3))
    written(layout).execute(plan(entry(6, 4, [1, 2, 3], [0, 2, 3])))
    with pytest.raises(KVMismatch, match="group 1"):
        written(layout).execute(plan(entry(6, 4, [1, 2, 3], [0, 4, 3])))
    with pytest.raises(KVMismatch, match="group 0"):
        written(layout).execute(plan(entry(6, 4, [0, 2, 3], [0, 2, 3])))


def test_output_depends_on_history_and_seed_only() -> None:
    oracle = KVOracle()
    sampled = SamplingParams(temperature=1.0, eos_token_id=())
    one = oracle.expected_output(TOKENS, sampled, max_tokens=20, seed=1)
    assert one == KVOracle().expected_output(TOKENS, sampled, max_tokens=20, seed=1) and len(one) == 10
    assert one != oracle.expected_output(TOKENS, sampled, max_tokens=20, seed=2)
    greedy = [oracle.expected_output(TOKENS, SAMPLING, max_tokens=20, seed=seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1] != one


def test_planned_errors_are_reported() -> None:
    cause = RuntimeError("planned")
    oracle = KVOracle(errors=lambda _: {1: cause})
    result = oracle.execute(plan(entry(0, 10, [1, 2, 3])))
    assert result.errors == {1: cause} and result.token_ids == [None]
