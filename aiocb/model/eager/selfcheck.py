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
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import CacheLayout, OpenedRequest, StepEntry, StepPlan

__all__ = ["NEW_TOKENS", "check_steps"]

LENGTHS = (13, 6)
NEW_TOKENS = 4

Logits = Callable[[Sequence[StepEntry], Sequence[Record]], Tensor]


def check_steps(
    pipeline: Pipeline,
    model: Any,
    layout: CacheLayout,
    logits: Logits,
    format_name: str,
    *,
    vocab_size: int,
    max_model_len: int,
) -> str | None:
    """Say what is wrong with the steps of a pipeline; None where nothing is. The cache must be nobody's.

    Args:
        pipeline: nothing is under way, and no request is open.
        model: whose ids are used.
        layout: of the cache.
        logits: of a step on the host.
        format_name: of the weights, for the tolerance.
        vocab_size, max_model_len: of the model.
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
    pipeline.keeps_logits = True
    try:
        sampling = SamplingParams(temperature=0.0).resolve(ModelDefaults(vocab_size, max_model_len))
        outputs, rows = _run(pipeline, prompts, tables, sampling)
        expected = [_expected(logits, prompt, output, table) for prompt, output, table in zip(prompts, outputs, tables)]
        error = max(relative_error(torch.stack(own), other) for own, other in zip(rows, expected))
    except Exception as cause:
        pipeline.abandon()
        return f"its self-check failed with {type(cause).__name__}: {cause}"
    finally:
        pipeline.keeps_logits = False
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
    pipeline: Pipeline,
    prompts: Sequence[list[int]],
    tables: Sequence[tuple[tuple[int, ...], ...]],
    sampling: SamplingParams,
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """A chunk alone, a chunk beside a whole prompt, then single tokens; as many steps under way as there may be."""
    outputs: list[list[int]] = [[] for _ in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    flights: deque[tuple[Flight, StepPlan]] = deque()

    def land() -> None:
        flight, plan = flights.popleft()
        result = pipeline.collect(flight)
        for error in (result.errors or {}).values():
            raise error
        assert flight.logits is not None
        for row, (entry, tokens) in enumerate(zip(plan.entries, result.token_ids)):
            outputs[entry.request_id] += tokens
            if entry.is_sampled:
                rows[entry.request_id].append(flight.logits[row].float().cpu())

    for plan in _plans(prompts, tables, sampling):
        flights.append((pipeline.submit(plan), plan))
        if len(flights) >= pipeline.depth:
            land()
    while flights:
        land()
    pipeline.collect(pipeline.submit(StepPlan((), 0, closed=tuple(range(len(prompts))))))
    return outputs, rows


def _plans(
    prompts: Sequence[list[int]], tables: Sequence[tuple[tuple[int, ...], ...]], sampling: SamplingParams
) -> list[StepPlan]:
    opened = [OpenedRequest(number, tuple(prompt), len(prompt), sampling, 0) for number, prompt in enumerate(prompts)]
    half = len(prompts[0]) // 2
    plans = [StepPlan((StepEntry(0, 0, half, 0, False, (), 0, tables[0]),), half, (opened[0],))]
    rest = [StepEntry(0, half, len(prompts[0]) - half, 1, True)]
    rest += [StepEntry(n, 0, len(prompts[n]), 1, True, (), 0, tables[n]) for n in range(1, len(prompts))]
    plans.append(StepPlan(tuple(rest), sum(entry.num_new_tokens for entry in rest), tuple(opened[1:])))
    for step in range(NEW_TOKENS - 1):
        entries = tuple(StepEntry(n, len(prompt) + step, 1, 1, True) for n, prompt in enumerate(prompts))
        plans.append(StepPlan(entries, len(entries)))
    return plans


def _expected(logits: Logits, prompt: list[int], output: list[int], tables: tuple[tuple[int, ...], ...]) -> Tensor:
    """Logits on the host behind the prompt and each of the output tokens but the last. [NEW_TOKENS, V]."""
    tokens = prompt + output[:-1]
    opened = OpenedRequest(0, tuple(tokens), len(prompt), SamplingParams(), 0)
    entry = StepEntry(0, 0, len(tokens), len(output), False, (), 0, tables)
    records = Records(len(tables)).begin(StepPlan((entry,), len(tokens), (opened,)))
    return logits((entry,), records).float().cpu()
