"""The engine's life: starting, failing to start, dying, hanging, pausing, draining and closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aiocb
from aiocb.records import Record
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import FakeRunner, Gate, assert_quiescent, fake_engine, settle, submitted
from aiocb.testing.quiescent import worker_threads

from .helpers import CHECKED, ENDLESS, read_some, running, solo, spin


def engine_of(make_runner: Callable[[aiocb.EngineConfig], FakeRunner], **options: float | None) -> aiocb.Engine:
    return aiocb.Engine.from_runner(make_runner, ModelDefaults(260, 4096), config=CHECKED, **options)


class SlowStart:
    """A runner whose building waits until it is told to go on."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.runner = FakeRunner()

    def __call__(self, _: aiocb.EngineConfig) -> FakeRunner:
        self.began.set()
        assert self.may_end.wait(20)
        return self.runner


def state_of(engine: aiocb.Engine) -> str:
    return engine.state


# ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_start_that_fails_raises_and_leaves_no_thread() -> None:
    calls = []

    def build(_: aiocb.EngineConfig) -> FakeRunner:
        calls.append(1)
        if len(calls) < 3:
            raise FileNotFoundError("no weights")
        return FakeRunner()

    engine = engine_of(build)
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="no weights"):
            await engine.__aenter__()
        assert not worker_threads()
        with pytest.raises(aiocb.EngineClosed):
            await engine.generate([1])
    async with engine:  # and a third entry is a fresh start
        assert list((await engine.generate([1], max_new_tokens=3)).token_ids) == solo([1], 3)


