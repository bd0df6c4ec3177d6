"""The scheduler's rules, one by one, over the KV oracle."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aiocb.config import SchedulerType
from aiocb.errors import InvalidRequest, RequestFailed, RequestTimeout
from aiocb.scheduler import RequestStatus
from aiocb.step import StepPlan, StepResult
from tests.scheduler.helpers import VOCAB, Harness, chunks, ids

POLICIES: tuple[SchedulerType, ...] = ("fifo", "prefill_first", "priority")


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first * 7 + i * i + i // 3) % VOCAB for i in range(length)]


# Order and budgets


def test_one_request_from_beginning_to_end() -> None:
    h = Harness()
    request = h.add(prompt(6), 3)
    first = h.step()
    assert chunks(first) == [(1, 6)] and first.entries[0].is_sampled and first.entries[0].num_logits == 1
    assert chunks(h.step()) == [(1, 1)]
    assert first.opened[0].token_ids == tuple(prompt(6)) and not first.closed
    assert h.run() == 2 and h.plans[-1].entries == () and h.plans[-1].closed == (1,)
    assert h.ends[1].reason == "length" and h.ends[1].stop_reason is None
    assert request.num_output_tokens == 3 and sum(plan.num_tokens for plan in h.plans) == 6 + 2
    h.assert_quiescent()
    assert h.scheduler.schedule().entries == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_arrival_order_and_budget(policy: SchedulerType) -> None:
    h = Harness(max_batch_tokens=8, policy=policy, sharing=False)
    for first in range(3):
        h.add(prompt(5, first))
    assert chunks(h.step()) == [(1, 5), (2, 3)]
    h.run()
    h.assert_quiescent()


def test_fifo_decodes_before_it_prefills() -> None:
    h = Harness(max_batch_tokens=4)
    h.add(prompt(3), 20)
    h.step()
    h.add(prompt(20, 1))
    assert chunks(h.step()) == [(1, 1), (2, 3)]
    assert chunks(h.step()) == [(1, 1), (2, 3)]


def test_prefill_first_gives_prompts_the_budget() -> None:
    h = Harness(max_batch_tokens=4, policy="prefill_first")
    h.add(prompt(3), 20)
    h.step()
    h.add(prompt(10, 1))
    assert [chunks(h.step()) for _ in range(3)] == [[(2, 4)], [(2, 4)], [(2, 2), (1, 1)]]
    h.run()
    h.assert_quiescent()


def test_a_prompt_is_capped_while_others_decode_and_only_then() -> None:
    h = Harness(max_batch_tokens=32, chunk=5)
    h.add(prompt(20), 10)
    assert chunks(h.step()) == [(1, 20)]
    h.add(prompt(12, 1))
    h.add(prompt(12, 2))
    assert chunks(h.step()) == [(1, 1), (2, 5), (3, 5)]
    h.run()
    h.assert_quiescent()


def test_seats_are_bounded_by_the_tokens_of_a_step() -> None:
    h = Harness(max_batch_tokens=4, max_requests=100)
    for first in range(8):
        h.add([first], 10)
    h.step()
    assert h.scheduler.num_running == 4 and h.scheduler.num_waiting == 4
    h.run()
    h.assert_quiescent()


def test_priority_orders_the_queue() -> None:
    h = Harness(max_requests=1, policy="priority")
    low, high = h.add(prompt(4), 2, priority=5), h.add(prompt(4, 1), 2, priority=1)
    assert ids(h.step()) == [high.id]
    h.run()
    assert [entry for plan in h.plans for entry in ids(plan)] == [high.id] * 2 + [low.id] * 2
    h.assert_quiescent()


def test_fifo_ignores_priorities() -> None:
    h = Harness(max_requests=1)
    h.add(prompt(4), 2, priority=5)
    h.add(prompt(4, 1), 2, priority=1)
    assert ids(h.step()) == [1]


def test_a_more_important_request_takes_the_seat_of_a_less_important_one() -> None:
    h = Harness(max_requests=2, policy="priority")
    low, middle = h.add(prompt(4), 9, priority=9), h.add(prompt(4, 1), 9, priority=5)
    h.step()
    equal = h.add(prompt(4, 2), 9, priority=9)
    h.step()
    assert h.scheduler.num_preemptions == 0 and not equal.has_run
    high = h.add(prompt(4, 3), 9, priority=1)
    plan = h.step()
    assert set(ids(plan)) == {middle.id, high.id} and low.status is RequestStatus.PREEMPTED
    h.run()
    assert low.num_preemptions == 1
    h.assert_quiescent()


def test_a_more_important_request_takes_the_blocks_of_less_important_ones() -> None:
    h = Harness(num_blocks=9, policy="priority", sharing=False)
    low = [h.add(prompt(12, i), 4, priority=9) for i in range(2)]
    h.step()
    high = h.add(prompt(16, 5), 8, priority=1)
    assert high.id in ids(h.step())
    assert low[1].num_preemptions == 1 and low[0].num_preemptions == 0
    h.run()
    h.assert_quiescent()


def test_the_room_made_is_for_the_one_it_was_made_for() -> None:
    h = Harness(num_blocks=9, policy="priority", sharing=False)
    low = h.add(prompt(24), 4, priority=9)
    h.step()
    small = h.add(prompt(12, 1), 4, priority=8)
    high = h.add(prompt(12, 2), 4, priority=1)
    assert ids(h.step()) == [high.id]
    assert low.num_preemptions == 1 and not small.has_run
    h.run()
    h.assert_quiescent()


def test_nobody_is_preempted_in_vain() -> None:
    h = Harness(num_blocks=9, policy="priority", sharing=False)
    h.add(prompt(20), 4, priority=0)
    low = h.add(prompt(4, 1), 4, priority=9)
    h.step()
    h.add(prompt(24, 2), 4, priority=1)
    h.step()
    assert low.num_preemptions == 0
    h.run()
    h.assert_quiescent()


# Ends


def first_outputs(count: int, tokens: list[int]) -> list[int]:
    h = Harness()
    request = h.request(tokens, count)
    return h.expected(request)


def test_eos_and_stop_ids_end_a_request_and_are_kept() -> None:
    output = first_outputs(8, prompt(5))
    h = Harness()
    eos = h.add(prompt(5), 8, eos_token_id=(output[2],))
    stop = h.add(prompt(5), 8, stop_token_ids=(output[2],))
    both = h.add(prompt(5), 8, eos_token_id=(output[2],), stop_token_ids=(output[2],))
    h.run()
    length = output.index(output[2]) + 1
    assert [len(h.outputs[r.id]) for r in (eos, stop, both)] == [length] * 3
    assert all(h.outputs[r.id][-1] == output[2] for r in (eos, stop, both))
    assert [h.ends[r.id].reason for r in (eos, stop, both)] == ["stop"] * 3
    assert [h.ends[r.id].stop_reason for r in (eos, stop, both)] == [None, output[2], None]
    h.assert_quiescent()


def test_stop_wins_over_length_at_the_same_token() -> None:
    output = first_outputs(3, prompt(5))
    h = Harness()
    h.add(prompt(5), output.index(output[2]) + 1, eos_token_id=(output[2],))
    h.run()
    assert h.ends[1].reason == "stop"


def test_no_end_before_min_new_tokens() -> None:
    h = Harness()
    request = h.add(prompt(5), 6, eos_token_id=tuple(range(VOCAB - 1)), min_new_tokens=3)
    h.run()
    assert request.num_output_tokens == 4 and h.outputs[1][:3] == [VOCAB - 1] * 3
    # Even a sampler that lets one through does not end it early.
    h = Harness()
    h.add(prompt(5), 6, eos_token_id=(1,), min_new_tokens=2)
    for expected in (None, None, "stop"):
        plan = h.scheduler.schedule()
        (update,) = h.scheduler.update(plan, StepResult([(1,)]))
        assert (update.finished.reason if update.finished else None) == expected


def test_a_failure_ends_its_request_only() -> None:
    cause = RequestFailed("processor")
    h = Harness(errors=lambda plan: {2: cause} if 2 in ids(plan) and len(h.plans) == 3 else None)
    for first in range(3):
        h.add(prompt(5, first), 6)
    h.run()
    assert h.ends[2].reason == "error" and h.ends[2].error is cause and len(h.outputs[2]) == 2
    assert h.ends[1].reason == h.ends[3].reason == "length"
    h.assert_quiescent()


def test_a_missing_token_is_a_failure_and_not_a_hang() -> None:
    h = Harness()
    h.add(prompt(5))
    (update,) = h.scheduler.update(h.scheduler.schedule(), StepResult([()]))
    assert update.finished is not None and isinstance(update.finished.error, RequestFailed)
    assert h.scheduler.schedule().closed == (1,) and not h.scheduler.has_work


def test_finishing_twice_is_once() -> None:
    h = Harness()
    request = h.add(prompt(5))
    h.step()
    assert h.scheduler.finish(request, "cancelled") is not None
    assert h.scheduler.finish(request, "stop") is None
    assert request.finish_reason == "cancelled"


@pytest.mark.parametrize("when", ["queued", "between chunks", "in flight", "decoding", "paused", "preempted"])
def test_cancelling_gives_everything_back(when: str) -> None:
    h = Harness(max_batch_tokens=8, chunk=4, sharing=False)
    other = h.add(prompt(4), 12)
    h.step()
    request = h.add(prompt(12, 1), 12)
    if when == "queued":
        h.finish(request)
        assert request.num_computed_tokens == 0
    elif when == "between chunks":
        h.step()
        assert 0 < request.num_computed_tokens < 12
        h.finish(request)
    elif when == "in flight":
        plan = h.schedule()
        h.finish(request)
        assert all(update.request is other for update in h.execute(plan))
    else:
        for _ in range(5):
            h.step()
        if when == "paused":
            h.scheduler.pause(request)
        elif when == "preempted":
            h.scheduler.preempt_all()
            assert request.status is RequestStatus.PREEMPTED
        h.finish(request)
    blocks = len(other.tables[0]) if other.tables else 0
    assert h.cache.pools[0].num_used == blocks
    h.run()
    assert h.ends[request.id].reason == "cancelled"
    h.assert_quiescent()
    closed = sorted(request_id for plan in h.plans for request_id in plan.closed)
    expected = [other.id, *([] if when == "queued" else [request.id]), *([other.id] * (when == "preempted"))]
    assert closed == sorted(expected)


def test_cancelled_in_the_step_that_ends_it() -> None:
    h = Harness()
    request = h.add(prompt(4), 1)
    plan = h.schedule()
    h.finish(request)
    assert h.execute(plan) == [] and h.ends[1].reason == "cancelled"
    h.run()
    h.assert_quiescent()


def test_what_a_cancelled_request_has_computed_is_hit() -> None:
    h = Harness()
    request = h.add(prompt(16), 8)
    for _ in range(4):
        h.step()
    h.finish(request)
    again = h.add(request.tokens[:18], 2)
    h.step()
    assert again.num_cached_tokens == 16
    h.run()
    h.assert_quiescent()


def test_a_request_is_closed_by_the_next_plan_be_it_empty() -> None:
    h = Harness()
    h.add(prompt(4), 1)
    h.step()
    h.add(prompt(4), 1)
    assert h.step().closed == (1,) and h.oracle.num_open == 1
    assert h.scheduler.has_work
    plan = h.step()
    assert (plan.entries, plan.closed, plan.num_tokens) == ((), (2,), 0)
    assert h.oracle.num_open == 0 and not h.scheduler.has_work


def test_a_request_that_can_never_fit_is_refused() -> None:
    h = Harness(num_blocks=4)
    with pytest.raises(InvalidRequest, match="never fit"):
        h.add(prompt(10), 4)
    with pytest.raises(InvalidRequest):
        h.add_group(3, prompt(10), 4)
    assert not h.scheduler.has_work
    h.add(prompt(9), 4)
    h.run()
    h.ends.setdefault(1, h.ends.get(5) or next(iter(h.ends.values())))
    assert h.ends[5].reason == "length"


# Deadlines


def test_deadlines_end_what_waits_and_what_runs() -> None:
    h = Harness(max_requests=1)
    running = h.add(prompt(4), 50, deadline=5.0, queue_deadline=1.0)
    queued = h.add(prompt(4), 5, queue_deadline=3.0)
    total = h.add(prompt(4), 5, deadline=4.0)
    h.step()
    assert h.scheduler.next_deadline == 1.0
    assert h.expire(2.9) == []
    assert [event.request for event in h.expire(3.0)] == [queued]
    assert [event.request for event in h.expire(10.0)] == [total, running]
    errors = [h.ends[r.id].error for r in (queued, total, running)]
    assert [isinstance(e, RequestTimeout) and e.stage for e in errors] == ["queue", "queue", "run"]
    assert h.ends[running.id].reason == "timeout"
    assert h.expire(100.0) == []
    h.assert_quiescent()


# A full cache


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sharing", [True, False])
def test_twenty_requests_in_the_room_of_one_and_a_half(policy: SchedulerType, sharing: bool) -> None:
    h = Harness(num_blocks=10, policy=policy, sharing=sharing, chunk=8)
    for first in range(20):
        h.add(prompt(5 + first % 7, first), 12, priority=first % 3)
    h.run()
    assert h.scheduler.num_preemptions > 0
    assert all(end.reason == "length" for end in h.ends.values())
    h.assert_quiescent()


def test_the_newest_gives_way_and_comes_back_first() -> None:
    h = Harness(num_blocks=5, sharing=False)
    first, second = h.add(prompt(8), 7), h.add(prompt(7, 1), 7)
    third = h.add(prompt(4, 2), 2)
    h.step()
    h.step()
    h.step()
    assert second.status is RequestStatus.PREEMPTED and first.num_preemptions == 0
    h.run()
    assert second.num_preemptions >= 1 and third.first_scheduled_at is not None
    assert list(h.ends) == [first.id, second.id, third.id]
    h.assert_quiescent()


def test_blocks_taken_from_one_are_not_given_to_a_newcomer() -> None:
    h = Harness(num_blocks=7, sharing=False)
    older, newer = h.add(prompt(8), 9), h.add(prompt(15, 1), 9)
    h.step()
    small = h.add(prompt(3, 2), 2)
    assert ids(h.step()) == [older.id]
    assert newer.num_preemptions == 1 and h.cache.pools[0].num_free == 3 and not small.has_run
    h.run()
    h.assert_quiescent()


def test_the_newest_sits_out_rather_than_losing_its_cache() -> None:
    h = Harness(num_blocks=5, sharing=False)
    # Both fill two blocks; the newer one needs its third first, and there is one free only later.
    older, newer = h.add(prompt(5), 3), h.add(prompt(8, 1), 4)
    h.step()
    plan = h.step()
    assert ids(plan) == [older.id] and newer.num_preemptions == 0
    h.run()
    assert h.scheduler.num_preemptions == 0
    h.assert_quiescent()


def test_the_safety_margin_holds_newcomers_back_unless_idle() -> None:
    h = Harness(num_blocks=11, margin=0.5, sharing=False)
    h.add(prompt(24), 4)
    waiting = h.add(prompt(4, 1), 2)
    h.step()
    assert not waiting.has_run and h.cache.pools[0].num_free == 4
    h.run()
    assert h.scheduler.num_preemptions == 0
    h.add(prompt(36, 2), 4)
    h.run()
    h.assert_quiescent()


def test_cached_blocks_do_not_count_as_used() -> None:
    h = Harness(num_blocks=11, margin=0.5)
    h.add(prompt(30), 4)
    h.run()
    assert h.cache.usage() == 0.0
    a, b = h.add(prompt(8, 1), 2), h.add(prompt(8, 2), 2)
    h.step()
    assert a.has_run and b.has_run


def test_prompts_under_way_keep_the_blocks_they_are_going_to_take() -> None:
    h = Harness(num_blocks=11, max_batch_tokens=8, chunk=4, sharing=False)
    h.add(prompt(4), 6)
    h.step()
    long, short = h.add(prompt(28, 1), 2), h.add(prompt(12, 2), 2)
    h.step()
    h.step()
    assert long.has_run and not short.has_run
    h.run()
    assert h.scheduler.num_preemptions == 0
    h.assert_quiescent()


def test_preempt_all_recomputes_with_the_same_output() -> None:
    h = Harness(max_batch_tokens=16)
    for first in range(4):
        h.add(prompt(6, first), 10)
    for step in range(30):
        if step == 4:
            h.scheduler.reset_prefix_cache()
            h.scheduler.preempt_all()
            assert h.scheduler.num_running == 0 and h.scheduler.num_waiting == 4
        if h.scheduler.has_work:
            h.step()
    assert h.scheduler.num_preemptions == 4
    h.assert_quiescent()


# Back-pressure


def test_a_paused_request_keeps_its_cache_and_takes_no_part() -> None:
    h = Harness(num_blocks=20)
    slow, fast = h.add(prompt(6), 8), h.add(prompt(6, 1), 8)
    h.step()
    h.scheduler.pause(slow)
    h.scheduler.pause(slow)
    assert h.scheduler.num_paused == 1 and slow.tables
    h.run()
    assert fast.is_finished and slow.num_output_tokens == 1 and not h.scheduler.has_work
    h.scheduler.resume(slow)
    h.scheduler.resume(slow)
    assert chunks(h.step()) == [(slow.id, 1)]
    h.run()
    assert slow.num_preemptions == 0
    h.assert_quiescent()


def test_a_paused_request_gives_its_blocks_to_those_who_need_them() -> None:
    h = Harness(num_blocks=7, sharing=False)
    slow = h.add(prompt(16), 4)
    h.step()
    h.scheduler.pause(slow)
    h.add(prompt(16, 1), 4)
    h.run()
    assert slow.status is RequestStatus.PAUSED and slow.num_preemptions == 1 and not slow.tables
    h.scheduler.resume(slow)
    assert h.scheduler.num_waiting == 1
    h.run()
    h.assert_quiescent()


def test_paused_requests_hold_no_seat() -> None:
    h = Harness(max_requests=2)
    slow = [h.add(prompt(4, i), 8) for i in range(2)]
    h.step()
    for request in slow:
        h.scheduler.pause(request)
    others = [h.add(prompt(4, 5 + i), 8) for i in range(2)]
    h.step()
    assert h.scheduler.num_running == 2
    for request in slow:
        h.scheduler.resume(request)
    # Four are on two seats now: they take turns.
    for _ in range(4):
        h.step()
    assert all(request.num_output_tokens >= 2 for request in (*slow, *others))
    h.run()
    h.assert_quiescent()


@pytest.mark.parametrize("resumed", [True, False])
def test_pausing_while_the_step_is_in_flight_loses_nothing(resumed: bool) -> None:
    h = Harness()
    request = h.add(prompt(6), 4)
    plan = h.schedule()
    h.scheduler.pause(request)
    if resumed:
        h.scheduler.resume(request)
    h.execute(plan)
    assert request.num_output_tokens == 1
    h.scheduler.resume(request)
    h.run()
    h.assert_quiescent()


def test_what_comes_for_lost_blocks_is_dropped() -> None:
    h = Harness()
    request = h.add(prompt(6), 4)
    h.step()
    plan = h.schedule()
    h.scheduler.pause(request)
    h.scheduler.preempt_all()
    assert h.execute(plan) == [] and request.num_output_tokens == 1
    h.scheduler.resume(request)
    h.run()
    h.assert_quiescent()


def test_pausing_what_waits() -> None:
    h = Harness(max_requests=1)
    h.add(prompt(4), 4)
    waiting = h.add(prompt(4, 1), 4)
    h.step()
    h.scheduler.pause(waiting)
    h.run()
    assert waiting.num_output_tokens == 0
    h.scheduler.resume(waiting)
    h.run()
    h.assert_quiescent()


# Prefixes


def test_a_later_request_hits_the_prefix() -> None:
    h = Harness()
    h.add(prompt(16), 2)
    h.run()
    second = h.add([*prompt(16), 3], 2)
    h.step()
    assert second.num_cached_tokens == 16 and chunks(h.plans[-1]) == [(2, 1)]
    assert (h.scheduler.prefix_cache_queries, h.scheduler.prefix_cache_hits) == (33, 16)
    assert "48 %" in repr(h.scheduler)


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    h = Harness(num_blocks=600, max_batch_tokens=32, max_requests=64, chunk=32)
    common = prompt(128)
    for i in range(40):
        h.add([*common, i % VOCAB, i // VOCAB, 5], 2)
    h.run()
    assert h.num_computed() == 128 + 40 * (3 + 1)
    h.assert_quiescent()


@pytest.mark.parametrize("policy", POLICIES)
def test_prefixes_of_different_lengths_arrive_together(policy: SchedulerType) -> None:
    h = Harness(num_blocks=300, max_batch_tokens=16, chunk=8, policy=policy)
    common = prompt(64)
    for i in range(12):
        h.add([*common[: 4 * i + 6], i % VOCAB, 3], 3, priority=i % 2)
    h.run()
    assert h.num_computed() < 400
    h.assert_quiescent()


def test_other_prompts_overtake_those_that_wait_for_a_prefix() -> None:
    h = Harness(max_batch_tokens=16, chunk=8)
    h.add(prompt(4, 9), 20)
    h.step()
    h.add(prompt(40), 2)
    parked = h.add([*prompt(40), 1], 2)
    other = h.add(prompt(8, 3), 2)
    h.step()
    assert other.has_run and not parked.has_run
    assert h.scheduler.num_waiting == 1
    h.run()
    h.assert_quiescent()


@pytest.mark.parametrize("event", ["finish", "pause", "preempt", "reset"])
def test_who_waits_for_a_prefix_goes_on_when_its_owner_does_not(event: str) -> None:
    h = Harness(max_batch_tokens=8, chunk=4)
    owner = h.add(prompt(40), 2)
    waiting = [h.add([*prompt(40), i], 2) for i in range(3)]
    h.step()
    assert h.scheduler.num_waiting == 3 and h.scheduler.num_running == 1
    if event == "finish":
        h.finish(owner)
    elif event == "pause":
        h.scheduler.pause(owner)
    elif event == "preempt":
        h.scheduler.preempt_all()
    else:
        h.scheduler.reset_prefix_cache()
    h.run()
    assert all(request.is_finished for request in waiting)
    h.scheduler.resume(owner)
    h.run()
    h.assert_quiescent()


def test_nobody_waits_for_a_prefix_of_older_weights() -> None:
    h = Harness(max_batch_tokens=16, chunk=4)
    h.add(prompt(4, 9), 30)
    h.step()
    owner, waiting = h.add(prompt(40), 2), h.add([*prompt(40), 1], 2)
    h.step()
    assert h.scheduler.num_waiting == 1
    h.scheduler.reset_prefix_cache()
    h.step()
    assert waiting.has_run and owner.num_output_tokens == 0
    # Back on its feet, the old owner announces nothing.
    h.scheduler.pause(owner)
    h.scheduler.resume(owner)
    late = h.add([*prompt(40), 2], 2, salt="other weights")
    h.step()
    assert late.has_run
    h.run()
    h.assert_quiescent()


def test_cancelling_who_waits_for_a_prefix() -> None:
    h = Harness(max_batch_tokens=8)
    h.add(prompt(40), 2)
    waiting = [h.add([*prompt(40), i], 2) for i in range(3)]
    h.step()
    h.finish(waiting[1])
    h.scheduler.pause(waiting[2])
    h.scheduler.check_invariants()
    h.run()
    h.scheduler.resume(waiting[2])
    h.run()
    h.assert_quiescent()


def test_a_more_important_request_does_not_wait_for_a_less_important_owner() -> None:
    h = Harness(max_batch_tokens=8, policy="priority")
    h.add(prompt(40), 2, priority=9)
    h.step()
    urgent = h.add([*prompt(40), 1], 2, priority=0)
    h.step()
    assert urgent.has_run
    h.run()
    h.assert_quiescent()


def test_a_chunk_that_ends_inside_a_block_publishes_the_ones_before() -> None:
    h = Harness(max_batch_tokens=6)
    h.add(prompt(20), 2)
    h.step()
    assert h.cache.match(h.request([*prompt(20), 1])) == 1
    h.run()
    h.assert_quiescent()


def test_salts_are_not_shared_even_when_they_arrive_together() -> None:
    h = Harness(max_batch_tokens=64)
    for salt in ("a", "b", None):
        h.add(prompt(17), 2, salt=salt)
    h.run()
    assert h.scheduler.prefix_cache_hits == 0
    h.assert_quiescent()


def test_a_reset_prefix_cache_finds_nothing_old() -> None:
    h = Harness()
    h.add(prompt(17), 2)
    running = h.add(prompt(17, 1), 9)
    h.step()
    h.scheduler.reset_prefix_cache()
    h.run()
    assert running.is_finished
    for tokens in (prompt(17), running.tokens):
        h.add(tokens, 2)
    h.run()
    assert h.scheduler.prefix_cache_hits == 0
    h.assert_quiescent()


def test_a_blocked_long_prompt_is_not_looked_up_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(num_blocks=30, sharing=True)
    h.add(prompt(60), 40)
    h.step()
    h.add(prompt(100, 1), 4)
    h.step()
    calls = 0
    match = h.cache.match

    def counting(sequence: Any) -> int:
        nonlocal calls
        calls += 1
        return match(sequence)

    monkeypatch.setattr(h.cache, "match", counting)
    for _ in range(20):
        h.step()
    assert calls == 0
    h.run()
    h.assert_quiescent()


def num_calls(function: Callable[[], object]) -> int:
    """How many calls, into Python and into C, a function makes: a cost that does not depend on the machine."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # its callbacks would be counted
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_costs_the_same_however_many_wait(policy: SchedulerType) -> None:
    costs = []
    for num_waiting in (10, 3000):
        h = Harness(num_blocks=600, page_size=64, max_batch_tokens=256, max_requests=64, policy=policy)
        for i in range(64 + num_waiting):
            h.add([i % VOCAB, i // VOCAB % VOCAB, 3], 60)
        h.step()
        plans: list[StepPlan] = []
        deciding = num_calls(lambda h=h, plans=plans: plans.append(h.scheduler.schedule()))  # type: ignore[misc]
        assert len(plans[0].entries) == 64
        result = StepResult([(4,)] * 64)
        costs.append((deciding, num_calls(lambda h=h, p=plans[0], r=result: h.scheduler.update(p, r))))  # type: ignore[misc]
    assert costs[0] == costs[1]
    # Two appends and one tuple per request, and nothing else.
    assert costs[0][0] < 64 * 4 + 60 and costs[0][1] < 64 * 7 + 60


# Prompt log-probabilities


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_prompt_logprobs_come_once_for_every_position(num_blocks: int) -> None:
    h = Harness(num_blocks=num_blocks, max_batch_tokens=8, chunk=3)
    h.add(prompt(12), 8)
    h.step()
    wanted = h.add(prompt(12), 8, prompt_logprobs=0)
    rows: list[int] = []
    while h.scheduler.has_work:
        plan = h.schedule()
        for update in h.execute(plan):
            if update.request is wanted and update.prompt_logprobs:
                rows += [row.token_id for row in update.prompt_logprobs]
        if len(rows) > 3 and not wanted.num_preemptions:
            h.scheduler.preempt_all()
    assert rows == prompt(12)[1:]
    assert wanted.num_preemptions >= 1
    h.assert_quiescent()


def test_logprobs_travel_with_their_token() -> None:
    h = Harness()
    h.add(prompt(5), 2, logprobs=1)
    h.add(prompt(5, 1), 2)
    updates = h.execute(h.schedule())
    with_logprobs, without = updates
    assert with_logprobs.logprobs is not None and with_logprobs.logprobs[0].token_id == with_logprobs.token_ids[0]
    assert without.logprobs is None


# Windows


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8, 11, 12, 13, 30])
@pytest.mark.parametrize("windows", [(6,), (None, 6), (4, None, 9)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_window_edges(windows: tuple[int | None, ...], length: int, is_chunked: bool) -> None:
    h = Harness(num_blocks=14, windows=windows, is_chunked=is_chunked, max_batch_tokens=8)
    h.add(prompt(length), 12)
    h.add(prompt(length), 12)
    h.run()
    h.add([*prompt(length), 1, 2], 3)
    h.run()
    h.assert_quiescent()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_long_prompt_passes_through_a_small_sliding_pool(is_chunked: bool) -> None:
    h = Harness(num_blocks=[40, 4], windows=(None, 8), is_chunked=is_chunked, max_batch_tokens=64)
    h.add(prompt(100), 20)
    h.run()
    assert h.oracle.max_tokens < 64
    h.assert_quiescent()


def test_blocks_of_earlier_chunks_are_given_back() -> None:
    h = Harness(num_blocks=32, windows=(8,), is_chunked=True, max_batch_tokens=64)
    request = h.add(prompt(13), 8)
    held = []
    while request.finish_reason is None:
        h.step()
        if request.tables:
            held.append(sum(block != 0 for block in request.tables[0]))
    # Positions 13 to 15 are in the second chunk of two pages; at 16 a third one begins with a page of its own.
    assert held == [2, 2, 2, 2, 1, 1, 1]
    h.assert_quiescent()


def test_prefixes_are_shared_on_hybrid_models() -> None:
    h = Harness(num_blocks=60, windows=(None, 8))
    h.add(prompt(32), 2)
    h.run()
    second = h.add([*prompt(32), 4], 2)
    h.run()
    assert second.num_cached_tokens == 32
    h.assert_quiescent()


# Parallel samples


def test_a_group_computes_its_prompt_once_and_copies_one_block() -> None:
    h = Harness(max_batch_tokens=16)
    requests = h.add_group(4, prompt(11), 5)
    h.step()
    plan = h.step()
    assert len(plan.copies_before) == 3 and len(plan.entries) == 4
    # Only the leader's prompt, and the last prompt token of the others.
    assert chunks(plan)[1:] == [(r.id, 1) for r in requests[1:]]
    h.run()
    assert len({tuple(h.outputs[r.id]) for r in requests}) > 1
    assert h.num_computed() == 11 + 3 + 4 * 4
    h.assert_quiescent()


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
def test_groups_with_prompts_of_every_length(length: int, windows: tuple[int | None, ...], sharing: bool) -> None:
    h = Harness(max_batch_tokens=4, windows=windows, sharing=sharing)
    h.add_group(3, prompt(length), 7)
    h.run()
    h.assert_quiescent()


@pytest.mark.parametrize("event", ["cancelled in the queue", "cancelled in its prompt", "ended", "paused", "preempted"])
@pytest.mark.parametrize("sharing", [True, False])
def test_the_others_do_without_their_leader(event: str, sharing: bool) -> None:
    seats = 1 if event == "ended" else 8
    h = Harness(max_batch_tokens=8, max_requests=seats, sharing=sharing)
    leader, *others = h.add_group(3, prompt(19), 5)
    if event != "cancelled in the queue":
        h.step()
        assert leader.has_run and h.scheduler.num_waiting == 2
    if event.startswith("cancelled"):
        h.finish(leader)
    elif event == "paused":
        h.scheduler.pause(leader)
    elif event == "preempted":
        h.scheduler.preempt_all()
    h.run()
    assert all(h.ends[other.id].reason == "length" for other in others)
    h.scheduler.resume(leader)
    h.run()
    h.assert_quiescent()


def test_all_of_a_cancelled_group_go() -> None:
    h = Harness(max_batch_tokens=8)
    requests = h.add_group(4, prompt(11), 50)
    for _ in range(4):
        h.step()
    for request in requests:
        h.finish(request)
    assert h.scheduler.num_requests == 0 and h.cache.usage() == 0.0
    h.run()
    h.assert_quiescent()


def test_a_group_in_a_full_cache() -> None:
    h = Harness(num_blocks=7, sharing=False)
    h.add_group(6, prompt(10), 10)
    h.run()
    assert h.scheduler.num_preemptions > 0
    h.assert_quiescent()


def test_times_are_the_callers() -> None:
    h = Harness(max_batch_tokens=8)
    request = h.add(prompt(12), 2)
    for now in (1.0, 2.0, 3.0):
        h.now = now
        h.step()
    assert (request.first_scheduled_at, request.first_token_at) == (1.0, 2.0)


def test_reprs_are_live() -> None:
    h = Harness()
    h.add(prompt(5))
    h.step()
    assert "fifo [1 running, 0 waiting, 0 paused | blocks 2/63" in repr(h.scheduler)
    for part in (h.scheduler._roster, h.scheduler._admission, h.scheduler._roster.pending):
        assert repr(part).startswith("<")


@pytest.mark.parametrize("prompts", [(2, 8), (5, 2), (8, 5)])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
def test_blocks_that_come_back_late_go_to_whom_they_were_taken_for(
    policy: SchedulerType, prompts: tuple[int, int]
) -> None:
    """Two steps deep, what a preempted request gives back lands a step later: it must not take it again itself."""
    h = Harness(num_blocks=6, policy=policy, depth=2, max_batch_tokens=3)
    for index, length in enumerate(prompts):
        h.add([index] * length, 12)
    h.run(200)
    h.assert_quiescent()
