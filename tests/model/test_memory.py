"""A step that has no memory: told apart from other failures, it frees what it had, and the engine goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import aiocb
from aiocb.kernels import KernelError, NativeModel
from aiocb.kernels.interface import NO_MEMORY, StepArguments
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.memory import is_out_of_memory, run_in_memory
from aiocb.step import StepEntry, StepOutOfMemory
from aiocb.testing import assert_quiescent

from .helpers import tiny

CPU = torch.device("cpu")


def allocate_too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def make_bytes() -> None:
    bytearray(1 << 62)


@pytest.mark.parametrize("run", [allocate_too_much, make_bytes])
def test_real_failures_are_recognised(run: Callable[[], None]) -> None:
    with pytest.raises(StepOutOfMemory) as caught:
        run_in_memory(CPU, run)
    assert caught.value.__context__ is None, "it would keep the frames of the step"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (KernelError("no memory for 1 bytes", NO_MEMORY), True),
        (KernelError("a message about memory: out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts(error: Exception, expected: bool) -> None:
    def fail() -> None:
        raise error

    assert is_out_of_memory(error) is expected
    with pytest.raises(StepOutOfMemory if expected else type(error)):
        run_in_memory(CPU, fail)


def test_the_tensors_of_the_step_are_freed() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def step(depth: int) -> None:
        activations = torch.zeros(8)
        seen.append(weakref.ref(activations))
        if depth:
            step(depth - 1)
        else:
            raise torch.OutOfMemoryError("CUDA out of memory")

    try:
        run_in_memory(CPU, step, 3)
    except StepOutOfMemory:
        assert [one() for one in seen] == [None] * 4, "while the error is handled, when the next step is made"


PROMPTS = [list(range(3 + n, 50 + 7 * n)) for n in range(4)]


async def outputs(model: Any, **config: Any) -> tuple[list[list[int]], aiocb.Stats]:
    settings = aiocb.EngineConfig(debug_checks=True, max_batch_tokens=64, **config)
    async with aiocb.Engine(model, None, config=settings) as engine:
        found = await engine.generate_batch(PROMPTS, max_new_tokens=8, temperature=0.0, ignore_eos=True)
        await assert_quiescent(engine)
        return [list(one.token_ids) for one in found], engine.stats()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
async def test_an_eager_engine_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = tiny("llama")
    expected, before = await outputs(model, native=False)
    logits = TorchRunner.logits

    def failing(self: TorchRunner, entries: Sequence[StepEntry], records: Any) -> torch.Tensor:
        result = logits(self, entries, records)  # keys and values are written: of no use to anyone
        if sum(entry.num_new_tokens for entry in entries) > 24:
            raise error
        return result

    monkeypatch.setattr(TorchRunner, "logits", failing)
    found, stats = await outputs(model, native=False)
    assert found == expected
    assert stats.num_steps_out_of_memory > 0 and stats.max_step_tokens < before.max_step_tokens == 64


@pytest.mark.asyncio
async def test_a_native_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    expected, _ = await outputs(model, native=True)
    step = NativeModel.step

    def failing(self: NativeModel, arguments: StepArguments) -> None:
        if arguments.num_tokens > 24:
            raise KernelError("no memory for 4096 bytes", NO_MEMORY)
        step(self, arguments)

    monkeypatch.setattr(NativeModel, "step", failing)
    found, stats = await outputs(model, native=True)
    assert found == expected and stats.num_steps_out_of_memory > 0


LIMITED = """
import asyncio, resource, sys
sys.path.insert(0, {root!r})
import torch
import aiocb
from tests.model.helpers import tiny

torch.set_num_threads(1)
model = tiny("llama", intermediate_size=16384, max_position_embeddings=8192)

async def main():
    config = aiocb.EngineConfig(
        max_batch_tokens=2048, max_prefill_chunk=2048, target_itl=None, native=True, num_threads=1
    )
    async with aiocb.Engine(model, None, config=config) as engine:
        await engine.generate([1, 2, 3], max_new_tokens=2)
        used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20),) * 2)  # 2048 tokens would take 128 MiB
        found = await engine.generate([1 + i % 100 for i in range(2048)], max_new_tokens=3, ignore_eos=True)
        print(len(found.token_ids), engine.stats().num_steps_out_of_memory > 0, engine.stats().max_step_tokens)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_native_step_under_a_real_limit() -> None:
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", LIMITED.format(root=str(root))], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert child.stdout.split()[:2] == ["3", "True"], child.stdout
