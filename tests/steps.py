"""Single steps for a runner, without a scheduler: whole requests at a time, forgotten after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from aiocb.outputs import TokenLogprobs
from aiocb.records import Record
from aiocb.sampling.sampler import Sampler
from aiocb.sampling_params import SamplingParams
from aiocb.step import BlockCopy, OpenedRequest, Runner, StepEntry, StepPlan, StepResult


class Work(NamedTuple):
    """One request and its part of a step."""

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
    state_slot: int = 0

    def opened(self) -> OpenedRequest:
        return OpenedRequest(
            self.request_id,
            tuple(self.tokens),
            self.num_prompt_tokens,
            self.sampling,
            self.seed,
            state_slot=self.state_slot,
        )

    def entry(self) -> StepEntry:
        blocks = tuple(tuple(table) for table in self.block_tables)
        return StepEntry(
            self.request_id,
            self.num_computed_tokens,
            self.num_new_tokens,
            self.num_logits,
            self.is_sampled,
            (),
            0,
            blocks,
        )


class Done(NamedTuple):
    """A `StepResult` of one token or none per entry."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None] | None
    prompt_logprobs: Any
    errors: Any


def execute(runner: Runner, works: Sequence[Work], copies: Sequence[BlockCopy] = ()) -> Done:
    """Open the requests, run one step, forget them."""
    plan = StepPlan(
        tuple(work.entry() for work in works),
        sum(work.num_new_tokens for work in works),
        tuple(work.opened() for work in works),
        copies_before=tuple(copies),
    )
    try:
        result = runner.collect(runner.submit(plan))
    finally:
        runner.release()
    tokens = [token_ids[0] if token_ids else None for token_ids in result.token_ids]
    logprobs = None if result.logprobs is None else [None if one is None else one[0] for one in result.logprobs]
    return Done(tokens, logprobs, result.prompt_logprobs, result.errors)


class CallbackSampler(Sampler):
    """A sampler that is a function of logits, entries and records."""

    def __init__(self, sample: Callable[[Tensor, Sequence[StepEntry], Sequence[Record]], StepResult]) -> None:
        super().__init__(0)
        self._sample_step = sample

    def __call__(self, logits: Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        return self._sample_step(logits, entries, records)


def described(runner: Runner) -> dict[str, str]:
    """What was decided when a runner was built, by name."""
    return {choice.name: f"{choice.value} ({choice.reason})" for choice in runner.choices}
