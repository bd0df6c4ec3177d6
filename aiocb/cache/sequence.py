"""The cache's part of a request: `CachedSequence`, base class of the scheduler's `Request`.

A base class and not an object of its own: the step loop reads these attributes once per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CachedSequence"]


@dataclass(slots=True, eq=False, repr=False)
class CachedSequence:
    """Tokens, how many of them have their KV in the cache, and where.

    Only `CacheManager` writes the attributes from `tables` on.

    Attributes:
        tokens: prompt and output; only appended to.
        num_computed_tokens: leading tokens whose KV is in the cache.
        num_scheduled_tokens: leading tokens whose KV is there once all plans in flight have been executed.
        cache_salt: separates prefixes that must not be shared.
        tables: per group, the physical block of each logical block; `()` while nothing is held.
        num_sent_blocks: leading logical blocks of the tables that the runner has been told of.
        capacity: tokens that the tables have room for.
        first_blocks: per group, the first logical block that has not fallen out of the window.
        block_hashes: chained hash of each full block, as far as they were needed.
        num_published: leading full blocks that were offered to the prefix index.
        cache_version: weights version that the KV and the hashes belong to.
    """

    tokens: list[int]
    cache_salt: str | bytes | None = None
    num_computed_tokens: int = field(default=0, init=False)
    num_scheduled_tokens: int = field(default=0, init=False)
    tables: tuple[list[int], ...] = field(default=(), init=False)
    num_sent_blocks: int = field(default=0, init=False)
    capacity: int = field(default=0, init=False)
    first_blocks: list[int] = field(default_factory=list, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    num_published: int = field(default=0, init=False)
    cache_version: int = field(default=-1, init=False)
