"""The load-time self-check: two short prompts, chunked and mixed, against the model's own forward.

Two requests whose steps interleave show what one alone would not: state that a module keeps for itself. Where windows,
chunks or a change of the rotation lie beyond such prompts, one that goes beyond all of them follows, if that is cheap;
if it is not, the choice says so, and tiny models that test it stand for the large ones (tests/model). Any runner is
checked in the same way, over its own cache, before it serves anybody.
"""

from __future__ import annotations

import inspect
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

__all__ = ["TOLERANCES", "Checked", "check_parity", "probe_ids", "relative_error"]

LENGTH = 21
"""Tokens of the first prompt, where there is room for them; the second has a third of it."""

FAR_TOKENS = 8192
"""The most tokens of a prompt that goes beyond all boundaries."""

FAR_WORK_CPU, FAR_WORK = 4e9, 4e13
"""Its tokens times the model's parameters, at most: 0.1 s on a CPU, 0.5 s on an accelerator, or so."""

FAR_LOGITS = 1 << 26
"""Logits that a model may give at once where it cannot be told to give the last ones only."""

BEYOND = 24
"""Tokens beyond the last boundary."""

COMPARED = 16
"""The last of them, three of which are computed one by one."""

TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.12, "float16": 0.06, "int8": 0.25, "int4": 0.6}
"""Of the root mean square of the logits, by the format of the weights. Structural mistakes give errors near 1; of
packaged models, bf16 by itself gives 0.03 to 0.05, int8 0.05 to 0.09, and int4 ZZ."""


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
        length, note = _far_length(model, runner)
        if length:
            error = max(error, _far_error(model, runner, length))
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
    return Choice("parity", f"{error:.1e}", f"difference of the logits from the model's own forward, relative{note}")


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
    return max(relative_error(own, torch.cat(parts)) for own, parts in zip(expected, rows, strict=True))


def _far_length(model: Any, runner: Checked) -> tuple[int, str]:
    """Tokens of a prompt that goes beyond every window, chunk and change of the rotation; 0 without; and a note."""
    layout = runner.cache_layout
    named = {f"a window of {group.window}": group.window for group in layout.groups}
    named |= {f"chunks of {group.chunk}": group.chunk for group in layout.groups}
    if layout.switch is not None:
        named["the change of its rotation"] = layout.switch.length
    # What cannot be exceeded, or is exceeded by the short prompts already, is no boundary.
    boundaries = {name: far for name, far in named.items() if far and LENGTH - 4 < far < runner.max_model_len - BEYOND}
    if not boundaries:
        return 0, ""
    length = max(boundaries.values()) + BEYOND
    parameters = sum(parameter.numel() for parameter in model.parameters())
    most = FAR_WORK_CPU if model.device.type == "cpu" else FAR_WORK
    is_cheap = length <= FAR_TOKENS and parameters * length <= most
    if not _keeps_logits(model):
        is_cheap = is_cheap and length * text_config(model).vocab_size <= FAR_LOGITS
    if not is_cheap:
        return 0, f"; not beyond {', '.join(boundaries)}: that takes too long here"
    if not _far_tables(layout, length):
        return 0, f"; not beyond {', '.join(boundaries)}: the cache is too small"
    return length, f"; up to {length} tokens"


def _far_tables(layout: CacheLayout, length: int) -> tuple[tuple[int, ...], ...] | None:
    """Block tables of such a prompt, blocks of a window or chunk again and again. None where they do not fit."""
    num_pages, tables = -(-length // layout.page_size), []
    for group in layout.groups:
        usable = group.num_blocks - 1
        needed = num_pages if group.reach is None else -(-group.reach // layout.page_size) + 3
        if usable < min(needed, num_pages):
            return None
        tables.append(tuple(1 + page % usable for page in range(num_pages)))
    return tuple(tables)


def _far_error(model: Any, runner: Checked, length: int) -> float:
    """Run one long prompt, in chunks and at last token by token; return the error of the last ones."""
    layout, ids = runner.cache_layout, probe_ids(model, 61, 2)
    tokens = [ids[place * place * 7 % 61 * (1 + place // 61) % 61] for place in range(length)]
    tables = _far_tables(layout, length)
    assert tables is not None
    # No step may be longer than the blocks of a window are many, less the window.
    rooms = [(group.num_blocks - 2) * layout.page_size - group.reach for group in layout.groups if group.reach]
    chunk = max(min([length // 2, *rooms]), 1)
    stops = [*range(chunk, length - COMPARED, chunk), length - COMPARED, length - 3, length - 2, length - 1, length]
    slot = 0 if layout.states is None else 1
    opened = [OpenedRequest(0, tuple(tokens), length, SamplingParams(), 0, state_slot=slot)]
    records, rows, done = Records(len(layout.groups)), [], 0
    with torch.inference_mode():
        expected = _own_logits(model, tokens, COMPARED)
        for stop in stops:
            count = stop - done
            num_logits = count if stop > length - COMPARED else 1
            entry = StepEntry(0, done, count, num_logits, False, new_blocks=() if done else tables)
            plan = StepPlan((entry,), count, tuple(opened) if not done else ())
            logits = runner.logits(plan.entries, records.begin(plan)).float().clone()
            if stop > length - COMPARED:
                rows.append(logits)
            done = stop
    return relative_error(expected, torch.cat(rows))


def _keeps_logits(model: Any) -> bool:
    """True where the model can be told to give the last logits only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


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


def _own_logits(model: Any, tokens: list[int], num_last: int | None = None) -> Tensor:
    """Logits [T, V] of the model as its owner has it, in eval mode and without a cache; of the last so many tokens."""
    view = View(model)
    if getattr(text_config(model), "attn_logit_softcapping", None):
        view.name_attention("eager")  # others refuse a soft cap
    own = view.model
    options = {"logits_to_keep": num_last} if num_last is not None and _keeps_logits(own) else {}
    if num_last is not None:  # a dynamic rotation that has grown with what its owner did goes back to where it began
        own(input_ids=torch.tensor([tokens[:1]], device=own.device), use_cache=False)
    logits: Tensor = own(input_ids=torch.tensor([tokens], device=own.device), use_cache=False, **options).logits[0]
    logits = logits[-(num_last or len(tokens)) :].float()
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
    if hasattr(weight, "full_tensor"):  # spread over processes, which have to find the same ids
        weight = _Rows(embedding)
    ids: list[int] = []
    candidate, attempts = 17 + 101 * seed, 0
    while len(ids) < length:
        candidate, attempts = (candidate * 48271 + 11) % 2147483647, attempts + 1
        token = candidate % rows
        is_usable = token not in special and (weight is None or bool(weight[token].isfinite().all()))
        if is_usable or rows < 16 or attempts > 1000:
            ids.append(token)
    return ids


class _Rows:
    """Rows of an embedding, as it gives them."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    def __getitem__(self, token: int) -> Tensor:
        weight = self._embedding.weight
        row: Tensor = self._embedding(torch.tensor([token], device=weight.device))[0]
        return row


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """The root mean square of the difference of logits [N, V], in parts of that of the expected ones."""
    # Centred: a shift that is common to a row changes no probability.
    difference = expected - actual
    difference = difference - difference.mean(-1, keepdim=True)
    scale = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    return float(difference.square().mean().sqrt() / scale.clamp_min(1e-6))
