"""Swapping out what preempted requests have computed, and in again."""

from __future__ import annotations

from typing import Any

import pytest

from aiocb.cache import CachedSequence, CacheManager
from aiocb.scheduler import Request, RequestStatus
from aiocb.scheduler.draft import Draft
from aiocb.step import BlockSwap
from aiocb.testing.oracle import KVOracle
from aiocb.testing.records import KVMismatch, simple_layout
from tests.scheduler.helpers import VOCAB, Harness, chunks
from tests.scheduler.test_oracle import RIGHT, opened, plan, written


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7 + i * i * (seed + 3) + i) % VOCAB for i in range(length)]


def make(**options: Any) -> Harness:
    options.setdefault("num_blocks", 12)
    options.setdefault("swap_places", 100)
    return Harness(**options)


def num_swaps(h: Harness) -> tuple[int, int]:
    return sum(len(plan.swaps_out) for plan in h.plans), sum(len(plan.swaps_in) for plan in h.plans)


def preempted(h: Harness) -> tuple[Request, Request]:
    """Two requests of which the newer one has just lost its blocks."""
    older, newer = h.add(prompt(1, 16), 24), h.add(prompt(2, 16), 24)
    while not newer.num_preemptions:
        h.step()
    return older, newer


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("swap_places", [0, 3, 100])
def test_twenty_requests_in_the_room_of_few(swap_places: int, windows: tuple[int | None, ...], depth: int) -> None:
    h = make(windows=windows, swap_places=swap_places, depth=depth, num_blocks=10)
    for seed in range(20):
        h.add(prompt(seed, 6 + seed % 5), 12 + seed % 7, temperature=1.0, seed=seed, logprobs=0)
    h.run()
    assert h.scheduler.num_preemptions > 0
    out, back = num_swaps(h)
    assert swap_places or (out, back) == (0, 0)
    assert (out > 0 and back > 0) or swap_places < 100
    h.assert_quiescent()


def test_nothing_is_computed_twice() -> None:
    h = make(sharing=False)
    older, newer = preempted(h)
    h.run()
    assert older.num_preemptions == 0
    # All but the last token of each, once.
    assert h.num_computed() == 2 * (16 + 24 - 1)
    h.assert_quiescent()


def test_only_what_the_prefix_cache_has_lost_comes_back_from_places() -> None:
    h = make(num_blocks=14)
    older, newer = preempted(h)
    assert newer.swapped is not None
    held = sum(map(len, newer.swapped.places))
    h.finish(older)
    h.run()
    out, back = num_swaps(h)
    assert out == held and 0 < back < held
    h.assert_quiescent()


def test_places_are_dropped_when_the_prefix_cache_has_all() -> None:
    h = make(num_blocks=40, swap_places=100)
    request = h.add(prompt(1, 17), 12)
    h.step()
    h.scheduler.pause(request)
    assert request.num_computed_tokens == 17
    other = h.add([*prompt(1, 17), *h.expected(request)[:8]], 2)
    h.run()
    assert other.is_finished and h.cache.swap is not None
    h.scheduler._roster.preempt(request, None)
    h.scheduler.resume(request)
    # As if it had been swapped out at 17 tokens: the other one has published more.
    request.swapped = None
    sequence = CachedSequence(list(request.tokens))
    h.cache.match(sequence)
    assert not h.cache.swap.is_worth_it(request, 5)
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("when", ["waiting", "coming back"])
def test_an_abort_frees_places_once(when: str, depth: int) -> None:
    h = make(depth=depth)
    older, newer = preempted(h)
    assert newer.swapped is not None and newer.status is RequestStatus.PREEMPTED
    if when == "coming back":
        while not any(plan.swaps_in for plan in h.plans):
            h.step()
    h.finish(newer)
    h.scheduler.check_invariants()
    assert not older.is_finished or when == "coming back"
    h.assert_quiescent()


def test_an_abort_in_the_step_that_swaps_out_waits_for_it() -> None:
    h = make(depth=2)
    older, newer = h.add(prompt(1, 16), 24), h.add(prompt(2, 16), 24)
    while not any(plan.swaps_out for plan in h.plans):
        h.execute(h.schedule())
    assert h.cache.swap is not None and h.flights and h.flights[-1].swaps_out
    taken = h.cache.swap.usage
    h.finish(newer)
    assert h.cache.swap.usage == taken > 0, "the plan in flight writes there"
    h.scheduler.check_invariants()
    assert not older.is_finished
    h.assert_quiescent()


