"""The engine's own cost: a model that computes nothing, many streams, one token each a step.

Counts `Chunk` objects that reached their readers per second of wall time. The fake model waits after every step until
the event loop has read the step's chunks (else they would merge, and fewer objects would be built than tokens made).
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from typing import Any

import aiocb
from aiocb.sampling_params import ModelDefaults
from aiocb.step import CacheGroup, CacheLayout, ImmediateRunner, StepPlan, StepResult

__all__ = ["LockstepRunner", "measure", "run"]

_VOCAB = 32_000


class LockstepRunner(ImmediateRunner):
    """Returns token 1 for every row, then waits until the readers have had it."""

    vocab_size = _VOCAB
    max_model_len = 1 << 20
    device_type = "cpu"
    choices = ()

    def __init__(self, num_blocks: int, lockstep: bool = True) -> None:
        self.cache_layout = CacheLayout(16, (CacheGroup(None, (0,), num_blocks, 1),))
        self.lockstep = lockstep
        self._num_made = 0
        self._num_read = 0
        self._turn = threading.Semaphore(1)

    def execute(self, plan: StepPlan) -> StepResult:
        """Answer at once, one step after the readers."""
        tokens: list[tuple[int, ...]] = [(1,) if entry.is_sampled else () for entry in plan.entries]
        if self.lockstep and tokens:
            self._turn.acquire(timeout=1.0)
            self._num_made += sum(map(len, tokens))
            if self._num_made == self._num_read:
                self._turn.release()
        return StepResult(tokens)

    def was_read(self, num_tokens: int) -> None:
        """Let the next step begin once everything that was made has been read (event loop)."""
        self._num_read += num_tokens
        if self._num_read == self._num_made:
            self._turn.release()

    def release(self) -> None:
        """Nothing is remembered."""

    def reload_weights(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing to free."""


async def measure(num_streams: int, num_tokens: int, num_queued: int = 0) -> dict[str, Any]:
    """Stream `num_tokens` to each of `num_streams` readers, with `num_queued` more requests waiting all the time.

    Returns:
        chunks per second, microseconds per chunk, wake-ups per step.
    """
    pages = (num_tokens + 32) // 16 + 2
    runner = LockstepRunner(num_streams * pages + num_streams + 2)
    config = aiocb.EngineConfig(
        max_batch_tokens=max(num_streams, 16),
        max_requests_per_batch=num_streams,
        safety_margin=0.0,
        allow_block_sharing=False,
    )
    engine = aiocb.Engine.from_runner(lambda _: runner, ModelDefaults(_VOCAB, 1 << 20), config=config)
    num_chunks = 0

    async def read(index: int) -> None:
        nonlocal num_chunks
        async with engine.stream([2, 3], max_new_tokens=num_tokens) as stream:
            async for chunk in stream:
                num_chunks += 1
                runner.was_read(len(chunk.token_ids))

    async with engine:
        tasks = [asyncio.ensure_future(read(index)) for index in range(num_streams)]
        while engine.stats().num_requests_running < num_streams:  # noqa: ASYNC110
            await asyncio.sleep(0)
        queued = [engine.stream([5], max_new_tokens=2, priority=1) for _ in range(num_queued)]
        for stream in queued:
            await stream.__aenter__()
        before, steps, wakeups = num_chunks, engine.stats().num_steps, engine.stats().num_loop_wakeups
        cpu = time.process_time()
        start = time.perf_counter()
        await asyncio.gather(*tasks)
        elapsed = time.perf_counter() - start
        cpu = time.process_time() - cpu
        stats = engine.stats()
        runner.lockstep = False
        for stream in queued:
            stream.close()
    chunks = num_chunks - before
    return {
        "streams": num_streams,
        "tokens": num_tokens,
        "queued": num_queued,
        "chunks_per_s": round(chunks / elapsed),
        "us_per_chunk": round(elapsed / chunks * 1e6, 3),
        "cpu_us_per_chunk": round(cpu / chunks * 1e6, 3),
        "wakeups_per_step": round((stats.num_loop_wakeups - wakeups) / max(stats.num_steps - steps, 1), 3),
    }


def run(repeats: int = 3) -> list[dict[str, Any]]:
    """Measure all cases on asyncio and, where installed, uvloop; medians of `repeats` alternating runs."""
    factories: dict[str, Any] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:
        pass
    else:
        factories["uvloop"] = uvloop.new_event_loop
    cases = [(256, 400, 0), (256, 100, 0), (256, 2000, 0), (16, 8000, 0), (256, 400, 10), (256, 400, 10_000)]
    results: dict[tuple[str, tuple[int, int, int]], list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for case in cases:
            for name, factory in factories.items():
                with asyncio.Runner(loop_factory=factory) as runner:
                    results.setdefault((name, case), []).append(runner.run(measure(*case)))
    rows = []
    for (name, _), measured in results.items():
        row = {"loop": name, **measured[0]}
        for key in ("chunks_per_s", "us_per_chunk", "cpu_us_per_chunk", "wakeups_per_step"):
            row[key] = statistics.median(each[key] for each in measured)
        rows.append(row)
    return rows