async def test_two_who_wait_for_a_start_that_fails() -> None:
    gate = threading.Event()

    def build(_: aiocb.EngineConfig) -> FakeRunner:
        gate.wait(20)
        raise aiocb.ConfigError("too small")

    engine = engine_of(build)
    tasks = [asyncio.create_task(engine.__aenter__()) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [aiocb.ConfigError] * 2
    assert not worker_threads()


async def test_a_cache_that_is_too_small_is_a_config_error() -> None:
    engine = engine_of(lambda _: FakeRunner(num_blocks=1))
    with pytest.raises(aiocb.ConfigError, match="too small"):
        await engine.__aenter__()
    assert not worker_threads()


async def test_an_entry_that_is_cancelled_leaves_no_thread() -> None:
    start = SlowStart()
    engine = engine_of(start)
    task = asyncio.create_task(engine.__aenter__())
    await asyncio.to_thread(start.began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    start.may_end.set()
    for thread in worker_threads():
        await asyncio.to_thread(thread.join, 10)
    assert not worker_threads() and start.runner.is_closed
    async with engine:
        assert len((await engine.generate([1], max_new_tokens=3)).token_ids) == 3


async def test_settings_among_the_options_are_refused_before_anything_starts() -> None:
    with pytest.raises(aiocb.ConfigError, match=r"config=EngineConfig\(max_batch_tokens=64, native=False\)"):
        aiocb.Engine.from_pretrained("smollm2", native=False, revision="main", max_batch_tokens=64)
    with pytest.raises(aiocb.ConfigError, match=r"config=EngineConfig\(block_size=16\)"):
        aiocb.Engine.from_pretrained("smollm2", block_size=16)


@pytest.mark.parametrize(
    "setting",
    [
        {"use_cuda_graph": True},
        {"q_padding_interval_size": 32},
        {"kv_padding_interval_size": 1024},
        {"use_async_batching": True},
        {"default_compile_level": 2},
        {"varlen_compile_config": {"mode": "default"}},
        {"decode_compile_config": {"dynamic": True}},
        {"max_blocks_per_request": 4},
        {"per_request_processors": False},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_without_effect_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(aiocb.ConfigError, match=next(iter(setting))):
        fake_engine(config=aiocb.EngineConfig(**setting))


async def test_closing_during_the_start() -> None:
    start = SlowStart()
    engine = engine_of(start)
    entering = asyncio.create_task(engine.__aenter__())
    await asyncio.to_thread(start.began.wait)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    with pytest.raises(aiocb.EngineClosed):
        await engine.generate([1])
    start.may_end.set()
    with pytest.raises(aiocb.EngineClosed, match="starting"):
        await entering
    await closing
    assert not worker_threads() and start.runner.is_closed


async def test_the_loop_is_free_during_the_start() -> None:
    start = SlowStart()
    engine = engine_of(start)
    entering = asyncio.create_task(engine.__aenter__())
    await asyncio.to_thread(start.began.wait)
    assert state_of(engine) == "starting" and not engine.health().is_ok
    for _ in range(100):
        await asyncio.sleep(0)
    start.may_end.set()
    await entering
    assert engine.health().is_ok
    await engine.aclose()


async def test_nothing_works_outside() -> None:
    engine = fake_engine("x", config=CHECKED)
    for _ in range(2):
        with pytest.raises(aiocb.EngineClosed):
            await engine.generate("Hi")
        with pytest.raises(aiocb.EngineClosed):
            async for _ in engine.stream("Hi"):
                pass
        with pytest.raises(aiocb.EngineClosed):
            engine.reset_prefix_cache()
        with pytest.raises(aiocb.EngineClosed):
            async with engine.pause():
                pass
        async with engine:
            pass
    with pytest.raises(aiocb.EngineError, match="closed"):
        engine.health().raise_if_bad()


# ── dying and hanging ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_step_that_raises_ends_every_stream() -> None:
    cause = MemoryError("out of memory")
    config = aiocb.EngineConfig(max_requests_per_batch=4, max_queue_size=4, debug_checks=True)
    async with running(raise_at={3: cause}, config=config, is_open=False) as setup:
        engine = setup.engine
        streams = [setup.endless([index]) for index in range(4)]
        readers: list[asyncio.Task[Any]] = [asyncio.create_task(read_some(stream, 100)) for stream in streams]
        await setup.gate.held()
        readers += [asyncio.create_task(engine.generate([9, i], n=2, **ENDLESS)) for i in range(2)]
        await setup.gate.step()
        await setup.gate.held()
        readers += [asyncio.create_task(engine.generate([8, i], **ENDLESS)) for i in range(2)]
        await setup.gate.step()
        await setup.gate.held()
        context = engine.pause()  # asked for during the step that raises
        pausing = asyncio.create_task(context.__aenter__())
        await asyncio.sleep(0)
        setup.gate.open()
        results = await asyncio.gather(*readers, pausing, return_exceptions=True)
        assert [type(result) for result in results] == [aiocb.EngineDead] * 9
        assert len({id(result) for result in results}) == 9, "each has an error of its own"
        assert all(result.__cause__ is cause for result in results if isinstance(result, aiocb.EngineDead))
        assert state_of(engine) == "dead"
        for _ in range(2):
            with pytest.raises(aiocb.EngineDead) as caught:
                await engine.generate([1])
            assert caught.value.__cause__ is cause
        health = engine.health()
        assert not health.is_ok and health.error is cause
        with pytest.raises(aiocb.EngineDead):
            health.raise_if_bad()
        for stream in streams:
            stream.close()
    assert not worker_threads()


async def test_a_dead_engine_can_be_entered_again() -> None:
    runner = FakeRunner(raise_at={2: OSError("device")})
    engine = engine_of(lambda _: runner)
    async with engine:
        with pytest.raises(aiocb.EngineDead):
            await engine.generate([1], max_new_tokens=5)
        async with engine:
            assert list((await engine.generate([1], max_new_tokens=5)).token_ids) == solo([1], 5)
        assert state_of(engine) == "running", "the outer entry still holds it"
        assert len((await engine.generate([1], max_new_tokens=5)).token_ids) == 5
    assert state_of(engine) == "closed" and not worker_threads()


async def test_what_was_delivered_before_the_death_is_read_first() -> None:
    async with running(raise_at={4: OSError("device")}) as setup:
        tokens: list[int] = []
        with pytest.raises(aiocb.EngineDead):
            async for chunk in setup.endless([1, 2, 3]):
                tokens += chunk.token_ids
        assert tokens == solo([1, 2, 3], 3)


async def test_a_step_that_wedges_is_seen() -> None:
    config = aiocb.EngineConfig(hang_timeout=0.05)
    async with running(hang_at={2}, config=config) as setup:
        task = asyncio.create_task(setup.engine.generate([1], max_new_tokens=4))
        await spin(lambda: setup.runner.is_hanging)
        await asyncio.sleep(0.06)
        health = setup.engine.health()
        assert health.state == "running" and health.is_hung and not health.is_ok
        assert health.step_age_s is not None and health.step_age_s > 0.05
        with pytest.raises(aiocb.EngineDead, match="hangs"):
            health.raise_if_bad()
        setup.runner.resume()
        assert list((await task).token_ids) == solo([1], 4)
        health = setup.engine.health()
        assert health.is_ok and not health.is_hung
        await asyncio.sleep(0.06)  # idle for longer than the bound: not hung
        assert setup.engine.health().is_ok


async def test_one_request_that_fails_ends_alone() -> None:
    def fail(step: int, record: Record) -> Exception | None:
        return ValueError("this processor raises") if record.tokens[0] == 13 and step >= 3 else None

    async with running(fail=fail, is_open=False) as setup:
        good = [asyncio.create_task(setup.engine.generate([i], max_new_tokens=20)) for i in (1, 2)]
        bad = asyncio.create_task(setup.engine.generate([13], max_new_tokens=20))
        samples = asyncio.create_task(setup.engine.generate([13], max_new_tokens=20, n=3))
        await setup.gate.held()
        await submitted(setup.engine)
        setup.gate.open()
        for task in (bad, samples):
            with pytest.raises(aiocb.RequestFailed, match="this processor raises") as caught:
                await task
            assert isinstance(caught.value.__cause__, ValueError)
            assert 1 <= len(caught.value.partial[0].token_ids) <= 3
        for i, task in zip((1, 2), good, strict=True):
            assert list((await task).token_ids) == solo([i], 20)
        await assert_quiescent(setup.engine)


async def test_a_submission_that_the_scheduler_refuses_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiocb.scheduler.scheduler import Scheduler

    add = Scheduler.add

    def refuse(self: Scheduler, request: object) -> None:
        if request.tokens[0] == 13:  # type: ignore[attr-defined]
            raise RuntimeError("not this one")
        add(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "add", refuse)
    async with running() as setup:
        good = asyncio.create_task(setup.engine.generate([1], max_new_tokens=20))
        for n in (1, 3):
            with pytest.raises(aiocb.RequestFailed, match="not this one"):
                await setup.engine.generate([13], max_new_tokens=20, n=n)
        assert list((await good).token_ids) == solo([1], 20)


# ── pausing ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_pause_holds_the_steps_and_forgets_the_prefixes() -> None:
    async with running() as setup:
        prompt, other = list(range(64)), list(range(100, 164))
        for _ in range(2):
            completion = await setup.engine.generate(other, max_new_tokens=2)
        assert completion.usage.num_cached_tokens == 48
        async with setup.endless(prompt, max_new_tokens=2000) as stream:
            tokens = await read_some(stream, 3)
            async with setup.engine.pause():
                num_steps = setup.runner.num_steps
                waiting = asyncio.create_task(setup.engine.generate(other, max_new_tokens=2))
                await settle(setup.engine)
                assert setup.runner.num_steps == num_steps
            completion = await waiting
            assert completion.usage.num_cached_tokens == 0, "the weights may have changed"
            tokens += await read_some(stream, 50)
            assert tokens == solo(prompt, len(tokens)), "a running request goes on where it was"


async def test_pauses_nest() -> None:
    async with running() as setup:
        first, second = setup.engine.pause(), setup.engine.pause()
        await first.__aenter__()
        await second.__aenter__()
        await first.__aexit__(None, None, None)
        task = asyncio.create_task(setup.engine.generate([1], max_new_tokens=2))
        await settle(setup.engine)
        assert setup.runner.num_steps == 0
        await second.__aexit__(None, None, None)
        await task


async def test_pause_gives_up_when_cancelled() -> None:
    async with running(is_open=False) as setup:
        task = asyncio.create_task(setup.engine.generate([1], max_new_tokens=4))
        await setup.gate.held()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), setup.engine.pause():
                raise AssertionError("a step is running")
        setup.gate.open()
        assert len((await task).token_ids) == 4


async def test_while_paused_deadlines_hold_and_aborts_free() -> None:
    async with running() as setup, setup.engine.pause():
        with pytest.raises(aiocb.RequestTimeout):
            await setup.engine.generate([1], timeout=0.01, **ENDLESS)
        stream = setup.endless()
        await stream.__aenter__()
        stream.close()
        await assert_quiescent(setup.engine)


# ── closing ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_leaving_with_open_streams_ends_them() -> None:
    gate = Gate()
    engine = fake_engine(runner=FakeRunner(gate=gate), tokenizer=False, config=CHECKED)
    async with engine:
        stream = engine.stream([1], **ENDLESS)
        task = asyncio.create_task(read_some(stream, 10_000))
        await gate.held()
        gate.open()
    with pytest.raises(aiocb.EngineClosed):
        await task
    await assert_quiescent(engine)


async def test_close_with_a_thousand_queued() -> None:
    gate = Gate()
    config = aiocb.EngineConfig(max_requests_per_batch=2)
    engine = fake_engine(runner=FakeRunner(gate=gate), tokenizer=False, config=config)
    async with engine:
        tasks = [asyncio.create_task(engine.generate([i % 200], **ENDLESS)) for i in range(1000)]
        await gate.held()
        gate.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {aiocb.EngineClosed}
    await assert_quiescent(engine)


async def test_close_twice_and_at_once() -> None:
    async with running() as setup:
        task = asyncio.create_task(read_some(setup.endless(), 10_000))
        await spin(lambda: setup.runner.num_steps > 2)
        await asyncio.gather(setup.engine.aclose(), setup.engine.aclose(), setup.engine.aclose(drain=None))
        await setup.engine.aclose()
        with pytest.raises(aiocb.EngineClosed):
            await task
        assert state_of(setup.engine) == "closed"


async def test_draining_finishes_what_runs_and_accepts_nothing() -> None:
    gate = Gate()
    engine = fake_engine(runner=FakeRunner(gate=gate), tokenizer=False, config=CHECKED)
    async with engine:
        tasks = [asyncio.create_task(engine.generate([i], max_new_tokens=8)) for i in range(3)]
        await gate.held()
        closing = asyncio.create_task(engine.aclose(drain=None))
        await asyncio.sleep(0)
        assert state_of(engine) == "draining" and engine.health().is_ok
        with pytest.raises(aiocb.EngineClosed, match="draining"):
            await engine.generate([5])
        gate.open()
        for i, task in enumerate(tasks):
            assert list((await task).token_ids) == solo([i], 8)
        await closing
        assert state_of(engine) == "closed"


@pytest.mark.parametrize("is_begun_only", [False, True])
async def test_draining_lets_in_all_that_had_begun_however_full_the_queue(is_begun_only: bool) -> None:
    config = aiocb.EngineConfig(max_queue_size=1, max_requests_per_batch=1, debug_checks=True)
    async with running(is_open=False, config=config) as setup:
        tasks = [asyncio.create_task(setup.engine.generate([index], max_new_tokens=2)) for index in range(6)]
        await asyncio.sleep(0)  # each has begun, and is being prepared
        if not is_begun_only:
            session = setup.engine._lives.session
            assert session is not None
            await spin(lambda: sum(len(line._places) for line in session.room._lines) >= 4)
        closing = asyncio.create_task(setup.engine.aclose(drain=None))
        await asyncio.sleep(0)
        setup.gate.open()
        assert [list((await task).token_ids) for task in tasks] == [solo([index], 2) for index in range(6)]
        await closing


async def test_draining_has_a_deadline() -> None:
    engine = fake_engine(runner=FakeRunner(step_time=0.001), tokenizer=False, config=CHECKED)
    async with engine:
        task = asyncio.create_task(read_some(engine.stream([1], **ENDLESS), 10_000))
        await asyncio.sleep(0)
        await engine.aclose(drain=0.05)
    with pytest.raises(aiocb.EngineClosed):
        await task


async def test_a_second_close_cuts_a_drain_short() -> None:
    gate = Gate()
    engine = fake_engine(runner=FakeRunner(gate=gate), tokenizer=False, config=CHECKED)
    await engine.__aenter__()
    task = asyncio.create_task(read_some(engine.stream([1], **ENDLESS), 10_000))
    await gate.held()
    patient = asyncio.create_task(engine.aclose(drain=None))
    also_patient = asyncio.create_task(engine.aclose(drain=None))
    await asyncio.sleep(0)
    gate.open()
    assert not patient.done()
    await engine.aclose()
    await asyncio.gather(patient, also_patient)
    with pytest.raises(aiocb.EngineClosed):
        await task
    assert not worker_threads()


async def test_draining_on_the_way_out() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False, config=CHECKED, drain=None)
    async with engine:
        stream = engine.stream([1], max_new_tokens=50)
        await stream.__aenter__()
    assert [token async for chunk in stream for token in chunk.token_ids] == solo([1], 50)
    with pytest.raises(KeyError):
        async with engine:
            stream = engine.stream([1], **ENDLESS)
            await read_some(stream, 1)
            raise KeyError("an error does not wait")
    stream.close()


async def test_a_close_that_is_cancelled_leaves_no_thread() -> None:
    gate = Gate()
    engine = fake_engine(runner=FakeRunner(gate=gate), tokenizer=False, config=CHECKED)
    await engine.__aenter__()
    task = asyncio.create_task(read_some(engine.stream([1], **ENDLESS), 10_000))
    await gate.held()
    closing = asyncio.create_task(engine.aclose(drain=None))
    await asyncio.sleep(0)
    closing.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(aiocb.EngineClosed):
        await task
    assert not worker_threads()


async def test_the_last_to_leave_closes() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False, config=CHECKED)
    async with engine:
        async with engine:
            await engine.generate([1], max_new_tokens=2)
        assert state_of(engine) == "running"
        await engine.generate([1], max_new_tokens=2)
    assert state_of(engine) == "closed"


async def test_streams_of_an_earlier_life_are_closed_in_peace() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False, config=CHECKED)
    async with engine:
        old = engine.stream([1], **ENDLESS)
        await read_some(old, 2)
    async with engine:
        new = asyncio.create_task(engine.generate([2], max_new_tokens=100))
        with pytest.raises(aiocb.EngineClosed):
            await read_some(old, 10_000)
        old.close()
        del old
        assert list((await new).token_ids) == solo([2], 100)


