"""What requests hold of the cache, and what they share: `CacheManager`. Torch-free; owned by the worker thread.

`tables` draws blocks and tables.

A full block is *published* in the prefix index once the step that wrote it has returned. A published block without
references is free, yet hittable until the pool reuses it, least recently freed first. A request gives its blocks back
from the end, so the beginning of a prefix outlives its tail.

A hit of p tokens needs every block before p in a full group, but only those that the query at p can see in a sliding
one: this is how prefixes are shared on hybrid models. Where layers have states (`states`), it also needs a snapshot at
p: a hit is the longest prefix that all of them can serve.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiocb.cache.invariants import check
from aiocb.cache.offload import SwapSpace
from aiocb.cache.prefix import block_payload, chain_hash, root_hash
from aiocb.cache.sequence import CachedSequence, Held
from aiocb.cache.states import Snapshot, StateCache
from aiocb.cache.tables import BlockTables
from aiocb.step import NULL_BLOCK, BlockCopy, CacheLayout

__all__ = ["CacheManager"]


class CacheManager(BlockTables):
    """What requests hold of the cache: blocks, prefixes that they share, states, places of the swap space.

    Args:
        layout: page size and groups, learned by the runner.
        sharing: keep full blocks findable for other requests (prefix caching).
    """

    def __init__(self, layout: CacheLayout, sharing: bool = True) -> None:
        super().__init__(layout)
        self.sharing = sharing
        self.version = 0
        self.states = None if layout.states is None else StateCache(layout.states, layout.page_size)
        self.swap = SwapSpace(self, layout.swap_places) if layout.swap_places else None

    # What fits

    def num_free(self) -> tuple[int, ...]:
        """Free blocks per group; behind them the free slots where there are states."""
        slots = () if self.states is None else (self.states.pool.num_free,)
        return (*(pool.num_free for pool in self.pools), *slots)

    @property
    def has_slot(self) -> bool:
        """True when one more request can have a state, or needs none."""
        return self.states is None or self.states.pool.num_free > 0

    # Prefixes

    def match(self, sequence: CachedSequence) -> int:
        """Return how many leading blocks of a request need no computing: its own and what the prefix index has.

        Pure apart from what is remembered: hashes, and where KV was found but no snapshot. The last token is always
        left to compute.
        """
        start = sequence.num_computed_tokens // self.page_size
        if not self._is_current(sequence):
            return start
        limit = (len(sequence.tokens) - 1) // self.page_size
        tokens, hashes, page_size = sequence.tokens, sequence.block_hashes, self.page_size
        # Blocks of its own count as found: what the window needs of them is there, or a later window needs less.
        runs = [start] * len(self.pools)
        states = self.states
        best = longest = start
        for i in range(start, limit):
            if i >= len(hashes):
                self.extend_block_hashes(sequence, i + 1)
            block_hash = hashes[i]
            page = tokens[i * page_size : (i + 1) * page_size]
            is_usable = True
            for g, index in enumerate(self.indices):
                window = self.windows[g]
                if index.find(block_hash, page) is not None:
                    runs[g] += 1
                elif window is None:
                    break
                else:
                    runs[g] = 0
                if runs[g] < i + 1 - self.first_block(window, (i + 1) * page_size):
                    is_usable = False
            else:
                if is_usable:
                    longest = i + 1
                    if states is None or states.index.find(block_hash, page) is not None:
                        best = longest
                continue
            break
        if longest > best:
            sequence.branch_at = max(sequence.branch_at, longest * page_size)
        return best

    def attach(self, sequence: CachedSequence, num_blocks: int) -> int:
        """Let a request hold the cached blocks that `match` has just found; return how many tokens that saves.

        Where there are states, it gets a slot if it has none (see `has_slot`).
        """
        self.open(sequence)
        start = sequence.num_computed_tokens // self.page_size
        states = self.states
        if states is not None:
            if num_blocks > start:
                states.go_on_from(sequence, sequence.block_hashes[num_blocks - 1])
            if not sequence.state_slot:
                states.enter(sequence)
        if num_blocks <= start:
            return 0
        is_fresh = sequence.capacity == 0
        for g, table in enumerate(sequence.tables):
            pool, index = self.pools[g], self.indices[g]
            first = self.first_block(self.windows[g], num_blocks * self.page_size)
            for i in range(start, num_blocks):
                block: int | None = NULL_BLOCK
                if i >= first:
                    block = index.peek(sequence.block_hashes[i])
                    assert block is not None, "attach() without match()"
                    pool.retain(block)
                assert block is not None
                if i < len(table):
                    # A block that was allocated for this page, perhaps partly written: the cached one replaces it.
                    self.release(g, table[i])
                    table[i] = block
                else:
                    table.append(block)
            if is_fresh:
                sequence.first_blocks[g] = first
        saved = num_blocks * self.page_size - sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = num_blocks * self.page_size
        sequence.num_sent_blocks = min(sequence.num_sent_blocks, start)
        sequence.num_published = num_blocks
        sequence.capacity = len(sequence.tables[0]) * self.page_size
        return saved

    def publish(self, sequence: CachedSequence) -> None:
        """Make the full blocks findable that have been computed; call it after the step that wrote them."""
        num_full = sequence.num_computed_tokens // self.page_size
        start = sequence.num_published
        if start >= num_full:
            return
        sequence.num_published = num_full
        # KV of older weights must not be found by requests that run with the new ones.
        if not self.sharing or sequence.cache_version != self.version:
            return
        hashes, page_size, indices = sequence.block_hashes, self.page_size, self.indices
        if len(hashes) < start:
            self.extend_block_hashes(sequence, start)
        for i in range(start, num_full):
            payload = block_payload(sequence.tokens[i * page_size : (i + 1) * page_size])
            if i == len(hashes):
                hashes.append(chain_hash(hashes[-1] if hashes else self._root(sequence), payload))
            for index, table in zip(indices, sequence.tables):
                if table[i] != NULL_BLOCK:
                    index.publish(table[i], hashes[i], payload)

    def next_snapshot(self, sequence: CachedSequence, targets: Iterable[int]) -> int:
        """Where the next snapshot of a request that computes its tokens belongs: see `StateCache.next_point`."""
        if self.states is None or not self._is_current(sequence):
            return 0
        self.extend_block_hashes(sequence, len(sequence.tokens) // self.page_size)
        return self.states.next_point(sequence, targets)

    def publish_snapshot(self, sequence: CachedSequence, snapshot: Snapshot) -> None:
        """Make a snapshot findable; call it after `publish`."""
        assert self.states is not None
        if self._is_current(sequence):
            self.states.publish(sequence, snapshot)
        else:
            self.states.free(snapshot.slot)

    def extend_block_hashes(self, sequence: CachedSequence, num_blocks: int) -> None:
        """Compute the hashes of a request's first `num_blocks` full blocks, as far as they are not there yet."""
        hashes, tokens, page_size = sequence.block_hashes, sequence.tokens, self.page_size
        parent = hashes[-1] if hashes else self._root(sequence)
        for i in range(len(hashes), num_blocks):
            parent = chain_hash(parent, block_payload(tokens[i * page_size : (i + 1) * page_size]))
            hashes.append(parent)

    def kind(self, sequence: CachedSequence) -> int:
        """The kind of keys that a request of its present length asks for (see `step.LengthSwitch`)."""
        return self._kind(sequence.num_prompt_tokens, len(sequence.tokens))

    def reset_prefix(self) -> None:
        """Forget all prefixes and start a new weights version; what requests hold stays theirs, but is not shared."""
        self.version += 1
        for index in self.indices:
            index.clear()
        if self.states is not None:
            self.states.index.clear()

    # Blocks

    def open(self, sequence: CachedSequence) -> None:
        """Give a request empty tables if it has none, and the present weights with them."""
        if not sequence.tables:
            self._is_current(sequence)
        super().open(sequence)

    def detach(self, sequence: CachedSequence) -> Held:
        """Let a request hold nothing any more; what it held, for `free`, now or later. Idempotent."""
        slots = tuple(slot for slot in (sequence.state_slot, sequence.state_source) if slot != NULL_BLOCK)
        held = Held(sequence.tables, slots)
        sequence.tables = ()
        sequence.capacity = 0
        sequence.first_blocks = []
        sequence.num_published = sequence.num_sent_blocks = 0
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0
        sequence.state_slot = sequence.state_source = sequence.snapshot_at = sequence.branch_at = 0
        return held

    def free(self, held: Held) -> None:
        """Give back what a request held; published blocks stay hittable."""
        for g, table in enumerate(held.tables):
            for block in reversed(table):
                self.release(g, block)
        for slot in held.slots:
            assert self.states is not None
            self.states.free(slot)
        if held.places:
            assert self.swap is not None
            self.swap.free(held.places)

    def can_fork(self, source: CachedSequence, num_tokens: int) -> bool:
        """True when `source` holds the KV of its first `num_tokens` tokens, as far as the next one can see them.

        A state has no history: where there are any, it must stand at exactly `num_tokens`, with no plan in flight.
        """
        if num_tokens < 1 or source.num_computed_tokens < num_tokens or source.cache_version != self.version:
            return False
        if self.states is not None and source.num_computed_tokens != num_tokens:
            return False
        if source.cache_kind != self._kind(source.num_prompt_tokens, num_tokens + 1):
            return False
        return all(
            first <= self.first_block(window, num_tokens)
            for window, first in zip(self.windows, source.first_blocks, strict=True)
        )

    def fork(self, source: CachedSequence, target: CachedSequence, num_tokens: int) -> list[BlockCopy] | None:
        """Let `target` start with the first `num_tokens` tokens of `source`: share full blocks, copy a partial one.

        Returns:
            The copies to make before the next forward pass, to which that of the live slot comes where there is one and
            `target` has no `state_source`; None, and nothing taken, when no block or slot is free for them.
        """
        num_full, rest = divmod(num_tokens, self.page_size)
        states = self.states
        # A state must be copied in the very next step, so its first block has to be there.
        needs_block = rest > 0 or states is not None
        if (needs_block and not all(pool.num_free for pool in self.pools)) or not self.has_slot:
            return None
        assert not target.tables, "a fork starts with nothing"
        self._is_current(target)
        self.open(target)
        copies = []
        for g, (table, shared) in enumerate(zip(target.tables, source.tables, strict=True)):
            first = self.first_block(self.windows[g], num_tokens)
            table += [NULL_BLOCK] * min(first, num_full)
            for block in shared[len(table) : num_full]:
                self.pools[g].retain(block)
                table.append(block)
            if needs_block:
                table += self.take(g, 1)
            if rest:
                copies.append(BlockCopy(g, shared[num_full], table[-1]))
            target.first_blocks[g] = first
        if states is not None:
            states.enter(target)
            if source.state_source != NULL_BLOCK:
                # Its own slot has not been filled yet: both go on from the same snapshot.
                states.pool.retain(source.state_source)
                target.state_source = source.state_source
        target.num_computed_tokens = target.num_scheduled_tokens = num_tokens
        target.num_published = num_full
        target.capacity = len(target.tables[0]) * self.page_size
        return copies

    def check_invariants(self, sequences: Iterable[CachedSequence], held: Iterable[Held] = ()) -> None:
        """Check everything against everything: see `invariants.check`.

        Args:
            sequences: all that hold anything.
            held: what requests hold no longer and has not been freed yet, and what plans in flight refer to.

        Raises:
            AssertionError: blocks are lost, owned by nobody, published wrongly or missing in a window.
        """
        check(self, list(sequences), list(held))

    # Internals

    def _root(self, sequence: CachedSequence) -> bytes:
        return root_hash(sequence.cache_salt, sequence.cache_version, sequence.cache_kind, sequence.adapter)

    def _kind(self, num_prompt_tokens: int, num_tokens: int) -> int:
        switch = self.layout.switch
        if switch is None:
            return 0
        kind: int = switch.kinds_of(num_tokens if switch.is_recomputed else num_prompt_tokens)
        return kind

    def _is_current(self, sequence: CachedSequence) -> bool:
        # A request that holds nothing moves to the present weights, and to the kind of keys that its length asks for;
        # one that holds KV belongs to its old ones.
        if not sequence.capacity:
            kind = self.kind(sequence)
            if (sequence.cache_version, sequence.cache_kind) != (self.version, kind):
                sequence.cache_version, sequence.cache_kind = self.version, kind
                sequence.block_hashes = []
        return self.sharing and sequence.cache_version == self.version

    def __repr__(self) -> str:
        pools = ", ".join(f"{pool.num_used}/{pool.num_usable}" for pool in self.pools)
        states = "" if self.states is None else f" | {self.states!r}"
        return f"<CacheManager [blocks {pools} | cached {sum(map(len, self.indices))}{states}]>"
