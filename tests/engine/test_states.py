"""Models with states behind a whole engine: what `stats()` says, and that nothing is left."""

from __future__ import annotations

import asyncio

from aiocb.testing import assert_quiescent, fake_engine


async def test_stats_tell_of_slots_and_snapshots() -> None:
    async with fake_engine(reply="abcdefgh" * 8, num_slots=9, page_size=16) as engine:
        assert "StateCache" not in repr(engine)
        before = engine.stats()
        assert (before.num_state_slots, before.num_state_snapshots, before.state_cache_usage_perc) == (8, 0, 0.0)
        prompt = "a prompt of some length, with a state behind it"
        await asyncio.gather(*(engine.generate(prompt) for _ in range(20)))
        await engine.generate(prompt)
        stats = engine.stats()
        assert stats.num_state_hits > 0 and 0 < stats.num_state_snapshots <= 8
        assert stats.state_cache_bytes == stats.num_state_snapshots * 16
        assert stats.state_cache_budget_bytes == 8 * 16 and stats.state_cache_usage_perc == 0.0
        await assert_quiescent(engine)


async def test_stats_without_states() -> None:
    async with fake_engine(reply="abc") as engine:
        await engine.generate("x")
        stats = engine.stats()
        assert stats.num_state_slots == stats.num_state_snapshots == stats.state_cache_budget_bytes == 0
        await assert_quiescent(engine)


async def test_no_more_requests_than_slots() -> None:
    async with fake_engine(reply="abc", num_slots=4) as engine:
        choice = next(each for each in engine.describe() if each.name == "max_requests_per_batch")
        assert (choice.value, "slot" in choice.reason) == ("3", True)
