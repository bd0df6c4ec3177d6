"""The cache's part of a request: `CachedSequence`, base class of the scheduler's `Request`.

A base class and not an object of its own: the step loop reads these attributes once per token.
"""

from __future__ import annotations

__all__ = ["CachedSequence"]


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

    __slots__ = (
        "block_hashes",
        "cache_salt",
        "cache_version",
        "capacity",
        "first_blocks",
        "num_computed_tokens",
        "num_published",
        "num_scheduled_tokens",
        "num_sent_blocks",
        "tables",
        "tokens",
    )

    def __init__(self, tokens: list[int], cache_salt: str | bytes | None = None) -> None:
        self.tokens = tokens
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.cache_salt = cache_salt
        self.tables: tuple[list[int], ...] = ()
        self.num_sent_blocks = 0
        self.capacity = 0
        self.first_blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_published = 0
        self.cache_version = -1
