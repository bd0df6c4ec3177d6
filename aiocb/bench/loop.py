"""How long the event loop stands still: when many requests arrive at once, and while it streams.

The lag is that of a ticker of one millisecond, from the first request to the last token. The model sleeps for ten
milliseconds a step and computes nothing. The loop's own time for a request is measured apart: the processor time of its
thread while requests are submitted (chat messages: rendered, encoded, checked, handed over) and no step runs.
"""

from __future__ import annotations

import asyncio
import time

from aiocb.bench.figures import Row, lag_probe, quantile_ms
from aiocb.bench.idle import IdleRunner, engine_over, on_every_loop
from aiocb.testing import byte_tokenizer

__all__ = ["measure", "run"]

_STEP_S = 0.01
_NUM_RUNNING = 256
_PROMPT = [{"role": "user", "content": "What is the capital of France, and since when? One sentence, please."}]

# Requests at once, tokens of each, log-probabilities.
_CASES = ((256, 16, None), (5000, 4, None), (64, 100, None), (64, 100, 20))


async def measure(num_requests: int, num_tokens: int, logprobs: int | None = None) -> Row:
    """Submit requests at once and read them to their ends.

    Returns:
        the lag's median, 99th percentile and maximum, and the loop's time per request.
    """
    engine = engine_over(
        IdleRunner(_NUM_RUNNING * 32, _STEP_S, logprobs),
        byte_tokenizer(),
        max_batch_tokens=8192,
        max_requests_per_batch=_NUM_RUNNING,
    )
    lags: list[float] = []

    async def read(is_open: asyncio.Semaphore) -> None:
        async with engine.stream(_PROMPT, max_new_tokens=num_tokens, logprobs=logprobs) as stream:
            is_open.release()
            async for _ in stream:
                pass

    async def submit(group: asyncio.TaskGroup) -> tuple[list[asyncio.Task[None]], float]:
        """Open all; return their tasks and the time that this thread has worked until the last was open."""
        num_open = asyncio.Semaphore(0)
        worked = time.thread_time()
        tasks = [group.create_task(read(num_open)) for _ in range(num_requests)]
        for _ in tasks:
            await num_open.acquire()
        return tasks, time.thread_time() - worked

    async with engine:
        await engine.generate(_PROMPT, max_new_tokens=2)  # a template is compiled when it is first used
        async with engine.pause(), asyncio.TaskGroup() as group:
            tasks, worked = await submit(group)
            for task in tasks:
                task.cancel()
        probe = asyncio.ensure_future(lag_probe(lags))
        await asyncio.sleep(0.02)
        lags.clear()
        async with asyncio.TaskGroup() as group:
            await submit(group)
        probe.cancel()
    return {
        "requests": num_requests,
        "tokens": num_tokens,
        "logprobs": logprobs,
        "lag_p50_ms": quantile_ms(lags, 0.5),
        "lag_p99_ms": quantile_ms(lags, 0.99),
        "lag_max_ms": quantile_ms(lags, 1.0),
        "loop_us_per_request": round(worked / num_requests * 1e6, 1),
    }


def run(repeats: int = 3) -> list[Row]:
    """Measure all cases on every kind of event loop; medians of `repeats` alternating runs."""
    return on_every_loop(measure, _CASES, repeats)
