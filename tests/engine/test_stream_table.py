"""The stream object's promises, row by row: how it is left, and what that frees."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

import aiocb
from aiocb.engine.core import EngineCore
from aiocb.engine.worker import Worker
from aiocb.testing import assert_quiescent, settle

from .helpers import Setup, read_some, running, solo, spin

Leaver = Callable[[Setup], Awaitable[None]]


# Each reads two tokens of a stream that never ends, and leaves it in its own way.


async def by_break(setup: Setup) -> None:
    count = 0
    async for chunk in setup.endless():
        count += len(chunk.token_ids)
        if count >= 2:
            break


async def by_return(setup: Setup) -> None:
    async def first() -> aiocb.Chunk:
        async for chunk in setup.endless():
            return chunk
        raise AssertionError

    assert (await first()).token_ids


async def by_exception_in_the_body(setup: Setup) -> None:
    async def fail() -> None:
        async for _ in setup.endless():
            raise KeyError("body")

    with pytest.raises(KeyError):
        await fail()


async def by_async_with(setup: Setup) -> None:
    async with setup.endless() as stream:
        await read_some(stream, 2)
    assert stream.is_closed


async def by_exception_in_async_with(setup: Setup) -> None:
    with pytest.raises(KeyError):
        async with setup.endless() as stream:
            await read_some(stream, 2)
            raise KeyError("body")


async def by_return_in_async_with(setup: Setup) -> None:
    async def first() -> aiocb.Chunk:
        async with setup.endless() as stream:
            async for chunk in stream:
                return chunk
        raise AssertionError

    assert (await first()).token_ids


async def by_plain_with(setup: Setup) -> None:
    with setup.endless() as stream:
        await read_some(stream, 2)


async def by_close(setup: Setup) -> None:
    stream = setup.endless()
    await read_some(stream, 2)
    stream.close()


async def by_aclosing(setup: Setup) -> None:
    async with contextlib.aclosing(setup.endless()) as stream:
        await read_some(stream, 2)


async def by_dropping_it(setup: Setup) -> None:
    stream = setup.endless()
    await read_some(stream, 2)
    del stream


async def by_garbage_collection(setup: Setup) -> None:
    stream = setup.endless()
    await read_some(stream, 2)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()


async def by_closing_a_generator_around_it(setup: Setup) -> None:
    async def sse() -> AsyncIterator[str]:
        async with setup.endless() as stream:
            async for chunk in stream:
                yield f"data: {chunk.token_ids}\n\n"

    generator = sse()
    assert (await anext(generator)).startswith("data: ")
    await generator.aclose()  # type: ignore[attr-defined]


async def by_breaking_out_of_a_generator(setup: Setup) -> None:
    async def events() -> AsyncIterator[tuple[int, ...]]:
        async for chunk in setup.endless():
            yield chunk.token_ids

    async for _ in events():
        break
    # The generator is closed by a task that the loop makes for it.
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def by_cancelling_the_task(setup: Setup) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in setup.endless():
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def by_cancelling_generate(setup: Setup) -> None:
    task = asyncio.create_task(setup.engine.generate([1, 2], max_new_tokens=10_000, ignore_eos=True))
    await spin(lambda: setup.runner.num_steps >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancelling_an_awaited_stream(setup: Setup) -> None:
    async def whole() -> aiocb.Completion:
        return await setup.endless()

    task = asyncio.create_task(whole())
    await spin(lambda: setup.runner.num_steps >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_asyncio_timeout(setup: Setup) -> None:
    stream = setup.endless()
    await read_some(stream, 2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            async for _ in stream:
                pass
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def by_asyncio_wait_for(setup: Setup) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(setup.engine.generate([1, 2], max_new_tokens=10_000, ignore_eos=True), 0.02)


async def by_move_on_after(setup: Setup) -> None:
    with anyio.move_on_after(0.02) as scope:
        async for _ in setup.endless():
            pass
    assert scope.cancelled_caught


async def by_fail_after_around_async_with(setup: Setup) -> None:
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.02):
            async with setup.endless() as stream:
                async for _ in stream:
                    pass


async def by_a_sibling_that_fails(setup: Setup) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in setup.endless():
            started.set()

    async def fail() -> None:
        await started.wait()
        raise KeyError("sibling")

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            group.create_task(fail())
    assert caught.group_contains(KeyError)


async def by_a_cancelled_anyio_task_group(setup: Setup) -> None:
    async def read() -> None:
        async with setup.endless() as stream:
            async for _ in stream:
                group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(read)


async def by_level_cancellation_with_awaits_in_finally(setup: Setup) -> None:
    """Every await in the cleanup is cancelled again: nothing of ours may depend on one."""
    interrupted = 0

    async def read() -> None:
        nonlocal interrupted
        try:
            async for _ in setup.endless():
                group.cancel_scope.cancel()
        finally:
            for _ in range(3):
                try:
                    await anyio.sleep(0)
                except anyio.get_cancelled_exc_class():
                    interrupted += 1

    async with anyio.create_task_group() as group:
        group.start_soon(read)
    assert interrupted == 3


async def by_closing_in_another_task(setup: Setup) -> None:
    stream = setup.endless()
    tokens: list[int] = []

    async def read() -> None:
        async for chunk in stream:
            tokens.extend(chunk.token_ids)

    task = asyncio.create_task(read())
    await spin(lambda: len(tokens) >= 2)
    stream.close()
    await task


async def by_closing_in_another_thread(setup: Setup) -> None:
    stream = setup.endless()
    await read_some(stream, 2)
    thread = threading.Thread(target=stream.close)
    thread.start()
    async for _ in stream:
        pass
    thread.join()


async def by_dropping_it_in_another_thread(setup: Setup) -> None:
    streams = [setup.endless()]
    await read_some(streams[0], 2)
    thread = threading.Thread(target=streams.clear)
    thread.start()
    await asyncio.to_thread(thread.join)


LEAVERS = [value for name, value in sorted(globals().items()) if name.startswith("by_")]


@pytest.mark.parametrize("leave", LEAVERS, ids=lambda leave: leave.__name__)
async def test_leaving_frees_at_once(leave: Leaver) -> None:
    async with running() as setup:
        await leave(setup)
        num_steps = setup.runner.num_steps
        await settle(setup.engine)
        # One step may have been running, and one may have begun before the step count was read.
        assert setup.runner.num_steps <= num_steps + 2
        await assert_quiescent(setup.engine)
        # The engine is as good as new.
        completion = await setup.engine.generate([5, 6], max_new_tokens=4)
        assert list(completion.token_ids) == solo([5, 6], 4)


@pytest.mark.parametrize("leave", [by_break, by_close, by_dropping_it, by_async_with], ids=lambda leave: leave.__name__)
async def test_a_neighbour_is_not_disturbed(leave: Leaver) -> None:
    async with running() as setup:
        neighbour = asyncio.create_task(setup.engine.generate([7, 8, 9], max_new_tokens=60))
        await leave(setup)
        assert list((await neighbour).token_ids) == solo([7, 8, 9], 60)


async def test_never_iterated_submits_nothing() -> None:
    async with running() as setup:
        stream = setup.endless()
        del stream
        setup.endless().close()
        await assert_quiescent(setup.engine)
        assert setup.engine.stats().num_aborts == 0
    assert setup.runner.num_steps == 0


async def test_a_timeout_around_one_anext_loses_nothing() -> None:
    async with running(is_open=False) as setup, setup.endless(max_new_tokens=12) as stream:
        tokens: list[int] = []
        num_timeouts = 0
        while True:
            try:
                async with asyncio.timeout(0.002):
                    chunk = await anext(stream)
            except TimeoutError:
                num_timeouts += 1
                setup.gate.release()
                continue
            except StopAsyncIteration:
                break
            tokens += chunk.token_ids
        assert tokens == solo([1, 2, 3], 12)
        assert num_timeouts >= 12
        assert setup.engine.stats().num_aborts == 0


async def test_move_on_after_around_one_anext_loses_nothing() -> None:
    async with running(is_open=False) as setup, setup.endless(max_new_tokens=6) as stream:
        tokens: list[int] = []
        while len(tokens) < 6:
            with anyio.move_on_after(0.002) as scope:
                tokens += (await anext(stream)).token_ids
            if scope.cancelled_caught:
                setup.gate.release()
        assert tokens == solo([1, 2, 3], 6)


async def test_wait_for_in_a_loop_loses_nothing() -> None:
    async with running(is_open=False) as setup, setup.endless(max_new_tokens=6) as stream:
        tokens: list[int] = []
        while len(tokens) < 6:
            try:
                tokens += (await asyncio.wait_for(anext(stream), 0.002)).token_ids
            except TimeoutError:
                setup.gate.release()
        assert tokens == solo([1, 2, 3], 6)


async def test_a_token_that_arrives_with_the_cancellation_is_kept() -> None:
    """The reader has been woken for a token and is cancelled before it runs."""
    async with running(is_open=False) as setup, setup.endless(max_new_tokens=3) as stream:
        reader = asyncio.create_task(_next(stream))
        await setup.gate.held()
        slot = stream._slot
        assert slot is not None
        await setup.gate.step()
        await spin(lambda: bool(slot.ready))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        setup.gate.open()
        tokens = [token async for chunk in stream for token in chunk.token_ids]
        assert tokens == solo([1, 2, 3], 3)


async def test_finish_delivers_what_is_there() -> None:
    async with running(is_open=False) as setup, setup.endless() as stream:
        await setup.gate.held()
        await setup.gate.step(3)
        await setup.gate.held()
        stream.finish()
        stream.finish()
        setup.gate.open()
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "cancelled"
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        # The step that was running when it was told to finish counts.
        assert tokens == solo([1, 2, 3], 4)
        usage = chunks[-1].usage
        assert usage is not None and usage.num_output_tokens == 4


async def test_finish_before_submission_ends_it_without_output() -> None:
    async with running() as setup:
        stream = setup.endless(max_new_tokens=2)
        stream.finish()
        (chunk,) = [chunk async for chunk in stream]
        assert (chunk.token_ids, chunk.finish_reason) == ((), "cancelled")
        assert chunk.usage is not None and chunk.usage.num_prompt_tokens == 3
        completion = setup.endless(max_new_tokens=2)
        completion.finish()
        assert (await completion).finish_reason == "cancelled"
        assert setup.runner.num_steps == 0


async def _chunks(stream: aiocb.Stream) -> list[aiocb.Chunk]:
    return [chunk async for chunk in stream]


async def test_finish_while_waiting_for_room_ends_it_without_output() -> None:
    async with running(is_open=False, config=aiocb.EngineConfig(max_queue_size=1, max_requests_per_batch=1)) as setup:
        first = setup.endless()
        await first.__aenter__()
        await setup.gate.held()
        second = setup.endless()
        await second.__aenter__()  # fills the queue
        third = setup.endless()
        task = asyncio.create_task(_chunks(third))
        await spin(lambda: third._intent.withdraw is not None)
        third.finish()
        assert [chunk.finish_reason for chunk in await task] == ["cancelled"]
        first.close()
        second.close()


@pytest.mark.parametrize("leave", ["finish", "close"])
async def test_a_thread_that_leaves_a_stream_as_it_is_submitted_is_heard(
    leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has the request already, and the stream does not know its slot yet."""
    async with running(is_open=False) as setup:
        stream, put = setup.endless(), Worker.put

        def put_and_leave(worker: Worker, command: Any) -> None:
            put(worker, command)
            if command[0] is EngineCore.submit:
                thread = threading.Thread(target=getattr(stream, leave))
                thread.start()
                thread.join()

        monkeypatch.setattr(Worker, "put", put_and_leave)
        setup.gate.open()
        reasons = [chunk.finish_reason async for chunk in stream]
        assert reasons[-1:] == ([] if leave == "close" else ["cancelled"])


