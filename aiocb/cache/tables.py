"""Decides which physical blocks hold which request's KV: `BlockTables`. Torch-free; owned by the worker thread.

Units, from small to large:

- page: `page_size` tokens of one layer.
- block: the same page of every layer of a *group* (layers of one attention kind). Unit of ownership and sharing.
- table: per request and group, logical block (`position // page_size`) to physical block.

Example, `page_size` 4. Two requests share a prompt of 9 tokens and have gone on differently; the group on the right
sees a window of 4 tokens only:

    tokens    | a b c d | e f g h | i x y . |          full group                 sliding group
                                                   pool: # 1 2 3 4 5 6        pool: # 1 2 3 4 5
    request A:  logical 0    1        2            table [1, 2, 3]            table [0, 2, 3]     (0: fell out,
    request B:                                     table [1, 2, 4]            table [0, 2, 4]      given back)
                                                          |  |                         |
                                                   2 references each          2 references
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import repeat

from aiocb.cache.blocks import BlockPool
from aiocb.cache.prefix import PrefixIndex
from aiocb.cache.sequence import CachedSequence
from aiocb.step import NULL_BLOCK, CacheLayout

__all__ = ["BlockTables"]


class BlockTables:
    """The block pools of all groups, and what has room in them.

    Args:
        layout: page size and groups, learned by the runner.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.pools = tuple(BlockPool(group.num_blocks) for group in layout.groups)
        self.indices = tuple(PrefixIndex(pool) for pool in self.pools)
        self.windows = tuple(group.window for group in layout.groups)
        self._sliding = tuple(g for g, window in enumerate(self.windows) if window is not None)

    # What fits

    @property
    def max_request_tokens(self) -> int:
        """The most tokens (prompt and output) that one request can ever have; `sys.maxsize` where nothing bounds it."""
        # The KV of the last output token is never computed. A sliding group that holds its window holds any length.
        return min(
            (
                pool.num_usable * self.page_size + 1
                for pool, window in zip(self.pools, self.windows, strict=True)
                if window is None or self._most_blocks(window, pool.num_usable + 1, 1) > pool.num_usable
            ),
            default=sys.maxsize,
        )

    def has_margin(self, share: float, gains: Sequence[int] | None = None) -> bool:
        """True when at least this share of every pool is free; blocks that are only cached count as free.

        Args:
            share: 0 to 1.
            gains: per group, blocks to count as free on top.
        """
        return all(
            pool.num_free + gain >= share * pool.num_usable for pool, gain in zip(self.pools, gains or repeat(0))
        )

    def demand(self, sequence: CachedSequence, max_chunk: int) -> list[int]:
        """Per group, how many more blocks it takes until all present tokens of an admitted request are computed."""
        length = len(sequence.tables[0])
        blocks = self.num_pages(len(sequence.tokens))
        return [
            max(0, self._most_blocks(window, blocks - first, max_chunk) - (length - first))
            for window, first in zip(self.windows, sequence.first_blocks, strict=True)
        ]

    def can_hold(self, sequence: CachedSequence, hit_blocks: int, max_chunk: int, promised: Sequence[int]) -> bool:
        """True when a request with so many hits can be computed to its end from the free blocks.

        Args:
            sequence: a request that holds nothing yet.
            hit_blocks: what `match` returned.
            max_chunk: the most tokens that are computed at once (a sliding group holds window and chunk).
            promised: per group, free blocks that earlier requests are going to take.
        """
        blocks = self.num_pages(len(sequence.tokens))
        for g, pool in enumerate(self.pools):
            first = self.first_block(self.windows[g], hit_blocks * self.page_size)
            needed = self._most_blocks(self.windows[g], blocks - first, max_chunk) - (hit_blocks - first)
            free = pool.num_free - promised[g]
            if needed > free:
                return False
            for block_hash in sequence.block_hashes[first:hit_blocks]:
                block = self.indices[g].peek(block_hash)
                if block is not None and not pool.num_references(block):
                    free -= 1
            if needed > free:
                return False
        return True

    def usage(self) -> float:
        """Share of the cache that requests hold, 0 to 1, by size; cached blocks without references do not count."""
        sizes = [max(group.block_bytes, 1) for group in self.layout.groups]
        used = sum(pool.num_used * size for pool, size in zip(self.pools, sizes, strict=True))
        return used / sum(pool.num_usable * size for pool, size in zip(self.pools, sizes, strict=True))

    # Blocks

    def open(self, sequence: CachedSequence) -> None:
        """Give a request empty tables if it has none."""
        if not sequence.tables:
            sequence.tables = tuple([] for _ in self.pools)
            sequence.first_blocks = [0] * len(self.pools)

    def fit(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens have room; gives back what fell out of the windows."""
        self.open(sequence)
        self._drop_out_of_window(sequence)
        free = min(pool.num_free for pool in self.pools)
        return min(num_tokens, sequence.capacity + free * self.page_size - sequence.num_scheduled_tokens)

    def allocate(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens of a request; False, and nothing taken, when it is not there."""
        if num_tokens <= sequence.capacity:
            return True
        self.open(sequence)
        self._drop_out_of_window(sequence)
        count = self.num_pages(num_tokens) - len(sequence.tables[0])
        for pool in self.pools:
            if pool.num_free < count:
                return False
        for g, table in enumerate(sequence.tables):
            table += self.take(g, count)
        sequence.capacity = len(sequence.tables[0]) * self.page_size
        return True

    def new_blocks(self, sequence: CachedSequence) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """What the runner has not been told of the tables: from which logical block on, and the blocks by group."""
        start, end = sequence.num_sent_blocks, len(sequence.tables[0])
        if start == end:
            return 0, ()
        sequence.num_sent_blocks = end
        return start, tuple([tuple(table[start:]) for table in sequence.tables])

    def take(self, g: int, count: int) -> list[int]:
        """Take blocks that are free; whatever was in them is not found any more."""
        blocks = self.pools[g].try_allocate(count)
        assert blocks is not None
        withdraw = self.indices[g].withdraw
        for block in blocks:
            withdraw(block)
        return blocks

    def release(self, g: int, block: int) -> None:
        """Drop a reference to a block."""
        if block != NULL_BLOCK:
            self.pools[g].free(block, reuse_first=not self.indices[g].is_published(block))

    def _drop_out_of_window(self, sequence: CachedSequence) -> None:
        for g in self._sliding:
            table = sequence.tables[g]
            first = min(self.first_block(self.windows[g], sequence.num_computed_tokens), len(table))
            for i in range(sequence.first_blocks[g], first):
                self.release(g, table[i])
                table[i] = NULL_BLOCK
            if first > sequence.first_blocks[g]:
                sequence.first_blocks[g] = first

    # Positions and blocks

    def num_pages(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.page_size)

    def first_block(self, window: int | None, position: int) -> int:
        """First logical block that the query at `position` can see (`position - window < key <= position`)."""
        return 0 if window is None or position < window else (position - window + 1) // self.page_size

    def _most_blocks(self, window: int | None, blocks: int, max_chunk: int) -> int:
        """Most blocks held at once while so many are computed in chunks: a sliding group holds window and chunk."""
        return blocks if window is None else min(blocks, self.num_pages(window - 1 + max_chunk - 1) + 1)
