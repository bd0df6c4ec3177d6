"""The benchmarks of the engine itself: what they count, and that they cannot measure their own waiting."""

from __future__ import annotations

import asyncio

import pytest

import aiocb
from aiocb.bench import idle
from aiocb.bench.idle import VOCAB_SIZE, IdleRunner, LockstepRunner
from aiocb.bench.loop import measure as measure_loop
from aiocb.bench.overhead import measure
from aiocb.errors import EngineDead
from aiocb.sampling_params import ModelDefaults


def test_it_reads_one_chunk_per_token() -> None:
    row = asyncio.run(measure(8, 20))
    assert row["streams"] == 8
    assert row["chunks_per_s"] > 0
    assert row["wakeups_per_step"] <= 1.2


@pytest.mark.parametrize("num_queued", [1, 500])
def test_requests_that_wait_are_not_in_the_figure(num_queued: int) -> None:
    # Steps that wait for the readers of requests that nobody reads take seconds, not microseconds.
    row = asyncio.run(measure(4, 50, num_queued))
    assert row["queued"] == num_queued
    assert row["us_per_chunk"] < 20_000


def test_tokens_that_nobody_reads_are_an_error_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_PATIENCE_S", 0.05)

    async def main() -> None:
        async with aiocb.Engine.from_runner(lambda _: LockstepRunner(8), ModelDefaults(VOCAB_SIZE, 64)) as engine:
            with pytest.raises(EngineDead) as caught:
                await engine.generate([1], max_new_tokens=5)
            assert isinstance(caught.value.__cause__, TimeoutError)

    asyncio.run(main())


def test_the_loop_is_watched_while_requests_arrive_and_stream() -> None:
    row = asyncio.run(measure_loop(16, 4))
    assert 0 <= row["lag_p50_ms"] <= row["lag_p99_ms"] <= row["lag_max_ms"]
    assert row["loop_us_per_request"] > 0
    assert asyncio.run(measure_loop(4, 4, 20))["lag_max_ms"] >= 0


def test_an_idle_model_has_as_many_log_probabilities_as_were_asked_for() -> None:
    async def main() -> None:
        engine = aiocb.Engine.from_runner(lambda _: IdleRunner(8, num_logprobs=20), ModelDefaults(VOCAB_SIZE, 64))
        async with engine:
            completion = await engine.generate([1], max_new_tokens=2, logprobs=20)
        assert completion.logprobs is not None
        assert [len(each.top) for each in completion.logprobs] == [20, 20]

    asyncio.run(main())


def test_a_measurement_that_is_cancelled_ends_at_once() -> None:
    async def main() -> None:
        for delay in (0.0, 0.05, 0.2):
            task = asyncio.ensure_future(measure(4, 100_000, 10))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 20)

    asyncio.run(main())
