"""What crosses the middle of the engine: `StepPlan` down to the runner, `StepResult` up from it. Torch-free.

A plan is a message: plain, immutable, small, and valid for ever; it may be in flight while the next one is made, or go
through a pipe. It says what has changed, and a runner keeps a record of every open request (see `records`): its tokens,
its block tables, its parameters.

```
opened ─► entries, step by step ─► closed         a preempted request is closed, a resumed one opened again
```

Steps that decode send a few integers per request. A runner appends what it returns to its own record of the request;
`new_token_ids` are those that come from elsewhere. The order within a plan: close, open, swap, copy, compute, copy.

All types are NamedTuples: built three times as fast as frozen dataclasses, and there is one per request and step.

Words: T tokens of the step, R requests of the step, V vocabulary, G cache groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.outputs import TokenLogprobs
from aiocb.sampling_params import SamplingParams

__all__ = [
    "NULL_BLOCK",
    "BlockCopy",
    "BlockSwap",
    "CacheGroup",
    "CacheLayout",
    "Handle",
    "ImmediateRunner",
    "LengthSwitch",
    "OpenedRequest",
    "Runner",
    "StateCopy",
    "StateLayout",
    "StepEntry",
    "StepOutOfMemory",
    "StepPlan",
    "StepResult",
    "first_visible",
]

NULL_BLOCK = 0
"""Physical block 0 of every group is never allocated: it stands for a block that fell out of a sliding window."""


def first_visible(queries: Any, window: int | None, chunk: int | None) -> Any:
    """Position of the oldest key that a query sees. queries: a position, or an array of them."""
    if chunk is not None:
        return queries // chunk * chunk
    return queries * 0 if window is None else (queries - window + 1) * (queries >= window)


class CacheGroup(NamedTuple):
    """Layers that share block tables: all layers of one attention kind.

    Attributes:
        window: tokens that a query can see including itself, or None for full attention.
        layers: indices of the model's layers in this group.
        num_blocks: physical blocks, the null block included.
        block_bytes: bytes of one block (one page of K and V for every layer of the group).
        chunk: a query sees only keys of its own chunk of so many tokens, up to itself; None is off.
    """

    window: int | None
    layers: tuple[int, ...]
    num_blocks: int
    block_bytes: int
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """The most tokens that a query sees, or None for all before it: keys behind that are given back."""
        return self.window if self.chunk is None else self.chunk

    def first_visible(self, query: int) -> int:
        """Position of the oldest key that a query sees."""
        first: int = first_visible(query, self.window, self.chunk)
        return first


class StateLayout(NamedTuple):
    """Slots for what a model carries from token to token in place of keys and values (recurrent, convolution states).

    Every open request has one, and every snapshot: the state behind a full block, from which others may go on.

    Attributes:
        num_slots: physical slots, the null slot 0 included.
        slot_bytes: bytes of one slot, all layers together.
        interval: tokens from one snapshot of a long prompt to the next: a multiple of the page, and of the chunk in
            which the model scans. 0 takes none at all.
    """

    num_slots: int
    slot_bytes: int
    interval: int


class LengthSwitch(NamedTuple):
    """A length beyond which keys are of another kind: those of one kind are of no use to a request of another.

    Attributes:
        length: sequences of so many tokens are of kind 0.
        is_by_length: each length beyond is a kind of its own; else all are of kind 1.
        is_recomputed: what counts is the whole length: a request that gets longer computes everything anew. Else the
            length of the prompt counts, and keys stay what they are.
    """

    length: int
    is_by_length: bool = False
    is_recomputed: bool = False

    def kinds_of(self, lengths: Any) -> Any:
        """Kind of each of an array of lengths, or of one."""
        return (lengths > self.length) * (lengths if self.is_by_length else 1)


class CacheLayout(NamedTuple):
    """The shape of the cache, learned by the runner and obeyed by the cache manager.

    A model without keys and values has one group of no layers, whose blocks cost nothing: prefixes are found by blocks.

    `swap_places` has the places of the swap space by group, numbered from 0, and behind them those of states where
    there are any; none where there is no swap space.
    """

    page_size: int
    groups: tuple[CacheGroup, ...]
    states: StateLayout | None = None
    switch: LengthSwitch | None = None
    swap_places: tuple[int, ...] = ()


class OpenedRequest(NamedTuple):
    """A request that enters: all that a runner has to know of it before its first entry.

    Attributes:
        request_id: unique for the runner's life, apart from a request that was closed and is opened again.
        token_ids: prompt and output so far.
        num_prompt_tokens: how many of these are the prompt.
        sampling: resolved parameters.
        seed: 64-bit key of the random stream; the sampled position is the counter.
        adapter, grammar_key: keys of an adapter that the runner has loaded, of a compiled grammar; None is none.
        state_slot: where its state is while it is open; 0 where the model has none.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    adapter: str | None = None
    grammar_key: str | None = None
    state_slot: int = 0