async def test_the_runner_is_given_back_once_per_life() -> None:
    num_closed = 0

    class Counted(FakeRunner):
        def close(self) -> None:
            nonlocal num_closed
            num_closed += 1
            super().close()

    engine = fake_engine(runner=Counted(), tokenizer=False, config=CHECKED)
    for count in (1, 2):
        async with engine:
            await engine.generate([1], max_new_tokens=2)
        assert num_closed == count


async def test_an_exit_after_aclose_leaves_the_next_session_alone() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with engine:
            entered.set()
            await leave.wait()

    holder = asyncio.create_task(hold())
    await entered.wait()
    await engine.aclose()
    async with engine:
        leave.set()
        await holder
        assert state_of(engine) == "running"
        assert len((await engine.generate([1], max_new_tokens=3)).token_ids) == 3
    assert state_of(engine) == "closed"


async def test_nested_entries_of_one_task_around_aclose() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False)
    async with engine:
        await engine.aclose()
        async with engine:
            pass
        assert state_of(engine) == "closed"
        async with engine:
            assert state_of(engine) == "running"
    assert state_of(engine) == "closed"


async def test_entered_in_one_task_and_left_in_another() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False)
    for _ in range(2):
        await asyncio.create_task(engine.__aenter__())
        assert state_of(engine) == "running"
        await asyncio.create_task(engine.__aexit__(None, None, None))
        assert state_of(engine) == "closed"
    # Closed without an exit: the next session's only exit closes it all the same.
    await asyncio.create_task(engine.__aenter__())
    await engine.aclose()
    async with engine:
        pass
    assert state_of(engine) == "closed"


async def test_a_task_that_closed_without_leaving_may_still_end_another_entry() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False)
    await engine.__aenter__()
    await engine.aclose()  # this task will never exit
    await asyncio.create_task(engine.__aenter__())
    await engine.__aexit__(None, None, None)
    assert state_of(engine) == "closed"


async def test_a_late_exit_of_a_task_that_has_ended() -> None:
    engine = fake_engine(runner=FakeRunner(), tokenizer=False)
    await asyncio.create_task(engine.__aenter__())
    await engine.aclose()
    async with engine:
        await asyncio.create_task(engine.__aexit__(None, None, None))  # of the first entry
        assert state_of(engine) == "running"
    assert state_of(engine) == "closed"
