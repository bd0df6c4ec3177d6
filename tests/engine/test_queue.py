"""The bounded queue, deadlines, back-pressure and requests that can never run."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

import aiocb
from aiocb.engine.bridge import resolve
from aiocb.engine.room import Line
from aiocb.testing import assert_quiescent, settle, submitted

from .helpers import ENDLESS, Setup, read_some, running, solo, spin


def bounded(size: int, **values: Any) -> aiocb.EngineConfig:
    return aiocb.EngineConfig(max_queue_size=size, max_requests_per_batch=1, debug_checks=True, **values)


async def fill(setup: Setup, size: int) -> list[asyncio.Task[aiocb.Completion]]:
    """One request that runs and a queue that is full behind it; every step is held."""
    tasks = [asyncio.create_task(setup.engine.generate([0], max_new_tokens=4))]
    await setup.gate.held()
    tasks += [asyncio.create_task(setup.engine.generate([index + 1], max_new_tokens=4)) for index in range(size)]
    await submitted(setup.engine)
    await setup.gate.step()
    await setup.gate.held()
    assert setup.engine.stats().num_requests_waiting == size
    return tasks


# ── the bounded queue ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_full_queue_refuses_when_asked_to() -> None:
    async with running(config=bounded(2), is_open=False) as setup:
        tasks = await fill(setup, 2)
        for _ in range(100):
            with pytest.raises(aiocb.QueueFull, match="on_full"):
                await setup.engine.generate([9], max_new_tokens=1, on_full="refuse")
        assert setup.engine.stats().num_requests_waiting == 2
        setup.gate.open()
        for index, task in enumerate(tasks):
            assert list((await task).token_ids) == solo([index], 4)
        await setup.engine.generate([9], max_new_tokens=1, on_full="refuse")


async def test_a_full_queue_is_waited_for_in_order() -> None:
    async with running(config=bounded(2), is_open=False) as setup:
        tasks = await fill(setup, 2)
        done: list[int] = []

        async def late(index: int) -> None:
            completion = await setup.engine.generate([index], max_new_tokens=2)
            assert list(completion.token_ids) == solo([index], 2)
            done.append(index)

        waiting = [asyncio.create_task(late(index)) for index in range(10, 30)]
        for _ in range(5):
            await submitted(setup.engine)
        assert setup.engine.stats().num_requests_waiting == 2, "the others wait outside"
        # Newcomers that do not wait do not overtake either.
        with pytest.raises(aiocb.QueueFull):
            await setup.engine.generate([9], on_full="refuse")
        setup.gate.open()
        await asyncio.gather(*tasks, *waiting)
        assert done == list(range(10, 30))


async def test_cancelled_while_waiting_for_room() -> None:
    async with running(config=bounded(1), is_open=False) as setup:
        tasks = await fill(setup, 1)
        waiting = [asyncio.create_task(setup.engine.generate([index], max_new_tokens=2)) for index in range(10, 20)]
        await submitted(setup.engine)
        for task in waiting[::2]:
            task.cancel()
        setup.gate.open()
        results = await asyncio.gather(*tasks, *waiting, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 5
        assert sum(isinstance(result, aiocb.Completion) for result in results) == 7
        await assert_quiescent(setup.engine)
        assert setup.engine.stats().num_aborts == 0, "they were never submitted"


async def test_closed_while_waiting_for_room() -> None:
    async with running(config=bounded(1), is_open=False) as setup:
        tasks = await fill(setup, 1)
        streams = [setup.endless([index]) for index in range(3)]

        async def read(stream: aiocb.Stream) -> list[aiocb.Chunk]:
            return [chunk async for chunk in stream]

        async def enter(stream: aiocb.Stream) -> list[aiocb.Chunk]:
            async with stream:
                return [chunk async for chunk in stream]

        readers = [asyncio.create_task(read(streams[0])), asyncio.create_task(enter(streams[1]))]
        readers.append(asyncio.create_task(read(streams[2])))
        for _ in range(3):
            await submitted(setup.engine)
        streams[0].close()
        streams[1].close()
        thread = threading.Thread(target=streams[2].close)
        thread.start()
        await asyncio.to_thread(thread.join)
        async with asyncio.timeout(10):
            assert await asyncio.gather(*readers) == [[], [], []]
        setup.gate.open()
        await asyncio.gather(*tasks)


async def test_more_samples_than_the_queue_holds() -> None:
    async with running(config=bounded(3)) as setup:
        with pytest.raises(aiocb.QueueFull, match="4 samples"):
            await setup.engine.generate([1], n=4, max_new_tokens=2)
        completions = await setup.engine.generate([1], n=3, max_new_tokens=2)
        assert [completion.index for completion in completions] == [0, 1, 2]
        with pytest.raises(aiocb.QueueFull):
            async for _ in setup.engine.as_completed([[1]], n=4, max_new_tokens=2):
                pass


async def test_samples_enter_together_or_not_at_all() -> None:
    async with running(config=bounded(4), is_open=False) as setup:
        tasks = await fill(setup, 2)
        with pytest.raises(aiocb.QueueFull):
            await setup.engine.generate([7], n=3, max_new_tokens=2, on_full="refuse")
        assert setup.engine.stats().num_requests_waiting == 2
        waiting = asyncio.create_task(setup.engine.generate([7], n=3, max_new_tokens=2))
        setup.gate.open()
        assert len(await waiting) == 3
        await asyncio.gather(*tasks)


async def test_room_that_another_loop_makes() -> None:
    """The loop that waits has no stream of its own, so nothing but the room is news to it."""
    async with running(config=bounded(1), is_open=False) as setup:
        tasks = await fill(setup, 1)
        waits = threading.Event()

        async def other() -> aiocb.Completion:
            task = asyncio.create_task(setup.engine.generate([50], max_new_tokens=3))
            await submitted(setup.engine)
            waits.set()
            return await task

        thread = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(other())))
        await asyncio.to_thread(waits.wait)
        setup.gate.open()
        async with asyncio.timeout(20):
            assert list((await thread).token_ids) == solo([50], 3)
        await asyncio.gather(*tasks)


async def test_those_who_wait_for_room_hear_of_the_end() -> None:
    async with running(config=bounded(1), is_open=False) as setup:
        tasks = await fill(setup, 1)
        waiting = [asyncio.create_task(setup.engine.generate([index], **ENDLESS)) for index in range(3)]
        await submitted(setup.engine)
        setup.gate.open()
        await setup.engine.aclose()
        results = await asyncio.gather(*tasks, *waiting, return_exceptions=True)
        assert {type(result) for result in results[2:]} == {aiocb.EngineClosed}
    async with running(config=bounded(1), is_open=False, raise_at={2: OSError("device")}) as setup:
        tasks = [asyncio.create_task(setup.engine.generate([index], **ENDLESS)) for index in range(4)]
        await setup.gate.held()
        setup.gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {aiocb.EngineDead}


async def test_a_queue_under_pressure_stays_within_its_bound() -> None:
    async with running(config=bounded(8)) as setup:
        longest = 0

        async def watch() -> None:
            nonlocal longest
            while True:
                longest = max(longest, setup.engine.stats().num_requests_waiting)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        completions = await asyncio.gather(
            *(setup.engine.generate([index], max_new_tokens=1 + index % 3) for index in range(200))
        )
        watching.cancel()
        await asyncio.wait([watching])
        assert [list(each.token_ids) for each in completions] == [solo([i], 1 + i % 3) for i in range(200)]
        assert longest <= 8


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_timeout_while_running_keeps_what_is_there() -> None:
    async with running(is_open=False) as setup:
        task = asyncio.create_task(setup.engine.generate([1], timeout=0.05, **ENDLESS))
        await setup.gate.held()
        await setup.gate.step(3)
        await setup.gate.held()
        await asyncio.sleep(0.06)
        setup.gate.open()
        with pytest.raises(aiocb.RequestTimeout) as caught:
            await task
        assert caught.value.stage == "run"
        (partial,) = caught.value.partial
        assert list(partial.token_ids) == solo([1], 4)
        assert setup.engine.stats().request_success == {"timeout": 1}


async def test_a_timeout_in_the_queue() -> None:
    async with running(config=bounded(5), is_open=False) as setup:
        active = asyncio.create_task(setup.engine.generate([1], max_new_tokens=4))
        await setup.gate.held()
        queued = asyncio.create_task(setup.engine.generate([2], queue_timeout=0.01, **ENDLESS))
        await asyncio.sleep(0.02)
        setup.gate.open()
        with pytest.raises(aiocb.RequestTimeout) as caught:
            await queued
        assert caught.value.stage == "queue"
        await active
        # It is only about the queue: what has run once is not affected.
        completion = await setup.engine.generate([3], queue_timeout=0.5, max_new_tokens=3)
        assert len(completion.token_ids) == 3


async def test_a_timeout_while_waiting_for_room() -> None:
    async with running(config=bounded(1), is_open=False) as setup:
        tasks = await fill(setup, 1)
        bounds: list[dict[str, Any]] = [{"timeout": 0.01}, {"queue_timeout": 0.01}]
        for bound in bounds:
            with pytest.raises(aiocb.RequestTimeout) as caught:
                await setup.engine.generate([5], max_new_tokens=2, **bound)
            assert caught.value.stage == "queue"
        setup.gate.open()
        await asyncio.gather(*tasks)


async def test_an_idle_worker_wakes_for_a_deadline() -> None:
    """The only request is held back by its reader: nothing but the clock can end it."""
    async with running() as setup:
        stream = setup.endless(max_unread_tokens=2, timeout=0.05)
        with pytest.raises(aiocb.RequestTimeout):
            async with stream:
                await asyncio.sleep(0.1)
                async for _ in stream:
                    await asyncio.sleep(0.02)


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9])
async def test_no_time_at_all(timeout: float) -> None:
    async with running() as setup:
        with pytest.raises(aiocb.RequestTimeout):
            await setup.engine.generate([1], timeout=timeout, **ENDLESS)


async def test_deadlines_beyond_what_a_lock_can_wait_for() -> None:
    async with running() as setup:
        for timeout in (1e10, 1e300, math.inf):
            stream = setup.endless(timeout=timeout, max_unread_tokens=1)
            await read_some(stream, 1)
            await settle(setup.engine)  # the worker now sleeps until that deadline
            stream.close()
            completion = await setup.engine.generate([1], timeout=timeout, queue_timeout=timeout, max_new_tokens=2)
            assert len(completion.token_ids) == 2


# ── back-pressure ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_reader_that_is_behind_is_waited_for() -> None:
    async with running() as setup, setup.endless(max_new_tokens=200, max_unread_tokens=5) as slow:
        others = await asyncio.gather(*(setup.engine.generate([index], max_new_tokens=100) for index in range(4)))
        assert [list(each.token_ids) for each in others] == [solo([index], 100) for index in range(4)]
        await settle(setup.engine)
        stats = setup.engine.stats()
        assert stats.num_requests_paused == 1
        assert slow._slot is not None and slow._slot.num_sent == 5
        tokens: list[int] = []
        async for chunk in slow:
            assert len(chunk.token_ids) <= 5
            tokens += chunk.token_ids
            await asyncio.sleep(0)
        assert tokens == solo([1, 2, 3], 200)


async def test_a_reader_that_is_behind_is_cut_off_when_asked() -> None:
    async with running() as setup:
        async with setup.endless(max_unread_tokens=5, on_unread="cancel") as slow:
            await setup.engine.generate([1], max_new_tokens=20)
            chunks = [chunk async for chunk in slow]
            assert chunks[-1].finish_reason == "cancelled"
            assert [token for chunk in chunks for token in chunk.token_ids] == solo([1, 2, 3], 5)
        await assert_quiescent(setup.engine)


async def test_a_paused_request_is_left_and_finished() -> None:
    async with running() as setup:
        for leave in (aiocb.Stream.close, aiocb.Stream.finish):
            stream = setup.endless(max_unread_tokens=3)
            await stream.__aenter__()
            await spin(lambda: setup.engine.stats().num_requests_paused == 1)
            leave(stream)
            await settle(setup.engine)
            assert setup.engine.stats().num_requests_paused == 0
            assert [len(chunk.token_ids) async for chunk in stream] == ([] if leave is aiocb.Stream.close else [3])


async def test_samples_are_held_back_together() -> None:
    async with running() as setup:
        options: dict[str, Any] = {"n": 3, "max_new_tokens": 30, "max_unread_tokens": 6, "temperature": 1.0}
        stream = setup.engine.stream([1], **options)
        await stream.__aenter__()
        await spin(lambda: setup.engine.stats().num_requests_paused == 3)
        counts = [0, 0, 0]
        async for chunk in stream:
            counts[chunk.index] += len(chunk.token_ids)
        assert counts == [30, 30, 30]


async def test_a_reader_without_a_bound_gets_everything_merged() -> None:
    """It stops reading; the others go on at full speed; then it gets it all, in one chunk."""
    async with running() as setup, setup.endless(max_new_tokens=500) as slow:
        first = await read_some(slow, 1)
        for index in range(3):
            assert len((await setup.engine.generate([index], max_new_tokens=200)).token_ids) == 200
        chunks = [chunk async for chunk in slow]
        assert len(chunks) == 1 and chunks[0].finish_reason == "length"
        assert first + list(chunks[0].token_ids) == solo([1, 2, 3], 500)


async def test_a_hundred_slow_readers_hold_what_they_may() -> None:
    async with running(config=aiocb.EngineConfig(max_batch_tokens=128), num_blocks=4096) as setup:
        streams = [setup.endless([index], max_unread_tokens=4) for index in range(100)]
        for stream in streams:
            await stream.__aenter__()
        await spin(lambda: setup.engine.stats().num_requests_paused == 100)
        await settle(setup.engine)
        held = [lane for stream in streams for lane in stream._lanes]
        assert all(len(lane.token_ids) == 4 and len(lane.texts) <= 4 for lane in held)
        num_steps = setup.runner.num_steps
        await asyncio.sleep(0.05)
        assert setup.runner.num_steps == num_steps
        for stream in streams:
            stream.close()


# ── what can never run ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_that_can_never_fit_is_refused() -> None:
    async with running(num_blocks=9, page_size=4, max_model_len=10_000) as setup:
        neighbour = asyncio.create_task(setup.engine.generate([1], max_new_tokens=20))
        refused: list[tuple[list[int], dict[str, Any], str]] = [
            ([1] * 33, {}, "cache"),
            ([1] * 1000, {"max_new_tokens": 1}, "cache"),
            ([1] * 30, {"max_new_tokens": 4}, "at most 3 fit"),
            ([1] * 34, {"max_new_tokens": 0}, "cache"),
        ]
        for prompt, options, match in refused:
            with pytest.raises(aiocb.InvalidRequest, match=match):
                await setup.engine.generate(prompt, **options)
        assert len((await setup.engine.generate([1] * 30, max_new_tokens=3)).token_ids) == 3
        unlimited = await setup.engine.generate([1] * 30)
        assert len(unlimited.token_ids) == 3 and unlimited.finish_reason == "length"
        assert list((await neighbour).token_ids) == solo([1], 20)


async def test_a_request_longer_than_the_model_is_refused() -> None:
    async with running(max_model_len=32) as setup:
        with pytest.raises(aiocb.InvalidRequest, match="model's limit"):
            await setup.engine.generate([1] * 32)
        with pytest.raises(aiocb.InvalidRequest, match="at most 2 fit"):
            await setup.engine.generate([1] * 30, max_new_tokens=3)
        assert len((await setup.engine.generate([1] * 30)).token_ids) == 2
        kept = await setup.engine.generate(list(range(100)), truncate_prompt_tokens=20, max_new_tokens=2)
        assert kept.prompt_token_ids == tuple(range(80, 100))


async def test_what_sliding_groups_cannot_hold_is_refused() -> None:
    async with running(num_blocks=4, page_size=4, windows=[16], max_model_len=10_000) as setup:
        with pytest.raises(aiocb.InvalidRequest, match="cache"):
            await setup.engine.generate([1] * 14, max_new_tokens=100)
        assert len((await setup.engine.generate([1] * 4, max_new_tokens=8)).token_ids) == 8
    async with running(num_blocks=8, page_size=4, windows=[16], max_model_len=10_000) as setup:
        assert len((await setup.engine.generate([1] * 14, max_new_tokens=500)).token_ids) == 500


async def test_what_is_wrong_is_refused_before_anything_is_registered() -> None:
    async with running() as setup:
        unseen: list[dict[str, Any]] = [
            {"timeout": -1},
            {"timeout": math.nan},
            {"stream_interval": 0},
            {"max_unread_tokens": 0},
            {"priority": 1.5},
            {"on_full": "drop"},
            {"on_unread": "drop"},
            {"cache_salt": 3},
            {"temprature": 1.0},
            {"max_tokens": 3, "max_new_tokens": 3},
        ]
        for options in unseen:
            with pytest.raises(aiocb.InvalidRequest):
                setup.engine.stream([1], **options)
        wrong: list[tuple[Any, dict[str, Any]]] = [
            ([1, 260], {}),
            ([-1], {}),
            ([], {}),
            ("text", {}),
            ([1], {"stop": "x"}),
            ([1], {"echo": True}),
            ([1], {"stop_token_ids": [260]}),
            ([1], {"temperature": math.nan}),
        ]
        for prompt, values in wrong:
            with pytest.raises(aiocb.InvalidRequest):
                await setup.engine.generate(prompt, **values)
            with pytest.raises(aiocb.InvalidRequest):
                async with setup.engine.stream(prompt, **values):
                    raise AssertionError("it was refused")
        assert setup.engine.stats().request_success == {}
    assert setup.runner.num_steps == 0


async def test_room_that_is_given_up_goes_to_another_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was let in and is cancelled before it enters leaves nobody standing who has looked for room meanwhile."""
    armed, reserved, looked = threading.Event(), threading.Event(), threading.Event()
    let_in, here_thread = Line.let_in, threading.current_thread()

    def resolve_and_cancel(future: asyncio.Future[Any], value: Any) -> None:
        resolve(future, value)
        if armed.is_set() and threading.current_thread() is here_thread:
            reserved.set()
            assert looked.wait(10)
            here.cancel()

    def let_in_second(line: Line) -> None:
        is_late = armed.is_set() and threading.current_thread() is not here_thread
        if is_late:
            assert reserved.wait(10)
        let_in(line)
        if is_late:
            looked.set()

    monkeypatch.setattr("aiocb.engine.session.resolve", resolve_and_cancel)
    monkeypatch.setattr(Line, "let_in", let_in_second)
    async with running(is_open=False, config=bounded(1)) as setup:
        first, second = setup.endless(), setup.endless(max_new_tokens=2)
        await first.__aenter__()
        await setup.gate.held()
        await second.__aenter__()  # fills the queue

        def num_lines() -> int:
            assert setup.engine._lives.session is not None
            return sum(line.is_waiting for line in setup.engine._lives.session.room._lines)

        here = asyncio.create_task(setup.engine.generate([1, 2], max_new_tokens=2))
        await spin(lambda: num_lines() == 1)
        other = asyncio.create_task(
            asyncio.to_thread(lambda: asyncio.run(setup.engine.generate([1, 2, 3], max_new_tokens=2)))
        )
        await spin(lambda: num_lines() == 2)
        armed.set()
        first.close()
        setup.gate.open()
        await asyncio.wait([here])
        assert here.cancelled()
        assert (await asyncio.wait_for(other, 20)).token_ids == tuple(solo([1, 2, 3], 2))


async def test_who_is_let_in_and_needs_no_room_leaves_nobody_standing() -> None:
    async with running(is_open=False, config=bounded(1)) as setup:
        tasks = await fill(setup, 1)
        nothing = asyncio.create_task(setup.engine.generate([7], max_new_tokens=0))
        last = asyncio.create_task(setup.engine.generate([8, 9], max_new_tokens=2))
        session = setup.engine._lives.session
        assert session is not None
        await spin(lambda: sum(len(line._places) for line in session.room._lines) == 2)
        setup.gate.open()
        assert (await nothing).token_ids == ()
        assert list((await asyncio.wait_for(last, 20)).token_ids) == solo([8, 9], 2)
        await asyncio.gather(*tasks)