class StepEntry(NamedTuple):
    """One request's part of a step.

    The step computes the tokens at positions `num_computed_tokens` to `num_computed_tokens + num_new_tokens`, writes
    their K/V through the request's block tables, and attends to all positions before them.

    Attributes:
        request_id: of an open request.
        num_logits: how many of the *last* new tokens need logits: 0 none, 1 to sample, more for prompt log-probs
            and for drafts.
        is_sampled: True when tokens are sampled: the entry reaches the end of what is known of the request.
        new_token_ids: tokens to append to the record first: only those that the runner did not return itself.
        block_start: where `new_blocks` go in the request's block tables; what stood there and behind is replaced.
        new_blocks: per group, ids of physical blocks; `()` when nothing has changed. Blocks that fell out of a sliding
            window are not taken back: they keep their old id, and are not read.
        draft_token_ids: the next tokens, the last of the new ones: those that the runner has said to follow
            (`StepResult.follows`), or guesses; a guess is accepted when it equals what is sampled before it.
    """

    request_id: int
    num_computed_tokens: int
    num_new_tokens: int
    num_logits: int
    is_sampled: bool
    new_token_ids: tuple[int, ...] = ()
    block_start: int = 0
    new_blocks: tuple[tuple[int, ...], ...] = ()
    draft_token_ids: tuple[int, ...] = ()


class BlockCopy(NamedTuple):
    """Copy one physical block of one group."""

    group: int
    source: int
    target: int


class StateCopy(NamedTuple):
    """Copy one slot of states."""

    source: int
    target: int


class BlockSwap(NamedTuple):
    """Copy one physical block of one group to, or from, a place of the swap space.

    The group behind the last one are the states: its blocks are slots.
    """

    group: int
    block: int
    place: int


class StepPlan(NamedTuple):
    """Everything a runner has to do for one step.

    Attributes:
        entries: the requests of the step; entries that sample and entries that do not are mixed freely.
        num_tokens: sum of `num_new_tokens`.
        opened: requests that have their first entry in this plan.
        closed: ids that no further plan names, unless they are opened again; no plan in flight names them.
        copies_before, copies_after: blocks to copy, in order, before and after the forward pass.
        swaps_out, swaps_in: blocks to move to the swap space and back, before anything is copied.
        states_before, states_after: slots to copy, in order, before and after the forward pass. An entry without
            computed tokens starts afresh, whatever is in its slot.
    """

    entries: tuple[StepEntry, ...]
    num_tokens: int
    opened: tuple[OpenedRequest, ...] = ()
    closed: tuple[int, ...] = ()
    copies_before: tuple[BlockCopy, ...] = ()
    copies_after: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockSwap, ...] = ()
    swaps_in: tuple[BlockSwap, ...] = ()
    states_before: tuple[StateCopy, ...] = ()
    states_after: tuple[StateCopy, ...] = ()


