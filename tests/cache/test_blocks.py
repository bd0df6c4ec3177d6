"""The block pool: reference counts and the order of reuse."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiocb.cache import BlockPool
from aiocb.step import NULL_BLOCK


def test_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    blocks = pool.try_allocate(4)
    assert blocks is not None and NULL_BLOCK not in blocks and len(set(blocks)) == 4
    assert pool.num_free == 0 and pool.num_used == 4


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate(4) is None
    assert pool.num_free == 3
    assert pool.try_allocate(0) == []


def test_least_recently_freed_is_reused_first() -> None:
    pool = BlockPool(4)
    blocks = pool.try_allocate(3)
    assert blocks is not None
    for block in (blocks[1], blocks[2], blocks[0]):
        pool.free(block)
    assert pool.try_allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_worthless_contents_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.try_allocate(3)
    assert blocks is not None
    pool.free(blocks[0])
    pool.free(blocks[1], reuse_first=True)
    assert pool.free_blocks() == [blocks[1], blocks[0]]


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(3)
    blocks = pool.try_allocate(1)
    assert blocks is not None
    pool.retain(blocks[0])
    pool.free(blocks[0])
    assert pool.num_references(blocks[0]) == 1 and pool.num_free == 1
    pool.free(blocks[0])
    assert pool.num_free == 2


def test_retaining_a_free_block_takes_it_out_of_the_middle() -> None:
    pool = BlockPool(6)
    middle = pool.free_blocks()[2]
    pool.retain(middle)
    assert middle not in pool.free_blocks() and pool.num_free == 4
    pool.check_invariants()


def test_releasing_too_often_raises() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="more often"):
        pool.free(1)
    with pytest.raises(RuntimeError):
        pool.free(NULL_BLOCK)


def test_a_pool_needs_a_usable_block() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)
    assert "0/1" in repr(BlockPool(2))


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model: a dictionary of counts and a plain list of free blocks."""

    @initialize(num_blocks=st.integers(2, 12))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.counts = dict.fromkeys(range(1, num_blocks), 0)
        self.free = list(range(1, num_blocks))

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        blocks = self.pool.try_allocate(count)
        if count > len(self.free):
            assert blocks is None
            return
        assert blocks == self.free[:count]
        del self.free[:count]
        for block in blocks:
            self.counts[block] = 1

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.retain(block)
        if self.counts[block] == 0:
            self.free.remove(block)
        self.counts[block] += 1

    @precondition(lambda self: any(self.counts.values()))
    @rule(data=st.data(), reuse_first=st.booleans())
    def release(self, data: st.DataObject, reuse_first: bool) -> None:
        block = data.draw(st.sampled_from([block for block, count in self.counts.items() if count]))
        self.pool.free(block, reuse_first=reuse_first)
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.free.insert(0 if reuse_first else len(self.free), block)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()
            assert self.pool.free_blocks() == self.free
            assert all(self.pool.num_references(block) == count for block, count in self.counts.items())


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
