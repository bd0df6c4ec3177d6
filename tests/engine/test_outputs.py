"""What comes out: chunks, completions, text, samples, stops, and what one token costs."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter
from typing import Any

import pytest

import aiocb
from aiocb.engine.bridge import LoopBridge
from aiocb.engine.core import EngineCore
from aiocb.engine.slot import Lane
from aiocb.testing import FakeRunner, byte_tokenizer, fake_engine, settle
from aiocb.text.pieces import PieceDetokenizer

from .helpers import read_some, running, solo


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


async def test_chunks_are_deltas_and_the_last_one_tells_why() -> None:
    async with running(is_open=False) as setup:
        stream = setup.engine.stream([1, 2], max_new_tokens=4, request_id="label")
        await stream.__aenter__()
        chunks = []
        for _ in range(4):
            await setup.gate.held()
            setup.gate.release()
            chunks.append(await anext(stream))
        assert [chunk.token_ids for chunk in chunks] == [(token,) for token in solo([1, 2], 4)]
        assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "length"]
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * 3
        assert chunks[-1].usage == aiocb.Usage(2, 4, 0)
        assert {(chunk.request_id, chunk.index) for chunk in chunks} == {("label", 0)}
        assert pickle.loads(pickle.dumps(chunks)) == chunks
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_a_completion_is_the_whole() -> None:
    async with running() as setup:
        completion = await setup.engine.generate([1, 2], max_new_tokens=20)
        assert list(completion.token_ids) == solo([1, 2], 20)
        assert completion.prompt_token_ids == (1, 2)
        assert completion.finish_reason == "length" and completion.error is None
        metrics = completion.metrics
        assert metrics.queue_s is not None and metrics.time_to_first_token_s is not None
        assert 0 <= metrics.queue_s <= metrics.time_to_first_token_s <= metrics.total_s
        assert pickle.loads(pickle.dumps(completion)) == completion
        assert completion.to_dict()["usage"] == {
            "num_prompt_tokens": 2,
            "num_output_tokens": 20,
            "num_cached_tokens": 0,
            "num_reasoning_tokens": 0,
        }
        awaited = await setup.engine.stream([1, 2], max_new_tokens=20)
        assert awaited.token_ids == completion.token_ids


@pytest.mark.parametrize("count", [1, 2])
async def test_few_tokens(count: int) -> None:
    async with running() as setup:
        completion = await setup.engine.generate([1, 2], max_new_tokens=count)
        assert list(completion.token_ids) == solo([1, 2], count)
        assert completion.usage.num_output_tokens == count
        chunks = [chunk async for chunk in setup.engine.stream([1, 2], max_new_tokens=count)]
        assert chunks[-1].finish_reason == "length"


async def test_no_tokens() -> None:
    async with running() as setup:
        for n in (1, 3):
            chunks = [chunk async for chunk in setup.engine.stream([1, 2], max_new_tokens=0, n=n)]
            assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [((), "length")] * n
            assert sorted(chunk.index for chunk in chunks) == list(range(n))
        completion = await setup.engine.generate([1, 2], max_new_tokens=0)
        assert completion.token_ids == () and completion.usage == aiocb.Usage(2, 0)
        # A neighbour in the same loop has its own deliveries all the while.
        neighbour = asyncio.create_task(setup.engine.generate([3], max_new_tokens=30))
        for _ in range(10):
            await setup.engine.generate([1, 2], max_new_tokens=0)
        assert list((await neighbour).token_ids) == solo([3], 30)
    assert setup.runner.num_tokens == 30


async def test_prompt_logprobs_alone() -> None:
    async with running() as setup:
        completion = await setup.engine.generate([1, 2, 3], max_new_tokens=0, prompt_logprobs=0)
        assert completion.token_ids == () and completion.finish_reason == "length"
        logprobs = completion.prompt_logprobs
        assert logprobs is not None and logprobs[0] is None
        assert [each.token_id for each in logprobs[1:] if each is not None] == [2, 3]


async def test_logprobs_belong_to_their_tokens() -> None:
    async with running() as setup:
        chunks = [chunk async for chunk in setup.engine.stream([1], max_new_tokens=30, logprobs=0, stream_interval=4)]
        for chunk in chunks:
            assert chunk.logprobs is not None
            assert tuple(each.token_id for each in chunk.logprobs) == chunk.token_ids
        completion = await setup.engine.generate([1], max_new_tokens=30, logprobs=True)
        assert completion.logprobs is not None and len(completion.logprobs) == 30
        async with setup.engine.stream([1], max_new_tokens=30, logprobs=0) as stream:
            await settle(setup.engine)
            merged = [chunk async for chunk in stream]
        assert sum(len(chunk.logprobs or ()) for chunk in merged) == 30


async def test_parallel_samples() -> None:
    async with running() as setup:
        alone = await setup.engine.generate([1, 2], max_new_tokens=12, temperature=1.0, seed=5)
        samples = await setup.engine.generate([1, 2], max_new_tokens=12, temperature=1.0, seed=5, n=4)
        assert [sample.index for sample in samples] == [0, 1, 2, 3]
        assert samples[0].token_ids == alone.token_ids
        assert len({sample.token_ids for sample in samples}) == 4
        again = await setup.engine.generate([1, 2], max_new_tokens=12, temperature=1.0, seed=5, n=4)
        assert [sample.token_ids for sample in again] == [sample.token_ids for sample in samples]
        streamed: dict[int, list[int]] = {}
        ends: Counter[int] = Counter()
        async for chunk in setup.engine.stream([1, 2], max_new_tokens=12, temperature=1.0, seed=5, n=4):
            streamed.setdefault(chunk.index, []).extend(chunk.token_ids)
            ends[chunk.index] += chunk.finish_reason is not None
        assert [tuple(streamed[index]) for index in range(4)] == [sample.token_ids for sample in samples]
        assert ends == {0: 1, 1: 1, 2: 1, 3: 1}


async def test_unseeded_requests_differ_and_an_engine_seed_repeats_them() -> None:
    async with running() as setup:
        outputs = {(await setup.engine.generate([1], max_new_tokens=12, temperature=1.0)).token_ids for _ in range(5)}
        assert len(outputs) > 1
    runs = []
    for _ in range(2):
        async with running(config=aiocb.EngineConfig(seed=3)) as setup:
            runs.append([(await setup.engine.generate([1], max_new_tokens=9, temperature=1.0)).token_ids for _ in "ab"])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


async def test_text_and_chat(tokenizer: Any) -> None:
    reply = "Grüße, 世界! 👋🏽 Ende"
    async with fake_engine(reply, tokenizer=tokenizer) as engine:
        completion = await engine.generate("Hi")
        assert completion.text == reply and completion.finish_reason == "stop"
        assert completion.prompt_token_ids == tuple(b"Hi")
        deltas = [chunk.text async for chunk in engine.stream([{"role": "user", "content": "Hi"}])]
        assert "".join(deltas) == reply
        assert all("\ufffd" not in delta for delta in deltas)
        assert engine.tokenizer is tokenizer


async def test_a_reply_may_depend_on_the_prompt(tokenizer: Any) -> None:
    async with fake_engine(lambda prompt: f"You said {prompt!r}.", tokenizer=tokenizer) as engine:
        completions = await engine.generate_batch(["one", "two"])
        assert [completion.text for completion in completions] == ["You said 'one'.", "You said 'two'."]


async def test_echo(tokenizer: Any) -> None:
    async with fake_engine(" world", tokenizer=tokenizer) as engine:
        assert (await engine.generate("Hello", echo=True)).text == "Hello world"
        assert (await engine.generate("Hello", echo=True, max_new_tokens=0)).text == "Hello"
        samples = await engine.generate("Hello", echo=True, n=2)
        assert [sample.text for sample in samples] == ["Hello world"] * 2
        deltas = [chunk.text async for chunk in engine.stream("Hello", echo=True)]
        assert deltas[0].startswith("Hello") and "".join(deltas) == "Hello world"


async def test_stop_strings(tokenizer: Any) -> None:
    async with fake_engine("one, two, three", tokenizer=tokenizer) as engine:
        for stop, include, text in (
            ("two", False, "one, "),
            (["ree", "o, t"], False, "one, tw"),
            ("two", True, "one, two"),
            ("nothing", False, "one, two, three"),
            ("o", False, ""),
            ("threee", False, "one, two, three"),
        ):
            stream = engine.stream("x", stop=stop, include_stop_str_in_output=include)
            deltas = [chunk async for chunk in stream]
            assert "".join(chunk.text for chunk in deltas) == text
            assert deltas[-1].finish_reason == "stop"
            matched = deltas[-1].stop_reason
            assert matched is None if text == "one, two, three" else matched in ([stop] if type(stop) is str else stop)
        delayed = await engine.generate("x", stop="o", min_new_tokens=5)
        assert delayed.text == "one, tw"
        by_id = await engine.generate("x", stop_token_ids=[ord("t")])
        assert (by_id.text, by_id.stop_reason) == ("one, t", ord("t"))
        ignoring = await engine.generate("x", ignore_eos=True, max_new_tokens=20)
        assert ignoring.finish_reason == "length" and len(ignoring.token_ids) == 20


async def test_text_that_may_become_a_stop_string_is_held_back_and_released(tokenizer: Any) -> None:
    async with running(reply=list(b"ab abc"), eos_token_id=256, is_open=False, tokenizer=tokenizer) as setup:
        stream = setup.engine.stream("x", stop="abc")
        setup.gate.open()
        assert "".join([chunk.text async for chunk in stream]) == "ab "


@pytest.mark.parametrize("interval", [1, 2, 5, 7, 100])
async def test_stream_interval(interval: int) -> None:
    async with running(is_open=False) as setup:
        stream = setup.engine.stream([1], max_new_tokens=23, stream_interval=interval)
        await stream.__aenter__()
        sizes: list[int] = []
        while sum(sizes) < 23:
            await setup.gate.held()
            await setup.gate.step(min(interval, 23 - sum(sizes)))
            sizes.append(len((await anext(stream)).token_ids))
        assert sizes == [interval] * (23 // interval) + ([23 % interval] if 23 % interval else [])


async def test_detokenize_off(tokenizer: Any) -> None:
    async with fake_engine("text", tokenizer=tokenizer) as engine:
        completion = await engine.generate("x", detokenize=False)
        assert completion.text == "" and bytes(completion.token_ids[:-1]) == b"text"


async def test_every_stream_gets_its_own_in_order() -> None:
    """256 streams of different tempers: no token is lost, doubled, or somebody else's."""
    config = aiocb.EngineConfig(max_batch_tokens=256)
    async with running(config=config, num_blocks=4096) as setup:

        async def read(index: int) -> None:
            tokens: list[int] = []
            async with setup.engine.stream([index, index // 2], max_new_tokens=50) as stream:
                async for chunk in stream:
                    tokens += chunk.token_ids
                    if index % 5 == 0:
                        for _ in range(index % 17):
                            await asyncio.sleep(0)
            assert tokens == solo([index, index // 2], 50), index

        async with asyncio.TaskGroup() as group:
            for index in range(256):
                group.create_task(read(index))
        stats = setup.engine.stats()
        assert stats.num_loop_wakeups <= stats.num_steps + 1
        assert stats.request_success == {"length": 256}
        assert stats.generation_tokens == 256 * 50


async def test_one_wakeup_per_step_however_many_streams() -> None:
    async with running(is_open=False) as setup:
        streams = [setup.engine.stream([index], max_new_tokens=40) for index in range(64)]
        for stream in streams:
            await stream.__aenter__()
        setup.gate.open()
        await asyncio.gather(*(read_some(stream, 40) for stream in streams))
        stats = setup.engine.stats()
        assert stats.num_steps >= 40
        assert stats.num_loop_wakeups <= stats.num_steps


async def test_a_loop_that_does_not_run_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once per step: asyncio would read its own wake-ups for as long as steps that hold the GIL add some."""
    async with running(is_open=False) as setup:
        stream = setup.endless()
        reading = asyncio.create_task(anext(stream))
        await setup.gate.held()
        loop = asyncio.get_running_loop()
        call, calls = loop.call_soon_threadsafe, []

        def counting(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            return call(*arguments, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        wakeups = setup.engine.stats().num_loop_wakeups
        setup.gate.release(50)
        while setup.gate.num_finished < 50:  # the loop stands still
            time.sleep(0.001)
        assert len(calls) == 1
        await setup.gate.held()  # the worker has posted all of them
        chunks = [await reading]
        while sum(len(chunk.token_ids) for chunk in chunks) < 50:
            chunks.append(await anext(stream))
        assert setup.engine.stats().num_loop_wakeups - wakeups <= 3
        monkeypatch.undo()
        stream.close()


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
async def test_the_cost_of_a_token_does_not_grow(
    is_read: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of 8000 tokens, counted in calls and in what they carry, and not in seconds."""
    counts: Counter[str] = Counter()

    def count(owner: type, name: str, size: Any) -> None:
        original = getattr(owner, name)
        key = f"{owner.__name__}.{name}"

        def counting(self: Any, *arguments: Any) -> Any:
            counts[key] += 1  # by one thread each
            counts[f"{key}: carried"] += size(*arguments)
            return original(self, *arguments)

        monkeypatch.setattr(owner, name, counting)

    count(Lane, "push", lambda token_ids, text, *_: len(token_ids) + len(text))
    count(PieceDetokenizer, "push", len)
    count(LoopBridge, "_arrived", len)
    count(LoopBridge, "post", len)
    count(aiocb.Stream, "_take", lambda slot: 1)
    runner = FakeRunner(num_blocks=600, max_model_len=9000)
    config = aiocb.EngineConfig(allow_block_sharing=False)
    num_chunks = num_tokens = num_characters = 0
    engine = fake_engine(runner=runner, tokenizer=tokenizer, config=config)
    async with engine:
        before = Counter(counts)  # of the probes that prove the tokenizer
        stream = engine.stream("x", max_new_tokens=8000)
        await stream.__aenter__()
        if not is_read:
            while engine.stats().request_success == {}:
                await asyncio.sleep(0.001)
            await settle(engine)
        async for chunk in stream:
            num_chunks += 1
            num_tokens += len(chunk.token_ids)
            num_characters += len(chunk.text)
            assert type(chunk.token_ids) is tuple
    counts -= before
    assert (num_tokens, num_characters) == (8000, 8000)
    assert counts["LoopBridge._arrived"] == counts["LoopBridge._arrived: carried"] == 8000
    assert counts["LoopBridge.post"] == counts["LoopBridge.post: carried"] == 8000
    # One push per token on each side, which carry a token and a character each, once.
    assert counts["PieceDetokenizer.push"] == counts["PieceDetokenizer.push: carried"] == 8000
    assert counts["Lane.push"] == 8000
    assert counts["Lane.push: carried"] == 16_000
    assert counts["Stream._take"] == num_chunks
    if not is_read:
        assert num_chunks == 1


def test_unread_output_is_extended_and_not_copied() -> None:
    class Bridge:
        def lane_ended(self, lane: Lane) -> None: ...

    from aiocb.engine.slot import Slot

    slot = Slot("x", Bridge(), 1)  # type: ignore[arg-type]
    (lane,) = slot.make_lanes()
    lane.push((1,), "a", None, None)
    lane.push((2,), "b", None, None)
    buffer = lane.token_ids
    for index in range(1000):
        lane.push((index,), "c", None, None)
    assert lane.token_ids is buffer and len(buffer) == 1002
    assert len(slot.ready) == 1


async def test_a_failing_detokenizer_ends_its_request_only(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine(tokenizer=tokenizer) as engine:
        push, flush = PieceDetokenizer.push, PieceDetokenizer.flush
        bad: list[object] = []

        def failing_push(self: PieceDetokenizer, token_ids: Any) -> str:
            if self in bad:
                raise UnicodeError("broken")
            return push(self, token_ids)

        def failing_flush(self: PieceDetokenizer) -> str:
            if self in bad:
                raise UnicodeError("broken at the end")
            return flush(self)

        good = engine.stream("good", max_new_tokens=30)
        await good.__aenter__()
        monkeypatch.setattr(PieceDetokenizer, "push", failing_push)
        session = engine._lives.session
        assert session is not None and session.text is not None
        make = session.text.token_text.detokenizer

        def make_bad(**options: Any) -> Any:
            detokenizer = make(**options)
            bad.append(detokenizer)
            return detokenizer

        monkeypatch.setattr(session.text.token_text, "detokenizer", make_bad)
        with pytest.raises(aiocb.RequestFailed, match="broken") as caught:
            await engine.generate("bad", max_new_tokens=30)
        assert isinstance(caught.value.__cause__, UnicodeError)
        monkeypatch.setattr(PieceDetokenizer, "push", push)
        monkeypatch.setattr(PieceDetokenizer, "flush", failing_flush)
        with pytest.raises(aiocb.RequestFailed, match="broken at the end"):
            await engine.generate("bad", max_new_tokens=3)
        with pytest.raises(aiocb.RequestFailed, match="broken at the end"):
            async with engine.stream("bad", max_new_tokens=1000) as stream:
                await anext(stream)
                stream.finish()
                async for _ in stream:
                    pass
        assert (await good).finish_reason == "length"
        await settle(engine)
        assert engine.stats().request_success == {"error": 3, "length": 1}


async def test_describe_and_repr(tokenizer: Any) -> None:
    engine = fake_engine("x", tokenizer=tokenizer)
    assert "created" in repr(engine) and engine.describe() == []
    with pytest.raises(aiocb.EngineClosed):
        engine.stats()
    async with engine:
        names = {choice.name for choice in engine.describe()}
        assert {"max_batch_tokens", "max_requests_per_batch", "safety_margin", "max_request_tokens"} <= names
        assert "running" in repr(engine)
        await engine.generate("x")
        assert engine.stats().prompt_tokens == 1
        engine.reset_prefix_cache()
        await settle(engine)
    assert "closed" in repr(engine)


@pytest.mark.parametrize(("max_model_len", "num_blocks", "expected"), [(20, 100, 20), (1000, 3, 33)])
async def test_how_long_a_request_can_be(max_model_len: int, num_blocks: int, expected: int) -> None:
    """The model's positions or the cache, whichever is smaller; it fits, and one more does not."""
    runner = FakeRunner(vocab_size=50, max_model_len=max_model_len, num_blocks=num_blocks, page_size=16)
    engine = fake_engine(runner=runner)
    with pytest.raises(aiocb.EngineClosed):
        _ = engine.max_request_tokens
    async with engine:
        longest = engine.max_request_tokens
        assert longest == expected
        assert {choice.name: choice.value for choice in engine.describe()}["max_request_tokens"] == str(longest)
        completion = await engine.generate([1] * 3, max_new_tokens=longest - 3, ignore_eos=True)
        assert completion.usage.num_tokens == longest
        with pytest.raises(aiocb.InvalidRequest):
            await engine.generate([1] * 3, max_new_tokens=longest - 2)
    with pytest.raises(aiocb.EngineClosed):
        _ = engine.max_request_tokens


def test_the_core_can_be_asked_between_two_steps() -> None:
    """`EngineCore.call` answers after what was asked for before it has been delivered."""
    from aiocb.cache.manager import CacheManager
    from aiocb.scheduler.scheduler import Scheduler

    runner = FakeRunner()
    scheduler = Scheduler(CacheManager(runner.cache_layout), max_batch_tokens=16, max_requests_per_batch=4)
    core = EngineCore(runner, scheduler)
    asked: list[EngineCore] = []
    core.inbox.put((EngineCore.call, asked.append))
    core.step()
    assert asked == [core]
