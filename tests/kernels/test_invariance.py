"""A request's result depends, bit for bit, on nothing but the request."""

from __future__ import annotations

import pytest
import torch

from aiocb.kernels import Library
from aiocb.kernels.interface import StepArguments
from aiocb.model.native.runner import NativeRunner
from aiocb.step import BlockCopy, StepPlan
from tests.kernels.helpers import MiniScheduler, Request
from tests.kernels.test_families import make, prompts_of, runner_of

pytestmark = pytest.mark.slow
of_both_caches = pytest.mark.parametrize("cache", [None, "int8"], ids=["own cache", "int8 cache"])


class Recorder(MiniScheduler):
    """Keeps the logits of every sampled row: equal tokens would hide a difference in the last bit."""

    def __init__(self, runner: NativeRunner, *, seed: int = 0) -> None:
        super().__init__(runner, seed=seed)
        self.logits: dict[int, list[torch.Tensor]] = {}

    def step(self, requests: list[Request], budget: int) -> None:  # type: ignore[override]
        native, vocab = self.runner.native, self.runner.vocab_size
        original = native.step
        buffer = torch.empty(len(requests), vocab)
        slots = torch.arange(len(requests), dtype=torch.int32)

        def recorded(arguments: StepArguments) -> None:
            arguments.logits, arguments.logit_targets = buffer.data_ptr(), slots.data_ptr()
            original(arguments)

        before = {request.id: len(request.tokens) for request in requests}
        native.step = recorded  # type: ignore[method-assign]
        try:
            super().step(requests, budget)
        finally:
            native.step = original  # type: ignore[method-assign]
        sampled = [request for request in requests if len(request.tokens) > before[request.id]]
        for row, request in zip(buffer, sampled):
            self.logits.setdefault(request.id, []).append(row.clone())


def _record(runner: NativeRunner, prompts: list[list[int]], budget: int, seed: int) -> dict[int, list[torch.Tensor]]:
    recorder = Recorder(runner, seed=seed)
    recorder.run([Request(i, prompt, 6) for i, prompt in enumerate(prompts)], budget)
    return recorder.logits


@of_both_caches
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "qwen2_moe-mixed", "olmoe"])
def test_alone_batched_chunked(
    library: Library, instruction_set: str, name: str, dtype: torch.dtype, cache: str | None
) -> None:
    runner = runner_of(make(name, dtype), library=library, instruction_set=instruction_set, cache=cache)
    prompts = [*prompts_of(5), list(range(3, 123)) + list(range(3, 80))]
    alone: dict[int, list[torch.Tensor]] = {}
    for index, prompt in enumerate(prompts):
        alone[index] = _record(runner, [prompt], 4096, seed=index)[0]
    for budget in (4096, 37, 16, 7):
        together = _record(runner, prompts, budget, seed=budget)
        for index, rows in alone.items():
            assert len(rows) == len(together[index]) == 6
            assert all(torch.equal(a, b) for a, b in zip(rows, together[index])), f"request {index}, budget {budget}"
    runner.close()


@of_both_caches
def test_after_a_shared_prefix_and_a_copied_block(library: Library, cache: str | None) -> None:
    """Starting in the middle, on blocks that another request has filled, or on a copy of its last one."""
    runner = runner_of(make("llama", torch.bfloat16), library=library, cache=cache)
    prompt = prompts_of(3)[2]
    first = Recorder(runner)
    donor = Request(0, prompt, 4)
    first.run([donor], 4096)
    for computed in (16, 48, 59):
        recorder = Recorder(runner)
        used = {block for table in donor.tables for block in table}
        recorder.free = [[block for block in free if block not in used] for free in recorder.free]
        follower = Request(1, prompt, 4, computed=computed)
        full = computed // 16
        follower.tables = [list(table[:full]) for table in donor.tables]
        if computed % 16:
            target = recorder.free[0].pop()
            recorder.copies = [BlockCopy(0, donor.tables[0][full], target)]
            follower.tables[0].append(target)
        recorder.run([follower], 4096)
        assert all(torch.equal(a, b) for a, b in zip(first.logits[0], recorder.logits[1]))
    runner.close()


@of_both_caches
def test_blocks_move_out_and_back(library: Library, cache: str | None) -> None:
    """A preempted request's blocks are read back, overwritten by others, and restored elsewhere."""
    import numpy as np

    runner = runner_of(make("gemma3", torch.bfloat16), library=library, cache=cache)
    prompt = prompts_of(3)[2]
    plain = Recorder(runner)
    plain.run([Request(0, prompt, 8)], 4096)

    scheduler = Recorder(runner, seed=5)
    request = Request(0, prompt, 8)
    for _ in range(3):
        scheduler.step([request], 4096)
    for group, layout in enumerate(runner.cache_layout.groups):
        for index, block in enumerate(request.tables[group]):
            if block == 0:
                continue
            data = np.empty(layout.block_bytes, np.uint8)
            runner.native.read_block(group, block, data)
            runner.native.write_block(group, block, np.zeros_like(data))
            target = scheduler.free[group].pop(0)
            runner.native.write_block(group, target, data)
            request.tables[group][index] = target
    scheduler.run([request], 4096)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits[0], scheduler.logits[0]))
    runner.close()


def test_an_empty_plan_does_nothing(library: Library) -> None:
    runner = runner_of(make("llama"), library=library)
    assert list(runner.submit(StepPlan((), 0)).token_ids) == []
    runner.close()
