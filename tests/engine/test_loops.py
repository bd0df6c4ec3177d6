"""Event loops and threads: several of them, closed ones, interrupted ones, and how long the loop is held up."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiocb
from aiocb.engine.bridge import Mailbox, next_part
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import FakeRunner, assert_quiescent, fake_engine
from aiocb.testing.quiescent import worker_threads

from .helpers import CHECKED, ENDLESS, read_some, running, solo, spin

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def made(**options: object) -> aiocb.Engine:
    return fake_engine(runner=FakeRunner(**options), tokenizer=False, config=CHECKED)  # type: ignore[arg-type]


def test_three_runs_in_a_row_on_one_engine(loop_factory: LoopFactory) -> None:
    engine = made()

    async def main() -> None:
        async with engine:
            completions = await engine.generate_batch([[1, 2], [3, 4]], max_new_tokens=5)
            assert [list(each.token_ids) for each in completions] == [solo([1, 2], 5), solo([3, 4], 5)]
        await assert_quiescent(engine)

    for _ in range(3):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())
        assert not worker_threads()


def test_one_entry_many_loops_one_after_another(loop_factory: LoopFactory) -> None:
    """An engine held open by one loop serves others that come and go, and forgets them."""
    engine = made()

    async def use() -> None:
        assert list((await engine.generate([1, 2], max_new_tokens=5)).token_ids) == solo([1, 2], 5)

    async def main() -> None:
        async with engine:
            for _ in range(20):
                await asyncio.to_thread(lambda: asyncio.run(use()))
            session = engine._lives.session
            assert session is not None and len(session._bridges) <= 2
            await use()
            assert engine.stats().num_loop_wakeups == 21  # one each: `generate` is delivered at its end

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_two_loops_in_two_threads_at_once(loop_factory: LoopFactory) -> None:
    engine = made()
    barrier = threading.Barrier(2)
    failures: list[BaseException] = []

    async def main(first: int) -> None:
        await asyncio.to_thread(barrier.wait)
        async with engine:
            tasks = [
                asyncio.create_task(engine.generate([first, index], max_new_tokens=10 + index)) for index in range(40)
            ]
            tasks.append(asyncio.create_task(engine.generate([first], **ENDLESS)))
            for index, task in enumerate(tasks[:-1]):
                assert list((await task).token_ids) == solo([first, index], 10 + index)
            tasks[-1].cancel()
            await asyncio.wait(tasks)
            await asyncio.to_thread(barrier.wait)

    def work(first: int) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(main(first))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert engine.state == "closed" and not worker_threads()


def test_a_loop_that_dies_with_streams_open(loop_factory: LoopFactory) -> None:
    """Not even its tasks are cancelled: the worker finds out and frees what belonged to it, and nothing else."""
    engine = made()

    async def main() -> None:
        async with engine:
            other = loop_factory()
            held: list[aiocb.Stream] = []

            async def begin() -> None:
                held.extend([engine.stream([5, index], **ENDLESS) for index in range(3)])
                for stream in held:
                    await read_some(stream, 1)

            def live_and_die() -> None:
                other.run_until_complete(begin())
                for task in asyncio.all_tasks(other):
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                other.close()

            neighbour = asyncio.create_task(engine.generate([7], max_new_tokens=300))
            await asyncio.to_thread(live_and_die)
            assert list((await neighbour).token_ids) == solo([7], 300)
            await spin(lambda: engine.stats().num_requests_running == 0)
            await assert_quiescent(engine)
            assert engine.stats().num_aborts == 3
            held.clear()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    gc.collect()


def test_asyncio_run_that_ends_with_streams_open(loop_factory: LoopFactory) -> None:
    """`asyncio.run` cancels all tasks, ours too: the streams of that loop end, those of another go on."""
    engine = made()
    kept: list[aiocb.Stream] = []

    async def begin() -> None:
        kept.append(engine.stream([5], **ENDLESS))
        await read_some(kept[0], 3)

    async def read_after_the_end() -> None:
        async for _ in kept[0]:
            pass

    async def main() -> None:
        async with engine:
            neighbour = asyncio.create_task(engine.generate([7], max_new_tokens=200))
            await asyncio.to_thread(lambda: asyncio.run(begin()))
            assert list((await neighbour).token_ids) == solo([7], 200)
            await assert_quiescent(engine)
            with pytest.raises(aiocb.EngineClosed, match="event loop"):
                await read_after_the_end()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_somebody_cancels_all_tasks_and_goes_on() -> None:
    """Also a dispatcher that was cancelled before its first step must not leave the loop deaf."""
    async with running() as setup:
        stream = setup.endless()
        await stream.__aenter__()  # the dispatcher has been made, and has not run
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(aiocb.EngineClosed):
            await read_some(stream, 10_000)
        stream.close()
        assert len((await setup.engine.generate([1], max_new_tokens=5)).token_ids) == 5


def test_a_forgotten_engine_ends_its_thread(loop_factory: LoopFactory) -> None:
    engine = made()

    async def main(engine: aiocb.Engine) -> None:
        await engine.__aenter__()
        await engine.generate([1], max_new_tokens=3)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main(engine))
    (thread,) = worker_threads()
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    thread.join(10)
    assert not thread.is_alive()


def test_engines_that_failed_are_freed(loop_factory: LoopFactory) -> None:
    def failing(_: aiocb.EngineConfig) -> FakeRunner:
        raise FileNotFoundError("no weights")

    async def main() -> list[weakref.ref[aiocb.Engine]]:
        unstartable = aiocb.Engine.from_runner(failing, ModelDefaults(260, 4096))
        with pytest.raises(FileNotFoundError):
            await unstartable.__aenter__()
        dying = made(raise_at={2: OSError("device")})
        async with dying:
            with pytest.raises(aiocb.EngineDead):
                await dying.generate([1], max_new_tokens=5)
        return [weakref.ref(unstartable), weakref.ref(dying)]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        references = runner.run(main())
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.slow
def test_nothing_piles_up_over_many_entries(loop_factory: LoopFactory) -> None:
    engine = made()

    async def main() -> None:
        async with engine:
            await engine.generate([1], max_new_tokens=2)

    counts = []
    for _ in range(4):
        for _ in range(5):
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(main())
        gc.collect()
        counts.append(sum(type(each).__name__ in ("EngineCore", "Worker", "Session") for each in gc.get_objects()))
    assert counts[-1] <= counts[0], counts


# The development mode reports slow callbacks too: on a busy machine there are some.
PRELUDE = """
import asyncio, logging, sys
import aiocb
from aiocb.testing import FakeRunner, fake_engine
logging.getLogger("asyncio").addFilter(lambda record: not record.msg.startswith("Executing"))
"""


def run_script(body: str, *, interrupt: bool = False) -> tuple[int, str, float]:
    """Run a program that prints `ready`; interrupt it then. Returns its code, stderr and how long it took to end."""
    script = f"{PRELUDE}{body}"
    environment = {**os.environ, "PYTHONPATH": str(Path(aiocb.__file__).parents[1]), "PYTHONDEVMODE": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            start = time.monotonic()
            if interrupt:
                process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            return process.returncode, errors, time.monotonic() - start
        finally:
            process.kill()


ENGINE = "engine = fake_engine(runner=FakeRunner(step_time=0.005), tokenizer=False)\n"


def test_interrupt_mid_stream() -> None:
    code, errors, elapsed = run_script(
        ENGINE
        + """
