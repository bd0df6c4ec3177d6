"""Several lives of one engine over one runner: who has it, who waits, who is told. `FakeRunner` checks every step."""

from __future__ import annotations

import asyncio
import logging
import random
import subprocess
import sys

import pytest

import aiocb
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import FakeRunner, Gate, assert_quiescent, fake_engine
from aiocb.testing.quiescent import worker_threads

from .helpers import CHECKED, ENDLESS, read_some, solo, spin


def shared(runner: FakeRunner, **options: float) -> aiocb.Engine:
    """An engine whose lives all have this runner."""
    config = aiocb.EngineConfig(debug_checks=True, **options)  # type: ignore[arg-type]
    defaults = ModelDefaults(runner.vocab_size, runner.max_model_len, ())
    return aiocb.Engine.from_runner(lambda _: runner, defaults, config=config)


async def test_entering_while_a_life_drains_waits_for_its_end() -> None:
    gate = Gate()
    engine = shared(FakeRunner(gate=gate))
    await engine.__aenter__()
    reader = asyncio.create_task(engine.generate([1], max_new_tokens=40))
    await gate.held()
    closing = asyncio.create_task(engine.aclose(drain=None))
    await spin(lambda: engine.state == "draining")

    async def enter() -> tuple[int, ...]:
        async with engine:
            return (await engine.generate([2], max_new_tokens=40)).token_ids

    second = asyncio.create_task(enter())
    await gate.step(20)
    assert not second.done() and engine.state == "starting", "the first life has not come to its end"
    gate.open()
    assert list((await reader).token_ids) == solo([1], 40)
    assert list(await second) == solo([2], 40)
    await closing
    await assert_quiescent(engine)


async def test_who_waits_too_long_is_told_for_whom() -> None:
    gate = Gate()
    engine = shared(FakeRunner(gate=gate), start_timeout=0.05)
    await engine.__aenter__()
    stream = engine.stream([1], **ENDLESS)
    await stream.__aenter__()
    await gate.held()
    closing = asyncio.create_task(engine.aclose(drain=None))
    await spin(lambda: engine.state == "draining")
    with pytest.raises(aiocb.EngineError, match=r"life 1 of the engine over runner \(draining\).*start_timeout"):
        await engine.__aenter__()
    stream.close()
    gate.open()
    await closing
    async with engine:
        assert list((await engine.generate([3], max_new_tokens=5)).token_ids) == solo([3], 5)
    assert not worker_threads()


async def test_closing_while_waiting_for_an_earlier_life_ends_the_wait() -> None:
    gate = Gate()
    engine = shared(FakeRunner(gate=gate))
    await engine.__aenter__()
    stream = engine.stream([1], **ENDLESS)
    await stream.__aenter__()
    await gate.held()
    first = asyncio.create_task(engine.aclose(drain=None))
    await spin(lambda: engine.state == "draining")
    second = asyncio.create_task(engine.__aenter__())
    await spin(lambda: engine.state == "starting")
    await engine.aclose()
    with pytest.raises(aiocb.EngineClosed, match="while it was starting"):
        await second
    stream.close()
    gate.open()
    await first
    assert not worker_threads()


async def test_a_second_life_knows_nothing_of_the_first() -> None:
    """Ids go on, seeds and samplers begin anew; the fake runner refuses an id that it has met."""
    runner = FakeRunner()
    engine = shared(runner)
    sampled = aiocb.SamplingParams(temperature=1.0, seed=5, max_new_tokens=8)
    async with engine:
        await engine.generate([1], max_new_tokens=8)
        expected = (await engine.generate([1], sampled)).token_ids
    assert runner.num_open == 0
    async with engine:
        assert (await engine.generate([1], sampled)).token_ids == expected
        assert list((await engine.generate([1], max_new_tokens=8)).token_ids) == solo([1], 8)
    assert runner.num_open == 0


async def test_leaving_in_the_middle_of_a_step_gives_the_runner_back_empty() -> None:
    gate = Gate()
    runner = FakeRunner(gate=gate)
    engine = shared(runner)
    for first in (1, 2, 3):
        async with engine:
            streams = [engine.stream([first, index], **ENDLESS) for index in range(5)]
            for stream in streams:
                await stream.__aenter__()
            await gate.held()
            gate.release()
        assert runner.num_open == 0


