"""A cache in eight bits: what it takes, where it is refused, and that nobody's output depends on anybody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiocb
from aiocb.attention.base import KVFormat, LayerSpec
from aiocb.model.kv import choose_layout
from aiocb.testing import assert_quiescent
from tests.model.helpers import prompt, tiny

pytestmark = pytest.mark.asyncio
NUM_NEW = 12
# Where prompts end in a page, and beginnings that several of them share.
PROMPTS = [[*prompt(16 * (number % 3), number % 2), *prompt(1 + number, 9 + number)] for number in range(64)]


async def served(model: Any, prompts: list[list[int]], **settings: Any) -> tuple[list[Any], aiocb.Stats]:
    """Tokens and log-probabilities of each."""
    config = aiocb.EngineConfig(kv_cache_dtype="int8", debug_checks=True, safety_margin=0.0, **settings)
    async with aiocb.Engine(model, config=config) as engine:
        done = await engine.generate_batch(prompts, seed=7, max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
        await assert_quiescent(engine)
        stats = engine.stats()
    return [(each.token_ids, [entry.logprob for entry in each.logprobs or ()]) for each in done], stats


async def described(model: Any, **settings: Any) -> dict[str, aiocb.Choice]:
    async with aiocb.Engine(model, config=aiocb.EngineConfig(**settings)) as engine:
        return {choice.name: choice for choice in engine.describe()}


@pytest.mark.parametrize("attention", [None, "cpu"], ids=["native", "eager"])
async def test_it_takes_a_fraction_of_the_memory(attention: str | None) -> None:
    """And the difference from the model's own forward shows that it is in use: small, and larger than without."""
    model = tiny("llama", head_dim=64)
    settings = {"num_blocks": 100, "attention": attention}
    own, eighth = await described(model, **settings), await described(model, kv_cache_dtype="int8", **settings)
    assert own["kv_cache_dtype"].value == "float32" and eighth["kv_cache_dtype"].value == "int8"
    assert own["num_blocks"].reason == "configured (3.2 MiB)"
    assert eighth["num_blocks"].reason == "configured (833.2 KiB)"  # 66 bytes for 256
    assert float(own["parity"].value) < 1e-5 < 1e-4 < float(eighth["parity"].value) < 0.02


async def test_the_same_memory_holds_more() -> None:
    spec = LayerSpec(0, 9, 3, 64, 64, 0.125)
    config = aiocb.EngineConfig(max_memory_percent=0.5)
    own, eighth = (
        choose_layout(KVFormat.of(dtype), [spec], 16, config, 1 << 20, torch.device("cpu"), free=1 << 26)[0].groups[0]
        for dtype in (torch.bfloat16, torch.int8)
    )
    assert eighth.block_bytes == 16 * 3 * 2 * 66 and eighth.num_blocks == (1 << 25) // eighth.block_bytes
    assert eighth.num_blocks > 1.9 * own.num_blocks


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("qwen2", "k_proj.bias", {}),
        ("stablelm", "k_proj.bias", {"use_qkv_bias": True}),
        ("qwen3", "k_norm.weight", {"head_dim": 32}),
        ("olmo2", "k_norm.weight", {}),
    ],
)
async def test_channels_that_are_much_larger_do_not_drown_the_others(
    kind: str, name: str, options: dict[str, Any]
) -> None:
    """As biases and norms make them, and queries make up for them; rotated with others and, in StableLM, not."""
    model = tiny(kind, hidden_size=128, **options)
    own = name.replace("k_", "q_").removesuffix(".bias")
    for parameter_name, parameter in model.named_parameters():
        channels = parameter.view(-1, 32, *parameter.shape[1:]) if parameter.shape[0] % 32 == 0 else parameter
        if parameter_name.endswith(name):
            channels[:, [3, 14, 20]] = 300.0
        elif own in parameter_name:
            channels[:, [3, 19, 11, 14, 30, 6, 20, 4]] *= 0.001
    parity = (await described(model, kv_cache_dtype="int8", num_blocks=20))["parity"]
    assert float(parity.value) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
async def test_what_others_do_changes_nothing(dtype: torch.dtype) -> None:
    """64 requests: one after another, and together in odd chunks, with shared beginnings, preempted, swapped."""
    model: Any = tiny("llama")
    model.to(dtype)
    alone, stats = await served(model, PROMPTS, max_requests_per_batch=1, allow_block_sharing=False, num_blocks=400)
    assert stats.num_preemptions == 0
    tight = {"num_blocks": 24, "max_batch_tokens": 37, "page_size": 16}
    together, stats = await served(model, PROMPTS, **tight)
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    swapped, stats = await served(model, PROMPTS, cpu_offload_space=0.01, **tight)
    assert stats.num_restores > 0
    assert together == alone and swapped == alone


async def test_eager_models_swap_scales_too() -> None:
    model = tiny("llama")
    idle, _ = await served(model, PROMPTS[:12], attention="cpu", num_blocks=400)
    swapped, stats = await served(model, PROMPTS[:12], attention="cpu", num_blocks=10, cpu_offload_space=0.01)
    assert stats.num_restores > 0
    assert [tokens for tokens, _ in swapped] == [tokens for tokens, _ in idle]


async def test_windows_and_large_pages() -> None:
    model = tiny("gemma3_text")
    alone, _ = await served(model, PROMPTS[40:48], max_requests_per_batch=1, num_blocks=100)
    together, _ = await served(model, PROMPTS[40:48], page_size=32, num_blocks=20, cpu_offload_space=0.01)
    assert together == alone


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama", {"attention": "sdpa"}, "attention 'sdpa' cannot run this model: .* not in int8"),
        ("llama", {"page_size": 24}, "needs the native attention .* pages of 16 tokens, not 24.*leave it out"),
        ("llama", {"native": False}, "needs the native attention .* .native=False.; leave it out"),
        ("mamba", {}, "caches no keys and values; leave it out"),
    ],
)
async def test_it_is_refused_where_it_cannot_be(kind: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(aiocb.ConfigError, match=reason):
        await described(tiny(kind), kv_cache_dtype="int8", num_blocks=100, **settings)


async def test_other_names_are_refused() -> None:
    with pytest.raises(aiocb.ConfigError, match="kv_cache_dtype must be 'int8', or None for that of the model, not 'f"):
        aiocb.EngineConfig(kv_cache_dtype="fp8")  # type: ignore[arg-type]
