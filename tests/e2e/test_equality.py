"""Greedy tokens of the whole engine in fp32 equal the model's own `generate`, however the requests were scheduled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import aiocb
from aiocb.testing import assert_quiescent
from tests.model.helpers import tiny

pytestmark = pytest.mark.slow

KINDS = [
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite",
    "cohere2", "gpt_neox", "opt", "gpt_oss", "starcoder2", "stablelm", "smollm3",
]  # fmt: skip
NUM_NEW = 12


def prompts_of(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 3, 7, 8, 9, 16, 17, 30, 41, 64]
    prompts: list[list[int]] = [
        torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]
    # Shared beginnings: the prefix cache has something to find.
    prompts += [prompts[9][:48] + prompts[4], prompts[9][:33], prompts[9]]
    return prompts


def truth(model: Any, prompts: Sequence[Sequence[int]], num_new: int) -> list[tuple[int, ...]]:
    """The model's own greedy output, one by one, with no end of sequence."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, eos_token_id=None
        )
        outputs.append(tuple(out[0, len(prompt) :].tolist()))
    return outputs


async def served(
    model: Any, prompts: Sequence[Sequence[int]], num_new: int, config: aiocb.EngineConfig, *, repeat: bool = False
) -> tuple[list[tuple[int, ...]], aiocb.Stats]:
    async with aiocb.Engine(model, config=config) as engine:
        done = await engine.generate_batch(prompts, temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
        if repeat:
            again = await engine.generate_batch(prompts, temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
            assert [each.token_ids for each in again] == [each.token_ids for each in done]
            assert sum(each.usage.num_cached_tokens for each in again) > 0
        await assert_quiescent(engine)
        return [each.token_ids for each in done], engine.stats()


def cleared(kind: str) -> Any:
    model = tiny(kind)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("native", [None, False], ids=["auto", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models(kind: str, native: bool | None) -> None:
    model = cleared(kind)
    prompts = prompts_of(128)
    want = truth(model, prompts, NUM_NEW)
    # 24 tokens a step: every longer prompt comes in chunks, mixed with the decoding of others.
    config = aiocb.EngineConfig(
        native=native, num_blocks=80, max_batch_tokens=24, max_prefill_chunk=10, debug_checks=True, num_threads=1
    )
    got, _ = asyncio.run(served(model, prompts, NUM_NEW, config, repeat=True))
    assert got == want


@pytest.mark.parametrize("native", [None, False], ids=["auto", "torch"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_preempted_in_a_pool_of_one_and_a_half_requests(kind: str, native: bool | None) -> None:
    model = cleared(kind)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(5, 128, (40,), generator=generator).tolist() for _ in range(20)]
    num_new = 40
    want = truth(model, prompts, num_new)
    blocks = (40 + num_new) // 16 * 3 // 2 + 1
    config = aiocb.EngineConfig(
        native=native, page_size=16, num_blocks=blocks, max_batch_tokens=64, debug_checks=True, safety_margin=0.0,
        num_threads=1, allow_block_sharing=False,
    )  # fmt: skip
    got, stats = asyncio.run(served(model, prompts, num_new, config))
    assert got == want
    if kind != "mistral":  # every layer of it slides: a request never holds more than its window, and nothing is short
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("native", [None, False], ids=["auto", "torch"])
def test_seeded_sampling_alone_batched_and_preempted(native: bool | None) -> None:
    """Bit for bit on the native path; in fp32 the torch path chooses the same tokens, too."""
    model = cleared("llama")
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(5, 128, (24,), generator=generator).tolist() for _ in range(8)]
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "max_new_tokens": 30,
        "ignore_eos": True,
    }

    async def main() -> None:
        roomy = aiocb.EngineConfig(native=native, num_blocks=100, num_threads=1)
        tight = aiocb.EngineConfig(native=native, page_size=16, num_blocks=8, safety_margin=0.0, num_threads=1)
        async with aiocb.Engine(model, config=roomy) as engine:
            alone = [await engine.generate(prompt, seed=9, **settings) for prompt in prompts]
            together = await engine.generate_batch(prompts, seed=9, **settings)
            fresh = await engine.generate_batch([prompts[0]] * 4, **settings)
        async with aiocb.Engine(model, config=tight) as engine:
            squeezed = await engine.generate_batch(prompts, seed=9, **settings)
            assert engine.stats().num_preemptions > 0
        want = [each.token_ids for each in alone]
        assert [each.token_ids for each in together] == want
        assert [each.token_ids for each in squeezed] == want
        assert len({each.token_ids for each in fresh}) == 4

    asyncio.run(main())


def test_the_users_model_is_left_as_it_was() -> None:
    model = cleared("llama")
    ids = torch.arange(5, 25)[None]
    before = model(ids).logits
    state = {name: value.clone() for name, value in model.state_dict().items()}
    config, generation = model.config.to_json_string(), model.generation_config.to_json_string()
    asyncio.run(served(model, prompts_of(128), 4, aiocb.EngineConfig(num_blocks=80, num_threads=1)))
    assert model.config.to_json_string() == config
    assert model.generation_config.to_json_string() == generation
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("native", [None, False], ids=["auto", "torch"])
def test_weights_that_change_in_a_pause(native: bool | None) -> None:
    model = cleared("llama")
    prompts = prompts_of(128)[5:9]

    async def main() -> None:
        async with aiocb.Engine(
            model, config=aiocb.EngineConfig(native=native, num_blocks=80, num_threads=1)
        ) as engine:
            before = await engine.generate_batch(prompts, temperature=0.0, max_new_tokens=8, ignore_eos=True)
            async with engine.pause() as paused:
                assert paused is model
                with torch.no_grad():
                    for layer in paused.model.layers:
                        layer.mlp.down_proj.weight.mul_(-1.5)
            after = await engine.generate_batch(prompts, temperature=0.0, max_new_tokens=8, ignore_eos=True)
            assert [each.token_ids for each in after] != [each.token_ids for each in before]
            assert [each.token_ids for each in after] == truth(model, prompts, 8)

    asyncio.run(main())


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("native", [None, False], ids=["auto", "torch"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_packaged_models_in_fp32(name: str, native: bool | None) -> None:
    from aiocb.model.load.hub import load

    loaded = load(name, dtype="float32")
    model, tokenizer = loaded.model, loaded.tokenizer
    model.generation_config.eos_token_id = None
    texts = [
        "The capital of France is",
        "A long time ago, in a small village by the sea, there lived an old fisherman who",
        "Count: one, two, three,",
        "def fibonacci(n):\n",
    ]
    prompts = [tokenizer.encode(text) for text in texts]
    # Longer than Gemma's window of 512, and long enough to come in chunks.
    prompts.append((prompts[1] * 40)[:560])
    want = truth(model, prompts, 16)
    got, _ = asyncio.run(served(model, prompts, 16, aiocb.EngineConfig(native=native), repeat=True))
    assert got == want
