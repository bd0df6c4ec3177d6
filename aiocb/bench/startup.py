"""A start, seen from outside: seconds from the start of a process to a running engine and to its first token.

Run as a program, this is the process that is timed: it says on standard output how far it has come.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from typing import Any

import aiocb
from aiocb.bench.figures import Row
from aiocb.errors import AiocbError, EngineError

__all__ = ["run"]


def run(model: str, *, dtype: str = "auto", quantization: str | None = None, repeats: int = 5) -> list[Row]:
    """Start a process `repeats` times and return a row per event: seconds since the start, in the first run (kernels
    may have been built, files may have been read from the disk) and as the median of all.

    Raises:
        EngineError: a process failed; the message is the end of what it said.
    """
    runs = [_start([model, dtype, *([quantization] if quantization else [])]) for _ in range(repeats)]
    return [
        {
            "event": event,
            "first_run_s": round(seconds, 3),
            "median_s": round(statistics.median(times[event] for times in runs if event in times), 3),
        }
        for event, seconds in runs[0].items()
    ]


def _start(arguments: list[str]) -> dict[str, float]:
    times: dict[str, float] = {}
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            times.setdefault(line.strip(), time.perf_counter() - started)
        errors = process.stderr.read()
    times["the process has ended"] = time.perf_counter() - started
    if process.returncode:
        raise EngineError(f"the engine does not start: {(errors.strip() or 'it gives no reason').splitlines()[-1]}")
    return times


async def _child(model: str, dtype: str, quantization: Any = None) -> None:
    def say(event: str) -> None:
        print(event, flush=True)

    say("aiocb is imported")
    engine = aiocb.Engine.from_pretrained(
        model,
        dtype=dtype,
        quantization=quantization,
        progress=lambda stage, _: say(f"{stage} begins"),
    )
    async with engine:
        say("the engine runs")
        async for _ in engine.stream([1, 2, 3, 4], max_new_tokens=8, ignore_eos=True):
            say("first token")


if __name__ == "__main__":
    try:
        asyncio.run(_child(*sys.argv[1:]))
    except AiocbError as error:
        sys.exit(f"{error}")
