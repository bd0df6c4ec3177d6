"""Hybrid and recurrent models behind a whole engine: hits on snapshots, preemption, parallel samples."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiocb import Engine, EngineConfig
from aiocb.sampling_params import SamplingParams
from aiocb.testing import assert_quiescent
from tests.model.helpers import generate, prompt, tiny
from tests.model.state_models import STATES

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def model_of(name: str) -> Any:
    return tiny(name, **STATES[name])


async def answer(engine: Engine, tokens: list[int], num_new: int) -> list[int]:
    completion = await engine.generate(tokens, GREEDY, max_new_tokens=num_new)
    return list(completion.token_ids)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba"])
async def test_a_chat_goes_on_where_it_was(name: str) -> None:
    model = model_of(name)
    config = EngineConfig(max_batch_tokens=32, page_size=16, num_blocks=64, state_interval=32, debug_checks=True)
    async with Engine(model, config=config) as engine:
        first = prompt(50, 1)
        said = await answer(engine, first, 12)
        assert said == generate(model, first, 12)
        second, shifted = [*first, *said, *prompt(9, 2)], [*first[:40], *prompt(15, 3)]
        for tokens, num_hits in ((second, 48), (shifted, 32)):
            before = engine.stats().prefix_cache_hits
            assert await answer(engine, tokens, 8) == generate(model, tokens, 8)
            assert engine.stats().prefix_cache_hits - before >= num_hits
        samples = await engine.generate(first, GREEDY, max_new_tokens=6, n=3)
        assert [list(sample.token_ids) for sample in samples] == [said[:6]] * 3
        await assert_quiescent(engine)


async def test_without_snapshots_nothing_is_found_again() -> None:
    model = model_of("lfm2")
    config = EngineConfig(page_size=16, num_blocks=64, state_interval=0, max_requests_per_batch=4, debug_checks=True)
    async with Engine(model, config=config) as engine:
        for _ in range(2):
            assert await answer(engine, prompt(50), 8) == generate(model, prompt(50), 8)
        stats = engine.stats()
        assert (stats.prefix_cache_hits, stats.num_state_snapshots, stats.num_state_slots) == (0, 0, 4)
        await assert_quiescent(engine)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
async def test_more_requests_than_there_is_room_for(name: str) -> None:
    model = model_of(name)
    config = EngineConfig(
        max_batch_tokens=64, page_size=4, num_blocks=18, safety_margin=0.0, max_requests_per_batch=4, debug_checks=True
    )
    prompts = [prompt(12 + number, number) for number in range(6)]
    async with Engine(model, config=config) as engine:
        answers = await asyncio.gather(*(answer(engine, tokens, 14) for tokens in prompts))
        assert engine.stats().num_preemptions
        await assert_quiescent(engine)
    assert answers == [generate(model, tokens, 14) for tokens in prompts]
