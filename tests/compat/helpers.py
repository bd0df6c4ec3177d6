"""A runner without a model, stepped by hand where the order matters, and managers over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from aiocb.compat.transformers.manager import ContinuousBatchingManager
from aiocb.config import EngineConfig
from aiocb.engine.source import RunnerSource
from aiocb.outputs import TokenLogprobs
from aiocb.records import Records
from aiocb.sampling_params import ModelDefaults
from aiocb.step import CacheGroup, CacheLayout, ImmediateRunner, StepPlan, StepResult

VOCAB = 100
MAX_LEN = 200
EOS = 7
WAIT = 20.0
"""Seconds that a test waits for what must come; only a failing test waits that long."""


def generation(**values: Any) -> GenerationConfig:
    return GenerationConfig(**values)  # type: ignore[no-untyped-call]


def next_token(tokens: list[int]) -> int:
    """The next token of the fake model; never `EOS` by chance."""
    token = (sum(tokens) * 31 + len(tokens)) % VOCAB
    return token if token != EOS else EOS + 1


def expected(prompt: list[int], count: int) -> list[int]:
    """What the fake model produces."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner(ImmediateRunner):
    """Computes `next_token`; with `gated`, every step waits for `allow`."""

    def __init__(self, *, gated: bool = False, num_blocks: int = 400) -> None:
        self.cache_layout = CacheLayout(4, (CacheGroup(None, (0,), num_blocks, 1),))
        self.vocab_size = VOCAB
        self.max_model_len = MAX_LEN
        self.permits = threading.Semaphore(0) if gated else None
        self.is_open = False
        self.num_steps = 0
        self.is_closed = False
        self.error: Exception | None = None
        self.prompts: list[tuple[int, ...]] = []
        self.device_type = "cpu"
        self.choices = ()
        self._records = Records()
        self.reached = threading.Condition()
        self.force: Callable[[list[int]], int] = next_token

    def allow(self, count: int | None = None) -> None:
        """Let so many steps through; None opens the gate for good."""
        assert self.permits is not None
        self.is_open = self.is_open or count is None
        self.permits.release(count or 1)

    def wait_for_step(self, number: int) -> None:
        """Wait until step `number` (from 1) has been entered."""
        with self.reached:
            assert self.reached.wait_for(lambda: self.num_steps >= number, WAIT)

    def execute(self, plan: StepPlan) -> StepResult:
        records = self._records.begin(plan)
        if not plan.entries:
            return StepResult(())
        with self.reached:
            self.num_steps += 1
            self.reached.notify_all()
        if self.permits is not None and not self.is_open:
            assert self.permits.acquire(timeout=WAIT)
        if self.error is not None:
            raise self.error
        self.prompts += [opened.token_ids[: opened.num_prompt_tokens] for opened in plan.opened]
        tokens: list[tuple[int, ...]] = [
            (self.force(list(record.tokens)),) if entry.is_sampled else ()
            for entry, record in zip(plan.entries, records, strict=True)
        ]
        logprobs = None
        if any(record.sampling.logprobs is not None for record in records):
            logprobs = [tuple(TokenLogprobs(token, -token / 10, 1) for token in one) or None for one in tokens]
        result = StepResult(tokens, logprobs)
        self._records.finish(records, result)
        return result

    def release(self) -> None:
        self._records.clear()

    def reload_weights(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Setup:
    """A manager over fake runners: a new one for every session."""

    def __init__(self, *, gated: bool = False, num_blocks: int = 400, generation: Any = None, **config: Any) -> None:
        self.runners: list[FakeRunner] = []
        self.build_error: Exception | None = None
        self._gated = gated
        self._num_blocks = num_blocks
        source = RunnerSource(self._make, ModelDefaults(VOCAB, MAX_LEN, (EOS,)))
        self.manager = ContinuousBatchingManager(
            None, generation, EngineConfig(debug_checks=True, **config), source=source
        )

    def _make(self, _: EngineConfig) -> FakeRunner:
        if self.build_error is not None:
            raise self.build_error
        self.runners.append(FakeRunner(gated=self._gated, num_blocks=self._num_blocks))
        return self.runners[-1]

    @property
    def runner(self) -> FakeRunner:
        return self.runners[-1]


@contextmanager
def running(setup: Setup) -> Iterator[ContinuousBatchingManager]:
    """Start; at the end open the gate, destroy, and check that nothing is left behind."""
    setup.manager.start()
    try:
        yield setup.manager
    finally:
        finish(setup)


def finish(setup: Setup) -> None:
    for runner in setup.runners:
        if runner.permits is not None:
            runner.allow()
    setup.manager.destroy()
    assert_nothing_left(setup.manager)
    assert all(runner.is_closed for runner in setup.runners)


def assert_nothing_left(manager: ContinuousBatchingManager) -> None:
    assert manager._router.num_live == 0
    last = manager._life.last
    if last is not None:
        core = last.worker.core
        assert core is None or core.delivery.num_streams == 0
        if core is not None and last.worker.state != "dead":
            core.scheduler.check_invariants()
            assert core.scheduler.num_running == core.scheduler.num_waiting == 0
        assert not last.worker.is_alive
    assert not [thread for thread in threading.enumerate() if thread.name == "aiocb worker"]
