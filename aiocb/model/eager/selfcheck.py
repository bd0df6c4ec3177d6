"""Two prompts through the steps of an accelerator, compared with the same steps on the host. Worker thread, at start.

The host's way was compared with the model's own forward before (see `parity`). Logits are compared along the tokens
that the device has chosen itself: a token that is lost on the way from step to step shows in the next logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aiocb.model.eager.pipeline import Flight, Pipeline
from aiocb.model.parity import TOLERANCES, probe_ids, relative_error
from aiocb.records import Record, Records
from aiocb.sampling_params import SamplingParams
from aiocb.step import CacheLayout, OpenedRequest, StepEntry, StepPlan

__all__ = ["NEW_TOKENS", "check_steps"]

LENGTHS = (13, 6)
NEW_TOKENS = 4

Logits = Callable[[Sequence[StepEntry], Sequence[Record]], Tensor]


def check_steps(
    pipeline: Pipeline, model: Any, layout: CacheLayout, max_model_len: int, logits: Logits, format_name: str
) -> str | None:
    """Say what is wrong with the steps of a pipeline; None where nothing is. The cache must be nobody's.

    Args:
        pipeline: nothing is under way, and no request is open.
        model: whose ids are used.
        layout: of the cache.
        max_model_len: most tokens of a request.
        logits: of a step on the host.
        format_name: of the weights, for the tolerance.
    """
    lengths = _lengths(layout, max_model_len)
    if not lengths:
        return "the cache is too small for the self-check"
    prompts = [probe_ids(model, length, number) for number, length in enumerate(lengths)]
    tables, first = [], 1
    for prompt in prompts:
        count = -(-(len(prompt) + NEW_TOKENS) // layout.page_size)
        tables.append((tuple(range(first, first + count)),) * len(layout.groups))
        first += count
    try:
        outputs, rows = _run(pipeline, prompts, tables)
        expected = [
            _expected(logits, prompt, output, table) for prompt, output, table in zip(prompts, outputs, tables)
        ]
        error = max(relative_error(torch.stack(own), other) for own, other in zip(rows, expected))
    except Exception as cause:
        pipeline.abandon()
        return f"its self-check failed with {type(cause).__name__}: {cause}"
    if not error <= TOLERANCES.get(format_name, TOLERANCES["float16"]):  # NaN too
        return f"its logits differ from those without it by {error:.2g} of their size"
    return None


def _lengths(layout: CacheLayout, max_model_len: int) -> list[int]:
    num_blocks = min(group.num_blocks for group in layout.groups) - 1
    lengths: list[int] = []
    for length in LENGTHS:
        need = -(-(length + NEW_TOKENS) // layout.page_size)
        if need <= num_blocks and length + NEW_TOKENS <= max_model_len:
            lengths.append(length)
            num_blocks -= need
    return lengths


def _run(
    pipeline: Pipeline, prompts: Sequence[list[int]], tables: Sequence[tuple[tuple[int, ...], ...]]
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """A chunk alone, a chunk beside a whole prompt, then single tokens; as many steps under way as there may be."""
    outputs: list[list[int]] = [[] for _ in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    flights: deque[tuple[Flight, list[int]]] = deque()

    def land() -> None:
        flight, numbers = flights.popleft()
        result = pipeline.collect(flight)
        for error in (result.errors or {}).values():
            raise error
        for number, tokens in zip(numbers, result.token_ids):
            outputs[number] += tokens

    for plan, numbers in _plans(prompts, tables):
        flights.append((pipeline.submit(plan), numbers))
        logits = pipeline.last_logits
        for row, entry in enumerate(plan.entries):
            if entry.is_sampled and logits is not None:
                rows[numbers[row]].append(logits[row].float().cpu())
        if len(flights) >= pipeline.depth:
            land()
    while flights:
        land()
    pipeline.collect(pipeline.submit(StepPlan((), 0, closed=tuple(range(len(prompts))))))
    return outputs, rows


def _plans(
    prompts: Sequence[list[int]], tables: Sequence[tuple[tuple[int, ...], ...]]
) -> list[tuple[StepPlan, list[int]]]:
    opened = [
        OpenedRequest(number, tuple(prompt), len(prompt), SamplingParams(temperature=0.0, top_k=0), 0)
        for number, prompt in enumerate(prompts)
    ]
    half = len(prompts[0]) // 2
    first = StepEntry(0, 0, half, 0, False, (), 0, tables[0])
    plans = [(StepPlan((first,), half, (opened[0],)), [0])]
    rest = [StepEntry(0, half, len(prompts[0]) - half, 1, True)]
    rest += [StepEntry(n, 0, len(prompts[n]), 1, True, (), 0, tables[n]) for n in range(1, len(prompts))]
    numbers = list(range(len(prompts)))
    plans.append((StepPlan(tuple(rest), sum(entry.num_new_tokens for entry in rest), tuple(opened[1:])), numbers))
    for step in range(NEW_TOKENS - 1):
        entries = tuple(StepEntry(n, len(prompts[n]) + step, 1, 1, True) for n in numbers)
        plans.append((StepPlan(entries, len(entries)), numbers))
    return plans


def _expected(
    logits: Logits, prompt: list[int], output: list[int], tables: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Logits on the host behind the prompt and each of the output tokens but the last. [NEW_TOKENS, V]"""
    tokens = prompt + output[:-1]
    opened = OpenedRequest(0, tuple(tokens), len(prompt), SamplingParams(), 0)
    entry = StepEntry(0, 0, len(tokens), len(output), False, (), 0, tables)
    records = Records(len(tables)).begin(StepPlan((entry,), len(tokens), (opened,)))
    return logits((entry,), records).float().cpu()
