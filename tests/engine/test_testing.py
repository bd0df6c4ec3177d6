"""The shipped test tools find what they are meant to find."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiocb
from aiocb.step import OpenedRequest, StepEntry, StepPlan
from aiocb.testing import FakeRunner, Gate, assert_quiescent, byte_tokenizer, fake_engine, settle, submitted

from .helpers import CHECKED, ENDLESS, read_some, running, solo, spin


async def test_the_example_of_the_documentation() -> None:
    async with fake_engine(reply="Hello!") as engine:
        completion = await engine.generate("Hi")
        assert completion.text == "Hello!"
        await assert_quiescent(engine)


async def test_assert_quiescent_names_what_is_left() -> None:
    gate = Gate(is_open=True)
    engine = fake_engine(runner=FakeRunner(gate=gate), tokenizer=False, config=CHECKED)
    await assert_quiescent(engine)  # never entered: nothing
    async with engine:
        await assert_quiescent(engine)
        stream = engine.stream([1], request_id="left over", **ENDLESS)
        await read_some(stream, 2)
        with pytest.raises(AssertionError, match="'left over'.*blocks in use"):
            await assert_quiescent(engine)
        stream.close()
        await assert_quiescent(engine)
        paused = engine.stream([1], request_id="held back", max_unread_tokens=1, **ENDLESS)
        await paused.__aenter__()
        await spin(lambda: engine.stats().num_requests_paused == 1)
        with pytest.raises(AssertionError, match="'held back'"):
            await assert_quiescent(engine)
        paused.close()
    await assert_quiescent(engine)


@pytest.mark.parametrize("checks", [False, True])
async def test_assert_quiescent_finds_lost_blocks(checks: bool) -> None:
    config = aiocb.EngineConfig(debug_checks=checks)  # with them, the engine notices by itself
    async with running(config=config) as setup:
        await setup.engine.generate([1], max_new_tokens=2)
        session = setup.engine._lives.session
        assert session is not None and session.worker.core is not None
        pool = session.worker.core.scheduler.cache.pools[0]
        blocks = pool.try_allocate(1)
        assert blocks is not None
        with pytest.raises(AssertionError):
            await assert_quiescent(setup.engine)
        assert setup.engine.state == ("dead" if checks else "running")
        pool.free(blocks[0])


async def test_assert_quiescent_finds_those_who_wait_for_room() -> None:
    config = aiocb.EngineConfig(max_queue_size=1, max_requests_per_batch=1)
    async with running(config=config, is_open=False) as setup:
        tasks = [asyncio.create_task(setup.engine.generate([index], **ENDLESS)) for index in range(4)]
        await setup.gate.held()
        setup.gate.open()
        with pytest.raises(AssertionError, match="waits for room"):
            await assert_quiescent(setup.engine)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_gate_holds_and_lets_pass() -> None:
    async with running(is_open=False) as setup:
        gate, runner = setup.gate, setup.runner
        task = asyncio.create_task(setup.engine.generate([1, 2], max_new_tokens=10))
        await gate.held()
        assert gate.is_held and (runner.num_steps, gate.num_arrived, gate.num_finished) == (0, 1, 0)
        await gate.step()
        await gate.held()
        assert (runner.num_steps, gate.num_finished) == (1, 1)
        await gate.step(4)
        await gate.held()
        assert runner.num_steps == 5
        gate.release(2)
        await gate.held()
        assert runner.num_steps == 7
        gate.open()
        assert list((await task).token_ids) == solo([1, 2], 10)
        gate.close()
        task = asyncio.create_task(setup.engine.generate([1, 2], max_new_tokens=1))
        await gate.held()
        gate.open()
        await task


async def test_what_came_before_a_held_step_can_be_read() -> None:
    async with running(is_open=False) as setup, setup.endless([1]) as stream:
        for count in range(1, 6):
            await setup.gate.held()
            await setup.gate.step()
            await setup.gate.held()
            assert list((await anext(stream)).token_ids) == solo([1], count)[-1:]


async def test_a_gate_that_nobody_opens_fails_and_does_not_hang() -> None:
    gate = Gate(timeout=0.05)
    async with fake_engine(runner=FakeRunner(gate=gate), tokenizer=False, config=CHECKED) as engine:
        with pytest.raises(aiocb.EngineDead, match="held at the gate"):
            await engine.generate([1], max_new_tokens=2)
    idle = Gate(timeout=0.05)
    with pytest.raises(TimeoutError, match="a step to come"):
        await idle.held()
    with pytest.raises(TimeoutError, match="2 steps"):
        await idle.step(2)


async def test_a_fault_plan() -> None:
    runner = FakeRunner(
        hang_at={2},
        raise_at={4: OSError("broken")},
        fail=lambda step, record: aiocb.RequestFailed("planned") if step == 3 and record.tokens[0] == 7 else None,
    )
    async with fake_engine(runner=runner, tokenizer=False, config=CHECKED) as engine:
        good, bad = (engine.stream([first], **ENDLESS) for first in (6, 7))
        await good.__aenter__()
        await bad.__aenter__()
        await spin(lambda: runner.is_hanging)
        runner.resume()
        with pytest.raises(aiocb.RequestFailed, match="planned"):
            await read_some(bad, 100)
        with pytest.raises(aiocb.EngineDead, match="broken"):
            await read_some(good, 100)


async def test_scripted_replies() -> None:
    async with running(reply=[5, 6, 7], eos_token_id=9) as setup:
        completion = await setup.engine.generate([1])
        assert (completion.token_ids, completion.finish_reason) == ((5, 6, 7, 9), "stop")
    async with running(reply=[5, 6, 7]) as setup:
        assert (await setup.engine.generate([1], max_new_tokens=7)).token_ids == (5, 6, 7, 5, 6, 7, 5)
    async with running(reply=lambda prompt: [len(prompt), prompt[0]], eos_token_id=9) as setup:
        completions = await setup.engine.generate_batch([[3, 3, 3], [4]])
        assert [each.token_ids for each in completions] == [(3, 3, 9), (1, 4, 9)]


async def test_requests_need_not_run_in_the_order_in_which_they_came() -> None:
    config = aiocb.EngineConfig(scheduler_type="priority", max_requests_per_batch=1, debug_checks=True)
    async with running(config=config, is_open=False) as setup:
        tasks = []
        for number, priority in enumerate((0, 2, 1)):
            tasks.append(asyncio.create_task(setup.engine.generate([number], max_new_tokens=2, priority=priority)))
            await submitted(setup.engine)
        setup.gate.open()
        assert [list((await task).token_ids) for task in tasks] == [solo([number], 2) for number in range(3)]


def test_a_fake_is_stricter_than_a_model() -> None:
    runner = FakeRunner()
    sampling = aiocb.SamplingParams(temperature=0.0)
    plan = StepPlan((StepEntry(1, 0, 2, 1, True),), 2, (OpenedRequest(1, (5, 6), 2, sampling, 0),))
    runner.execute(plan)
    with pytest.raises(AssertionError, match="left 1 requests open"):
        runner.release()
    with pytest.raises(AssertionError, match="a second time"):
        runner.execute(plan)
    with pytest.raises(AssertionError, match="not open"):
        runner.execute(StepPlan((), 0, closed=(1,)))


def test_the_byte_tokenizer_is_what_it_says() -> None:
    tokenizer: Any = byte_tokenizer()
    text = "Grüße \x00\n\t  世界 👋🏽"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 256
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|user|>Hi<|end|><|assistant|>"
    assert tokenizer.decode([*b"a", 256, *b"b"], skip_special_tokens=True) == "ab"


async def test_settle_waits_for_what_was_asked() -> None:
    async with running() as setup:
        streams = [setup.endless([index]) for index in range(5)]
        for stream in streams:
            await read_some(stream, 1)
        for stream in streams:
            stream.close()
        await settle(setup.engine)
        assert setup.engine.stats().num_aborts == 5
        assert setup.engine.stats().num_requests_running == 0


def test_a_reply_and_a_runner_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="either"):
        fake_engine("text", runner=FakeRunner())
    with pytest.raises(TypeError, match="tokenizer"):
        fake_engine("text", tokenizer=False)
