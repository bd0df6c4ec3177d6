"""The prefix index: verified, separated by salt and version, consistent under reuse."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiocb.cache import BlockPool, PrefixIndex
from aiocb.cache.prefix import block_payload, chain_hash, root_hash


def digest_of(*tokens: int) -> bytes:
    return chain_hash(root_hash(None, 0), block_payload(tokens))


@pytest.mark.parametrize("other", [("a", 0), (b"a", 0), ("", 0), (None, 1), ("b", 0), ("n", 0)])
def test_salt_and_version_separate(other: tuple[str | bytes | None, int]) -> None:
    digests = {root_hash(None, 0), root_hash("\ud800", 0)}
    assert root_hash(*other) not in digests


def test_the_digest_covers_all_that_came_before() -> None:
    root = root_hash(None, 0)
    first, second = block_payload([1, 2]), block_payload([3, 4])
    assert chain_hash(chain_hash(root, first), second) != chain_hash(chain_hash(root, second), second)


def test_a_hit_is_verified_against_the_tokens() -> None:
    index = PrefixIndex(BlockPool(4))
    digest = b"a digest that two different blocks share"
    index.publish(1, digest, block_payload([1, 2, 3, 4]))
    assert index.find(digest, [1, 2, 3, 4]) == 1
    assert index.find(digest, [1, 2, 3, 5]) is None


def test_the_first_block_with_the_same_contents_stays() -> None:
    pool = BlockPool(4)
    blocks = pool.try_allocate(2)
    assert blocks is not None
    index = PrefixIndex(pool)
    for block in blocks:
        index.publish(block, digest_of(7), block_payload([7]))
    assert index.find(digest_of(7), [7]) == blocks[0]
    assert not index.is_published(blocks[1])


def test_a_free_block_yields_to_one_in_use() -> None:
    pool = BlockPool(4)
    blocks = pool.try_allocate(2)
    assert blocks is not None
    index = PrefixIndex(pool)
    index.publish(blocks[0], digest_of(7), block_payload([7]))
    pool.free(blocks[0])
    index.publish(blocks[1], digest_of(7), block_payload([7]))
    assert index.find(digest_of(7), [7]) == blocks[1]
    index.check_invariants()


def test_withdraw_and_clear() -> None:
    index = PrefixIndex(BlockPool(4))
    index.publish(1, digest_of(1), block_payload([1]))
    index.publish(2, digest_of(2), block_payload([2]))
    index.withdraw(1)
    index.withdraw(1)
    assert index.find(digest_of(1), [1]) is None and len(index) == 1
    index.clear()
    assert len(index) == 0 and "0 blocks" in repr(index)
    index.check_invariants()


class PrefixMachine(RuleBasedStateMachine):
    """Pool and index together, as the manager uses them: take, publish, give back, hit, reuse."""

    @initialize(num_blocks=st.integers(2, 8))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool)
        self.contents: dict[int, int] = {}
        self.held: list[int] = []

    @rule(value=st.integers(0, 5), is_published=st.booleans())
    def take(self, value: int, is_published: bool) -> None:
        blocks = self.pool.try_allocate(1)
        if blocks is None:
            return
        (block,) = blocks
        self.index.withdraw(block)
        self.contents[block] = value
        self.held.append(block)
        if is_published:
            self.index.publish(block, digest_of(value), block_payload([value]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(block, reuse_first=not self.index.is_published(block))

    @rule(value=st.integers(0, 5))
    def hit(self, value: int) -> None:
        block = self.index.find(digest_of(value), [value])
        if block is not None:
            assert self.contents[block] == value
            self.pool.retain(block)
            self.held.append(block)

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()
            self.index.check_invariants()
            # Whatever is worthless is reused before whatever can be hit.
            cached = [self.index.is_published(block) for block in self.pool.free_blocks()]
            if self.contents and len(self.index) and all(block in self.contents for block in self.pool.free_blocks()):
                assert sum(cached) <= len(self.index)


TestPrefixIndex = PrefixMachine.TestCase
TestPrefixIndex.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
