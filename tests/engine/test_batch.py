"""Many prompts at once: `generate_batch` and `as_completed`."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import aiocb
from aiocb.records import Record
from aiocb.testing import assert_quiescent, settle, submitted

from .helpers import ENDLESS, running, solo, spin


def fail_on_13(step: int, record: Record) -> Exception | None:
    return aiocb.RequestFailed("unlucky") if record.tokens[0] == 13 and len(record.tokens) > 3 else None


async def test_all_in_the_order_given() -> None:
    async with running() as setup:
        prompts = [[index] for index in range(50)]
        params = [aiocb.SamplingParams(max_new_tokens=1 + (50 - index) % 9) for index in range(50)]
        completions = await setup.engine.generate_batch(prompts, params)
        for index, completion in enumerate(completions):
            assert completion.request_id == str(index)
            assert list(completion.token_ids) == solo([index], 1 + (50 - index) % 9)
        assert await setup.engine.generate_batch([]) == []
        named = await setup.engine.generate_batch(iter([[1], [2]]), request_id=["a", "b"], max_new_tokens=1)
        assert [completion.request_id for completion in named] == ["a", "b"]
        samples = await setup.engine.generate_batch([[1], [2]], n=2, temperature=1.0, max_new_tokens=3)
        assert [(each.request_id, each.index) for each in samples] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]


async def test_one_wakeup_each() -> None:
    async with running() as setup:
        await setup.engine.generate_batch([[index] for index in range(20)], max_new_tokens=50)
        assert setup.engine.stats().num_loop_wakeups <= 20


async def test_the_first_failure_ends_the_batch() -> None:
    async with running(fail=fail_on_13) as setup:
        prompts = [[1], [13], [2]]
        with pytest.raises(aiocb.RequestFailed, match="unlucky"):
            await setup.engine.generate_batch(prompts, **{**ENDLESS, "max_new_tokens": 3000})
        await assert_quiescent(setup.engine)


async def test_failures_as_results() -> None:
    async with running(fail=fail_on_13, num_blocks=64) as setup:
        prompts: list[Any] = [[1], [13], [1] * 5000, "no tokenizer", [2]]
        completions = await setup.engine.generate_batch(prompts, max_new_tokens=8, return_exceptions=True)
        assert [each.finish_reason for each in completions] == ["length", "error", "error", "error", "length"]
        assert list(completions[1].token_ids) == solo([13], 3)
        assert isinstance(completions[1].error, aiocb.RequestFailed)
        assert isinstance(completions[2].error, aiocb.InvalidRequest)
        assert isinstance(completions[3].error, aiocb.InvalidRequest)
        assert list(completions[4].token_ids) == solo([2], 8)
        late = await setup.engine.generate_batch([[1], [2]], timeout=0, return_exceptions=True, max_new_tokens=8)
        assert [each.finish_reason for each in late] == ["timeout"] * 2
        assert all(isinstance(each.error, aiocb.RequestTimeout) for each in late)


async def test_wrong_numbers_of_things() -> None:
    async with running() as setup:
        with pytest.raises(aiocb.ConfigError, match="2 prompts"):
            await setup.engine.generate_batch([[1], [2]], [aiocb.SamplingParams()])
        with pytest.raises(aiocb.ConfigError):
            await setup.engine.generate_batch([[1], [2]], request_id="same")
        with pytest.raises(aiocb.InvalidRequest, match="temprature"):
            await setup.engine.generate_batch([[1], [2]], temprature=1.0)  # type: ignore[call-arg]


async def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    async with running() as setup:
        completions = await setup.engine.generate_batch(
            [[index] for index in range(7)], progress=True, max_new_tokens=3
        )
        assert len(completions) == 7
    assert "7/7" in capsys.readouterr().err


async def test_a_cancelled_batch_goes_whole() -> None:
    async with running() as setup:
        task = asyncio.create_task(setup.engine.generate_batch([[index] for index in range(30)], **ENDLESS))
        await spin(lambda: setup.runner.num_steps > 3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await assert_quiescent(setup.engine)


async def test_a_batch_larger_than_the_queue() -> None:
    config = aiocb.EngineConfig(max_queue_size=3, max_requests_per_batch=2, debug_checks=True)
    async with running(config=config) as setup:
        completions = await setup.engine.generate_batch([[index] for index in range(40)], max_new_tokens=3)
        assert [list(each.token_ids) for each in completions] == [solo([index], 3) for index in range(40)]


async def test_each_as_it_finishes() -> None:
    async with running(is_open=False) as setup:
        params = [aiocb.SamplingParams(max_new_tokens=count) for count in (9, 3, 6, 1)]
        iterator = setup.engine.as_completed([[index] for index in range(4)], params)
        reading = asyncio.create_task(_labels(iterator))
        await setup.gate.held()
        await submitted(setup.engine)
        setup.gate.open()
        assert await reading == ["3", "1", "2", "0"]


async def test_as_completed_yields_every_sample_and_failure() -> None:
    async with running(fail=fail_on_13) as setup:
        found = [
            (each.request_id, each.index, each.finish_reason)
            async for each in setup.engine.as_completed(
                [[1], [13], "x", [2]], n=2, temperature=1.0, max_new_tokens=6, return_exceptions=True
            )
        ]
        assert sorted(found) == [
            ("0", 0, "length"),
            ("0", 1, "length"),
            ("1", 0, "error"),
            ("2", 0, "error"),
            ("3", 0, "length"),
            ("3", 1, "length"),
        ]
        with pytest.raises(aiocb.RequestFailed, match="unlucky"):
            async for _ in setup.engine.as_completed([[1], [13], [2]], max_new_tokens=500):
                pass
        await assert_quiescent(setup.engine)
        assert [each async for each in setup.engine.as_completed([])] == []


async def test_as_completed_with_a_small_queue() -> None:
    config = aiocb.EngineConfig(max_queue_size=2, max_requests_per_batch=2, debug_checks=True)
    async with running(config=config) as setup:
        labels = await _labels(setup.engine.as_completed([[index] for index in range(30)], max_new_tokens=3))
        assert sorted(map(int, labels)) == list(range(30))

    async with running(config=config, is_open=False) as setup:

        async def read() -> list[aiocb.Completion]:
            prompts = [[index] for index in range(30)]
            options: dict[str, Any] = {"max_new_tokens": 3, "on_full": "refuse"}
            return [each async for each in setup.engine.as_completed(prompts, return_exceptions=True, **options)]

        reading = asyncio.create_task(read())
        await setup.gate.held()
        await submitted(setup.engine)
        setup.gate.open()
        refused = await reading
        assert len(refused) == 30
        assert {type(each.error) for each in refused} == {type(None), aiocb.QueueFull}


@pytest.mark.parametrize("way", ["break", "close", "context", "cancel", "drop"])
async def test_leaving_as_completed(way: str) -> None:
    async with running() as setup:
        params = [aiocb.SamplingParams(max_new_tokens=2), *[aiocb.SamplingParams(**ENDLESS)] * 5]
        prompts = [[index] for index in range(6)]
        if way == "break":
            async for _ in setup.engine.as_completed(prompts, params):
                break
        elif way == "close":
            iterator = setup.engine.as_completed(prompts, params)
            await anext(iterator)
            iterator.close()
            await iterator.aclose()
        elif way == "context":
            async with setup.engine.as_completed(prompts, params) as iterator:
                await anext(iterator)
        elif way == "cancel":
            task = asyncio.create_task(_labels(setup.engine.as_completed(prompts, params)))
            await spin(lambda: setup.engine.stats().num_requests_running == 5)
            task.cancel()
            await asyncio.wait([task])
        else:
            iterator = setup.engine.as_completed(prompts, params)
            await anext(iterator)
            gc.disable()
            del iterator
            gc.enable()
        await assert_quiescent(setup.engine)
        await settle(setup.engine)
        assert setup.engine.stats().num_aborts == 5


async def test_nothing_is_submitted_by_making_an_iterator() -> None:
    async with running() as setup:
        setup.engine.as_completed([[1], [2]])
        await assert_quiescent(setup.engine)
    assert setup.runner.num_steps == 0


async def _labels(iterator: Any) -> list[str]:
    return [completion.request_id async for completion in iterator]