async def test_finish_after_the_end_is_nothing() -> None:
    async with running() as setup:
        stream = setup.endless(max_new_tokens=2)
        assert len(await read_some(stream, 2)) == 2
        async for _ in stream:
            pass
        stream.finish()


async def test_late_and_double_close_are_nothing() -> None:
    async with running() as setup:
        async with setup.endless(max_new_tokens=3) as stream:
            chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "length"
        stream.close()
        stream.close()
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
        await settle(setup.engine)
        stats = setup.engine.stats()
        assert stats.num_aborts == 0
        assert stats.request_success == {"length": 1}
        other = setup.endless()
        await read_some(other, 1)
        other.close()
        other.close()
        await settle(setup.engine)
        assert setup.engine.stats().num_aborts == 1


async def test_a_closed_stream_ends_for_whoever_reads_it() -> None:
    async with running() as setup:
        closed = setup.endless()
        closed.close()
        assert [chunk async for chunk in closed] == []
        async with setup.endless() as inside:
            inside.close()
            assert [chunk async for chunk in inside] == []
        unread = setup.endless()
        unread.close()
        completion = await unread
        assert completion.finish_reason == "cancelled" and completion.token_ids == ()
        async with unread as entered:
            assert [chunk async for chunk in entered] == []
        assert "closed" in repr(unread)


