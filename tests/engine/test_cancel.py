"""Cancellation at every stage of a request's life, and what it must not touch."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable

import psutil
import pytest

import aiocb
from aiocb.testing import FakeRunner, assert_quiescent, fake_engine, settle, submitted

from .helpers import ENDLESS, read_some, running, solo, spin

LONG = list(range(100))


def small(**values: object) -> aiocb.EngineConfig:
    return aiocb.EngineConfig(debug_checks=True, safety_margin=0.0, **values)  # type: ignore[arg-type]


async def test_after_three_chunks_nothing_runs_two_steps_later() -> None:
    async with running(is_open=False) as setup:
        task = asyncio.create_task(read_some(setup.endless(), 1000))
        await setup.gate.held()
        await setup.gate.step(3)
        await setup.gate.held()
        num_steps = setup.runner.num_steps
        task.cancel()
        await asyncio.wait([task])
        await setup.assert_freed(num_steps)
        assert setup.engine.stats().num_requests_running == 0


async def test_while_queued_no_prompt_token_is_spent() -> None:
    async with running(is_open=False, config=small(max_requests_per_batch=1)) as setup:
        active = asyncio.create_task(setup.engine.generate([1, 2], max_new_tokens=5))
        await setup.gate.held()
        queued = asyncio.create_task(setup.engine.generate(LONG, max_new_tokens=5))
        await submitted(setup.engine)
        await setup.gate.step()
        await setup.gate.held()
        assert setup.engine.stats().num_requests_waiting == 1
        queued.cancel()
        await asyncio.wait([queued])
        setup.gate.open()
        assert list((await active).token_ids) == solo([1, 2], 5)
        await settle(setup.engine)
        assert setup.runner.num_tokens == 2 + 4


async def test_before_the_worker_has_seen_it_no_prompt_token_is_spent() -> None:
    async with running(is_open=False) as setup:
        active = asyncio.create_task(setup.engine.generate([1, 2], max_new_tokens=3))
        await setup.gate.held()
        async with setup.endless(LONG):
            pass
        setup.gate.open()
        await active
        await settle(setup.engine)
        assert setup.runner.num_tokens == 2 + 2


async def test_between_the_chunks_of_a_long_prompt_the_blocks_come_back() -> None:
    async with running(is_open=False, config=small(max_batch_tokens=16)) as setup:
        task = asyncio.create_task(setup.engine.generate(LONG, max_new_tokens=5))
        await setup.gate.held()
        await setup.gate.step(2)
        await setup.gate.held()
        assert setup.runner.num_tokens == 32
        assert setup.engine.stats().kv_cache_usage_perc > 0
        task.cancel()
        await asyncio.wait([task])
        await setup.assert_freed(2)
        assert setup.runner.num_tokens == 48
        assert setup.engine.stats().kv_cache_usage_perc == 0


async def test_in_the_step_that_completes_a_page() -> None:
    async with running(is_open=False, page_size=4, num_blocks=4000) as setup:
        for num_steps in range(1, 9):
            task = asyncio.create_task(setup.engine.generate([9, 9, num_steps], **ENDLESS))
            await setup.gate.held()
            for _ in range(num_steps):
                await setup.gate.step()
            await setup.gate.held()
            task.cancel()
            await asyncio.wait([task])
            setup.gate.open()
            await assert_quiescent(setup.engine)
            setup.gate.close()


async def test_one_of_a_batch_the_survivor_is_unchanged() -> None:
    async with running(is_open=False) as setup:
        tasks = [asyncio.create_task(setup.engine.generate([i, i + 1, i + 2], max_new_tokens=20)) for i in range(4)]
        await setup.gate.held()
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks[1:3])
        setup.gate.open()
        for i in (0, 3):
            assert list((await tasks[i]).token_ids) == solo([i, i + 1, i + 2], 20)


async def test_a_queued_one_never_touches_an_active_one() -> None:
    async with running(is_open=False, config=small(max_requests_per_batch=2)) as setup:
        active = [asyncio.create_task(setup.engine.generate([i, 7], max_new_tokens=12)) for i in range(2)]
        await setup.gate.held()
        queued = [asyncio.create_task(setup.engine.generate([i, 8], **ENDLESS)) for i in range(10)]
        for _ in range(8):
            await setup.gate.step()
            queued.pop(0).cancel()
        setup.gate.open()
        for i, task in enumerate(active):
            assert list((await task).token_ids) == solo([i, 7], 12)
        for task in queued:
            task.cancel()
        await asyncio.wait(queued)


async def test_all_samples_of_one_prompt_go() -> None:
    async with running(is_open=False) as setup:
        task = asyncio.create_task(setup.engine.generate(LONG, n=4, temperature=1.0, **ENDLESS))
        await setup.gate.held()
        await setup.gate.step(3)
        await setup.gate.held()
        num_steps = setup.runner.num_steps
        task.cancel()
        await asyncio.wait([task])
        await setup.assert_freed(num_steps)
        assert setup.engine.stats().num_aborts == 4


async def test_after_a_preemption_the_waiting_ones_go_on() -> None:
    async with running(config=small(max_batch_tokens=32), num_blocks=8, page_size=4, is_open=False) as setup:
        active = [asyncio.create_task(setup.engine.generate([i] * 4, max_new_tokens=20)) for i in range(2)]
        waiting = asyncio.create_task(setup.engine.generate([9] * 4, max_new_tokens=16))
        await setup.gate.held()
        while not setup.engine.stats().num_preemptions:
            await setup.gate.step()
            await setup.gate.held()
        for task in active:
            task.cancel()
        await asyncio.wait(active)
        setup.gate.open()
        assert list((await waiting).token_ids) == solo([9] * 4, 16)


async def test_a_resumed_conversation_hits_the_prefix_of_the_cancelled_one() -> None:
    async with running() as setup:
        stream = setup.endless(LONG)
        tokens = await read_some(stream, 8)
        stream.close()
        await settle(setup.engine)
        completion = await setup.engine.generate(LONG + tokens, max_new_tokens=4)
        assert completion.usage.num_cached_tokens >= 96
        assert list(completion.token_ids) == solo(LONG + tokens, 4)


@pytest.mark.slow
async def test_fire_and_forget_completes() -> None:
    """A task whose reference is dropped is kept by the loop while its stream is waited for."""
    async with running() as setup:
        done: list[aiocb.Completion] = []

        async def answer(prompt: int) -> None:
            done.append(await setup.engine.generate([prompt], max_new_tokens=5))

        for prompt in range(20):
            asyncio.ensure_future(answer(prompt))  # noqa: RUF006
        gc.collect()
        await spin(lambda: len(done) == 20)
        gc.collect()
        assert {completion.prompt_token_ids[0]: list(completion.token_ids) for completion in done} == {
            prompt: solo([prompt], 5) for prompt in range(20)
        }


async def test_one_label_for_many_requests() -> None:
    """Identity is internal: the label may be used twice at once, and again while its abort is on its way."""
    async with running(is_open=False) as setup:
        first = asyncio.create_task(setup.engine.generate([1], max_new_tokens=6, request_id="same"))
        second = asyncio.create_task(setup.engine.generate([2], max_new_tokens=6, request_id="same"))
        await setup.gate.held()
        first.cancel()
        third = asyncio.create_task(setup.engine.generate([3], max_new_tokens=6, request_id="same"))
        await asyncio.wait([first])
        setup.gate.open()
        for prompt, task in ((2, second), (3, third)):
            completion = await task
            assert completion.request_id == "same"
            assert list(completion.token_ids) == solo([prompt], 6)


async def test_before_the_task_has_begun() -> None:
    async with running() as setup:
        task = asyncio.create_task(setup.engine.generate([1], **ENDLESS))
        task.cancel()
        await asyncio.wait([task])
        await assert_quiescent(setup.engine)
    assert setup.runner.num_steps == 0


async def test_level_cancellation_before_anything_ran() -> None:
    import anyio

    async with running() as setup:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with setup.endless() as stream:
                async for _ in stream:
                    pass
        assert scope.cancelled_caught
        await assert_quiescent(setup.engine)


async def storm(engine: aiocb.Engine, chance: random.Random, num_tasks: int) -> int:
    """Tasks in every posture, each cancelled (or not) at a random await; how many came through."""
    num_survivors = 0

    async def one(index: int) -> None:
        nonlocal num_survivors
        prompt = [index % 50, index % 7, index % 3]
        count = chance.choice((1, 3, 12))
        posture = chance.randrange(4)
        tokens: list[int] = []
        if posture == 0:
            tokens += (await engine.generate(prompt, max_new_tokens=count)).token_ids
        elif posture == 1:
            async for chunk in engine.stream(prompt, max_new_tokens=count):
                tokens += chunk.token_ids
        elif posture == 2:
            async with engine.stream(prompt, max_new_tokens=count) as stream:
                async for chunk in stream:
                    tokens += chunk.token_ids
        else:
            completions = await engine.generate_batch([prompt, [1, 2]], max_new_tokens=count)
            tokens += completions[0].token_ids
        assert tokens == solo(prompt, count)
        num_survivors += 1

    async def cancel_at_a_random_point(task: asyncio.Task[None]) -> None:
        for _ in range(chance.choice((0, 0, 1, 2, 3, 5, 20, 200))):
            if task.done():
                return
            await asyncio.sleep(0)
        task.cancel()

    tasks = [asyncio.create_task(one(index)) for index in range(num_tasks)]
    cancellers = [asyncio.create_task(cancel_at_a_random_point(task)) for task in tasks if chance.random() < 0.8]
    await asyncio.wait(cancellers)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}, results
    await assert_quiescent(engine)
    return num_survivors


@pytest.mark.slow
def test_cancel_storm(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A thousand tasks cancelled at random points, three times over, in fresh loops over one engine."""
    runner = FakeRunner(num_blocks=600)
    config = aiocb.EngineConfig(max_batch_tokens=256, max_requests_per_batch=64, max_queue_size=300)
    engine = fake_engine(runner=runner, config=config, tokenizer=False)
    chance = random.Random(5)
    sizes = []

    async def main() -> None:
        async with engine:
            assert await storm(engine, chance, 1000) >= 100
        await assert_quiescent(engine)
        assert len(asyncio.all_tasks()) == 1

    for _ in range(3):
        with asyncio.Runner(loop_factory=loop_factory) as loop_runner:
            loop_runner.run(main())
        gc.collect()
        sizes.append((len(gc.get_objects()), psutil.Process().memory_info().rss))
    (_, _), (objects_before, memory_before), (objects_after, memory_after) = sizes
    assert objects_after - objects_before < 500, "objects are left after each round"
    assert memory_after - memory_before < 8 << 20


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_half_read_stream_cancelled_by_its_reader_and_closed_by_another(count: int) -> None:
    async with running() as setup:
        stream = setup.endless()
        reader = asyncio.create_task(read_some(stream, 10_000))
        await spin(lambda: setup.runner.num_steps > count)
        reader.cancel()
        stream.close()
        await asyncio.wait([reader])
        await settle(setup.engine)
        assert setup.engine.stats().num_aborts == 1
