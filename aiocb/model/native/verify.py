"""Thread: the worker's only. Drafts are verified: a token counts if it is the one that would have been sampled anyway.

The rows of a draft are sampled one after the other, each with the history that it has when those before it were right,
by the same sampler that would have sampled them in steps of their own: its random number depends on the seed and the
position alone. What is accepted is therefore what would have come without drafts, and so is the token behind it.

Shape legend: N rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aiocb.outputs import TokenLogprobs
from aiocb.records import Record
from aiocb.step import StepEntry, StepResult

__all__ = ["accepted", "sample_verified"]

Sample = Callable[[Tensor, Sequence[StepEntry], Sequence[Record]], StepResult]


def accepted(guesses: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the tokens chosen behind a draft's rows count: the right ones, and the one behind them."""
    count = 0
    for guess, token in zip(guesses, chosen):
        count += 1
        if guess != token:
            return count
    return count + 1


def sample_verified(
    sample: Sample, logits: Tensor, entries: Sequence[StepEntry], records: Sequence[Record]
) -> StepResult:
    """Sample entries some of which have drafts; their records then have no guesses any more.

    Where a row behind accepted tokens fails, these are kept: one of them may be the last, and if none is, the next step
    meets the same failure.

    Args:
        sample: a sampler.
        logits: `num_logits` rows of each entry in their order, [N, V].
        entries, records: aligned.
    """
    guesses = [record.guesses for record in records]
    if not any(guesses):
        return sample(logits, entries, records)
    for record in records:
        if record.guesses:
            del record.tokens[-len(record.guesses) :]
            record.guesses = ()
    lengths = [len(record.tokens) for record in records]
    starts = [0]
    for entry in entries:
        starts.append(starts[-1] + entry.num_logits)
    alive = list(range(len(entries)))
    tokens: list[list[int]] = [[] for _ in entries]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in entries]
    has_logprobs, depth = False, 0
    errors: dict[int, Exception] = {}
    prompt_logprobs, follows = None, None
    while alive:
        rows: list[int] = []
        for at in alive:
            rows += [starts[at] + depth] if guesses[at] else range(starts[at], starts[at + 1])
        part = [entries[at]._replace(num_logits=1) if guesses[at] else entries[at] for at in alive]
        result = sample(logits[torch.tensor(rows)], part, [records[at] for at in alive])
        if not depth:  # those without drafts are done after it
            errors |= result.errors or {}
            prompt_logprobs, follows = result.prompt_logprobs, result.follows
        has_logprobs = has_logprobs or result.logprobs is not None
        going_on = []
        for number, at in enumerate(alive):
            tokens[at] += result.token_ids[number]
            if result.logprobs is not None:
                logprobs[at] += result.logprobs[number] or ()
            if len(tokens[at]) == depth + 1 and guesses[at][depth : depth + 1] == result.token_ids[number]:
                records[at].tokens += result.token_ids[number]
                going_on.append(at)
        alive, depth = going_on, depth + 1
    for record, base in zip(records, lengths, strict=True):
        del record.tokens[base:]  # `Records.finish` appends them all
    return StepResult(
        [tuple(each) for each in tokens],
        [tuple(each) or None for each in logprobs] if has_logprobs else None,
        prompt_logprobs,
        errors or None,
        follows,
    )
