"""What holds of the cache after every step: `check`, which walks everything. For tests and `debug_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiocb.cache.sequence import CachedSequence, Held
from aiocb.step import NULL_BLOCK

if TYPE_CHECKING:
    from aiocb.cache.manager import CacheManager

__all__ = ["check"]


def check(cache: CacheManager, sequences: Sequence[CachedSequence], held: Sequence[Held]) -> None:
    """Check pools, indices, states and the tables of all requests that hold blocks, against each other.

    Args:
        cache: the whole of it.
        sequences, held: see `CacheManager.check_invariants`.

    Raises:
        AssertionError: something is lost, owned by nobody, published wrongly or missing in a window.
    """
    references = [[0] * pool.num_blocks for pool in cache.pools]
    page_size = cache.page_size
    for sequence in sequences:
        assert sequence.num_computed_tokens <= sequence.num_scheduled_tokens <= sequence.capacity
        assert sequence.num_sent_blocks * page_size <= sequence.capacity
        for g, table in enumerate(sequence.tables):
            assert len(table) * page_size == sequence.capacity
            first = cache.first_block(cache.windows[g], sequence.num_computed_tokens)
            assert sequence.first_blocks[g] <= first, "a block that is still visible was given back"
            assert all(block == NULL_BLOCK for block in table[: sequence.first_blocks[g]])
            assert all(block != NULL_BLOCK for block in table[first:])
            for block in table:
                references[g][block] += block != NULL_BLOCK
        if sequence.tables and sequence.cache_version == cache.version:
            _check_block_hashes(cache, sequence)
    for each in held:
        for g, table in enumerate(each.tables):
            for block in table:
                references[g][block] += block != NULL_BLOCK
    for pool, index, expected in zip(cache.pools, cache.indices, references, strict=True):
        pool.check_invariants()
        index.check_invariants()
        counted = [pool.num_references(block) for block in range(pool.num_blocks)]
        assert counted == expected, "reference counts and tables disagree"
    slots = [slot for each in held for slot in each.slots]
    if cache.states is not None:
        cache.states.check_invariants(sequences, slots)
    else:
        assert not slots, "slots of a model without states"
    if cache.swap is not None:
        cache.swap.check_invariants(sequences, [each.places for each in held])


def _check_block_hashes(cache: CacheManager, sequence: CachedSequence) -> None:
    fresh = CachedSequence(sequence.tokens, sequence.cache_salt)
    fresh.cache_version, fresh.cache_kind = sequence.cache_version, sequence.cache_kind
    cache.extend_block_hashes(fresh, max(len(sequence.block_hashes), sequence.num_published))
    assert fresh.block_hashes[: len(sequence.block_hashes)] == sequence.block_hashes, "hashes of other tokens"
    for index, table in zip(cache.indices, sequence.tables, strict=True):
        for i, block in enumerate(table):
            if block != NULL_BLOCK and index.is_published(block):
                assert (i + 1) * cache.page_size <= sequence.num_computed_tokens, "published before it was written"
                assert index.peek(fresh.block_hashes[i]) == block