def test_the_last_running_one_may_be_cancelled_while_others_are_swapped_out() -> None:
    h = make()
    older, newer = preempted(h)
    h.finish(older)
    h.run()
    assert newer.finish_reason == "length" and num_swaps(h)[1] > 0
    h.assert_quiescent()


def test_without_places_for_all_of_it_a_request_is_recomputed() -> None:
    h = make(swap_places=2)
    preempted(h)
    h.run()
    assert num_swaps(h) == (0, 0)
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_new_weights_make_places_worthless(depth: int) -> None:
    h = make(depth=depth)
    _, newer = preempted(h)
    assert newer.swapped is not None
    while h.flights:
        h.scheduler.update(oldest := h.flights.popleft(), h.oracle.collect(oldest))
    h.scheduler.reset_prefix_cache()
    h.scheduler.preempt_all()
    h.oracle.reload_weights()
    h.run()
    assert num_swaps(h)[1] == 0
    h.scheduler.check_invariants()
    assert h.cache.swap is not None and h.cache.swap.usage == 0.0


def test_a_paused_request_is_swapped_out_for_those_who_run() -> None:
    h = make()
    slow = h.add(prompt(1, 20), 8)
    h.step()
    h.scheduler.pause(slow)
    h.add(prompt(2, 30), 4)
    h.run()
    assert slow.swapped is not None and slow.status is RequestStatus.PAUSED
    h.scheduler.resume(slow)
    h.run()
    assert num_swaps(h)[1] > 0
    h.assert_quiescent()


def test_a_request_that_is_preempted_while_it_comes_back_keeps_its_places() -> None:
    h = make(sharing=False)
    older, newer = preempted(h)
    h.step()
    before, roster, draft = newer.swapped, h.scheduler._roster, Draft(64, 16)
    h.finish(older)
    assert before is not None and h.scheduler._admission.next(draft, 64, [0]) is newer
    assert newer.swapped is before and draft.swaps_in[newer] and newer.num_computed_tokens == before.num_tokens
    h.scheduler.check_invariants()
    roster.preempt(newer, draft)
    assert newer.swapped is before and not draft.swaps_in and not newer.tables
    h.scheduler.check_invariants()
    h.run()
    assert num_swaps(h)[1] > 0
    h.assert_quiescent()


def test_prompt_logprobs_survive() -> None:
    h = make(num_blocks=10)
    for seed in range(4):
        h.add(prompt(seed, 12), 20, prompt_logprobs=0)
    h.run()
    assert num_swaps(h)[1] > 0
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_states_go_with_keys_and_values_or_neither_does(windows: tuple[int | None, ...], depth: int) -> None:
    h = make(num_slots=6, depth=depth, windows=windows, sharing=False)
    for seed in range(10):
        h.add(prompt(seed, 6 + seed % 5), 12 + seed % 7)
    h.run()
    groups = [{swap.group for swap in plan.swaps_out} for plan in h.plans if plan.swaps_out]
    assert groups and all(each == set(range(len(windows) + 1)) for each in groups)
    h.assert_quiescent()


def test_a_swapped_request_is_not_parked_behind_another() -> None:
    h = make(num_blocks=14)
    first = h.add(prompt(1, 24), 20)
    second = h.add([*prompt(1, 24), 3], 20)
    while not second.num_preemptions:
        h.step()
    h.run()
    assert first.is_finished and second.is_finished and second.parked_on is None
    h.assert_quiescent()