@pytest.mark.parametrize("seed", range(6))
async def test_a_random_history_of_entries_and_exits(seed: int) -> None:
    """Whoever is inside is served, by one worker at a time, whatever the others do."""
    chance = random.Random(seed)
    runner = FakeRunner()
    engine = shared(runner, start_timeout=20.0)
    served = 0

    async def visit(index: int) -> None:
        nonlocal served
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        try:
            async with engine:
                completion = await engine.generate([index], max_new_tokens=chance.randrange(1, 60))
                assert list(completion.token_ids) == solo([index], len(completion.token_ids))
                served += 1
                if chance.random() < 0.3:
                    await engine.aclose(drain=chance.choice((0.0, None)))
        except aiocb.EngineClosed:
            pass  # somebody closed it

    tasks = [asyncio.create_task(visit(index)) for index in range(40)]
    for task in chance.sample(tasks, 6):
        await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [result for result in results if isinstance(result, Exception)]
    assert served > 0
    await engine.aclose()
    await assert_quiescent(engine)
    assert runner.num_open == 0 and not worker_threads()


async def test_two_engines_over_one_source_of_runners_have_one_each() -> None:
    one, other = fake_engine(tokenizer=False, config=CHECKED), fake_engine(tokenizer=False, config=CHECKED)
    async with one, other:
        results = await asyncio.gather(*(e.generate([i], max_new_tokens=30) for i in range(5) for e in (one, other)))
    assert [list(result.token_ids) for result in results] == [solo([i], 30) for i in range(5) for _ in (one, other)]


async def test_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "aiocb worker":
            raise RuntimeError("can't start new thread")
        start(self)

    engine = shared(FakeRunner())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(aiocb.EngineError, match="worker thread cannot be started"):
            await engine.__aenter__()
    assert engine.state == "created"
    async with engine:
        assert list((await engine.generate([1], max_new_tokens=3)).token_ids) == solo([1], 3)


# ── other loops, other processes ─────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_is_read_where_it_was_opened() -> None:
    async with fake_engine(tokenizer=False, config=CHECKED) as engine:
        stream = engine.stream([1], **ENDLESS)
        await read_some(stream, 2)

        def read_elsewhere() -> None:
            with pytest.raises(aiocb.EngineError, match="in the event loop that it was opened in"):
                asyncio.run(read_some(stream, 1))

        await asyncio.to_thread(read_elsewhere)
        await read_some(stream, 1)
        stream.close()
        await assert_quiescent(engine)


@pytest.mark.slow
async def test_every_life_says_once_what_it_chose(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(1))
    engine = shared(FakeRunner(), freeze_gc=True)
    with caplog.at_level(logging.INFO, "aiocb"):
        for life in (1, 2):
            async with engine, engine:
                said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
                expected = [f"{one.name} = {one.value} ({one.reason})" for one in engine.describe()]
                assert said == expected * life and any("max_request_tokens" in one for one in said)
                assert len(frozen) == life


FORKED = """
import asyncio, os, sys
from aiocb.testing import fake_engine

engine = fake_engine(tokenizer=False)
loop = asyncio.new_event_loop()
loop.run_until_complete(engine.__aenter__())
stream = engine.stream([1], max_new_tokens=10000)
loop.run_until_complete(anext(stream))

async def in_child():
    print(engine.state, engine.health().is_ok, engine.health().is_hung)
    for attempt in (engine.generate([1], max_new_tokens=2), engine.__aenter__(), anext(stream), engine.aclose()):
        try:
            print(type(await attempt).__name__)
        except Exception as error:
            print(type(error).__name__, "fork before it is entered" in str(error))

if CLOSED:
    stream.close()
    loop.run_until_complete(engine.__aexit__(None, None, None))
pid = os.fork()
if pid == 0:
    if CLOSED:
        async def use():
            async with engine:
                return len((await engine.generate([1], max_new_tokens=5)).token_ids)
        print(asyncio.new_event_loop().run_until_complete(use()))
    else:
        asyncio.new_event_loop().run_until_complete(in_child())
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
if not CLOSED:
    stream.close()
    loop.run_until_complete(engine.__aexit__(None, None, None))
loop.close()
"""


def forked(*, closed: bool) -> list[str]:
    code = FORKED.replace("CLOSED", str(closed))
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]  # 3.12 warns of threads at a fork
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_fork_while_it_runs_gets_typed_errors_at_once() -> None:
    lines = forked(closed=False)
    assert lines == ["closed False False", *["EngineClosed True"] * 3, "NoneType"]


def test_a_fork_after_it_was_closed_works() -> None:
    assert forked(closed=True) == ["5"]
