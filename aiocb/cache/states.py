"""Slots for what recurrent layers carry from token to token: `StateCache`. Torch-free; owned by the worker thread.

A block can be shared by all whose prefix goes through it; a state is the whole prefix in one piece, is overwritten by
every step, and is large (as much as the KV of thousands of tokens). So each running request has a *live* slot of its
own, and where others may want to go on from, a copy is put aside: a *snapshot*, published under the hash of the block
that ends there.

    prompt      | a b c d | e f g h | i j .               page 4
    snapshots             ^ branch  ^ end of the last full block, and of each one that is decoded (the newest stays)

    live        referenced by its request                        never taken away
    pinned      a snapshot that a plan is going to copy          comes back when that plan has landed
    snapshot    published, without a reference: free             found by hash, reused least recently used first

Live slots and snapshots come from one pool, which is the bound on the memory of both. A snapshot never takes a live
slot, and is not taken where no slot is free; a live slot takes the oldest snapshot. KV survives its state: a snapshot
that has gone is made again where a request comes by whose KV would have matched further (a branch).

This is `BlockPool` and `PrefixIndex` once more, one slot for a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aiocb.cache.blocks import BlockPool
from aiocb.cache.prefix import PrefixIndex, block_payload
from aiocb.cache.sequence import CachedSequence
from aiocb.step import NULL_BLOCK, StateLayout

__all__ = ["Snapshot", "StateCache"]


class Snapshot(NamedTuple):
    """One that a plan takes.

    Attributes:
        slot: where to; referenced until the plan has landed.
        num_tokens: that have gone into it.
        is_rolling: it takes the place of the one that its request took before in this way.
    """

    slot: int
    num_tokens: int
    is_rolling: bool


class StateCache:
    """The slots of one model.

    Args:
        layout: how many there are, and how large.
        page_size: snapshots stand at the ends of full blocks.

    Attributes:
        pool: of slots; those that it counts as used are live, pinned or being written.
        index: of snapshots.
        num_hits: how often a request has gone on from a snapshot.
    """

    __slots__ = ("_interval", "_page_size", "index", "layout", "num_hits", "pool")

    def __init__(self, layout: StateLayout, page_size: int) -> None:
        self.layout = layout
        self.pool = BlockPool(layout.num_slots)
        self.index = PrefixIndex(self.pool)
        self.num_hits = 0
        self._page_size = page_size
        self._interval = layout.interval

    @property
    def num_snapshots(self) -> int:
        """Snapshots that can be found, whoever uses them just now."""
        return len(self.index)

    @property
    def num_bytes(self) -> int:
        """Memory of the slots that hold something: live ones and snapshots."""
        index, pool = self.index, self.pool
        num_free_snapshots = sum(index.is_published(slot) and not pool.num_references(slot) for slot in self._slots())
        return (pool.num_used + num_free_snapshots) * self.layout.slot_bytes

    @property
    def usage(self) -> float:
        """Share of the slots that requests hold, 0 to 1; snapshots count while they are copied."""
        return self.pool.num_used / self.pool.num_usable

    def take(self) -> int | None:
        """Take a slot, the least recently used snapshot's if need be; None when all are held."""
        slots = self.pool.try_allocate(1)
        if slots is None:
            return None
        self.index.withdraw(slots[0])
        return slots[0]

    def free(self, slot: int) -> None:
        """Drop a reference; a snapshot stays where it can be found."""
        self.pool.free(slot, reuse_first=not self.index.is_published(slot))

    def enter(self, sequence: CachedSequence) -> None:
        """Give a request the live slot that it has until it lets go of everything.

        Where nothing is free but the snapshot that it goes on from (which it holds), this becomes its slot.
        """
        slot = self.take()
        if slot is None:
            slot, sequence.state_source = sequence.state_source, NULL_BLOCK
            assert slot != NULL_BLOCK and self.pool.num_references(slot) == 1, "admitted without a slot"
            self.index.withdraw(slot)
        sequence.state_slot = slot

    def go_on_from(self, sequence: CachedSequence, block_hash: bytes) -> None:
        """Let a request go on from a snapshot that was just found: it is copied before its next tokens."""
        slot = self.index.peek(block_hash)
        assert slot is not None, "attach() without match()"
        self.pool.retain(slot)
        if sequence.state_source != NULL_BLOCK:
            self.free(sequence.state_source)
        sequence.state_source = slot
        self.num_hits += 1

    def next_point(self, sequence: CachedSequence, targets: Iterable[int]) -> int:
        """Where the next snapshot of a request that computes its tokens belongs, in tokens; 0 for nowhere.

        Points are the end of its last full block, every `interval` tokens, where its KV would have matched and its
        state did not, and where others wait for it. There is none while no slot is free, or without an interval.

        Args:
            sequence: its block hashes are there.
            targets: numbers of tokens, ends of full blocks, that others wait for.
        """
        if not self.pool.num_free or not self._interval:
            return 0
        start, page_size = sequence.num_scheduled_tokens, self._page_size
        last = (len(sequence.tokens) - 1) // page_size * page_size
        regular = range((start // self._interval + 1) * self._interval, last, self._interval)
        point: int
        for point in sorted({last, sequence.branch_at, *targets, *regular[:1]}):
            if start < point <= last and self.index.peek(sequence.block_hashes[point // page_size - 1]) is None:
                return point
        return 0

    def snapshot(self, sequence: CachedSequence, *, is_rolling: bool) -> Snapshot | None:
        """Take a slot for the state behind all scheduled tokens of a request; None when none is free, or wanted."""
        slot = self.take() if self._interval else None
        if slot is None:
            return None
        return Snapshot(slot, sequence.num_scheduled_tokens, is_rolling)

    def publish(self, sequence: CachedSequence, snapshot: Snapshot) -> None:
        """Make a snapshot findable whose plan has landed, and drop the reference to it."""
        slot, num_tokens, is_rolling = snapshot
        page = sequence.tokens[num_tokens - self._page_size : num_tokens]
        block_hash = sequence.block_hashes[num_tokens // self._page_size - 1]
        self.index.publish(slot, block_hash, block_payload(page))
        self.free(slot)
        if is_rolling:
            self._replace(sequence.rolling)
            sequence.rolling = block_hash, slot

    def _replace(self, old: tuple[bytes, int] | None) -> None:
        # Only where nobody goes on from it just now, and where it has not become something else.
        if old is not None and self.index.peek(old[0]) == old[1] and not self.pool.num_references(old[1]):
            self.index.withdraw(old[1])
            self.pool.retain(old[1])
            self.pool.free(old[1], reuse_first=True)

    def _slots(self) -> range:
        return range(1, self.pool.num_blocks)

    def check_invariants(self, sequences: Iterable[CachedSequence], others: Iterable[int]) -> None:
        """Check the pool against all who refer to slots.

        Args:
            sequences: all that hold blocks.
            others: slots that plans in flight refer to, or that come back with them.

        Raises:
            AssertionError: a slot is lost, has two owners, or could be found while it changes.
        """
        self.pool.check_invariants()
        self.index.check_invariants()
        expected = [0] * self.pool.num_blocks
        for sequence in sequences:
            live, source = sequence.state_slot, sequence.state_source
            assert bool(sequence.tables) == (live != NULL_BLOCK), "blocks without a slot, or a slot without blocks"
            if live != NULL_BLOCK:
                assert not self.index.is_published(live), "a live slot could be found"
                assert not expected[live], "two requests have one slot"
                expected[live] += 1
            if source != NULL_BLOCK:
                expected[source] += 1
        for slot in others:
            expected[slot] += 1
        counted = [self.pool.num_references(slot) for slot in range(self.pool.num_blocks)]
        assert counted == expected, "reference counts of slots and their owners disagree"

    def __repr__(self) -> str:
        return f"<StateCache [slots {self.pool.num_used}/{self.pool.num_usable} | {self.num_snapshots} snapshots]>"