class TestSpace:
    def test_low_places_first_and_each_once(self) -> None:
        cache = CacheManager(simple_layout(20, swap_places=6))
        space = cache.swap
        assert space is not None
        first, second, third = (CachedSequence(prompt(seed, 12)) for seed in range(3))
        for sequence, count in ((first, 12), (second, 9), (third, 12)):
            assert cache.allocate(sequence, count)
            sequence.num_computed_tokens = sequence.num_scheduled_tokens = count
        assert (
            space.put_out(first, moves_on=False) and first.swapped is not None and first.swapped.places == ((0, 1, 2),)
        )
        assert space.put_out(second, moves_on=False) and not space.put_out(third, moves_on=False)
        assert space.usage == 1.0 and repr(space) == "<SwapSpace 6/6 places>"
        assert [swap.place for swap in space.take_pending()] == [0, 1, 2, 3, 4, 5] and not space.pending
        space.free(space.forget(first))
        assert space.forget(first) == () and space.usage == 0.5
        assert (
            space.put_out(third, moves_on=False) and third.swapped is not None and third.swapped.places == ((0, 1, 2),)
        )
        cache.check_invariants([first, second, third])
        space.free(space.forget(third))
        assert not space.pending

    def test_coming_back_without_room_takes_nothing(self) -> None:
        cache = CacheManager(simple_layout(6, swap_places=6))
        space = cache.swap
        assert space is not None
        first = CachedSequence(prompt(1, 12))
        assert cache.allocate(first, 12)
        first.num_computed_tokens = first.num_scheduled_tokens = 9
        cache.publish(first)
        assert space.put_out(first, moves_on=False)
        cache.free(cache.detach(first))
        other = CachedSequence(prompt(2, 12))
        assert cache.allocate(other, 12)
        hits = cache.match(first)
        assert space.is_worth_it(first, hits) and space.take_in(first, hits) is None
        cache.check_invariants([first, other])
        cache.free(cache.detach(other))
        hits = cache.match(first)
        swaps = space.take_in(first, hits)
        assert swaps is not None and len(swaps) == 3 - hits and first.num_computed_tokens == 9
        cache.check_invariants([first])

    def test_a_state_that_is_not_there_is_recomputed(self) -> None:
        """Where a plan in flight takes it further, or has not filled its slot yet."""
        cache = CacheManager(simple_layout(9, num_slots=5, swap_places=6))
        assert cache.swap is not None
        sequence = CachedSequence(prompt(1, 9))
        cache.attach(sequence, 0)
        assert cache.allocate(sequence, 8)
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 8
        assert not cache.swap.put_out(sequence, moves_on=True)
        sequence.state_source = 3
        assert not cache.swap.put_out(sequence, moves_on=False)
        sequence.state_source = 0
        assert cache.swap.put_out(sequence, moves_on=False)
        assert cache.swap.take_pending()[-1] == BlockSwap(1, sequence.state_slot, 0)

    def test_nothing_computed_is_nothing_to_keep(self) -> None:
        cache = CacheManager(simple_layout(6, swap_places=6))
        assert cache.swap is not None
        sequence = CachedSequence(prompt(1, 12))
        assert cache.allocate(sequence, 12) and not cache.swap.put_out(sequence, moves_on=False)


def swapped_oracle() -> KVOracle:
    """Request 1 has computed 6 tokens in blocks 1 and 2, which lie in places 0 and 1 as well; it is to be opened."""
    oracle = written(simple_layout(8, swap_places=4), depth=2)
    out = (BlockSwap(0, 1, 0), BlockSwap(0, 2, 1))
    other = RIGHT._replace(
        request_id=2, num_computed_tokens=0, num_new_tokens=10, new_blocks=((1, 2, 3),), block_start=0
    )
    oracle.execute(plan(other, opened=(opened(2),), closed=(1,), swaps_out=out))
    return oracle


def test_the_oracle_keeps_what_lies_in_places() -> None:
    back = RIGHT._replace(new_blocks=((4, 5, 6),), block_start=0)
    right = (BlockSwap(0, 4, 0), BlockSwap(0, 5, 1))
    oracle = swapped_oracle()
    oracle.submit(plan(back, opened=(opened(),), swaps_in=right))
    ahead = RIGHT._replace(request_id=2, num_computed_tokens=10, num_new_tokens=1)
    with pytest.raises(KVMismatch, match="in use"):
        oracle.submit(plan(ahead, swaps_out=(BlockSwap(0, 3, 1),)))
    for wrong in (right[:1], (BlockSwap(0, 4, 1), BlockSwap(0, 5, 0)), (*right[:1], BlockSwap(0, 0, 1))):
        with pytest.raises(KVMismatch):
            swapped_oracle().execute(plan(back, opened=(opened(),), swaps_in=wrong))
    with pytest.raises(KVMismatch):
        swapped_oracle().execute(plan(closed=(2,), swaps_in=right))


def test_chunks_go_on_where_a_prompt_was_swapped_out() -> None:
    h = make(num_blocks=12, chunk=4, sharing=False)
    h.add(prompt(9, 3), 36)
    h.step()
    long = h.add(prompt(1, 24), 3)
    while not long.num_preemptions and not long.is_finished:
        h.step()
    h.run()
    assert long.is_finished
    starts = [entry.num_computed_tokens for plan in h.plans for entry in plan.entries if entry.request_id == long.id]
    assert starts == sorted(starts) and chunks(h.plans[0])
    h.assert_quiescent()
