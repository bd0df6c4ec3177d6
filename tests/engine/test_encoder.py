"""The encoder thread: what it takes off the loop, in which order, and that a cancel there leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aiocb
from aiocb.engine.encoder import Encoder
from aiocb.engine.stream import Stream
from aiocb.testing import assert_quiescent, byte_tokenizer, fake_engine, settle, submitted

from .helpers import ENDLESS, Setup, running, solo

MESSAGES = [{"role": "user", "content": "Hi"}]


class Held:
    """A tokenizer whose template waits until it is let go."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self.began = threading.Event()
        self.go = threading.Event()
        self.error: BaseException | None = None
        self.num_rendered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        self.num_rendered += 1
        self.began.set()
        self.go.wait(20)
        if self.error is not None:
            raise self.error
        return self._tokenizer.apply_chat_template(*arguments, **options)

    async def rendering(self) -> None:
        await asyncio.to_thread(self.began.wait, 20)


@contextlib.asynccontextmanager
async def held(**options: Any) -> AsyncIterator[tuple[Setup, Held]]:
    tokenizer = Held()
    async with running(tokenizer=tokenizer, **options) as setup:
        try:
            yield setup, tokenizer
        finally:
            tokenizer.go.set()


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    encoder = Encoder()
    encoder.start()
    yield encoder
    encoder.stop(RuntimeError)
    encoder.join(20)
    assert not encoder.is_alive


# ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_jobs_are_done_in_order_and_their_results_come_in_order(encoder: Encoder) -> None:
    done: list[int] = []
    told: list[int] = []

    def tell(number: int, _: object) -> None:
        told.append(number)

    futures = [encoder.submit(partial(done.append, number)) for number in range(100)]
    for number, future in enumerate(futures):
        future.add_done_callback(partial(tell, number))
    await asyncio.gather(*futures)
    assert done == told == list(range(100))