class StepResult(NamedTuple):
    """What a runner returns for a plan; lists are aligned with `plan.entries`.

    Attributes:
        token_ids: per entry what was sampled: nothing, one token, or the accepted drafts and one more. Empty where the
            request failed.
        logprobs: of the sampled tokens where asked for; None when no request asked.
        prompt_logprobs: by request id, one element per logit row of this step that belongs to a *prompt* target
            (the row at position p predicts token p + 1), only for requests that asked.
        errors: by request id, a failure that ends that request only (a raising processor, NaN logits).
        follows: by request id, what the request's structure says after this step: the tokens that have to come next,
            each the only one that may; None where it is complete, and the output has to end.
    """

    token_ids: Sequence[tuple[int, ...]]
    logprobs: Sequence[tuple[TokenLogprobs, ...] | None] | None = None
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None
    errors: Mapping[int, Exception] | None = None
    follows: Mapping[int, tuple[int, ...] | None] | None = None


class StepOutOfMemory(MemoryError):
    """There is no memory for a step; the runner can go on with other plans.

    Raised by `submit`: what the plan closes, opens and swaps out counts, its entries do not. Raised by `collect`: the
    same for every plan in flight, and none is any more. No token has been sampled; what was to be written for the
    entries (keys, values, states, copies) may be there or not, so their requests have to be closed and opened again.
    """


Handle = Any
"""A plan in flight; what it is, is the runner's own business."""


class Runner(Protocol):
    """Executes plans. Built, used and closed in the worker thread only; one life of an engine has it at a time."""

    @property
    def cache_layout(self) -> CacheLayout:
        """The paged cache that it holds."""

    @property
    def vocab_size(self) -> int:
        """Rows of the logits; every id-valued parameter is checked against it."""

    @property
    def max_model_len(self) -> int:
        """The most tokens (prompt and output) that the model's positions allow."""

    @property
    def max_batch_tokens(self) -> int | None:
        """The token budget of a step that it was sized for; None where steps of any size can be taken."""

    @property
    def device_type(self) -> str:
        """Where it computes, as torch names it ("cpu", "cuda")."""

    @property
    def depth(self) -> int:
        """How many plans may be submitted before the first is collected; 1 where `submit` runs the step."""

    @property
    def choices(self) -> Sequence[Choice]:
        """What was decided when it was built, each with its reason."""

    def submit(self, plan: StepPlan) -> Handle:
        """Start a step; at most `depth` are under way. A plan without entries only opens, closes and copies.

        Raises:
            StepOutOfMemory: a smaller plan may succeed; never raised for a plan without entries.
            Exception: anything else raised here is fatal for the engine (`EngineDead`); request-scoped failures are
                returned in `StepResult.errors`.
        """

    def collect(self, handle: Handle) -> StepResult:
        """Return the result of the plan that was submitted first, waiting for it.

        Raises:
            Exception: as for `submit`.
        """

    def release(self) -> None:
        """Forget every request and every plan: the life that had this runner is over. The next one finds it empty."""

    def reload_weights(self) -> None:
        """Take the model's weights as they are now: they may have changed since. No plan is in flight.

        Raises:
            ConfigError: the model has become one that this runner cannot run.
        """

    def load_adapter(self, key: str, adapter: Any) -> None:
        """Take an adapter (see `model.load.peft.LoraWeights`) that requests may name by this key from now on.

        Raises:
            ConfigError: this runner applies none, or cannot apply this one; nothing has changed.
        """

    def drop_adapter(self, key: str) -> None:
        """Forget an adapter: no request that is open, or will be, names it."""

    def close(self) -> None:
        """Free the cache and restore whatever was changed on a user's model. Idempotent."""


class ImmediateRunner(ABC):
    """What `submit` and `collect` are wherever a step is over when `submit` returns, and steps may have any size."""

    depth = 1
    max_batch_tokens: int | None = None

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the whole step; see `Runner.submit`."""

    def load_adapter(self, key: str, adapter: Any) -> None:
        """Refuse: most apply none."""
        raise ConfigError(f"{type(self).__name__} applies no adapters")

    def drop_adapter(self, key: str) -> None:  # noqa: B027, there is none
        """Forget an adapter."""

    def submit(self, plan: StepPlan) -> StepResult:
        """Run the step."""
        return self.execute(plan)

    def collect(self, handle: StepResult) -> StepResult:
        """What the step has given."""
        return handle
