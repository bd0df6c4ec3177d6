"""Places outside of the cache for what preempted requests have computed: `SwapSpace`. Torch-free; worker thread.

When a request loses its blocks to others, what it has computed is copied to places of the swap space, if there are
enough, and copied back into other blocks when it is admitted again. Without space it is recomputed.

    running ── preempt ──► its blocks ─► places       the plan that gives them to others copies them out first
    waiting                              places
    running ◄── admit ──── new blocks ◄─ places       and this plan copies them in, before it goes on

States go with keys and values, or both are recomputed: one is of no use without the other.

*All* blocks that its next token can see go out, also those which are published: these stay hittable, but whoever took
the blocks may evict them any moment, and a copy that is certain is worth more than one that is smaller. On the way back
the prefix cache is asked first, and only what it does not have comes from places.

A plan's swaps come before everything else that it does, and plans are executed in order. So blocks that are copied out
may be given to others in the same plan, and places that are read come back when the plan that reads them has landed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from aiocb.cache.sequence import CachedSequence
from aiocb.step import NULL_BLOCK, BlockSwap

if TYPE_CHECKING:
    from aiocb.cache.manager import CacheManager

__all__ = ["Places", "SwapSpace", "Swapped"]

Places = tuple[tuple[int, ...], ...]
"""Per group, places of the swap space; behind them those of states where there are any."""


class Swapped(NamedTuple):
    """What of a request lies in the swap space.

    Attributes:
        num_tokens: the leading ones whose KV is there, as far as the next one can see them.
        version: weights version that it belongs to.
        kind: of its keys, as in `CachedSequence`.
        firsts: per group, the logical block that is in the first place.
        places: per group, those of consecutive logical blocks.
    """

    num_tokens: int
    version: int
    kind: int
    firsts: tuple[int, ...]
    places: Places


class SwapSpace:
    """The places of all groups, and what is on its way to them.

    Args:
        cache: whose blocks are copied.
        num_places: per group, and of states where there are any.

    Attributes:
        num_places: as given.
        pending: copies to places that no plan has been made for yet, by request.
        num_out, num_in: how often a request was copied out, and in again.
    """

    __slots__ = ("_cache", "_free", "num_in", "num_out", "num_places", "pending")

    def __init__(self, cache: CacheManager, num_places: Sequence[int]) -> None:
        self._cache = cache
        self.num_places = tuple(num_places)
        # Heaps: low places first, so that a request's are mostly consecutive and few copies move them.
        self._free = [list(range(count)) for count in num_places]
        self.pending: dict[CachedSequence, tuple[BlockSwap, ...]] = {}
        self.num_out = 0
        self.num_in = 0

    @property
    def usage(self) -> float:
        """Share of the places that are taken, 0 to 1, of the group that has the fewest left."""
        return max(1.0 - len(free) / max(count, 1) for free, count in zip(self._free, self.num_places, strict=True))

    def put_out(self, sequence: CachedSequence, *, moves_on: bool) -> bool:
        """Have a request's blocks copied out, before it lets go of them; False when it is to be recomputed.

        What plans in flight still write to its blocks lies behind its computed tokens, and is not looked at again. A
        state has no such thing: it would be behind tokens that are dropped.

        Args:
            sequence: one that holds blocks.
            moves_on: a plan in flight computes more of it.
        """
        cache, num_tokens = self._cache, sequence.num_computed_tokens
        if not num_tokens or sequence.cache_version != cache.version:
            return False
        if cache.states is not None and (moves_on or sequence.state_source):
            return False
        firsts = tuple(cache.first_block(window, num_tokens) for window in cache.windows)
        num_blocks = cache.num_pages(num_tokens)
        sources = [table[first:num_blocks] for table, first in zip(sequence.tables, firsts, strict=True)]
        if cache.states is not None:
            sources.append([sequence.state_slot])
        if any(len(blocks) > len(free) for blocks, free in zip(sources, self._free, strict=True)):
            return False
        places = tuple(tuple(heappop(free) for _ in blocks) for blocks, free in zip(sources, self._free, strict=True))
        self.pending[sequence] = tuple(
            BlockSwap(g, block, place)
            for g, (blocks, into) in enumerate(zip(sources, places, strict=True))
            for block, place in zip(blocks, into, strict=True)
        )
        sequence.swapped = Swapped(num_tokens, cache.version, sequence.cache_kind, firsts, places)
        self.num_out += 1
        return True

    def is_worth_it(self, sequence: CachedSequence, num_hits: int) -> bool:
        """True when more of a request lies in its places than in the prefix cache, and of the present weights."""
        swapped = sequence.swapped
        return (
            swapped is not None
            and (swapped.version, swapped.kind) == (self._cache.version, self._cache.kind(sequence))
            and num_hits * self._cache.page_size < swapped.num_tokens
        )

    def take_in(self, sequence: CachedSequence, num_hits: int) -> list[BlockSwap] | None:
        """Give a request blocks for all that lies in its places, and for its next token, and a slot (see `has_slot`).

        The places stay its own until a plan that copies them is launched.

        Args:
            sequence: one that holds no blocks, and for which `is_worth_it`.
            num_hits: leading blocks that `match` has just found; these need no copy.

        Returns:
            The copies to make before anything else; None, and nothing taken, when too few blocks are free.
        """
        cache, swapped = self._cache, sequence.swapped
        assert swapped is not None
        num_tokens = swapped.num_tokens
        num_blocks = cache.num_pages(num_tokens + 1)
        hits = []
        for index, pool, first in zip(cache.indices, cache.pools, swapped.firsts, strict=True):
            found = [index.peek(block_hash) for block_hash in sequence.block_hashes[first:num_hits]]
            blocks = [block for block in found if block is not None]
            assert len(blocks) == len(found), "take_in() without match()"
            for block in blocks:
                pool.retain(block)
            hits.append(blocks)
        needed = [num_blocks - max(first, num_hits) for first in swapped.firsts]
        if any(count > pool.num_free for count, pool in zip(needed, cache.pools, strict=True)):
            for g, blocks in enumerate(hits):
                for block in blocks:
                    cache.release(g, block)
            return None
        cache.open(sequence)
        swaps = []
        # The places of states, the last ones where there are any, have no table.
        for g, (table, first, places) in enumerate(zip(sequence.tables, swapped.firsts, swapped.places)):
            table += [NULL_BLOCK] * first + hits[g] + cache.take(g, needed[g])
            start = max(first, num_hits)
            swaps += [BlockSwap(g, table[i], places[i - first]) for i in range(start, first + len(places))]
        if cache.states is not None:
            cache.states.enter(sequence)
            swaps.append(BlockSwap(len(cache.pools), sequence.state_slot, swapped.places[-1][0]))
        sequence.first_blocks = list(swapped.firsts)
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = num_tokens
        sequence.num_published = num_hits
        sequence.capacity = num_blocks * cache.page_size
        self.num_in += 1
        return swaps

    def take_pending(self) -> tuple[BlockSwap, ...]:
        """The copies to places that the next plan has to make."""
        swaps = tuple(swap for each in self.pending.values() for swap in each)
        self.pending.clear()
        return swaps

    def forget(self, sequence: CachedSequence) -> Places:
        """Let a request have nothing here any more; its places, for `free`, now or later. Idempotent."""
        swapped, sequence.swapped = sequence.swapped, None
        self.pending.pop(sequence, None)
        return () if swapped is None else swapped.places

    def free(self, places: Places) -> None:
        """Give places back."""
        for free, each in zip(self._free, places):
            for place in each:
                heappush(free, place)

    def check_invariants(self, sequences: Iterable[CachedSequence], others: Iterable[Places]) -> None:
        """Check that every place is free, or has one owner.

        Args:
            sequences: all that have not ended.
            others: places that plans in flight read, or that come back with them.

        Raises:
            AssertionError: a place is lost, or has two owners.
        """
        swapped = [sequence.swapped for sequence in sequences if sequence.swapped is not None]
        owned = [*(each.places for each in swapped), *(places for places in others if places)]
        for g, (free, count) in enumerate(zip(self._free, self.num_places, strict=True)):
            assert sorted([*free, *(place for places in owned for place in places[g])]) == list(range(count))
            ordered = list(free)
            heapify(ordered)
            assert ordered == free, "the free places are no heap"
        assert all(sequence.swapped is not None for sequence in self.pending), "copied to nobody's places"

    def __repr__(self) -> str:
        taken = "+".join(
            f"{count - len(free)}/{count}" for free, count in zip(self._free, self.num_places, strict=True)
        )
        return f"<SwapSpace {taken} places>"
