"""What crosses the middle of the engine: `StepPlan` down to the runner, `StepResult` up from it.

Torch-free. Both are immutable tuples (a NamedTuple is built three times as fast as a frozen dataclass, and one entry
is built per request and step). Lists inside an entry are *borrowed*: they belong to the scheduler, must not be
changed by a runner, and are valid until the step's result has been returned.

Words: T tokens of the step, R requests of the step, V vocabulary, G cache groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from aiocb.sampling_params import SamplingParams

__all__ = [
    "NULL_BLOCK",
    "BlockCopy",
    "CacheGroup",
    "CacheLayout",
    "Runner",
    "StepEntry",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]

NULL_BLOCK = 0
"""Physical block 0 of every group is never allocated: it stands for a block that fell out of a sliding window."""


class CacheGroup(NamedTuple):
    """Layers that share block tables: all layers of one attention kind.

    Attributes:
        window: tokens that a query can see including itself, or None for full attention.
        layers: indices of the model's layers in this group.
        num_blocks: physical blocks, the null block included.
        block_bytes: bytes of one block (one page of K and V for every layer of the group).
    """

    window: int | None
    layers: tuple[int, ...]
    num_blocks: int
    block_bytes: int


class CacheLayout(NamedTuple):
    """The shape of the paged cache, learned by the runner and obeyed by the cache manager."""

    page_size: int
    groups: tuple[CacheGroup, ...]


class StepEntry(NamedTuple):
    """One request's part of a step.

    The step computes tokens `tokens[num_computed_tokens : num_computed_tokens + num_new_tokens]` at those absolute
    positions, writes their K/V through `block_tables`, and attends to all positions before them.

    Attributes:
        request_id: internal, unique for the engine's life.
        tokens: prompt and output so far, borrowed. Its length can exceed the computed range (chunked prefill).
        num_prompt_tokens: how many of `tokens` are the prompt.
        block_tables: per cache group, physical block of each logical block (`position // page_size`), borrowed.
            Blocks that fell out of a sliding window are `NULL_BLOCK`.
        num_logits: how many of the *last* new tokens need logits: 0 none, 1 to sample, more for prompt log-probs.
        is_sampled: True when a token is sampled from the last logits (the chunk reaches the end of `tokens`).
        sampling: resolved parameters of the request.
        seed: 64-bit key of the request's random stream; the sampled position is the counter.
    """

    request_id: int
    tokens: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    block_tables: tuple[Sequence[int], ...]
    num_logits: int
    is_sampled: bool
    sampling: SamplingParams
    seed: int


class BlockCopy(NamedTuple):
    """Copy one physical block of one group before the forward pass (copy on write)."""

    group: int
    source: int
    target: int


class StepPlan(NamedTuple):
    """Everything a runner needs for one step.

    Attributes:
        entries: the requests of the step; entries that sample and entries that do not are mixed freely.
        num_tokens: sum of `num_new_tokens`.
        block_copies: to be applied, in order, before the forward pass.
        released_ids: requests that ended since the last plan; a runner drops what it keeps for them.
    """

    entries: tuple[StepEntry, ...]
    num_tokens: int
    block_copies: tuple[BlockCopy, ...] = ()
    released_ids: tuple[int, ...] = ()


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position.

    Attributes:
        token_id, logprob: of the token that was chosen (or, for a prompt, that stands there).
        rank: 1-based rank of that token in the same distribution.
        top: the most likely (token id, log-probability) pairs, best first; always includes the chosen token.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class StepResult(NamedTuple):
    """What a runner returns for a plan; lists are aligned with `plan.entries`.

    Attributes:
        token_ids: the sampled token, or None where nothing was sampled or the request failed.
        logprobs: of the sampled token where asked for; None when no request asked.
        prompt_logprobs: by request id, one element per logit row of this step that belongs to a *prompt* target
            (the row at position p predicts token p + 1), only for requests that asked.
        errors: by request id, a failure that ends that request only (a raising processor, NaN logits).
    """

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None
    errors: Mapping[int, Exception] | None = None


class Runner(Protocol):
    """Executes plans. Built, used and closed in the worker thread only.

    Two more methods are called where a runner has them: `release(request_ids)` when no further plan will name those
    requests, and `reload_weights()` when the model's weights may have changed.
    """

    @property
    def cache_layout(self) -> CacheLayout:
        """The paged cache that this runner holds."""

    @property
    def vocab_size(self) -> int:
        """Rows of the logits; every id-valued parameter is checked against it."""

    @property
    def max_model_len(self) -> int:
        """The most tokens (prompt and output) that the model's positions allow."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the model once over the plan and sample.

        Raises:
            Exception: anything raised here is fatal for the engine (`EngineDead`); request-scoped failures are
                returned in `StepResult.errors`.
        """

    def describe(self) -> dict[str, str]:
        """What was chosen and why, one line per choice."""

    def close(self) -> None:
        """Free the cache and restore whatever was changed on a user's model. Idempotent."""
