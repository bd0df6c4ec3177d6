"""Hands out the physical blocks of one cache group: `BlockPool`, with reference counts and a free list in LRU order.

Owned by the worker thread. Every operation is O(1) per block. The free list is intrusive (two arrays of links) because
a prefix hit takes a free block out of its middle, which a deque cannot do in O(1). Block 0 is the null block: it is
never given out, so it serves as the sentinel of the circular list.

    head (reused next)                                tail (freed last)
    0 -> 7 -> 3 -> 9 -> 4 -> 0
         \\____/    \\____/
         contents   in the prefix index, hittable until they are reused
         worthless
"""

from __future__ import annotations

from itertools import pairwise

from aiocb.step import NULL_BLOCK

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks `1 .. num_blocks - 1` of one group; a block is free when nothing refers to it.

    Args:
        num_blocks: physical blocks, the null block included.
    """

    __slots__ = ("_next", "_previous", "_refs", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._refs = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        """Blocks that can be given out at all (the null block cannot)."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        """Blocks that something refers to; cached blocks without a reference count as free."""
        return self.num_blocks - 1 - self.num_free

    def try_allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, least recently freed first, each with one reference; None when so many are not free.

        Their old contents are still in the prefix index if they were: the caller withdraws them.
        """
        if count > self.num_free:
            return None
        following, refs = self._next, self._refs
        blocks = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            blocks.append(block)
            refs[block] = 1
            block = following[block]
        following[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        return blocks

    def retain(self, block: int) -> None:
        """Add a reference; a free block leaves the free list, wherever it stands in it."""
        if self._refs[block] == 0:
            following, previous = self._next[block], self._previous[block]
            self._next[previous] = following
            self._previous[following] = previous
            self.num_free -= 1
        self._refs[block] += 1

    def free(self, block: int, *, reuse_first: bool = False) -> None:
        """Drop a reference; the last one frees the block.

        Args:
            block: a block with at least one reference.
            reuse_first: put it at the head of the free list (its contents are worth nothing) instead of the tail.
        """
        count = self._refs[block] - 1
        if count < 0 or block == NULL_BLOCK:
            raise RuntimeError(f"block {block} was freed more often than retained")
        self._refs[block] = count
        if count:
            return
        if reuse_first:
            previous, following = NULL_BLOCK, self._next[NULL_BLOCK]
        else:
            previous, following = self._previous[NULL_BLOCK], NULL_BLOCK
        self._next[previous] = self._previous[following] = block
        self._next[block], self._previous[block] = following, previous
        self.num_free += 1

    def num_references(self, block: int) -> int:
        """How many hold this block; 0 means free."""
        return self._refs[block]

    def free_blocks(self) -> list[int]:
        """The free blocks in the order in which they will be reused (walks the list: for tests and checks)."""
        blocks: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def check_invariants(self) -> None:
        """Walk everything.

        Raises:
            AssertionError: the free list and the reference counts disagree.
        """
        blocks = self.free_blocks()
        assert len(blocks) == self.num_free, f"{len(blocks)} blocks in the free list, {self.num_free} counted"
        assert set(blocks) == {block for block in range(1, self.num_blocks) if self._refs[block] == 0}
        assert all(count >= 0 for count in self._refs), "a negative reference count"
        assert self._refs[NULL_BLOCK] == 0, "the null block was retained"
        chain = [NULL_BLOCK, *blocks, NULL_BLOCK]
        assert all(self._previous[after] == before for before, after in pairwise(chain))

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_used}/{self.num_usable} used>"
