"""Is an output the same whatever it was batched with? Token ids and log-probabilities, bit by bit, on a real model.

The same requests run alone, and then in ways that a busy engine would run them: all at once, with prompts cut for
several step budgets, behind a shared prefix that is found in the cache, and in a pool so small that they are preempted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiocb
from aiocb.bench.figures import Row
from aiocb.bench.load import Arrival, Workload

__all__ = ["run"]

_PAGE = 16

Outputs = list[tuple[tuple[int, ...], tuple[float, ...]]]


class _Way(NamedTuple):
    """One way of running the requests.

    Attributes:
        name: of the row.
        settings: what differs from the settings of the others.
        is_alone: one request after the other.
        is_repeated: a first run fills the prefix cache, the second counts.
    """

    name: str
    settings: dict[str, Any]
    is_alone: bool = False
    is_repeated: bool = False


async def run(workload: Workload, budgets: Sequence[int] = (48, 128, 512)) -> list[Row]:
    """Return a row per way: `run`, `identical` (of how many), and what happened on the way.

    Args:
        workload: its requests are plain greedy, greedy with log-probabilities and sampled ones in turn.
        budgets: step budgets (`max_batch_tokens`) that cut the prompts differently.
    """
    longest = -(-(workload.prompt_len[1] + workload.new_len[1]) // _PAGE) + 1
    ways = [
        _Way("alone", {}, is_alone=True),
        *(_Way(f"batched, budget {budget}", {"max_batch_tokens": budget}) for budget in budgets),
        _Way("prefix hits", {"allow_block_sharing": True}, is_repeated=True),
        _Way("preempted", {"num_blocks": 2 * longest + 1, "safety_margin": 0.0}),
    ]
    base = aiocb.EngineConfig(allow_block_sharing=False)
    expected: Outputs = []
    rows = []
    for way in ways:
        config = dataclasses.replace(base, **way.settings)
        async with workload.engine(config=config, device="cpu") as engine:
            requests = workload.arrivals(engine.tokenizer)
            if way.is_repeated:
                await _outputs(engine, requests, is_alone=False)
            outputs = await _outputs(engine, requests, is_alone=way.is_alone)
            stats = engine.stats()
        expected = expected or outputs
        rows.append(
            {
                "run": way.name,
                "identical": sum(mine == theirs for mine, theirs in zip(outputs, expected, strict=True)),
                "requests": workload.requests,
                "steps": stats.num_steps,
                "cached_prompt_tokens": stats.prefix_cache_hits,
                "preemptions": stats.num_preemptions,
            }
        )
    return rows


async def _outputs(engine: aiocb.Engine, requests: Sequence[Arrival], *, is_alone: bool) -> Outputs:
    prompts = [request.prompt for request in requests]
    params = [_params(index, request.num_new) for index, request in enumerate(requests)]
    if is_alone:
        done = [await engine.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    else:
        done = await engine.generate_batch(prompts, params)
    return [(each.token_ids, tuple(entry.logprob for entry in each.logprobs or ())) for each in done]


def _params(index: int, num_new: int) -> aiocb.SamplingParams:
    """In turn: plain greedy, greedy with log-probabilities, sampled with log-probabilities."""
    kind = index % 3
    return aiocb.SamplingParams(
        max_new_tokens=num_new,
        ignore_eos=True,
        temperature=0.8 if kind == 2 else 0.0,
        seed=index,
        logprobs=0 if kind else None,
    )
