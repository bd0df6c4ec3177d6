"""What quantisation costs: each way of running a model against the same model in float32, on English text.

Every candidate sees the same windows of tokens. The logit error is the mean of |logit - float32's logit| over all
tokens and the whole vocabulary; KL is that of the distributions, from float32's to the candidate's; both are given
beside transformers in bfloat16, the precision that users take for granted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aiocb.bench.figures import Row, alternate
from aiocb.bench.load import corpus
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import Library, load
from aiocb.kernels.formats import FORMATS
from aiocb.model.defaults import model_defaults
from aiocb.model.load.gguf import GgufModel
from aiocb.model.load.gguf_stored import open_stored
from aiocb.model.load.hub import find_file
from aiocb.model.load.hub import load as load_model
from aiocb.model.native.build import build
from aiocb.model.native.families import ModelDescription, describe
from aiocb.model.native.runner import NativeRunner
from aiocb.model.native.weights import stored_bytes
from aiocb.model.request import Refusal
from aiocb.records import Record
from aiocb.sampling.sampler import Sampler
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import OpenedRequest, StepEntry, StepPlan, StepResult

__all__ = ["english_tokens", "measure", "speed"]

_PAGE = 16
_CHUNK = 128  # tokens of a step: logits of a whole window at once would take gigabytes with a large vocabulary
_TEXT_START = 20_000  # past the tables at the beginning

Logits = Callable[[list[int]], Tensor]


def english_tokens(tokenizer: Any, count: int) -> list[int]:
    """Return `count` tokens of `corpus`.

    Raises:
        ConfigError: the text is shorter.
    """
    ids = corpus(tokenizer)
    start = min(_TEXT_START, max(0, len(ids) - count))
    if len(ids) - start < count:
        raise ConfigError(f"the text has {len(ids)} tokens, {count} were asked for")
    return ids[start : start + count]


def measure(name: str, *, num_tokens: int = 20_480, window: int = 512, num_threads: int | None = None) -> list[Row]:
    """Return a row per candidate: transformers in bfloat16, aiocb in bfloat16, int8 and int4, and a GGUF file as it is.

    Every row holds `name`, `perplexity`, `logit_error`, `error_ratio` (over that of transformers in bfloat16), `kl`,
    `same_choice` (share of tokens with the same largest logit as float32) and, for aiocb, `weight_mb`.

    Args:
        name: a model as `Engine.from_pretrained` takes it.
        num_tokens: tokens of text, cut into windows.
        window: tokens that are run together, each from position 0.
        num_threads: of the native kernels; None is one per physical core.

    Raises:
        ConfigError: the native kernels cannot run this model.
    """
    loaded = load_model(name, dtype=torch.bfloat16, device="cpu")
    tokens = english_tokens(loaded.tokenizer, num_tokens // window * window)
    windows = [tokens[first : first + window] for first in range(0, len(tokens), window)]
    candidates: dict[str, Logits] = {"transformers bfloat16": functools.partial(_module_logits, loaded.model)}
    runners = []
    weights = {}
    config = EngineConfig(num_blocks=max(16, window // _PAGE + 2), num_threads=num_threads)
    file = find_file(name, "auto", "cpu")
    labels: list[tuple[str, str | None]] = [("bfloat16", None), ("int8", "int8"), ("int4", "int4")]
    for label, quantization in labels if file is None else [*labels, ("as stored", None)]:
        capture = _Capture(model_defaults(loaded.model).vocab_size)
        if label == "as stored" and file is not None:
            runner, num_bytes = _stored_runner(file, capture, config)
        else:
            runner = _runner(loaded.model, quantization, capture, config)
            num_bytes = _weight_bytes(loaded.model, quantization)
        runners.append(runner)
        candidates[f"aiocb {label}"] = functools.partial(_native_logits, runner, capture)
        weights[f"aiocb {label}"] = {"weight_mb": round(num_bytes / 1e6, 1)}
    reference = load_model(name, dtype=torch.float32, device="cpu").model
    totals = {label: _Totals() for label in ("transformers float32", *candidates)}
    try:
        for ids in windows:
            expected = _module_logits(reference, ids)
            totals["transformers float32"].add(expected, expected, ids)
            for label, logits in candidates.items():
                totals[label].add(expected, logits(ids), ids)
    finally:
        for runner in runners:
            runner.close()
    base = totals["transformers bfloat16"].error
    return [{"name": label, **total.row(base), **weights.get(label, {})} for label, total in totals.items()]


def speed(name: str, *, num_threads: int | None = None, repeats: int = 15, context: int = 200) -> list[Row]:
    """Time steps in bfloat16, int8 and int4, alternating in one process; medians in milliseconds.

    Rows hold `step`, and `bfloat16_ms`, `int8_ms` and `int4_ms`.

    Args:
        name: a model as `Engine.from_pretrained` takes it.
        num_threads: None is one per physical core.
        repeats: steps of each kind, of which the median counts.
        context: tokens that every decoding sequence has behind it.
    """
    model = load_model(name, dtype=torch.bfloat16, device="cpu").model
    blocks = 64 * (context // _PAGE + 1) * _PAGE
    config = EngineConfig(num_blocks=max(16, blocks // _PAGE + 2), num_threads=num_threads)
    runners = [_runner(model, quantization, None, config) for quantization in (None, "int8", "int4")]
    rows = []
    for label, requests, start, count in (
        ("decode, batch 1", 1, context, 1), ("decode, batch 8", 8, context, 1), ("decode, batch 32", 32, context, 1),
        ("decode, batch 64", 64, context, 1), ("prefill of 128 tokens", 1, 0, 128),
    ):  # fmt: skip
        opening, plan = _plan(requests, start, count, runners[0].vocab_size)

        def open_requests(runner: NativeRunner, opening: StepPlan = opening) -> None:
            runner.release()
            runner.submit(opening)

        seconds = alternate(runners, open_requests, functools.partial(NativeRunner.submit, plan=plan), repeats)
        names = ("bfloat16_ms", "int8_ms", "int4_ms")
        rows.append({"step": label, **{name: round(each * 1e3, 2) for name, each in zip(names, seconds, strict=True)}})
    for runner in runners:
        runner.close()
    return rows


class _Totals:
    """Sums over windows."""

    def __init__(self) -> None:
        self.nll = self.error = self.kl = 0.0
        self.same = self.rows = self.predicted = 0

    def add(self, expected: Tensor, actual: Tensor, ids: list[int]) -> None:
        for first in range(0, len(ids), _CHUNK):  # by parts: all of it in float32 is a gigabyte
            part = slice(first, first + _CHUNK)
            p, q = torch.log_softmax(expected[part], -1), torch.log_softmax(actual[part], -1)
            self.kl += float((p.exp() * (p - q)).sum())
            self.error += float((expected[part] - actual[part]).abs().mean(-1).sum())
            self.same += int((expected[part].argmax(-1) == actual[part].argmax(-1)).sum())
            following = torch.tensor(ids[first + 1 : first + 1 + len(q)])
            self.nll -= float(q[: len(following)].gather(1, following[:, None]).sum())
            self.predicted += len(following)
            self.rows += len(q)

    def row(self, base: float) -> dict[str, float]:
        return {
            "perplexity": round(math.exp(self.nll / self.predicted), 4),
            "logit_error": round(self.error / self.rows, 5),
            "error_ratio": round(self.error / base, 3),
            "kl": round(self.kl / self.rows, 7),
            "same_choice": round(self.same / self.rows, 4),
        }


class _Capture(Sampler):
    """A sampler that keeps the logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.parts: list[Tensor] = []

    def __call__(self, logits: Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        self.parts.append(logits.clone())
        return StepResult([()] * len(entries))


def _module_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return result


def _native_logits(runner: NativeRunner, capture: _Capture, ids: list[int]) -> Tensor:
    blocks = (tuple(range(1, runner.cache_layout.groups[0].num_blocks)),) * len(runner.cache_layout.groups)
    capture.parts.clear()
    runner.release()
    opened = (OpenedRequest(1, tuple(ids), len(ids), _greedy(), 0),)
    for first in range(0, len(ids), _CHUNK):
        count = min(_CHUNK, len(ids) - first)
        entry = StepEntry(1, first, count, count, False, (), 0, () if first else blocks)
        runner.submit(StepPlan((entry,), count, () if first else opened))
    return torch.cat(capture.parts)


def _runner(model: Any, quantization: str | None, sampler: Any, config: EngineConfig) -> NativeRunner:
    return _built(describe(model), sampler, config, module=model, quantization=quantization)


def _stored_runner(file: GgufModel, sampler: Any, config: EngineConfig) -> tuple[NativeRunner, int]:
    """A runner of the file as it is, and the bytes of its packed weights."""
    stored = open_stored(file, lambda stage, fraction: None)
    description = describe(stored.module, has_memory=False)
    if isinstance(description, str):
        raise ConfigError(description)
    description = description._replace(dtype=torch.bfloat16)
    runner = _built(description, sampler, config, find_rows=stored.find_rows)
    return runner, stored_bytes(description, stored.find_rows)


def _built(description: ModelDescription | str, sampler: Any, config: EngineConfig, **options: Any) -> NativeRunner:
    library = load()
    if not isinstance(library, Library):
        raise ConfigError(library.reason)
    if isinstance(description, str):
        raise ConfigError(description)
    length = description.max_position_embeddings
    runner = build(description, library, config, max_model_len=length, sampler=sampler, **options)
    if isinstance(runner, Refusal):
        raise ConfigError(runner.reason)
    return runner


def _plan(requests: int, start: int, count: int, vocab_size: int) -> tuple[StepPlan, StepPlan]:
    """Two plans: one that computes a single token of each request and tells the tables, and the step to be timed."""
    generator = torch.Generator().manual_seed(0)
    pages = (start + count) // _PAGE + 1
    opened, first, entries = [], [], []
    for index in range(requests):
        tokens = torch.randint(0, vocab_size, (start + count,), generator=generator).tolist()
        opened.append(OpenedRequest(index, tuple(tokens), len(tokens), _greedy(), 0))
        blocks = (tuple(range(1 + index * pages, 1 + (index + 1) * pages)),)
        first.append(StepEntry(index, 0, 1, 0, False, (), 0, blocks))
        entries.append(StepEntry(index, start, count, 1, True))
    return StepPlan(tuple(first), requests, tuple(opened)), StepPlan(tuple(entries), requests * count)


def _greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0).resolve(ModelDefaults(vocab_size=1 << 30, max_model_len=1 << 30))


def _weight_bytes(model: Any, quantization: str | None) -> int:
    """Bytes that a step reads: every matrix once, the embedding not at all (it is looked up)."""
    weight_format = FORMATS[quantization or "bfloat16"]
    linears = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return sum(weight_format.packed_bytes(linear.out_features, linear.in_features) for linear in linears)
