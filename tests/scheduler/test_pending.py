"""Pending prefixes and the draft of a step: the corners that whole runs seldom meet."""

from __future__ import annotations

from aiocb.cache import CacheManager
from aiocb.cache.states import Snapshot
from aiocb.sampling_params import SamplingParams
from aiocb.scheduler import Request
from aiocb.scheduler.draft import Draft
from aiocb.scheduler.pending import PendingPrefixes
from aiocb.step import StateCopy
from aiocb.testing.records import simple_layout


def make(number: int, tokens: list[int], cache: CacheManager) -> Request:
    request = Request(list(tokens), id=number, sampling=SamplingParams(), max_tokens=len(tokens) + 4)
    cache.match(request)
    cache.extend_block_hashes(request, len(tokens) // 4)
    return request


def test_what_was_computed_and_evicted_again_is_not_waited_for() -> None:
    cache = CacheManager(simple_layout(8))
    pending = PendingPrefixes(4)
    owner, other = make(1, list(range(16)), cache), make(2, list(range(17)), cache)
    pending.add(owner, 0)
    assert pending.find(other.block_hashes, 0, 4) == (owner, 16)
    assert pending.find(other.block_hashes, 0, 2) == (owner, 8)
    assert pending.find(other.block_hashes, 2, 2) is None
    owner.num_computed_tokens = 8
    assert pending.find(other.block_hashes, 1, 4) is None
    assert pending.find(other.block_hashes, 2, 4) == (owner, 16)
    pending.discard(owner)
    pending.discard(owner)
    assert pending.find(other.block_hashes, 2, 4) is None and len(pending) == 0


def test_the_first_owner_of_a_prefix_stays() -> None:
    cache = CacheManager(simple_layout(8))
    pending = PendingPrefixes(4)
    first, second = make(1, list(range(8)), cache), make(2, list(range(16)), cache)
    pending.add(first, 0)
    pending.add(second, 0)
    assert pending.find(second.block_hashes, 0, 4) == (first, 8)
    assert pending.find(second.block_hashes, 2, 4) == (second, 16)
    pending.discard(second)
    assert pending.find(second.block_hashes, 0, 4) == (first, 8)


def test_waking_takes_those_who_waited_long_enough() -> None:
    cache = CacheManager(simple_layout(8))
    pending = PendingPrefixes(4)
    owner, *waiting = (make(i, list(range(16)), cache) for i in range(4))
    for request, target in zip(waiting, (4, 12, 8), strict=True):
        pending.park(request, owner, target)
    assert pending.unpark(waiting[1]) and not pending.unpark(waiting[1])
    assert pending.wake(owner, 4) == [waiting[0]]
    assert pending.num_parked == 1
    pending.check_invariants([owner])
    assert pending.wake(owner) == [waiting[2]]
    assert pending.num_parked == 0 and not owner.followers


def test_withdrawing_takes_entry_budget_and_copies_back() -> None:
    cache = CacheManager(simple_layout(16))
    leader, fork = make(1, list(range(10)), cache), make(2, list(range(10)), cache)
    draft = Draft(20, 4)
    assert cache.allocate(leader, 10)
    leader.num_computed_tokens = leader.num_scheduled_tokens = 9
    copies = cache.fork(leader, fork, 9)
    assert copies
    draft.copies += copies
    draft.add_chunk(leader, 1, *cache.new_blocks(leader))
    draft.add_chunk(fork, 1, *cache.new_blocks(fork))
    assert draft.budget == 18 and "2 requests" in repr(draft)
    draft.withdraw(fork)
    draft.withdraw(fork)
    assert draft.budget == 19 and draft.requests == [leader] and draft.copies == []
    assert leader.is_open and not fork.is_open
    leader.state_slot, fork.state_slot = 3, 4
    draft.states += [StateCopy(3, 4), StateCopy(5, 3)]
    draft.snapshots = {leader: False, fork: True}
    draft.withdraw(fork)
    assert draft.states == [StateCopy(5, 3)] and draft.snapshots == {leader: False}
    plan = draft.plan((), {leader: Snapshot(7, 12, False)}, ())
    assert plan.states_before == (StateCopy(5, 3),) and plan.states_after == (StateCopy(3, 7),)
    assert plan.num_tokens == 1 and [opened.request_id for opened in plan.opened] == [1]
