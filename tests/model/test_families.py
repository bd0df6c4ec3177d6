"""Greedy fp32 tokens equal to transformers' own `generate`, for many kinds of models."""

from __future__ import annotations

import pytest
import torch

from aiocb.config import EngineConfig
from aiocb.model.eager.runner import TorchRunner

from .helpers import MODELS, ManualScheduler, argmax_sampler, generate, prompt, tiny

pytestmark = pytest.mark.slow

NUM_NEW = 10
LENGTHS = (5, 19, 30, 7)


def build(model: object, **config: object) -> TorchRunner:
    values = {"num_blocks": 96, "page_size": 4, **config}
    return TorchRunner(model, EngineConfig(**values), argmax_sampler, max_model_len=512)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_generate(name: str) -> None:
    model = tiny(name)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [generate(model, tokens, NUM_NEW) for tokens in prompts]
    runner = build(model)

    alone = []
    for tokens in prompts[:2]:
        scheduler = ManualScheduler(runner)
        scheduler.add(tokens, NUM_NEW)
        alone += scheduler.run()
    assert alone == expected[:2], "alone"

    scheduler = ManualScheduler(runner)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, NUM_NEW, start_step=2 * index)
    assert scheduler.run() == expected, "in a mixed batch"

    scheduler = ManualScheduler(runner, chunk=6, budget=13)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, NUM_NEW, start_step=index)
    assert scheduler.run() == expected, "chunked"
    runner.close()


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_backends_agree(name: str, backend: str) -> None:
    model = tiny(name)
    tokens = prompt(21)
    runner = build(model, attention=backend)
    scheduler = ManualScheduler(runner, chunk=8)
    scheduler.add(tokens, NUM_NEW)
    scheduler.add(tokens[:9], NUM_NEW, start_step=1)
    outputs = scheduler.run()
    assert outputs == [generate(model, tokens, NUM_NEW), generate(model, tokens[:9], NUM_NEW)]
    assert torch.is_grad_enabled()
