"""The cache's part of a request: `CachedSequence`, base class of the scheduler's `Request`.

A base class and not an object of its own: the step loop reads these attributes once per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from aiocb.cache.offload import Places, Swapped

__all__ = ["CachedSequence", "Held"]


class Held(NamedTuple):
    """What a request has let go of, and what comes back to the cache once no plan in flight names it.

    Attributes:
        tables: per group, its blocks.
        slots: of states.
        places: of the swap space.
    """

    tables: tuple[list[int], ...]
    slots: tuple[int, ...] = ()
    places: Places = ()


@dataclass(slots=True, eq=False, repr=False)
class CachedSequence:
    """Tokens, how many of them have their KV in the cache, and where.

    Only `CacheManager` writes the attributes from `tables` on.

    Attributes:
        tokens: prompt and output; only appended to.
        num_computed_tokens: leading tokens whose KV is in the cache.
        num_scheduled_tokens: leading tokens whose KV is there once all plans in flight have been executed.
        cache_salt: separates prefixes that must not be shared.
        adapter: key of the adapter's content that its KV is computed with; None is the model alone.
        tables: per group, the physical block of each logical block; `()` while nothing is held.
        num_sent_blocks: leading logical blocks of the tables that the runner has been told of.
        capacity: tokens that the tables have room for.
        first_blocks: per group, the first logical block that has not fallen out of the window.
        block_hashes: chained hash of each full block, as far as they were needed.
        num_published: leading full blocks that were offered to the prefix index.
        cache_version: weights version that the KV and the hashes belong to.
        state_slot: where its state is; 0 while nothing is held, and for models without states.
        state_source: a snapshot, held, that is to be copied there before its next tokens are computed; 0 is none.
        snapshot_at: tokens in the latest snapshot of its prompt that was asked for since it was admitted.
        branch_at: tokens up to which KV was found where no snapshot was: others will come by here, too.
        rolling: hash and slot of the latest snapshot that the next one of its kind replaces.
        cache_kind: kind of keys (`step.LengthSwitch`) that they are of.
        num_prompt_tokens: tokens of the prompt.
        swapped: what of it lies in the swap space; None while it is in blocks, or is to be recomputed.
    """

    tokens: list[int]
    cache_salt: str | bytes | None = None
    adapter: str | None = None
    num_computed_tokens: int = field(default=0, init=False)
    num_scheduled_tokens: int = field(default=0, init=False)
    tables: tuple[list[int], ...] = field(default=(), init=False)
    num_sent_blocks: int = field(default=0, init=False)
    capacity: int = field(default=0, init=False)
    first_blocks: list[int] = field(default_factory=list, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    num_published: int = field(default=0, init=False)
    cache_version: int = field(default=-1, init=False)
    state_slot: int = field(default=0, init=False)
    state_source: int = field(default=0, init=False)
    snapshot_at: int = field(default=0, init=False)
    branch_at: int = field(default=0, init=False)
    rolling: tuple[bytes, int] | None = field(default=None, init=False)
    cache_kind: int = field(default=0, init=False)
    num_prompt_tokens: int = field(default=0, init=False)
    swapped: Swapped | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
