"""Steps for a sampler without an engine: requests whose tokens grow, and plans made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiocb.outputs import TokenLogprobs
from aiocb.records import Record
from aiocb.sampling import Sampler
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import OpenedRequest, StepEntry, StepResult

EOS = 2


class Sampled(NamedTuple):
    """A `StepResult` of one token or none per entry."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None] | None
    prompt_logprobs: Any
    errors: Any


@dataclass
class Request:
    """A request that decodes: all of its tokens but the last are computed."""

    request_id: int
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [1, 5, 7])
    seed: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        opened = OpenedRequest(
            self.request_id,
            tuple(self.tokens),
            self.num_prompt_tokens or len(self.tokens),
            self.sampling,
            self.seed,
        )
        self.record = Record(opened, self.request_id, 0)
        self.record.tokens = self.tokens

    def entry(
        self,
        num_logits: int = 1,
        *,
        is_sampled: bool = True,
        num_computed: int | None = None,
        num_new: int | None = None,
    ) -> tuple[StepEntry, Record]:
        self.record.tokens = self.tokens
        start = len(self.tokens) - 1 if num_computed is None else num_computed
        count = len(self.tokens) - start if num_new is None else num_new
        return StepEntry(self.request_id, start, count, num_logits, is_sampled), self.record


def params(vocab_size: int, **values: Any) -> SamplingParams:
    return SamplingParams(**values).resolve(ModelDefaults(vocab_size, 4096, (EOS,)))


def run(sampler: Sampler, logits: Tensor, pairs: Iterable[tuple[StepEntry, Record]]) -> Sampled:
    """Sample once."""
    entries, records = zip(*pairs, strict=True)
    result: StepResult = sampler(logits, entries, records)
    tokens = [token_ids[0] if token_ids else None for token_ids in result.token_ids]
    logprobs = None if result.logprobs is None else [None if one is None else one[0] for one in result.logprobs]
    return Sampled(tokens, logprobs, result.prompt_logprobs, result.errors)


def step(sampler: Sampler, requests: Sequence[Request], logits: Tensor) -> Sampled:
    """Sample once; the requests are not changed."""
    return run(sampler, logits, (request.entry() for request in requests))


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
