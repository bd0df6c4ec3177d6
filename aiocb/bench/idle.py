"""Runners that compute nothing, so that what is left is the engine, and the loops to measure it on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiocb
from aiocb.bench.figures import Row, medians
from aiocb.outputs import TokenLogprobs
from aiocb.sampling_params import ModelDefaults
from aiocb.step import CacheGroup, CacheLayout, ImmediateRunner, StepPlan, StepResult

__all__ = ["VOCAB_SIZE", "IdleRunner", "LockstepRunner", "engine_over", "on_every_loop"]

VOCAB_SIZE = 32_000

_TOKEN = 97
_PATIENCE_S = 60.0


class IdleRunner(ImmediateRunner):
    """Returns the same token for every row.

    Args:
        num_blocks: of the cache that it pretends to hold.
        step_s: seconds of sleep in a step: what a model computes without the interpreter's lock.
        num_logprobs: log-probabilities of every token; None is none.
    """

    vocab_size = VOCAB_SIZE
    max_model_len = 1 << 20
    device_type = "cpu"
    choices = ()

    def __init__(self, num_blocks: int, step_s: float = 0.0, num_logprobs: int | None = None) -> None:
        self.cache_layout = CacheLayout(16, (CacheGroup(None, (0,), num_blocks, 1),))
        self._step_s = step_s
        self._num_logprobs = num_logprobs

    def execute(self, plan: StepPlan) -> StepResult:
        """Sleep, and answer."""
        if self._step_s:
            time.sleep(self._step_s)
        tokens: list[tuple[int, ...]] = [(_TOKEN,) if entry.is_sampled else () for entry in plan.entries]
        if self._num_logprobs is None:
            return StepResult(tokens)
        return StepResult(tokens, [tuple(self._logprobs() for _ in each) for each in tokens])

    def _logprobs(self) -> TokenLogprobs:
        top = tuple((_TOKEN + rank, -0.5 - rank) for rank in range(self._num_logprobs or 0))
        return TokenLogprobs(_TOKEN, -0.5, 1, top)

    def release(self) -> None:
        """Nothing is remembered."""

    def reload_weights(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing to free."""


class LockstepRunner(IdleRunner):
    """Begins a step when the readers have had every token of the step before (else they would merge in one chunk).

    What is counted are tokens: all that it makes have to be read, or `free` has to be called.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._num_made = 0
        self._num_read = 0
        self._turn = threading.Semaphore(1)
        self._is_free = False

    def execute(self, plan: StepPlan) -> StepResult:
        """Wait for the readers, and answer.

        Raises:
            TimeoutError: the readers did not read for a minute: what is measured would be this wait.
        """
        result = super().execute(plan)
        if plan.entries and not self._is_free:
            if not self._turn.acquire(timeout=_PATIENCE_S):
                raise TimeoutError("tokens were made that nobody reads")
            self._num_made += sum(map(len, result.token_ids))
            if self._num_made == self._num_read:
                self._turn.release()
        return result

    def was_read(self, num_tokens: int) -> None:
        """Let the next step begin once everything that was made has been read (event loop)."""
        self._num_read += num_tokens
        if self._num_read == self._num_made:
            self._turn.release()

    def free(self) -> None:
        """Wait no more."""
        self._is_free = True
        self._turn.release()


def engine_over(runner: IdleRunner, tokenizer: Any = None, **config: Any) -> aiocb.Engine:
    """An engine without prefix cache and safety margin: nothing but what is measured."""
    return aiocb.Engine.from_runner(
        lambda _: runner,
        ModelDefaults(VOCAB_SIZE, runner.max_model_len),
        tokenizer,
        config=aiocb.EngineConfig(safety_margin=0.0, allow_block_sharing=False, **config),
    )


def on_every_loop(
    measure: Callable[..., Coroutine[Any, Any, Row]], cases: Sequence[tuple[Any, ...]], repeats: int
) -> list[Row]:
    """Measure all cases (arguments of `measure`) on asyncio's own event loop and, where it is installed, uvloop's.

    Returns:
        a row per case and loop: medians of `repeats` runs, taken in turn, so that a slow spell of the machine hits all.
    """
    factories: dict[str, Any] = {"asyncio": asyncio.new_event_loop}
    with contextlib.suppress(ImportError):
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    measured: dict[Any, list[Row]] = {}
    for _ in range(repeats):
        for case, (name, factory) in itertools.product(cases, factories.items()):
            with asyncio.Runner(loop_factory=factory) as runner:
                measured.setdefault((case, name), []).append(runner.run(measure(*case)))
    return [{"loop": name, **medians(rows)} for (_, name), rows in measured.items()]
