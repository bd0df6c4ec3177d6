"""Small native models for single kernels, and a plain scheduler for whole steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from aiocb.kernels import Library, NativeModel
from aiocb.kernels.formats import FORMATS
from aiocb.kernels.interface import PAGE_SIZE, ModelConfig, StepArguments
from aiocb.model.native.runner import NativeRunner
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import NULL_BLOCK, BlockCopy
from tests.steps import Work, execute

Tensor = torch.Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def native(library: Library, instruction_set: str, dtype: str, *, num_threads: int = 2, **fields: Any) -> NativeModel:
    values: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 64,
        "vocab_size": 64, "format": FORMATS[dtype].code, "num_groups": 1,
        "norm_eps": 1e-5, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0,
    } | fields  # fmt: skip
    values.setdefault("cache_format", values["format"])
    return NativeModel(library, ModelConfig(**values), num_threads=num_threads, instruction_set=instruction_set)


class Rows:
    """One sequence of a hand-made step: its new blocks, where it starts, how many tokens are new.

    `row` is None for its place in the step; the blocks replace the row's from `block_start` on.
    """

    def __init__(
        self, table: Sequence[int], start: int, count: int, *, row: int | None = None, block_start: int = 0
    ) -> None:
        self.table, self.start, self.count, self.row, self.block_start = table, start, count, row, block_start


def step_arguments(
    sequences: Sequence[Rows], keep: list[Any], *, ids: Sequence[int] | None = None, num_groups: int = 1
) -> StepArguments:
    total = sum(s.count for s in sequences)
    tables = [block for s in sequences for block in s.table]
    arrays = {
        "token_ids": array("i", ids if ids is not None else [0] * total),
        "rows": array("i", [at if s.row is None else s.row for at, s in enumerate(sequences)]),
        "starts": array("i", [s.start for s in sequences]), "lengths": array("i", [s.count for s in sequences]),
        "block_starts": array("i", [s.block_start for s in sequences]),
        "block_counts": array("i", [len(s.table) for s in sequences]), "new_blocks": array("i", tables * num_groups),
    }  # fmt: skip
    keep.append(arrays)
    return StepArguments(
        num_tokens=total, num_sequences=len(sequences), num_outputs=0, num_new_blocks=len(tables),
        **{name: values.buffer_info()[0] for name, values in arrays.items()},
    )  # fmt: skip


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0).resolve(
        ModelDefaults(vocab_size=1 << 20, max_model_len=1 << 20, eos_token_ids=())
    )


class Request:
    def __init__(self, request_id: int, prompt: Sequence[int], num_new: int, *, computed: int = 0) -> None:
        self.id, self.tokens, self.num_prompt, self.num_new = request_id, list(prompt), len(prompt), num_new
        self.computed = computed
        self.tables: list[list[int]] = []

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) >= self.num_prompt + self.num_new


class MiniScheduler:
    """Runs requests to their end on a runner under a token budget; blocks are handed out in a scrambled order."""

    def __init__(self, runner: NativeRunner, *, seed: int = 0, drop_window: bool = True) -> None:
        self.runner, self.drop_window = runner, drop_window
        generator = torch.Generator().manual_seed(seed)
        self.free = [
            (torch.randperm(group.num_blocks - 1, generator=generator) + 1).tolist()
            for group in runner.cache_layout.groups
        ]
        self.greedy = greedy()
        self.copies: list[BlockCopy] = []

    def entry(self, request: Request, count: int) -> Work:
        if not request.tables:
            request.tables = [[] for _ in self.free]
        end = request.computed + count
        for table, free, group in zip(request.tables, self.free, self.runner.cache_layout.groups, strict=True):
            while len(table) * PAGE_SIZE < end:
                table.append(free.pop())
            if group.window is not None and self.drop_window:
                for index in range(max(0, request.computed - group.window + 1) // PAGE_SIZE):
                    if table[index] != NULL_BLOCK:
                        free.append(table[index])
                        table[index] = NULL_BLOCK
        is_sampled = end == len(request.tokens)
        return Work(
            request_id=request.id, tokens=request.tokens, num_prompt_tokens=request.num_prompt,
            num_computed_tokens=request.computed, num_new_tokens=count, block_tables=tuple(request.tables),
            num_logits=int(is_sampled), is_sampled=is_sampled, sampling=self.greedy, seed=0,
        )  # fmt: skip

    def step(self, requests: Sequence[Request], budget: int) -> None:
        entries, chosen = [], []
        for request in requests:
            count = min(budget, len(request.tokens) - request.computed)
            if request.is_finished or count == 0:
                continue
            budget -= count
            entries.append(self.entry(request, count))
            chosen.append((request, count))
        result = execute(self.runner, entries, self.copies)
        self.copies = []
        for (request, count), token in zip(chosen, result.token_ids, strict=True):
            request.computed += count
            if token is not None:
                request.tokens.append(token)

    def run(self, requests: Sequence[Request], budget: int = 4096) -> list[list[int]]:
        while not all(request.is_finished for request in requests):
            self.step(requests, budget)
        return [request.tokens[request.num_prompt :] for request in requests]
