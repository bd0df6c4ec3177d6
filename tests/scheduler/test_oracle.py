"""The oracle itself: it notices each kind of mistake that it is there for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from aiocb.sampling_params import SamplingParams
from aiocb.step import BlockCopy, CacheLayout, OpenedRequest, StateCopy, StepEntry, StepPlan
from aiocb.testing.oracle import KVOracle
from aiocb.testing.records import KVMismatch, simple_layout

SAMPLING = SamplingParams(temperature=0.0, eos_token_id=())
TOKENS = [5, 3, 8, 1, 9, 2, 7, 4, 6, 10]


def entry(start: int, count: int, *tables: list[int], request_id: int = 1, **changes: Any) -> StepEntry:
    is_sampled = start + count == len(TOKENS)
    blocks = tuple(map(tuple, tables))
    plain = StepEntry(request_id, start, count, int(is_sampled), is_sampled, (), 0, blocks)
    return plain._replace(**changes)


def opened(request_id: int = 1, tokens: Sequence[int] = TOKENS) -> OpenedRequest:
    return OpenedRequest(request_id, tuple(tokens), 8, SAMPLING, 0)


def plan(*entries: StepEntry, **changes: Any) -> StepPlan:
    return StepPlan(entries, sum(e.num_new_tokens for e in entries))._replace(**changes)


def written(layout: CacheLayout | None = None, depth: int = 1) -> KVOracle:
    oracle = KVOracle(layout or simple_layout(8), depth=depth)
    oracle.execute(plan(entry(0, 6, *([[1, 2]] * len(oracle.cache_layout.groups))), opened=(opened(),)))
    return oracle


def test_a_right_plan_passes() -> None:
    oracle = written()
    result = oracle.execute(plan(entry(6, 4, [3], block_start=2)))
    (token,) = result.token_ids[0]
    assert 0 <= token < oracle.vocab_size
    assert oracle.num_steps == 2 and oracle.num_tokens == 10 and oracle.num_open == 1
    # What it returned is in its own record: the next entry brings nothing.
    assert oracle.execute(plan(entry(10, 1, num_logits=1, is_sampled=True))).token_ids[0]
    oracle.execute(plan(closed=(1,)))
    assert oracle.num_open == 0
    assert oracle.max_model_len > 1000 and oracle.choices[0].value == "KVOracle"
    oracle.close()
    assert oracle.is_closed


@pytest.mark.parametrize(
    "wrong",
    [
        entry(6, 4, [4, 3], block_start=1),  # another block than the one that was written
        entry(6, 4, [2, 2, 3]),
        entry(6, 4, [0, 2, 3]),  # given back, yet visible
        entry(6, 4),  # no block for the new tokens
        entry(6, 4, [0], block_start=2),
        entry(6, 4, [3], block_start=3),  # behind the end of the table
        entry(6, 4, [3], [3], block_start=2),  # for a group that does not exist
        entry(5, 5, [5, 3], block_start=1),
        entry(7, 3, [3], block_start=2),  # a token was skipped
        entry(6, 5, [3], block_start=2),  # more tokens than there are
        entry(6, 0, [3], block_start=2),
        entry(6, 3, [3], block_start=2, is_sampled=True),
        entry(6, 4, [3], block_start=2, is_sampled=False),
        entry(6, 4, [3], block_start=2, num_logits=5),
        entry(6, 4, [3], block_start=2, num_logits=0),
        entry(6, 4, [3], block_start=2, new_token_ids=(1,)),  # the entry does not reach the end any more
        entry(6, 4, [3], block_start=2, draft_token_ids=(1,)),
        entry(6, 4, [3], block_start=2, request_id=2),  # never opened
    ],
)
def test_wrong_entries_are_noticed(wrong: StepEntry) -> None:
    with pytest.raises(KVMismatch):
        written().execute(plan(wrong))


RIGHT = entry(6, 4, [3], block_start=2)


@pytest.mark.parametrize(
    "wrong",
    [
        plan(),
        plan(RIGHT, num_tokens=5),
        plan(RIGHT, RIGHT),
        plan(RIGHT, entry(6, 4, [1, 2, 3], request_id=2), opened=(opened(2),)),  # two write the same slots
        plan(entry(6, 4, [1, 2, 3], request_id=2), opened=(opened(2, [0, *TOKENS[1:]]),)),  # another history
        plan(RIGHT, closed=(1,)),
        plan(RIGHT, closed=(2,)),
        plan(RIGHT, opened=(opened(),)),
        plan(RIGHT, opened=(opened(2),)),  # without an entry
        plan(RIGHT, copies_before=(BlockCopy(0, 0, 3),)),
        plan(entry(6, 4, [1, 2, 3]), closed=(1,), opened=(opened(1, [0, *TOKENS[1:]]),)),  # it had other tokens
    ],
)
def test_wrong_plans_are_noticed(wrong: StepPlan) -> None:
    with pytest.raises(KVMismatch):
        written().execute(wrong)


def test_an_id_is_not_used_in_a_second_life() -> None:
    oracle = written()
    oracle.release()
    assert oracle.num_open == 0
    with pytest.raises(KVMismatch, match="a second time"):
        oracle.execute(plan(entry(0, 6, [1, 2]), opened=(opened(),)))
    oracle.execute(plan(entry(0, 6, [1, 2], request_id=2), opened=(opened(2),)))


def test_only_one_thread_may_use_it_in_a_life() -> None:
    oracle = written()
    errors: list[Exception] = []

    def use() -> None:
        try:
            oracle.execute(plan(RIGHT))
        except KVMismatch as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert "two threads" in str(errors[0])


def test_two_plans_in_flight() -> None:
    oracle = written(depth=2)
    first = oracle.submit(plan(RIGHT))
    ahead = oracle.submit(plan(entry(10, 1, num_logits=1, is_sampled=True)))  # a token that nobody has seen
    with pytest.raises(KVMismatch, match="more than 2"):
        oracle.submit(plan(entry(11, 1, num_logits=1, is_sampled=True)))
    with pytest.raises(KVMismatch, match="in flight"):
        oracle.reload_weights()
    tokens = oracle.collect(first).token_ids[0] + oracle.collect(ahead).token_ids[0]
    assert list(tokens) == oracle.expected_output(TOKENS, SAMPLING, max_tokens=12)
    oracle = written(depth=2)
    first, second = oracle.submit(plan(RIGHT)), oracle.submit(plan(entry(10, 1, num_logits=1, is_sampled=True)))
    with pytest.raises(KVMismatch, match="out of order"):
        oracle.collect(second)
    oracle = written(depth=2)
    oracle.submit(plan(RIGHT))
    with pytest.raises(KVMismatch, match="closed"):
        oracle.submit(plan(closed=(1,)))


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_drafts_are_accepted_while_they_are_right(num_right: int) -> None:
    oracle = written()
    right = oracle.expected_output(TOKENS, SAMPLING, max_tokens=13)
    drafts = tuple(token if at < num_right else (token + 1) % 101 for at, token in enumerate(right[:2]))
    verify = entry(6, 6, [3, 4], block_start=2, num_logits=3, is_sampled=True, draft_token_ids=drafts)
    assert oracle.execute(plan(verify)).token_ids == [tuple(right[: num_right + 1])]
    # What was written for drafts that were wrong may not be read: it has to be computed again.
    start = 10 + num_right
    oracle.execute(plan(entry(start, 1, num_logits=1, is_sampled=True)))


def test_a_fork_needs_its_copy() -> None:
    fork = entry(6, 4, [1, 4, 5], request_id=2)
    with pytest.raises(KVMismatch, match="other KV"):
        written().execute(plan(fork, opened=(opened(2),)))
    written().execute(plan(fork, opened=(opened(2),), copies_before=(BlockCopy(0, 2, 4),)))


def test_a_window_may_lose_what_nobody_sees_and_nothing_else() -> None:
    layout = simple_layout(8, windows=(None, 3))
    written(layout).execute(plan(entry(6, 4, [1, 2, 3], [0, 2, 3])))
    with pytest.raises(KVMismatch, match="group 1"):
        written(layout).execute(plan(entry(6, 4, [1, 2, 3], [0, 4, 3])))
    with pytest.raises(KVMismatch, match="group 0"):
        written(layout).execute(plan(entry(6, 4, [0, 2, 3], [0, 2, 3])))


STATES = simple_layout(8, num_slots=6)


def with_state(depth: int = 1) -> KVOracle:
    """Request 1 lives in slot 1 and has come to token 6; slot 2 has its state behind the first block."""
    oracle = KVOracle(STATES, depth=depth)
    first = opened()._replace(state_slot=1)
    oracle.execute(plan(entry(0, 4, [1, 2]), opened=(first,), states_after=(StateCopy(1, 2),)))
    oracle.execute(plan(entry(4, 2)))
    return oracle


def other(slot: int = 3) -> OpenedRequest:
    return opened(2)._replace(state_slot=slot)


def test_states_that_are_right_pass() -> None:
    oracle = with_state()
    restored = plan(entry(4, 6, [1, 4, 5], request_id=2), opened=(other(),), states_before=(StateCopy(2, 3),))
    assert oracle.execute(restored).token_ids[0]
    # A fork copies a live one.
    third = opened(3)._replace(state_slot=4)
    forked = plan(
        entry(6, 4, [1, 6, 7], request_id=3),
        opened=(third,),
        copies_before=(BlockCopy(0, 2, 6),),
        states_before=(StateCopy(1, 4),),
    )
    assert oracle.execute(forked).token_ids[0]
    # Whoever starts afresh needs no copy.
    fourth = opened(4)._replace(state_slot=3)
    oracle.execute(plan(entry(0, 4, [5], request_id=4), opened=(fourth,), closed=(2,)))


RESTORED = entry(4, 6, [1, 4, 5], request_id=2)


@pytest.mark.parametrize(
    "wrong",
    [
        plan(RESTORED, opened=(other(),)),  # nothing was copied
        plan(RESTORED, opened=(other(),), states_before=(StateCopy(1, 3),)),  # of another length
        plan(RESTORED, opened=(other(),), states_before=(StateCopy(2, 4),)),  # to another slot
        plan(RESTORED, opened=(other(0),), states_before=(StateCopy(2, 3),)),
        plan(RESTORED, opened=(other(),), states_before=(StateCopy(0, 3),)),
        plan(entry(0, 6, [3, 4], request_id=2), RIGHT._replace(new_blocks=((5,),)), opened=(other(1),)),
        plan(RIGHT, states_after=(StateCopy(3, 2),)),  # from where nobody lives
        plan(RIGHT, states_after=(StateCopy(1, 1),)),
        plan(RIGHT, states_after=(StateCopy(1, 0),)),
        plan(RIGHT, states_after=(StateCopy(1, 2), StateCopy(1, 2))),
        plan(RESTORED, opened=(other(),), states_before=(StateCopy(2, 3),), states_after=(StateCopy(3, 1),)),
    ],
)
def test_wrong_states_are_noticed(wrong: StepPlan) -> None:
    with pytest.raises(KVMismatch):
        with_state().execute(wrong)


def test_slots_of_a_plan_in_flight_are_not_given_away() -> None:
    restored = plan(RESTORED, opened=(other(),), states_before=(StateCopy(2, 3),))
    for taken in (2, 3):
        oracle = with_state(depth=2)
        oracle.submit(restored)
        with pytest.raises(KVMismatch, match="in flight"):
            oracle.submit(plan(entry(0, 4, [6], request_id=3), opened=(opened(3)._replace(state_slot=taken),)))
        oracle = with_state(depth=2)
        oracle.submit(restored)
        with pytest.raises(KVMismatch, match="in use"):
            oracle.submit(plan(RIGHT._replace(new_blocks=((6,),)), states_after=(StateCopy(1, taken),)))


def test_states_of_other_weights_are_of_no_use() -> None:
    oracle = with_state()
    oracle.reload_weights()
    with pytest.raises(KVMismatch):
        oracle.execute(plan(RESTORED, opened=(other(),), states_before=(StateCopy(2, 3),)))


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
    result = oracle.execute(plan(entry(0, 10, [1, 2, 3]), opened=(opened(),)))
    assert result.errors == {1: cause} and result.token_ids == [()]
