"""The engine's own cost per token: a model that computes nothing, many streams, one token each a step.

Counts `Chunk` objects that reached their readers per second of wall time, while all streams run: from the moment when
each has had its first token to the moment when the first of them ends. So nothing else is in the figure: not the
prompts, and none of the requests that wait behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiocb
from aiocb.bench.figures import Row, wakeups_per_step
from aiocb.bench.idle import LockstepRunner, engine_over, on_every_loop

__all__ = ["measure", "run"]

# Streams, tokens of each, requests that wait behind them. To be flat: the second and the third group.
_CASES = ((256, 400, 0), (64, 100, 0), (64, 1000, 0), (64, 8000, 0), (256, 400, 10), (256, 400, 10_000))


async def measure(num_streams: int, num_tokens: int, num_queued: int = 0) -> Row:
    """Stream `num_tokens` to each of `num_streams` readers, with `num_queued` more requests waiting all the time.

    Returns:
        chunks per second, microseconds per chunk, wake-ups per step.
    """
    runner = LockstepRunner(num_streams * (num_tokens // 16 + 2) + 1)
    num_chunks = 0
    all_run, one_ended = asyncio.Event(), asyncio.Event()

    async def read(stream: aiocb.Stream) -> None:
        nonlocal num_chunks
        async for chunk in stream:
            num_chunks += 1
            runner.was_read(len(chunk.token_ids))
            if num_chunks == num_streams:
                all_run.set()
        one_ended.set()

    engine = engine_over(runner, max_batch_tokens=max(num_streams, 16), max_requests_per_batch=num_streams)
    async with engine, contextlib.AsyncExitStack() as at_the_end:
        at_the_end.callback(runner.free)  # also after Ctrl-C: the engine waits for its step
        async with engine.pause():  # what is submitted here stands in line before the first step
            streams = [engine.stream([2], max_new_tokens=num_tokens) for _ in range(num_streams)]
            queued = [engine.stream([5], max_new_tokens=2) for _ in range(num_queued)]
            for stream in (*streams, *queued):
                await stream.__aenter__()
            while engine.stats().num_requests_waiting < num_streams + num_queued:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(read(stream))
            await all_run.wait()
            chunks, before = num_chunks, engine.stats()
            start, cpu = time.perf_counter(), time.process_time()
            await one_ended.wait()
            elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
            chunks, after = num_chunks - chunks, engine.stats()
            runner.free()
            for stream in (*streams, *queued):
                stream.close()
    return {
        "streams": num_streams,
        "tokens": num_tokens,
        "queued": num_queued,
        "chunks_per_s": round(chunks / elapsed),
        "us_per_chunk": round(elapsed / chunks * 1e6, 3),
        "cpu_us_per_chunk": round(cpu / chunks * 1e6, 3),
        "wakeups_per_step": wakeups_per_step(before, after),
    }


def run(repeats: int = 3) -> list[Row]:
    """Measure all cases on every kind of event loop; medians of `repeats` alternating runs."""
    return on_every_loop(measure, _CASES, repeats)