async def test_closing_while_it_is_awaited_gives_what_is_there() -> None:
    async with running() as setup:
        stream = setup.endless()

        async def whole() -> aiocb.Completion:
            return await stream

        task = asyncio.create_task(whole())
        await spin(lambda: setup.runner.num_steps >= 3)
        stream.close()
        assert (await task).finish_reason == "cancelled"


async def test_two_readers_at_once_are_refused() -> None:
    async with running(is_open=False) as setup, setup.endless() as stream:
        first = asyncio.create_task(_next(stream))
        await setup.gate.held()
        with pytest.raises(anyio.BusyResourceError):
            await anext(stream)
        await setup.gate.step()
        assert (await first).token_ids == tuple(solo([1, 2, 3], 1))


async def test_an_end_and_a_cancellation_in_one_step_give_one_end() -> None:
    """Cancelled in the very step that finishes the request."""
    async with running(is_open=False) as setup:
        for leave in (aiocb.Stream.close, aiocb.Stream.finish):
            stream = setup.endless(max_new_tokens=2)
            await stream.__aenter__()
            await setup.gate.held()
            await setup.gate.step()
            await setup.gate.held()
            leave(stream)
            setup.gate.release()
            if leave is aiocb.Stream.finish:
                reasons = [chunk.finish_reason async for chunk in stream if chunk.finish_reason]
                assert reasons == ["length"]
            else:
                assert [chunk async for chunk in stream] == []
            setup.gate.open()
            await assert_quiescent(setup.engine)
            setup.gate.close()
        assert setup.engine.stats().request_success == {"length": 2}


async def test_a_stream_does_not_keep_the_slot_in_a_cycle() -> None:
    """Dropping a stream frees it at once, with the collector off."""
    async with running() as setup:
        gc.disable()
        try:
            stream = setup.endless()
            await read_some(stream, 2)
            del stream
            await assert_quiescent(setup.engine)
        finally:
            gc.enable()


async def _next(stream: aiocb.Stream) -> aiocb.Chunk:
    return await anext(stream)
