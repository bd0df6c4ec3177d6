"""The cache manager: tables, prefix hits, windows, forks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from aiocb.cache import CachedSequence, CacheManager
from aiocb.step import NULL_BLOCK
from aiocb.testing.records import simple_layout


def make(
    num_blocks: int | Sequence[int] = 20,
    *,
    page_size: int = 4,
    windows: Sequence[int | None] = (None,),
    sharing: bool = True,
) -> CacheManager:
    return CacheManager(simple_layout(num_blocks, page_size=page_size, windows=windows), sharing)


def compute(
    cache: CacheManager, sequence: CachedSequence, num_tokens: int | None = None, others: Sequence[CachedSequence] = ()
) -> None:
    """As a step does: room, KV, publication."""
    num_tokens = len(sequence.tokens) if num_tokens is None else num_tokens
    assert cache.allocate(sequence, num_tokens)
    sequence.num_computed_tokens = sequence.num_scheduled_tokens = num_tokens
    cache.publish(sequence)
    cache.check_invariants([sequence, *others])


def hit(cache: CacheManager, tokens: Sequence[int], salt: str | None = None) -> int:
    return cache.match(CachedSequence(list(tokens), salt)) * cache.page_size


def test_a_prefix_is_found_after_its_request_has_gone() -> None:
    cache = make()
    first = CachedSequence(list(range(10)))
    compute(cache, first)
    cache.free(cache.detach(first))
    assert cache.usage() == 0.0
    second = CachedSequence([*range(9), 99, 98])
    assert cache.match(second) == 2
    assert cache.attach(second, 2) == 8
    assert second.num_computed_tokens == 8 and cache.pools[0].num_used == 2
    cache.free(cache.detach(second))
    cache.free(cache.detach(second))
    cache.check_invariants([])


def test_only_full_blocks_and_never_the_last_token() -> None:
    cache = make()
    compute(cache, CachedSequence(list(range(8))))
    assert hit(cache, range(8)) == 4
    assert hit(cache, range(9)) == 8
    assert hit(cache, range(3)) == 0
    assert hit(cache, [5, *range(1, 9)]) == 0


def test_nothing_is_found_before_its_step_has_returned() -> None:
    cache = make()
    sequence = CachedSequence(list(range(9)))
    assert cache.allocate(sequence, 9)
    assert hit(cache, range(9)) == 0
    sequence.num_computed_tokens = sequence.num_scheduled_tokens = 9
    cache.publish(sequence)
    assert hit(cache, range(9)) == 8


def test_salts_separate_tenants() -> None:
    cache = make()
    compute(cache, CachedSequence(list(range(9)), "one"))
    assert hit(cache, range(9), "one") == 8
    assert hit(cache, range(9), "two") == 0
    assert hit(cache, range(9)) == 0


def test_sharing_can_be_switched_off() -> None:
    cache = make(sharing=False)
    compute(cache, CachedSequence(list(range(9))))
    assert hit(cache, range(9)) == 0 and len(cache.indices[0]) == 0


def test_new_weights_find_nothing_old_and_old_kv_is_not_published() -> None:
    cache = make()
    old = CachedSequence(list(range(20)))
    compute(cache, old, 12)
    cache.reset_prefix()
    assert hit(cache, range(20)) == 0
    compute(cache, old)
    assert hit(cache, range(20)) == 0 and len(cache.indices[0]) == 0
    assert cache.match(old) == 5
    cache.free(cache.detach(old))
    compute(cache, old)
    assert hit(cache, range(20)) == 16


def test_eviction_goes_block_by_block_from_the_end() -> None:
    cache = make(6)
    compute(cache, first := CachedSequence(list(range(16))))
    cache.free(cache.detach(first))
    assert hit(cache, range(17)) == 16
    # One block was never used; the second one comes from the end of the cached prefix.
    compute(cache, CachedSequence([100] * 5))
    assert hit(cache, range(17)) == 12
    assert cache.pools[0].num_used == 2


def test_a_cached_block_in_use_is_not_evicted() -> None:
    cache = make(4)
    first = CachedSequence(list(range(8)))
    compute(cache, first)
    second = CachedSequence([*range(8), 1])
    cache.attach(second, cache.match(second))
    cache.free(cache.detach(first))
    assert not cache.allocate(CachedSequence([7] * 8), 8)
    cache.check_invariants([second])


def test_a_block_published_meanwhile_replaces_the_own_partial_one() -> None:
    cache = make()
    slow, fast = CachedSequence(list(range(12))), CachedSequence(list(range(12)))
    compute(cache, slow, 6)
    compute(cache, fast, others=[slow])
    assert cache.match(slow) == 2
    assert cache.attach(slow, 2) == 2
    assert slow.tables[0] == [slow.tables[0][0], fast.tables[0][1]]
    cache.check_invariants([slow, fast])


def test_fit_says_how_much_of_a_chunk_has_room() -> None:
    cache = make(4)
    sequence = CachedSequence(list(range(40)))
    assert cache.fit(sequence, 40) == 12
    assert cache.fit(sequence, 5) == 5
    assert not cache.allocate(sequence, 13) and cache.pools[0].num_free == 3
    compute(cache, sequence, 10)
    assert cache.fit(sequence, 40) == 2


@pytest.mark.parametrize("page_size", [1, 4, 5])
@pytest.mark.parametrize("window", [1, 4, 6, 8, 9])
def test_blocks_out_of_the_window_come_back(window: int, page_size: int) -> None:
    cache = make(60, page_size=page_size, windows=[window])
    sequence = CachedSequence(list(range(40)))
    for end in range(1, 41):
        compute(cache, sequence, end)
        # What the query at `end` sees, its own block included, and nothing else.
        assert cache.pools[0].num_used <= -(-(window - 1) // page_size) + 2
        visible = range(max(0, end - window), end)
        assert all(sequence.tables[0][position // page_size] != NULL_BLOCK for position in visible)
    assert cache.max_request_tokens >= 10**6


def test_a_long_prompt_gives_blocks_back_between_its_chunks() -> None:
    cache = make(7, windows=[8])
    sequence = CachedSequence(list(range(100)))
    end = 0
    while end < 100:
        count = cache.fit(sequence, 12)
        assert count >= 8
        end = min(100, end + count)
        compute(cache, sequence, end)
    cache.free(cache.detach(sequence))
    assert cache.pools[0].num_used == 0


def test_a_hit_on_a_sliding_group_needs_only_the_window() -> None:
    cache = make([40, 40], windows=[None, 6])
    first = CachedSequence(list(range(30)))
    for end in (10, 20, 30):
        compute(cache, first, end)
    cache.free(cache.detach(first))
    # The blocks out of the window were given back long ago, and reused by nobody: make them go.
    for block in cache.pools[1].free_blocks():
        tokens = first.tokens
        if cache.indices[1].find(first.block_hashes[6], tokens[24:28]) != block and (
            cache.indices[1].find(first.block_hashes[5], tokens[20:24]) != block
        ):
            cache.indices[1].withdraw(block)
    second = CachedSequence([*range(29), 7, 7])
    assert cache.match(second) == 7
    cache.attach(second, 7)
    assert second.tables[1][:5] == [NULL_BLOCK] * 5 and NULL_BLOCK not in second.tables[1][5:]
    assert NULL_BLOCK not in second.tables[0]
    cache.check_invariants([second])
    # A shorter hit would need blocks that are gone in the sliding group.
    assert hit(cache, range(20)) == 0


def test_a_sliding_only_model_is_hit_across_lost_blocks() -> None:
    cache = make(40, windows=[5])
    first = CachedSequence(list(range(30)))
    compute(cache, first)
    for i in range(3):
        block = cache.indices[0].peek(first.block_hashes[i])
        assert block is not None
        cache.indices[0].withdraw(block)
    assert hit(cache, range(30)) == 28
    assert hit(cache, range(16)) == 0
    assert hit(cache, range(17)) == 16


def test_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    cache = make()
    leader = CachedSequence(list(range(10)))
    compute(cache, leader)
    child = CachedSequence(list(range(10)))
    assert cache.can_fork(leader, 9)
    copies = cache.fork(leader, child, 9)
    assert copies is not None
    ((group, source, target),) = copies
    assert (group, source, target) == (0, leader.tables[0][2], child.tables[0][2])
    assert child.tables[0][:2] == leader.tables[0][:2] and source != target
    assert child.num_computed_tokens == 9
    cache.check_invariants([leader, child])
    cache.free(cache.detach(leader))
    cache.check_invariants([child])


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    cache = make()
    leader = CachedSequence(list(range(9)))
    compute(cache, leader)
    assert cache.fork(leader, CachedSequence(list(range(9))), 8) == []


def test_fork_with_a_full_cache_takes_nothing() -> None:
    cache = make(4)
    leader = CachedSequence(list(range(10)))
    compute(cache, leader)
    child = CachedSequence(list(range(10)))
    assert cache.fork(leader, child, 9) is None
    assert child.tables == () and cache.pools[0].num_used == 3
    cache.check_invariants([leader, child])


def test_no_fork_from_what_has_left_the_window_or_is_not_computed() -> None:
    cache = make([30, 30], windows=[None, 4])
    leader = CachedSequence(list(range(30)))
    assert not cache.can_fork(leader, 9)
    compute(cache, leader, 10)
    assert cache.can_fork(leader, 9) and not cache.can_fork(leader, 11) and not cache.can_fork(leader, 0)
    child = CachedSequence(list(range(30)))
    copies = cache.fork(leader, child, 9)
    assert copies is not None and [copy.group for copy in copies] == [0, 1]
    assert child.tables[1][0] == NULL_BLOCK
    cache.check_invariants([leader, child])
    for end in (20, 30):
        compute(cache, leader, end, others=[child])
    assert not cache.can_fork(leader, 9)
    cache.reset_prefix()
    assert not cache.can_fork(leader, 29)


def test_what_can_ever_fit() -> None:
    cache = make(5)
    # The last token's KV is never needed.
    assert cache.max_request_tokens == 17
    assert make([5, 3], windows=[None, 5]).max_request_tokens == 17
    assert make([5, 3], windows=[None, 6]).max_request_tokens == 9
    assert make([5, 4], windows=[None, 6]).max_request_tokens == 17
    assert make(9, windows=[6]).max_request_tokens == sys.maxsize


def test_usage_counts_references_only_and_by_size() -> None:
    cache = make([11, 6], windows=[None, 8])
    sequence = CachedSequence(list(range(20)))
    assert cache.allocate(sequence, 20)
    assert cache.usage() == pytest.approx(10 / 15)
    sequence.num_computed_tokens = sequence.num_scheduled_tokens = 20
    cache.publish(sequence)
    cache.free(cache.detach(sequence))
    assert cache.usage() == 0.0 and cache.has_margin(1.0)
    assert "cached 10" in repr(cache)


def test_publishing_long_after_forking_fills_in_the_hashes() -> None:
    cache = make()
    leader = CachedSequence(list(range(12)))
    compute(cache, leader)
    child = CachedSequence([*range(12), *range(50, 60)])
    assert cache.fork(leader, child, 11) is not None
    assert cache.allocate(child, 22)
    child.num_computed_tokens = child.num_scheduled_tokens = 22
    cache.publish(child)
    cache.check_invariants([leader, child])
    assert hit(cache, child.tokens) == 20


def test_a_partial_block_is_reused_before_cached_ones() -> None:
    cache = make(6)
    sequence = CachedSequence(list(range(18)))
    compute(cache, sequence)
    partial = sequence.tables[0][-1]
    cache.free(cache.detach(sequence))
    assert cache.pools[0].free_blocks()[0] == partial
    late = CachedSequence([7])
    compute(cache, late)
    (block,) = late.tables[0]
    assert block == partial
    cache.free(cache.detach(late))
    assert cache.pools[0].free_blocks()[0] == partial


def test_a_chunk_publishes_the_blocks_that_it_fills() -> None:
    cache = make()
    sequence = CachedSequence(list(range(18)))
    compute(cache, sequence, 6)
    assert hit(cache, range(18)) == 4
    compute(cache, sequence, 14)
    assert hit(cache, range(18)) == 12


@pytest.mark.parametrize("is_held", [True, False])
def test_hits_that_nobody_holds_are_taken_from_the_free_blocks(is_held: bool) -> None:
    cache = make(6)
    first = CachedSequence(list(range(12)))
    compute(cache, first)
    if not is_held:
        cache.free(cache.detach(first))
    second = CachedSequence([*range(12), *range(40, 49)])
    hits = cache.match(second)
    assert hits == 3 and cache.num_free() == (2 if is_held else 5,)
    # Three more blocks are needed, and the three hits are among the free ones unless somebody holds them.
    assert not cache.can_hold(second, hits, 100, [0])
    assert cache.can_hold(CachedSequence([*range(12), *range(40, 48)]), 0, 100, [0]) == (not is_held)
    shorter = CachedSequence([*range(12), *range(40, 48)])
    assert cache.can_hold(shorter, cache.match(shorter), 100, [0])
    assert not cache.can_hold(shorter, cache.match(shorter), 100, [1])


def test_a_sliding_group_needs_window_and_chunk() -> None:
    cache = make(8, windows=[8])
    sequence = CachedSequence(list(range(200)))
    assert cache.can_hold(sequence, 0, 12, [0])
    assert not cache.can_hold(sequence, 0, 24, [0])
    assert not cache.can_hold(sequence, 0, 12, [2])
    assert cache.fit(sequence, 12) == 12
    assert cache.demand(sequence, 12) == [6]
    compute(cache, sequence, 12)
    assert cache.demand(sequence, 12) == [3]
