"""The load-time self-check: two short prompts, chunked and mixed, against the model's own forward.

Two requests whose steps interleave show what one alone would not: state that a module keeps for itself. What it cannot
see is an error beyond a window longer than the prompts; tiny models with short windows test that (tests/model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiocb.attention.base import AttentionBackend
from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.model.kv import PagedCache
from aiocb.records import Record
from aiocb.sampling_params import SamplingParams
from aiocb.step import OpenedRequest, StepEntry

if TYPE_CHECKING:
    from aiocb.model.eager.adapter import ModelAdapter

__all__ = ["check_parity"]

LENGTHS = (21, 7)
# Tokens of the first and the second prompt per step: a chunk alone, chunks together, a chunk beside a decode, decodes.
STEPS = ((9, 0), (7, 4), (4, 1), (1, 2))
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_TOLERANCE = 0.06
"""Of the root mean square of the logits. bf16 alone gives 0.01 to 0.03; structural mistakes give errors near 1."""


def check_parity(adapter: ModelAdapter, backend: AttentionBackend, page_size: int) -> Choice:
    """Compare packed, chunked, mixed steps with the model's own forward.

    Raises:
        ConfigError: the logits differ by more than the dtype explains.
    """
    name = type(adapter.model).__name__
    try:
        error = _largest_error(adapter, backend, page_size)
    except Exception as cause:
        raise ConfigError(
            f"{name} cannot be run in packed batches: its self-check failed with {type(cause).__name__}: {cause}"
        ) from cause
    tolerance = TOLERANCE.get(adapter.dtype, HALF_TOLERANCE)
    if not error <= tolerance:
        raise ConfigError(
            f"{name} cannot be run in packed batches: its logits differ from the model's own forward by {error:.2g} "
            f"of their size (at most {tolerance:g} in {adapter.dtype})"
        )
    return Choice("parity", f"{error:.1e}", "difference of the logits from the model's own forward, relative")


def _largest_error(adapter: ModelAdapter, backend: AttentionBackend, page_size: int) -> float:
    """Run the steps over a small cache of their own; return the larger error of the two prompts."""
    prompts = [adapter.probe_ids(length, number) for number, length in enumerate(LENGTHS)]
    specs = tuple(adapter.specs.values())
    blocks = [-(-length // page_size) for length in LENGTHS]
    num_groups = len({spec.window for spec in specs})
    cache = PagedCache(backend, specs, page_size, (1 + sum(blocks),) * num_groups, adapter.dtype, adapter.device)
    tables = [list(range(1, 1 + blocks[0])), list(range(1 + blocks[0], 1 + sum(blocks)))]
    records = []
    for number, prompt in enumerate(prompts):
        record = Record(OpenedRequest(number, tuple(prompt), len(prompt), SamplingParams(), 0), number, num_groups)
        for table in record.tables:
            table += tables[number]
        records.append(record)
    rows: list[list[Tensor]] = [[], []]
    done = [0, 0]
    with torch.inference_mode():
        for counts in STEPS:
            present = [number for number, count in enumerate(counts) if count]
            entries = [StepEntry(number, done[number], counts[number], counts[number], False) for number in present]
            logits = adapter.run(entries, [records[number] for number in present], backend, cache).float()
            rows[0].append(logits[: counts[0]])
            rows[1].append(logits[counts[0] :])
            done = [done[0] + counts[0], done[1] + counts[1]]
        return max(_relative_error(_own_logits(adapter, prompts[n]), torch.cat(rows[n])) for n in (0, 1))


def _own_logits(adapter: ModelAdapter, tokens: list[int]) -> Tensor:
    """Logits of the model as it is, without a cache. [T, V]."""
    ids = torch.tensor([tokens], device=adapter.device)
    output: Any = adapter.model(input_ids=ids, use_cache=False)
    logits: Tensor = output.logits[0].float()
    return logits


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    # Centred: a shift that is common to a row changes no probability.
    difference = expected - actual
    difference = difference - difference.mean(-1, keepdim=True)
    scale = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    return float(difference.square().mean().sqrt() / scale.clamp_min(1e-6))