async def test_one_call_brings_everything_that_is_ready(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    call, calls = loop.call_soon_threadsafe, []

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return call(*arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    ready = threading.Event()
    begin = threading.Event()
    futures: list[asyncio.Future[Any]] = [encoder.submit(begin.wait)]
    futures += [encoder.submit(int) for _ in range(255)]
    futures.append(encoder.submit(ready.set))
    begin.set()
    ready.wait(20)  # the loop stands still
    await asyncio.gather(*futures)
    assert len(calls) <= 2  # the last job may have been posted while the first call was under way
    monkeypatch.undo()


async def test_a_cancelled_job_is_not_begun(encoder: Encoder) -> None:
    begin = threading.Event()
    done: list[int] = []
    first = encoder.submit(begin.wait)
    futures = [encoder.submit(partial(done.append, number)) for number in range(10)]
    for future in futures[::2]:
        future.cancel()
    begin.set()
    await asyncio.gather(first, *futures[1::2])
    assert done == [1, 3, 5, 7, 9]


async def test_an_exception_is_a_result(encoder: Encoder) -> None:
    def fail() -> None:
        raise ValueError("no")

    encoder.submit(fail)  # nobody looks at it, and nobody is told
    assert isinstance(await encoder.submit(fail), ValueError)
    assert await encoder.submit(lambda: 5) == 5


async def test_after_the_end_every_job_is_refused(encoder: Encoder) -> None:
    begin = threading.Event()
    began = threading.Event()

    def work() -> bool:
        began.set()
        return begin.wait(20)

    first = encoder.submit(work)
    second = encoder.submit(lambda: 2)
    began.wait(20)
    encoder.stop(lambda: KeyError("over"))
    third = encoder.submit(lambda: 3)
    begin.set()
    assert await first is True, "what has begun is finished"
    errors = [await second, await third]
    assert [type(error) for error in errors] == [KeyError, KeyError] and errors[0] is not errors[1]
    await encoder.exited.wait()


async def test_two_loops_get_their_own_results(encoder: Encoder) -> None:
    async def other() -> list[Any]:
        return [await encoder.submit(partial(int, -number)) for number in range(50)]

    mine = [encoder.submit(partial(int, number)) for number in range(50)]
    theirs = await asyncio.to_thread(lambda: asyncio.run(other()))
    assert theirs == [-number for number in range(50)]
    assert await asyncio.gather(*mine) == list(range(50))
    assert len(encoder._outboxes) == 2
    await asyncio.to_thread(lambda: asyncio.run(other()))
    assert len(encoder._outboxes) == 2, "that of the closed loop is gone"


async def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if thread.name.startswith("aiocb"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(aiocb.EngineError, match="no thread can be started"):
        await fake_engine().__aenter__()


# ── what it costs a loop ─────────────────────────────────────────────────────────────────────────────────────────────


async def count_calls(engine: aiocb.Engine, prompt: Any, **options: Any) -> float:
    """Functions of the package entered in the loop's thread for each of 50 requests, up to the worker's inbox."""
    count = 0
    package = str(Path(aiocb.__file__).parent)

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and package in frame.f_code.co_filename

    coroutines: list[Any] = []
    sys.setprofile(profile)
    try:
        for _ in range(50):
            stream = engine.stream(prompt, **options)
            coroutines.append(stream.__aenter__())
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        await asyncio.gather(*tasks)
    finally:
        sys.setprofile(None)
    for task in tasks:
        task.result().close()
    return count / 50


@pytest.mark.parametrize("kind", ["text", "messages", "ids"])
async def test_a_request_costs_its_loop_the_same_few_calls_whatever_it_holds(kind: str) -> None:
    async with running(is_open=False, tokenizer=byte_tokenizer()) as setup:

        def make(size: int) -> Any:
            text = "Hello, world! " * size
            return {"text": text, "messages": [{"role": "user", "content": text}], "ids": list(text.encode())}[kind]

        options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.5}
        await count_calls(setup.engine, make(1), **options)  # whatever is made once
        short = await count_calls(setup.engine, make(1), **options)
        long = await count_calls(setup.engine, make(300), **options)
        stops = await count_calls(setup.engine, make(1), stop=[f"{n:06d}" for n in range(2000)], **options)
        assert short < 60, "about 30 us where a call takes half of one"
        assert abs(long - short) < 5 and abs(stops - short) < 5
        setup.gate.open()


async def test_the_loop_and_streams_go_on_while_a_template_renders() -> None:
    async with held() as (setup, tokenizer), setup.endless() as stream:
        await anext(stream)
        chat = asyncio.create_task(setup.engine.generate(MESSAGES, max_new_tokens=3))
        await tokenizer.rendering()
        num_steps = setup.runner.num_steps
        for _ in range(50):
            await anext(stream)
        assert setup.runner.num_steps > num_steps and not chat.done()
        tokenizer.go.set()
        await chat


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_requests_reach_the_worker_in_the_order_in_which_they_were_made() -> None:
    config = aiocb.EngineConfig(max_requests_per_batch=1)
    ended: list[int] = []
    async with running(config=config, is_open=False, tokenizer=byte_tokenizer()) as setup:

        async def one(number: int) -> None:
            prompts: list[Any] = ["a" * 2000, [97, 98], [{"role": "user", "content": "x" * (number * 50)}], "b"]
            await setup.engine.generate(prompts[number % 4], max_new_tokens=1)
            ended.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(40)]
        await submitted(setup.engine)
        setup.gate.open()
        await asyncio.gather(*tasks)
    assert ended == list(range(40))


async def test_a_batch_is_prepared_ahead() -> None:
    """One after the other would be a trip to the thread for each prompt."""
    async with held(is_open=False) as (setup, tokenizer):
        prompts: list[Any] = [MESSAGES, *[[number] for number in range(20)]]
        batch = asyncio.create_task(setup.engine.generate_batch(prompts, max_new_tokens=2))
        await tokenizer.rendering()
        assert setup.engine._lives.session is not None
        assert setup.engine._lives.session.encoder._jobs.qsize() == 20
        tokenizer.go.set()
        setup.gate.open()
        completions = await batch
        assert [list(each.token_ids) for each in completions[1:]] == [solo([n], 2) for n in range(20)]


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["cancel", "close", "close in a thread", "timeout", "queue_timeout"])
@pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "rendering"])
async def test_leaving_while_it_is_prepared_leaves_nothing(way: str, is_queued: bool) -> None:
    async with held() as (setup, tokenizer):
        first = asyncio.create_task(setup.engine.generate(MESSAGES, max_new_tokens=1))
        await tokenizer.rendering()
        tokenizer.began.clear()
        options: dict[str, Any] = {way: 0.05} if way.endswith("timeout") else {}
        stream = setup.engine.stream(MESSAGES, max_new_tokens=5, **options)
        reading = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        if not is_queued:
            first.cancel()
            tokenizer.go.set()
            tokenizer.go.clear()
            await tokenizer.rendering()
        if way == "cancel":
            reading.cancel()
        elif way == "close":
            stream.close()
        elif way == "close in a thread":
            await asyncio.to_thread(stream.close)
        result = (await asyncio.gather(reading, return_exceptions=True))[0]
        if way == "cancel":
            assert isinstance(result, asyncio.CancelledError)
        elif way.endswith("timeout"):
            assert isinstance(result, aiocb.RequestTimeout) and result.stage == "queue"
        else:
            assert result == []
        tokenizer.go.set()
        await asyncio.gather(first, return_exceptions=True)
        await assert_quiescent(setup.engine)
        if is_queued:
            assert tokenizer.num_rendered <= 3, (
                "it was prepared all the same"
            )  # two of them ask what the template wants
    assert setup.runner.num_tokens <= len("<|user|>Hi<|end|><|assistant|>") + 1


