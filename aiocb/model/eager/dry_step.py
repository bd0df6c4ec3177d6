"""A step without requests, as large as steps can be: what it takes is measured before the cache is made.

The first row is a chunk of a prompt at the end of the longest request, the others decode. All of them have one block of
a tiny cache, again and again: what is computed means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from aiocb.records import Record
from aiocb.sampling.sampler import Sampler
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import CacheLayout, OpenedRequest, StepEntry

__all__ = ["dry_step"]

BLOCK = 1
"""The one block of each group that is not the null block."""

_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=0)
"""Of those that take the most memory for a row."""


def dry_step(
    run: Callable[[Sequence[StepEntry], Sequence[Record]], Tensor],
    sampler: Sampler,
    layout: CacheLayout,
    *,
    num_tokens: int,
    num_requests: int,
    longest: int,
    vocab_size: int,
) -> None:
    """Take the step.

    Args:
        run: computes logits over a cache in which block 1 of every group exists.
        sampler: samples from them, and forgets it.
        layout: of that cache.
        num_tokens: of the step.
        num_requests: at most in it.
        longest: positions of a request.
        vocab_size: of the logits.
    """
    sampling = _SAMPLING.resolve(ModelDefaults(vocab_size, longest + 1))
    num_slots = 1 if layout.states is None else layout.states.num_slots - 1
    num_groups = len(layout.groups)
    entries: list[StepEntry] = []
    records: list[Record] = []
    for number, count in enumerate(_rows(num_tokens, num_requests, longest)):
        end = longest if number == 0 else count
        pages = (BLOCK,) * -(-end // layout.page_size)
        entries.append(StepEntry(number, end - count, count, 1, True, (), 0, (pages,) * num_groups))
        opened = OpenedRequest(number, (0,) * end, end, sampling, number, state_slot=1 + number % num_slots)
        record = Record(opened, number, num_groups)
        for table in record.tables:
            table += pages
        record.num_blocks = len(pages)
        records.append(record)
    try:
        sampler(run(entries, records), entries, records)
    finally:
        sampler.forget()


def _rows(num_tokens: int, num_requests: int, longest: int) -> Iterator[int]:
    """New tokens of each row: first the rest as chunks of prompts, then one token each."""
    num_decodes = min(num_requests, num_tokens) - 1
    left = num_tokens - num_decodes
    while left > 0:
        yield min(left, longest)
        left -= longest
    yield from (1 for _ in range(num_decodes))