async def read(prompt):
    async for chunk in engine.stream([prompt], max_new_tokens=10_000):
        if prompt == 0 and len(chunk.token_ids):
            print("ready", flush=True) if not read.__dict__.setdefault("told", 0) else None
            read.told = 1

async def main():
    async with engine:
        async with asyncio.TaskGroup() as group:
            for prompt in range(8):
                group.create_task(read(prompt))
try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
""",
        interrupt=True,
    )
    assert (code, errors) == (130, "")
    assert elapsed < 10.0


def test_interrupt_where_nobody_catches_it() -> None:
    code, errors, elapsed = run_script(
        ENGINE
        + """
async def main():
    async with engine:
        async for chunk in engine.stream([1], max_new_tokens=10_000):
            if chunk.token_ids and not main.__dict__.setdefault("told", 0):
                main.told = 1
                print("ready", flush=True)
asyncio.run(main())
""",
        interrupt=True,
    )
    assert code != 0 and elapsed < 10.0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    for word in ("never awaited", "Exception ignored", "was destroyed", "Task exception", "Fatal", "aiocb worker"):
        assert word not in errors, errors


@pytest.mark.parametrize("how", ["engine", "stream"])
def test_the_interpreter_exits_with_a_forgotten_engine(how: str) -> None:
    code, errors, elapsed = run_script(
        ENGINE
        + f"""
async def main():
    global stream
    await engine.__aenter__()
    stream = engine.stream([1], max_new_tokens=10_000)
    await anext(stream)
    if {how == "engine"}:
        stream.close()
    print("ready", flush=True)
asyncio.run(main())
"""
    )
    assert (code, errors) == (0, "")
    assert elapsed < 10.0


async def lag_during(action: Callable[[], asyncio.Task[None]]) -> list[float]:
    """How late a 1 ms ticker was, in seconds, while the action ran."""
    loop = asyncio.get_running_loop()
    task = action()
    lags = []
    while not task.done():
        due = loop.time() + 0.001
        await asyncio.sleep(0.001)
        lags.append(loop.time() - due)
    await task
    return sorted(lags)


@pytest.mark.slow
async def test_a_step_of_200_ms_does_not_hold_up_the_loop() -> None:
    async with running(step_time=0.2) as setup:

        async def work() -> None:
            await setup.engine.generate_batch([[index] for index in range(16)], max_new_tokens=6)

        lags = await lag_during(lambda: asyncio.create_task(work()))
        # The machine may be busy and late at times; a loop that is held up is late in every step.
        assert len(lags) > 60
        assert lags[len(lags) // 2] < 0.05, lags[-8:]
        assert sum(lag > 0.15 for lag in lags) <= 2, lags[-8:]


async def test_256_streams_do_not_hold_up_the_loop() -> None:
    config = aiocb.EngineConfig(max_batch_tokens=256)
    async with running(step_time=0.005, config=config, num_blocks=4096) as setup:

        async def read(index: int) -> None:
            async for _ in setup.engine.stream([index], max_new_tokens=40):
                pass

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                for index in range(256):
                    group.create_task(read(index))

        lags = await lag_during(lambda: asyncio.create_task(work()))
        assert lags[len(lags) // 2] < 0.05, lags[-5:]


@pytest.mark.model
async def test_a_prompt_of_500_kb_does_not_hold_up_the_loop(smollm2: object) -> None:
    text = "The quick brown fox jumps over the lazy dog. Ünïcödé, 12345! " * 8000
    assert len(text) > 480_000
    runner = FakeRunner(vocab_size=49_152, max_model_len=1 << 20, num_blocks=40_000)
    async with fake_engine(runner=runner, tokenizer=smollm2, config=aiocb.EngineConfig()) as engine:

        async def work() -> None:
            stream = engine.stream(text, max_new_tokens=1)
            await stream.__aenter__()
            stream.close()

        start = time.monotonic()
        lags = await lag_during(lambda: asyncio.create_task(work()))
        elapsed = time.monotonic() - start
        assert len(lags) > 20, "the prompt was too quick to show anything"
        assert lags[-1] < max(0.15, elapsed / 2), (elapsed, lags[-5:])
        assert lags[len(lags) // 2] < 0.05, (elapsed, lags[-5:])
        await assert_quiescent(engine)


@pytest.mark.model
async def test_16_threads_share_one_tokenizer(smollm2: object) -> None:
    """Encoding and decoding through one engine, from loops in 16 threads ("Already borrowed")."""
    runner = FakeRunner(vocab_size=49_152, num_blocks=8192)
    engine = fake_engine(runner=runner, tokenizer=smollm2, config=aiocb.EngineConfig())
    texts = [f"Thread {index} says hello, " * (1 + 40 * (index % 3)) for index in range(16)]

    def work(text: str) -> list[aiocb.Completion]:
        async def main() -> list[aiocb.Completion]:
            return [await engine.generate(text, max_new_tokens=8) for _ in range(5)]

        return asyncio.run(main())

    async with engine:
        results = await asyncio.gather(*(asyncio.to_thread(work, text) for text in texts))
        await assert_quiescent(engine)
    for text, completions in zip(texts, results, strict=True):
        expected = smollm2.encode(text)  # type: ignore[attr-defined]
        assert {completion.prompt_token_ids for completion in completions} == {tuple(expected)}
        assert len({completion.text for completion in completions}) == 1


@pytest.mark.slow
async def test_an_idle_engine_uses_no_cpu_and_then_serves() -> None:
    async with running() as setup:
        await setup.engine.generate([1], max_new_tokens=2)
        before = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - before < 0.05
        assert list((await setup.engine.generate([2], max_new_tokens=2)).token_ids) == solo([2], 2)


async def test_waiting_readers_use_no_cpu() -> None:
    """A held step, 20 parked readers, timeouts that fired: nobody spins."""
    import anyio

    async with running(is_open=False) as setup:
        streams = [setup.endless([index]) for index in range(20)]
        for stream in streams:
            await stream.__aenter__()
            with anyio.move_on_after(0.001):
                await anext(stream)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.001)
        tasks = [asyncio.create_task(read_some(stream, 1)) for stream in streams]
        await setup.gate.held()
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < 0.05
        setup.gate.open()
        await asyncio.gather(*tasks)
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("place", [0, 1], ids=["prepared request", "delivery"])
def test_a_loop_that_was_interrupted_goes_on(
    place: int, loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C as something arrives, as in a notebook: the next stream of that loop is served."""
    engine = made()
    arrived = Mailbox._arrived
    interrupts = [None] * place + [KeyboardInterrupt()]

    def interrupted(self: Mailbox[Any]) -> None:
        if interrupts and (interrupt := interrupts.pop(0)):
            raise interrupt
        arrived(self)

    monkeypatch.setattr(Mailbox, "_arrived", interrupted)
    loop = asyncio.new_event_loop() if loop_factory is None else loop_factory()
    try:
        loop.run_until_complete(engine.__aenter__())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(engine.generate([1], max_new_tokens=3))
        completion = loop.run_until_complete(asyncio.wait_for(engine.generate([2], max_new_tokens=3), 20))
        assert len(completion.token_ids) == 3
        loop.run_until_complete(engine.aclose())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