async def collect(stream: Stream) -> list[aiocb.Chunk]:
    return [chunk async for chunk in stream]


async def test_a_dropped_iterator_leaves_nothing_to_prepare() -> None:
    async with held() as (setup, tokenizer):
        iterator = setup.engine.as_completed([MESSAGES, *([MESSAGES] * 5)], max_new_tokens=1)
        reading = asyncio.ensure_future(anext(iterator))
        await tokenizer.rendering()
        reading.cancel()
        await asyncio.wait([reading])
        del iterator, reading
        tokenizer.go.set()
        await settle(setup.engine)
    assert setup.runner.num_steps == 0 and tokenizer.num_rendered <= 3


async def test_closing_the_engine_while_requests_are_prepared() -> None:
    async with held() as (setup, tokenizer):
        tasks = [asyncio.create_task(setup.engine.generate(MESSAGES, **ENDLESS)) for _ in range(3)]
        await tokenizer.rendering()
        closing = asyncio.create_task(setup.engine.aclose())
        results = await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert {type(result) for result in results} == {aiocb.EngineClosed} and results[0] is not results[1]
        tokenizer.go.set()
        await closing
        with pytest.raises(aiocb.EngineClosed):
            await tasks[0]
    assert setup.runner.num_steps == 0


async def test_a_template_that_never_returns_does_not_keep_the_engine_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiocb.engine.session._ENCODER_EXIT_S", 0.01)
    tokenizer = Held()
    engine = fake_engine(tokenizer=tokenizer)
    async with engine:
        task = asyncio.create_task(engine.generate(MESSAGES))
        await tokenizer.rendering()
        began = time.monotonic()
    assert time.monotonic() - began < 10 and engine.state == "closed"
    tokenizer.go.set()
    with pytest.raises(aiocb.EngineClosed):
        await task
    await assert_quiescent(engine)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
async def test_whatever_a_template_raises_ends_its_own_request(error: BaseException) -> None:
    async with held() as (setup, tokenizer):
        tokenizer.go.set()
        tokenizer.error = error
        with pytest.raises(aiocb.InvalidRequest, match=type(error).__name__) as caught:
            await setup.engine.generate(MESSAGES)
        assert caught.value.__cause__ is error
        tokenizer.error = None
        assert len((await setup.engine.generate(MESSAGES, max_new_tokens=2)).token_ids) == 2


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_error_that_cannot_be_printed() -> None:
    async with held() as (setup, tokenizer):
        tokenizer.go.set()
        tokenizer.error = Unprintable()
        with pytest.raises(aiocb.InvalidRequest, match="Unprintable"):
            await setup.engine.generate(MESSAGES)


async def test_a_drain_lets_in_what_was_being_prepared() -> None:
    async with held() as (setup, tokenizer):
        begun = asyncio.create_task(setup.engine.generate(MESSAGES, max_new_tokens=3))
        await tokenizer.rendering()
        closing = asyncio.create_task(setup.engine.aclose(drain=None))
        await asyncio.sleep(0)
        with pytest.raises(aiocb.EngineClosed, match="draining"):
            await setup.engine.generate([1])
        tokenizer.go.set()
        assert len((await begun).token_ids) == 3
        await closing


async def test_a_stream_that_finishes_while_it_is_prepared_ends_without_output() -> None:
    async with held() as (setup, tokenizer):
        stream = setup.engine.stream(MESSAGES, **ENDLESS)
        reading = asyncio.create_task(collect(stream))
        await tokenizer.rendering()
        stream.finish()
        tokenizer.go.set()
        chunks = await reading
        assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [((), "cancelled")]
        assert chunks[0].usage is not None and chunks[0].usage.num_prompt_tokens > 0
    assert setup.runner.num_steps == 0
