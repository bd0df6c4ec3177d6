"""An engine whose answers do not end, and ways to read and to leave them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiocb
from aiocb.testing import FakeRunner, Gate, assert_quiescent, fake_engine

ENDLESS: dict[str, Any] = {"max_new_tokens": 10_000, "ignore_eos": True}
CHECKED = aiocb.EngineConfig(debug_checks=True)


class Setup:
    """A running engine, its runner and its gate."""

    def __init__(self, engine: aiocb.Engine, runner: FakeRunner, gate: Gate) -> None:
        self.engine = engine
        self.runner = runner
        self.gate = gate

    def endless(self, prompt: Any = (1, 2, 3), **options: Any) -> aiocb.Stream:
        return self.engine.stream(list(prompt), **{**ENDLESS, **options})

    async def assert_freed(self, num_steps: int) -> None:
        """Whoever left at `num_steps` has cost one more step at most: the one that was running."""
        self.gate.open()
        await assert_quiescent(self.engine)
        assert self.runner.num_steps <= num_steps + 1, "the request went on after its reader had left"


@contextlib.asynccontextmanager
async def running(
    *, is_open: bool = True, config: aiocb.EngineConfig | None = None, tokenizer: Any = False, **options: Any
) -> AsyncIterator[Setup]:
    """Enter an engine over a fake runner; leaving it checks that nothing is left."""
    gate = Gate(is_open=is_open)
    runner = FakeRunner(gate=gate, **options)
    engine = fake_engine(runner=runner, config=config or CHECKED, tokenizer=tokenizer)
    async with engine:
        try:
            yield Setup(engine, runner, gate)
        finally:
            runner.resume()
            gate.open()
        if engine.state == "running":
            await assert_quiescent(engine)
    await assert_quiescent(engine)
    assert runner.is_closed


async def read_some(stream: aiocb.Stream, count: int) -> list[int]:
    """At least `count` tokens of a stream."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += (await anext(stream)).token_ids
    return tokens


def solo(prompt: list[int], count: int, runner: FakeRunner | None = None) -> list[int]:
    """What `FakeRunner` answers to a prompt, greedily, computed here."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(ord("a") + (tokens[0] + 31 * tokens[-1] + 7 * len(tokens)) % 26)
    return tokens[len(prompt) :]


async def spin(predicate: Callable[[], bool], passes: int = 100_000) -> None:
    """Let the loop run until something is so. Bounded by passes of the loop, not by time."""
    for _ in range(passes):
        if predicate():
            return
        await asyncio.sleep(0)
    raise AssertionError("it has not come to be")