async def test_a_step_wakes_its_readers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is due runs between them: of readers that are slow, the fewest."""
    monkeypatch.setattr("aiocb.engine.bridge._PASS_S", 0.0)
    async with running(is_open=False) as setup:
        passes = 0
        is_counting = True
        woken: dict[int, int] = {}

        def count() -> None:
            nonlocal passes
            passes += 1
            if is_counting:
                asyncio.get_running_loop().call_soon(count)

        async def read(number: int) -> None:
            async with setup.endless([number + 1, 2]) as stream:
                async for _ in stream:
                    woken[passes] = woken.get(passes, 0) + 1

        readers = [asyncio.create_task(read(number)) for number in range(200)]
        await setup.gate.held()
        count()
        while sum(woken.values()) < 1000 or setup.runner.max_requests <= 100:
            await setup.gate.step()
            await asyncio.sleep(0)
        is_counting = False
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        assert setup.runner.max_requests > 100
        assert max(woken.values()) <= 32
        assert statistics.mode(woken.values()) == 8


def test_a_pass_of_the_loop_takes_as_long_as_it_may() -> None:
    """Whatever a reader costs: more of them are woken at once where they are quick, fewer where they are slow."""
    for cost, expected in ((1e-6, {256}), (40e-6, {32}), (1e-3, {8})):
        part, parts = 32, set()
        for step in range(40):
            part = next_part(part, min(part, 200), cost * min(part, 200))
            if step > 10:
                parts.add(part)
        assert parts <= expected | {2 * each for each in expected} | {each // 2 for each in expected}
    assert next_part(64, 20, 0.0) == 64  # a rest says nothing of more
