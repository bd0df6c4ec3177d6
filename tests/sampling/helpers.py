"""Steps for a sampler without an engine: requests whose tokens grow, and plans made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aiocb.sampling import Sampler
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import StepEntry, StepPlan, StepResult

EOS = 2


@dataclass
class Request:
    """A request that decodes: all of its tokens but the last are computed."""

    request_id: int
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [1, 5, 7])
    seed: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    def entry(self, num_logits: int = 1, *, is_sampled: bool = True, num_computed: int | None = None) -> StepEntry:
        start = len(self.tokens) - 1 if num_computed is None else num_computed
        return StepEntry(
            self.request_id,
            self.tokens,
            self.num_prompt_tokens,
            start,
            len(self.tokens) - start,
            (),
            num_logits,
            is_sampled,
            self.sampling,
            self.seed,
        )


def params(vocab_size: int, **values: Any) -> SamplingParams:
    return SamplingParams(**values).resolve(ModelDefaults(vocab_size, 4096, (EOS,)))


def plan_of(entries: Iterable[StepEntry], released: Iterable[int] = ()) -> StepPlan:
    listed = tuple(entries)
    return StepPlan(listed, sum(entry.num_new_tokens for entry in listed), (), tuple(released))


def step(sampler: Sampler, requests: Sequence[Request], logits: Tensor, released: Iterable[int] = ()) -> StepResult:
    """Sample once; the requests are not changed."""
    return sampler(logits, plan_of((request.entry() for request in requests), released))


def sample(vocab_size: int, logits: Tensor, *, tokens: Sequence[int] = (1, 5, 7), seed: int = 0, **values: Any) -> int:
    """One token of one fresh request over one row of logits."""
    result = step(Sampler(vocab_size), [Request(0, params(vocab_size, **values), list(tokens), seed)], logits[None])
    assert result.errors is None
    token = result.token_ids[0]
    assert token is not None
    return token


def peaked_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale
