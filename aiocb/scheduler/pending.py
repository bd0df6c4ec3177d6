"""Prefixes that are being computed right now: `PendingPrefixes`. Owned by the worker thread.

Requests that arrive together often share a prompt's beginning. Only the first of them computes it (its *owner*); the
others are parked on the owner until it has come as far as they agree with it, and then hit the prefix cache. Without
this, 64 requests with one 512-token prefix compute it 64 times.

Somebody always wakes the parked: the owner when it gets there, or whatever takes it out of the running (its end, a
preemption, a pause). So a parked request implies a running owner, which `check_invariants` holds to.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiocb.scheduler.request import Request

__all__ = ["PendingPrefixes"]


class PendingPrefixes:
    """Who computes which prefix, and who waits for it.

    Args:
        page_size: tokens per block.
    """

    __slots__ = ("_owners", "_page_size", "num_parked")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._owners: dict[bytes, Request] = {}
        self.num_parked = 0

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, owner: Request, start: int, branch: int = 0) -> None:
        """Note that `owner` is going to compute its blocks from `start` on (their hashes are there).

        Args:
            owner: whoever comes first owns a block,
            start: the first one.
            branch: before this one it owns all: there it takes a snapshot, which the owner before did not.
        """
        assert owner.pending_start < 0
        owner.pending_start = start
        owners = self._owners
        for i, block_hash in enumerate(owner.block_hashes[start:], start):
            if i < branch:
                owners[block_hash] = owner
            else:
                owners.setdefault(block_hash, owner)

    def discard(self, owner: Request) -> None:
        """Note that `owner` computes nothing more of its prefix. Idempotent."""
        if owner.pending_start < 0:
            return
        owners = self._owners
        for block_hash in owner.block_hashes[owner.pending_start :]:
            if owners.get(block_hash) is owner:
                del owners[block_hash]
        owner.pending_start = -1

    def find(self, hashes: list[bytes], start: int, end: int) -> tuple[Request, int] | None:
        """Return who is computing block `start` of these hashes, and how many tokens up to block `end` both share."""
        owners = self._owners
        if start >= end:
            return None
        owner = owners.get(hashes[start])
        # Computed already and yet not found by the look-up: it has been evicted again, so there is nothing to wait for.
        if owner is None or (start + 1) * self._page_size <= owner.num_computed_tokens:
            return None
        common = start + 1
        while common < end and owners.get(hashes[common]) is owner:
            common += 1
        return owner, common * self._page_size

    def park(self, request: Request, owner: Request, num_tokens: int) -> None:
        """Let a request that is in no queue wait until `owner` has computed so many tokens."""
        request.parked_on = owner
        owner.followers[request] = num_tokens
        self.num_parked += 1

    def unpark(self, request: Request) -> bool:
        """Take a request out (it has ended or was paused); False when it was not parked. O(1)."""
        owner, request.parked_on = request.parked_on, None
        if owner is None:
            return False
        del owner.followers[request]
        self.num_parked -= 1
        return True

    def wake(self, owner: Request, num_tokens: int | None = None) -> list[Request]:
        """Return the requests that wait for `owner` to come to `num_tokens` (None: all of them) and unpark them."""
        woken = [request for request, target in owner.followers.items() if num_tokens is None or target <= num_tokens]
        for request in woken:
            self.unpark(request)
        return woken

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Raise `AssertionError` when somebody waits for a request that is not on its way."""
        running = list(running)
        assert sum(len(owner.followers) for owner in running) == self.num_parked, "a request waits for nobody"
        for owner in running:
            for request, target in owner.followers.items():
                assert request.parked_on is owner and target > owner.num_computed_tokens, "overslept"
        assert set(self._owners.values()) <= set(running)
        for owner in self._owners.values():
            assert owner.pending_start >= 0

    def __repr__(self) -> str:
        return f"<PendingPrefixes {len(self._owners)} blocks, {self.num_parked} parked>"
