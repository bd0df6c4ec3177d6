"""The load-time self-check: two short prompts, chunked and mixed, against the model's own forward.

Two requests whose steps interleave show what one alone would not: state that a module keeps for itself. What it cannot
see is an error beyond a window longer than the prompts; tiny models with short windows test that (tests/model). Any
runner is checked in the same way, over its own cache, before it serves anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.model.eager.view import View, text_config
from aiocb.records import Record, Records
from aiocb.sampling_params import SamplingParams
from aiocb.step import CacheLayout, OpenedRequest, StepEntry, StepPlan

__all__ = ["TOLERANCES", "Checked", "check_parity", "probe_ids"]

LENGTH = 21
"""Tokens of the first prompt, where there is room for them; the second has a third of it."""

TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.12, "float16": 0.06, "int8": 0.25}
"""Of the root mean square of the logits, by the format of the weights. Structural mistakes give errors near 1; of
packaged models, bf16 by itself gives 0.03 to 0.05 and int8 0.05 to 0.09."""


class Checked(Protocol):
    """What is compared with the model's own forward."""

    @property
    def cache_layout(self) -> CacheLayout:
        """Of a cache in which nothing is held yet."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request."""

    def logits(self, entries: Sequence[StepEntry], records: Sequence[Record]) -> Tensor:
        """Compute: logits [N, V], `num_logits` rows of each entry in their order."""


def check_parity(model: Any, runner: Checked, weight_format: str) -> Choice:
    """Compare packed, chunked, mixed steps of a runner with the model's own forward.

    Args:
        model: the owner's; a view of it is run.
        runner: its cache is written to.
        weight_format: whose tolerance holds.

    Raises:
        ConfigError: the logits differ by more than the format explains.
    """
    name = type(model).__name__
    try:
        error = _largest_error(model, runner)
    except Exception as cause:
        raise ConfigError(
            f"{name} cannot be run in packed batches: its self-check failed with {type(cause).__name__}: {cause}"
        ) from cause
    tolerance = TOLERANCES.get(weight_format, TOLERANCES["float16"])
    if not error <= tolerance:  # NaN too
        raise ConfigError(
            f"{name} cannot be run in packed batches: its logits differ from the model's own forward by {error:.2g} "
            f"of their size (at most {tolerance:g} in {weight_format})"
        )
    return Choice("parity", f"{error:.1e}", "difference of the logits from the model's own forward, relative")


def _largest_error(model: Any, runner: Checked) -> float:
    """Run two prompts in interleaved steps; return the larger error of the two."""
    prompts = [probe_ids(model, length, number) for number, length in enumerate(_lengths(runner))]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    records = Records(len(runner.cache_layout.groups))
    with torch.inference_mode():
        expected = [_own_logits(model, tokens) for tokens in prompts]
        for plan in _plans(prompts, runner.cache_layout):
            logits, start = runner.logits(plan.entries, records.begin(plan)).float().clone(), 0
            for entry in plan.entries:
                rows[entry.request_id].append(logits[start : start + entry.num_logits])
                start += entry.num_logits
    return max(_relative_error(own, torch.cat(parts)) for own, parts in zip(expected, rows, strict=True))


def _lengths(runner: Checked) -> list[int]:
    """How long the prompts are: shorter where the cache or the model is small."""
    layout = runner.cache_layout
    num_blocks = min(group.num_blocks for group in layout.groups) - 1
    first = min(LENGTH, runner.max_model_len, max(num_blocks - 1, 1) * layout.page_size)
    second = min(first // 3, (num_blocks - -(-first // layout.page_size)) * layout.page_size)
    has_room = second > 0 and (layout.states is None or layout.states.num_slots > 2)
    return [first, second] if has_room else [first]


def _plans(prompts: Sequence[list[int]], layout: CacheLayout) -> Iterator[StepPlan]:
    """Yield steps in which chunks and single tokens of the prompts are mixed."""
    opened, tables, first_block = [], [], 1
    for number, tokens in enumerate(prompts):
        slot = 0 if layout.states is None else number + 1
        opened.append(OpenedRequest(number, tuple(tokens), len(tokens), SamplingParams(), 0, state_slot=slot))
        blocks = tuple(range(first_block, first_block - (-len(tokens) // layout.page_size)))
        tables.append((blocks,) * len(layout.groups))
        first_block += len(blocks)
    done = [0] * len(prompts)
    for step in zip(*(_stops(number, len(tokens)) for number, tokens in enumerate(prompts)), strict=True):
        entries = []
        for number, upto in enumerate(step):
            count = upto - done[number]
            if count:
                entries.append(StepEntry(number, done[number], count, count, False, new_blocks=tables[number]))
                done[number] = upto
        if entries:
            yield StepPlan(tuple(entries), sum(entry.num_new_tokens for entry in entries), tuple(opened))
            opened = []


def _stops(number: int, length: int) -> list[int]:
    """How far a prompt is after each step.

    A chunk that begins; a single token beside one that begins; two of them; chunks that go on; one beside a token.
    """
    first = round(0.4 * length)
    stops = ((first, first + 1, first + 2, length - 1, length), (0, 1, 2, length - 2, length))[number]
    return [min(max(stops[: index + 1]), length) for index in range(len(stops))]


def _own_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [T, V] of the model as its owner has it, in eval mode and without a cache."""
    view = View(model)
    if getattr(text_config(model), "attn_logit_softcapping", None):
        view.name_attention("eager")  # others refuse a soft cap
    own = view.model
    logits: Tensor = own(input_ids=torch.tensor([tokens], device=own.device), use_cache=False).logits[0].float()
    if not logits.isfinite().all():
        raise ValueError("the model's own forward gives logits that are not finite")
    return logits


def probe_ids(model: Any, length: int, seed: int = 0) -> list[int]:
    """Ids spread over the vocabulary; those with a meaning of their own (images, padding) are passed over.

    So are those whose embedding is not finite, as that of a token which nobody trained may be.
    """
    config = text_config(model)
    values = [*vars(model.config).items(), *vars(config).items()]
    special = {value for key, value in values if key.endswith("token_id") and isinstance(value, int)}
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None) or getattr(config, "vocab_size", None) or 4
    weight = getattr(embedding, "weight", None)
    ids: list[int] = []
    candidate, attempts = 17 + 101 * seed, 0
    while len(ids) < length:
        candidate, attempts = (candidate * 48271 + 11) % 2147483647, attempts + 1
        token = candidate % rows
        is_usable = token not in special and (weight is None or bool(weight[token].isfinite().all()))
        if is_usable or rows < 16 or attempts > 1000:
            ids.append(token)
    return ids


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    # Centred: a shift that is common to a row changes no probability.
    difference = expected - actual
    difference = difference - difference.mean(-1, keepdim=True)
    scale = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    return float(difference.square().mean().sqrt() / scale.clamp_min(1e-6))
