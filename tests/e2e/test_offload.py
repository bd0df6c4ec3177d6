"""Four times what the cache holds: with a swap space and without one, everybody gets the output of an idle engine."""

from __future__ import annotations

from typing import Any

import pytest

import aiocb
from aiocb.testing import assert_quiescent
from tests.model.helpers import prompt, tiny
from tests.model.state_models import STATES

pytestmark = pytest.mark.asyncio
NUM_NEW = 24
SLOW = pytest.mark.slow


def requests() -> list[list[int]]:
    """Twelve prompts, some of which begin like others."""
    prompts = [prompt(9 + 2 * number, number) for number in range(9)]
    return [*prompts, *([*prompts[8], *prompt(3, 50 + number)] for number in range(3))]


async def served(model: Any, **settings: Any) -> tuple[list[Any], aiocb.Stats, dict[str, aiocb.Choice]]:
    config = aiocb.EngineConfig(debug_checks=True, safety_margin=0.0, max_batch_tokens=64, **settings)
    async with aiocb.Engine(model, config=config) as engine:
        done = await engine.generate_batch(
            requests(), temperature=1.0, seed=7, max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=1,
            repetition_penalty=1.3,
        )  # fmt: skip
        await assert_quiescent(engine)
        stats, chosen = engine.stats(), {choice.name: choice for choice in engine.describe()}
    outputs = [(each.token_ids, [entry.logprob for entry in each.logprobs or ()]) for each in done]
    return outputs, stats, chosen


def same(outputs: list[Any], expected: list[Any]) -> bool:
    """Equal tokens, and log-probabilities that differ by no more than the order of additions."""
    assert all(len(logprobs) == NUM_NEW for _, logprobs in outputs)
    return [tokens for tokens, _ in outputs] == [tokens for tokens, _ in expected] and all(
        logprobs == pytest.approx(wanted, abs=1e-3)
        for (_, logprobs), (_, wanted) in zip(outputs, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "native", "page_size"),
    [
        pytest.param("llama", None, 16, id="native"),
        pytest.param("gemma3_text", None, 32, id="native, sliding, large pages", marks=SLOW),
        pytest.param("llama", False, 16, id="eager"),
        pytest.param("gemma3_text", False, 16, id="eager, sliding", marks=SLOW),
        pytest.param("qwen3_next", False, 16, id="states", marks=SLOW),
        pytest.param("mamba", False, 16, id="states alone", marks=SLOW),
    ],
)
async def test_overload(kind: str, native: bool | None, page_size: int) -> None:
    model = tiny(kind, **STATES.get(kind, {}))
    settings = {"native": native, "page_size": page_size}
    expected, idle, chosen = await served(model, num_blocks=100, **settings)
    assert idle.num_preemptions == idle.num_offloads == 0
    assert chosen["cpu_offload_space"].value == "off" and ("kernels" in chosen) == (native is None)
    # 12 requests of 30 to 50 tokens.
    tight = {"num_blocks": 160 // page_size, **settings}
    recomputed, before, _ = await served(model, **tight)
    swapped, after, chosen = await served(model, cpu_offload_space=0.01, **tight)
    assert same(recomputed, expected) and same(swapped, expected)
    assert before.num_preemptions > 0 and before.num_offloads == 0
    assert after.num_restores > 0 and after.cpu_offload_usage_perc == 0.0
    assert "10.2 MiB" in chosen["cpu_offload_space"].value
