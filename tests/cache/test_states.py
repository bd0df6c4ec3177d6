"""Slots of states: live ones, snapshots, hits, branches, what is evicted when."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from aiocb.cache import CachedSequence, CacheManager
from aiocb.cache.sequence import Held
from aiocb.cache.states import Snapshot, StateCache
from aiocb.step import StateLayout
from aiocb.testing.records import simple_layout


def make(num_slots: int = 6, *, num_blocks: int = 40, interval: int = 400, sharing: bool = True) -> CacheManager:
    return CacheManager(simple_layout(num_blocks, num_slots=num_slots, interval=interval), sharing)


def states_of(cache: CacheManager) -> StateCache:
    assert cache.states is not None
    return cache.states


def compute(cache: CacheManager, sequence: CachedSequence, num_tokens: int, *, is_rolling: bool = False) -> None:
    """As a step does that ends there: room, KV, publication, and a snapshot at the end of a block."""
    assert cache.allocate(sequence, num_tokens)
    sequence.num_scheduled_tokens = num_tokens
    snapshot = None
    if num_tokens % cache.page_size == 0:
        snapshot = states_of(cache).snapshot(sequence, is_rolling=is_rolling)
    sequence.num_computed_tokens = num_tokens
    cache.publish(sequence)
    if snapshot is not None:
        cache.publish_snapshot(sequence, snapshot)


def enter(cache: CacheManager, tokens: Sequence[int], salt: str | None = None) -> tuple[CachedSequence, int]:
    """A request that goes on from what it finds; the copy from the snapshot has been made."""
    sequence = CachedSequence(list(tokens), salt)
    saved = cache.attach(sequence, cache.match(sequence))
    if sequence.state_source:
        cache.free(Held((), (sequence.state_source,)))
        sequence.state_source = 0
    return sequence, saved


def leave(cache: CacheManager, *sequences: CachedSequence) -> None:
    for sequence in sequences:
        cache.free(cache.detach(sequence))
    cache.check_invariants([])


def test_a_hit_needs_the_blocks_and_a_snapshot_behind_them() -> None:
    cache = make()
    first, _ = enter(cache, range(14))
    for end in (6, 12, 14):
        compute(cache, first, end)
    leave(cache, first)
    assert states_of(cache).num_snapshots == 1 and states_of(cache).usage == 0.0
    # Three blocks are found and so is the state behind them; behind two of them there is none.
    assert enter(cache, range(14))[1] == 12
    other = CachedSequence([*range(8), 77, 78])
    assert cache.match(other) == 0 and other.branch_at == 8


def test_a_hit_is_pinned_and_copied_before_anything_is_computed() -> None:
    cache = make(3)
    first, _ = enter(cache, range(9))
    compute(cache, first, 8)
    leave(cache, first)
    second = CachedSequence(list(range(9)))
    assert cache.attach(second, cache.match(second)) == 8
    states = states_of(cache)
    assert second.state_source and second.state_source != second.state_slot
    assert states.pool.num_free == 0 and states.take() is None and states.num_hits == 1
    cache.check_invariants([second])
    leave(cache, second)
    assert states.num_snapshots == 1


def test_where_only_the_snapshot_is_free_it_becomes_the_slot() -> None:
    cache = make(2)
    first, _ = enter(cache, range(9))
    leave(cache, first)
    states = states_of(cache)
    first, _ = enter(cache, range(9))
    compute(cache, first, 8)
    assert states.num_snapshots == 0, "no slot is free, so none is taken"
    leave(cache, first)
    # Put one there by hand.
    third = CachedSequence(list(range(9)))
    cache.match(third)
    slot = states.take()
    assert slot is not None
    states.publish(third, Snapshot(slot, 8, False))
    assert cache.attach(third, cache.match(third)) == 8
    assert (third.state_slot, third.state_source) == (slot, 0) and states.num_snapshots == 0
    cache.check_invariants([third])
    assert states.pool.num_free == 0
    leave(cache, third)


@pytest.mark.parametrize("kind", ["state", "blocks"])
def test_one_may_be_evicted_without_the_other(kind: str) -> None:
    """A hit is what both have."""
    cache = make()
    first, _ = enter(cache, range(9))
    compute(cache, first, 4)
    compute(cache, first, 8)
    leave(cache, first)
    index = states_of(cache).index if kind == "state" else cache.indices[0]
    gone = index.peek(first.block_hashes[1])
    assert gone is not None
    index.withdraw(gone)
    again = CachedSequence(list(range(9)))
    assert cache.match(again) == 1
    assert again.branch_at == (8 if kind == "state" else 0)


def test_snapshots_of_other_salts_and_other_weights_are_not_found() -> None:
    cache = make()
    first, _ = enter(cache, range(9), "one")
    compute(cache, first, 8)
    assert cache.match(CachedSequence(list(range(9)), "two")) == 0
    assert cache.match(CachedSequence(list(range(9)), "one")) == 2
    cache.reset_prefix()
    assert states_of(cache).num_snapshots == 0
    assert cache.match(CachedSequence(list(range(9)), "one")) == 0
    # What goes on with the old weights leaves nothing behind, and loses no slot.
    first.tokens += range(9, 20)
    compute(cache, first, 12)
    assert states_of(cache).num_snapshots == 0
    leave(cache, first)


def test_the_newest_snapshot_of_an_answer_replaces_the_one_before() -> None:
    cache = make()
    first, _ = enter(cache, range(30))
    compute(cache, first, 8)
    for end in (12, 16, 20):
        compute(cache, first, end, is_rolling=True)
        assert states_of(cache).num_snapshots == 2, "the prompt's and the newest"
    leave(cache, first)
    assert cache.match(CachedSequence(list(range(30)))) == 5
    # Whoever goes on from one keeps it where it is.
    second, _ = enter(cache, range(21))
    pinned = CachedSequence(list(range(21)))
    cache.attach(pinned, cache.match(pinned))
    second.rolling = first.rolling
    second.tokens += range(21, 30)
    compute(cache, second, 24, is_rolling=True)
    assert cache.match(CachedSequence(list(range(30)))) == 6
    assert cache.match(CachedSequence([*range(20), 99])) == 5
    leave(cache, second, pinned)


def test_two_with_the_same_text_do_not_replace_each_others_snapshots() -> None:
    cache = make(8)
    first, _ = enter(cache, range(30))
    second, _ = enter(cache, [*range(16), *range(50, 60)])
    compute(cache, first, 16, is_rolling=True)
    compute(cache, second, 16, is_rolling=True)
    # The second one's has taken the place of the first one's, whose slot is somebody else's now.
    third, _ = enter(cache, range(100, 109))
    compute(cache, third, 8)
    slot = states_of(cache).index.peek(third.block_hashes[1])
    assert first.rolling is not None and slot is not None
    first.rolling = first.rolling[0], slot
    compute(cache, first, 20, is_rolling=True)
    assert cache.match(CachedSequence([*range(16), 99])) == 4
    assert cache.match(CachedSequence(list(range(100, 109)))) == 2
    leave(cache, first, second, third)


def test_live_slots_take_the_oldest_snapshot_and_snapshots_take_no_live_slot() -> None:
    cache = make(5)
    for start in (0, 100, 200):
        sequence, _ = enter(cache, range(start, start + 9))
        compute(cache, sequence, 8)
        leave(cache, sequence)
    states = states_of(cache)
    assert states.num_snapshots == 3
    assert states.num_bytes == 3 * states.layout.slot_bytes and states.usage == 0.0
    live = [enter(cache, [400 + i])[0] for i in range(3)]
    # One slot was worth nothing; then the two went that were used first.
    assert [cache.match(CachedSequence(list(range(start, start + 9)))) for start in (0, 100, 200)] == [0, 0, 2]
    live.append(CachedSequence([600]))
    cache.attach(live[3], cache.match(live[3]))
    cache.check_invariants(live)
    assert not cache.has_slot and states.snapshot(live[0], is_rolling=False) is None
    assert cache.num_free()[1:] == (0,) and states.usage == 1.0
    leave(cache, *live)


def test_points() -> None:
    cache = make(8, interval=8)
    states = states_of(cache)
    sequence, _ = enter(cache, range(31))
    assert cache.next_snapshot(sequence, ()) == 8
    assert cache.next_snapshot(sequence, (4, 20)) == 4
    sequence.branch_at = 4
    assert cache.next_snapshot(sequence, ()) == 4
    compute(cache, sequence, 4)
    assert cache.next_snapshot(sequence, ()) == 8
    compute(cache, sequence, 24)
    assert cache.next_snapshot(sequence, ()) == 28
    compute(cache, sequence, 28)
    assert cache.next_snapshot(sequence, ()) == 0
    # What is there already needs no chunk of its own.
    leave(cache, sequence)
    again = CachedSequence(list(range(31)))
    cache.attach(again, 0)
    assert cache.next_snapshot(again, ()) == 8
    again.branch_at = 4
    assert cache.next_snapshot(again, ()) == 8
    held = [states.take() for _ in range(states.pool.num_free)]
    assert cache.next_snapshot(again, ()) == 0, "where no slot is free, no chunk is cut short"
    assert None not in held


def test_without_sharing_there_are_no_snapshots() -> None:
    cache = make(sharing=False)
    sequence, _ = enter(cache, range(31))
    assert cache.next_snapshot(sequence, ()) == 0
    assert cache.num_free()[1:] == (4,)


def test_a_state_is_forked_where_it_stands() -> None:
    cache = make()
    leader, _ = enter(cache, range(9))
    compute(cache, leader, 6)
    assert cache.can_fork(leader, 6) and not cache.can_fork(leader, 5)
    child = CachedSequence(list(range(9)))
    copies = cache.fork(leader, child, 6)
    assert copies is not None and len(copies) == 1
    assert child.state_slot not in (0, leader.state_slot) and not child.state_source
    cache.check_invariants([leader, child])
    leave(cache, leader, child)
    # At the end of a block there is nothing to copy but the state, whose first block is taken at once.
    leader, _ = enter(cache, range(50, 59))
    compute(cache, leader, 8)
    child = CachedSequence(list(range(50, 59)))
    assert cache.fork(leader, child, 8) == [] and child.capacity == 12
    leave(cache, leader, child)


def test_a_fork_of_what_has_not_been_copied_yet_goes_on_from_the_same_snapshot() -> None:
    cache = make()
    first, _ = enter(cache, range(9))
    compute(cache, first, 8)
    leave(cache, first)
    leader, child = CachedSequence(list(range(9))), CachedSequence(list(range(9)))
    cache.attach(leader, cache.match(leader))
    assert cache.fork(leader, child, 8) == []
    assert child.state_source == leader.state_source != 0
    cache.check_invariants([leader, child])
    leave(cache, leader, child)


def test_a_fork_without_a_slot_takes_nothing() -> None:
    cache = make(2)
    leader, _ = enter(cache, range(9))
    compute(cache, leader, 6)
    child = CachedSequence(list(range(9)))
    assert cache.fork(leader, child, 6) is None and child.tables == ()
    cache.check_invariants([leader])


def test_a_model_of_states_alone() -> None:
    """One group without layers: blocks cost nothing, and find prefixes."""
    layout = simple_layout(40, num_slots=5)
    group = layout.groups[0]._replace(layers=(), block_bytes=0)
    cache = CacheManager(layout._replace(groups=(group,)))
    first, _ = enter(cache, range(9))
    compute(cache, first, 8)
    leave(cache, first)
    assert enter(cache, range(9))[1] == 8


@pytest.mark.parametrize("seed", range(6))
def test_hits_are_what_a_simple_model_says(seed: int) -> None:
    """Snapshots by recency in a list of prefixes, against the pool and its index."""
    rng = random.Random(seed)
    num_usable = rng.randint(2, 6)
    cache = make(num_usable + 1, num_blocks=400)
    states = states_of(cache)
    known: list[tuple[int, ...]] = []  # least recently used first
    prefixes = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
    for _ in range(120):
        tokens = [*rng.choice(prefixes)[: rng.randint(1, 40)], 9]
        sequence = CachedSequence(tokens)
        expected = max((len(key) for key in known if tuple(tokens[: len(key)]) == key), default=0)
        assert cache.match(sequence) * 4 == expected
        if expected:
            key = tuple(tokens[:expected])
            known.remove(key)
        cache.attach(sequence, expected // 4)
        if len(known) + bool(expected) + 1 > num_usable:
            if known:
                known.pop(0)
            else:
                expected = 0  # it has become the live slot
        if sequence.state_source:
            cache.free(Held((), (sequence.state_source,)))
            sequence.state_source = 0
        if expected:
            known.append(key)
        point = cache.next_snapshot(sequence, ())
        if point:
            compute(cache, sequence, point)
            key = tuple(tokens[:point])
            if len(known) + 2 > num_usable:
                known.pop(0)
            known.append(key)
        compute_rest = len(tokens)
        assert cache.allocate(sequence, compute_rest)
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = compute_rest
        cache.publish(sequence)
        leave(cache, sequence)
        found = {tuple(key) for key in known}
        assert states.num_snapshots == len(found) == len(known)


def test_the_text_of_it() -> None:
    cache = make()
    assert repr(states_of(cache)) == "<StateCache [slots 0/5 | 0 snapshots]>"
    assert "StateCache" in repr(cache)
    with pytest.raises(ValueError, match="null block"):
        StateCache(StateLayout(1, 4, 8), 4)
