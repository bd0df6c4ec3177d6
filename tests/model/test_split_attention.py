"""Modules that attend in a way of their own: called in parts, with real masks and the keys of their requests alone."""

from __future__ import annotations

import pytest

from aiocb.config import EngineConfig
from aiocb.model.eager.runner import TorchRunner
from tests.models.tiny import tiny_model
from tests.steps import described

from .helpers import ManualScheduler, argmax_sampler, generate, prompt

pytestmark = pytest.mark.slow

NUM_NEW = 8
KINDS = {
    "deepseek_v32": "DeepseekV32Attention split",  # an indexer over latents
    "glm_moe_dsa": "GlmMoeDsaAttention split",  # what the indexer selects goes on to other layers
    "inkling_text": "InklingShortConvolution scanned by torch code, InklingAttention one by one",  # positions, states
    "inkling2_text": "Inkling2SlidingAttention one by one",  # distances from above, attention across layers
    "minimax_m3_vl_text": "MiniMaxM3VLAttention split",  # blocks of keys; dense layers too
}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_generate(name: str) -> None:
    model = tiny_model(name)
    prompts = [prompt(length, seed, 100) for seed, length in enumerate((5, 19, 30, 1))]
    expected = [generate(model, tokens, NUM_NEW) for tokens in prompts]
    config = EngineConfig(num_blocks=96, page_size=4, native=False)
    runner = TorchRunner(model, config, argmax_sampler, max_model_len=512)
    assert KINDS[name] in described(runner)["mixers"]
    for chunk, budget in ((64, 128), (6, 13)):
        scheduler = ManualScheduler(runner, chunk, budget)
        for index, tokens in enumerate(prompts):
            scheduler.add(tokens, NUM_NEW, start_step=index)
        for _ in range(7):
            scheduler.step()
        for sequence in scheduler.sequences[:2]:  # preempted
            scheduler.release(sequence)
            sequence.num_computed = 0
        assert scheduler.run() == expected, chunk
    runner.close()
