"""The budget of a step in time: what is learned of steps, and what is made of it."""

from __future__ import annotations

import random

import pytest

from aiocb.cache.manager import CacheManager
from aiocb.engine.core import EngineCore
from aiocb.sampling_params import SamplingParams
from aiocb.scheduler.pace import LADDER, Pace, StepCost
from aiocb.scheduler.request import Request
from aiocb.scheduler.scheduler import Scheduler
from aiocb.step import StepEntry, StepPlan, StepResult
from aiocb.testing import FakeRunner


def _seconds(tokens: float, keys: float) -> float:
    return 0.004 + 0.0003 * tokens + 2e-7 * keys


def _learned(pace: Pace, *, steps: int = 60, seed: int = 0, noise: float = 0.0) -> Pace:
    chance = random.Random(seed)
    for _ in range(steps):
        tokens, keys = chance.randrange(1, 600), chance.randrange(1, 200_000)
        seconds = _seconds(tokens, keys) * (1 + noise * chance.uniform(-1, 1))
        pace.cost.observe(tokens, keys, seconds, has_prompts=True)
    return pace


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.2, 0.15)])
def test_the_time_of_steps_is_learned(noise: float, tolerance: float) -> None:
    cost = _learned(Pace(0.1, 0.5), noise=noise).cost
    for tokens, keys in ((64, 20_000), (500, 150_000)):
        assert cost.seconds(tokens, keys) == pytest.approx(_seconds(tokens, keys), rel=tolerance)


def test_steps_that_are_all_alike_leave_all_of_their_time_to_the_tokens() -> None:
    """Or larger ones would seem to cost nothing."""
    cost = StepCost()
    for _ in range(10):
        cost.observe(128, 8000, 0.04, has_prompts=True)
    assert cost.seconds(128, 8000) == pytest.approx(0.04, rel=0.05)
    assert cost.seconds(512, 32_000) > 0.12


def test_the_first_steps_and_a_slow_one_are_not_believed() -> None:
    cost = StepCost()
    for seconds in (5.0, 3.0, *[_seconds(100, 1000)] * 20, 2.0, _seconds(100, 1000)):
        cost.observe(100, 1000, seconds, has_prompts=True)
    assert cost.seconds(100, 1000) == pytest.approx(_seconds(100, 1000), rel=0.05)
    for _ in range(60):  # but a machine that has become slow is
        cost.observe(100, 1000, 1.0, has_prompts=True)
    assert cost.seconds(100, 1000) == pytest.approx(1.0, rel=0.1)


def test_no_time_at_all() -> None:
    """A clock that stands still, as of a simulation."""
    pace = Pace(0.1, 0.5)
    for _ in range(20):
        pace.cost.observe(64, 1000, 0.0, has_prompts=True)
    assert pace.budget([10, 20], 0, 0.0, 1024) == 128


class Clocked(FakeRunner):
    """Whose steps take a millisecond and half of one for each token, on a clock of their own."""

    def __init__(self) -> None:
        super().__init__([7])
        self.now = 0.0
        self.durations: list[tuple[int, float]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        seconds = 0.001 + 0.0005 * plan.num_tokens
        self.now += seconds
        self.durations.append((plan.num_tokens, seconds))
        return super().execute(plan)


def test_stats_show_what_was_learned() -> None:
    for pace in (Pace(0.03, 0.4), None):
        runner = FakeRunner([7])
        cache = CacheManager(runner.cache_layout)
        scheduler = Scheduler(cache, max_batch_tokens=64, max_requests_per_batch=8, pace=pace)
        if pace is not None:
            _learned(pace)
        stats = EngineCore(runner, scheduler).stats(0)
        figures = (stats.step_cost_seconds, stats.step_cost_seconds_per_token, stats.step_cost_seconds_per_key)
        assert figures == (pytest.approx((0.004, 0.0003, 2e-7), rel=0.05) if pace is not None else (0.0, 0.0, 0.0))


def _run(pace: Pace | None) -> Clocked:
    """Four requests decode when a prompt of 3,000 tokens comes, and another of 1,000 behind it."""
    runner = Clocked()
    scheduler = Scheduler(CacheManager(runner.cache_layout), max_batch_tokens=1024, max_requests_per_batch=8, pace=pace)
    core = EngineCore(runner, scheduler, clock=lambda: runner.now)

    def add(number: int, length: int, num_output: int) -> None:
        sampling = SamplingParams(temperature=0.0, eos_token_id=(), min_new_tokens=0)
        scheduler.add(
            Request(
                [1 + number] * length,
                id=number,
                sampling=sampling,
                max_tokens=length + num_output,
                seed=0,
                submitted_at=runner.now,
            )
        )

    for number in range(1, 5):
        add(number, 8 * number, 400)

    def step() -> None:
        plan = scheduler.schedule(runner.now)
        for landed, result in core._execute(plan):
            scheduler.update(landed, result, runner.now)

    for _ in range(30):
        step()
    runner.durations.clear()
    add(5, 3000, 2)
    add(6, 1000, 2)
    while scheduler.num_running > 4 or scheduler.num_waiting:
        step()
    return runner


def test_a_long_prompt_leaves_steps_as_long_as_they_should_be() -> None:
    runner = _run(Pace(0.03, 0.4))
    longest = max(seconds for _, seconds in runner.durations)
    late = [seconds for _, seconds in runner.durations[20:]]
    assert 0.05 < longest <= 0.063  # twice the target, after 0.4 seconds
    assert max(seconds for _, seconds in runner.durations[:8]) <= 0.032
    assert max(late) <= 0.063
    unpaced = _run(None)
    assert max(seconds for _, seconds in unpaced.durations) > 0.4


def test_a_slowdown_counts_at_once() -> None:
    """Before it is learned: others have taken the machine's cores."""
    pace = _learned(Pace(0.1, 0.5))
    before = pace.budget([100] * 10, 0, 0.0, 4096)
    for _ in range(3):
        pace.cost.observe(200, 10_000, 2.5 * _seconds(200, 10_000), has_prompts=True)
    slow = pace.budget([100] * 10, 0, 0.0, 4096)
    assert 0.35 * before < slow < 0.7 * before
    for _ in range(12):
        pace.cost.observe(200, 10_000, _seconds(200, 10_000), has_prompts=True)
    assert pace.budget([100] * 10, 0, 0.0, 4096) > 0.8 * before


class TestBudget:
    def test_prompts_get_what_decoding_leaves(self) -> None:
        pace = _learned(Pace(0.1, 0.5))
        decoding = [100] * 40
        budget = pace.budget(decoding, 0, 0.0, 4096)
        chunk = budget - len(decoding)
        assert chunk % LADDER == 0

        def seconds(tokens: int) -> float:
            return _seconds(len(decoding) + tokens, sum(decoding) + tokens * tokens / 2)

        assert seconds(chunk) <= 0.1 * 1.02 and seconds(chunk + 2 * LADDER) > 0.1

    def test_what_lies_before_a_chunk_counts(self) -> None:
        pace = _learned(Pace(0.1, 0.5))
        assert pace.budget([], 50_000, 0.0, 4096) < pace.budget([], 0, 0.0, 4096) / 2

    def test_who_has_waited_long_gets_more(self) -> None:
        pace = _learned(Pace(0.1, 0.5))
        soon, late = (pace.budget([100] * 40, 0, waited, 4096) for waited in (0.4, 0.6))
        assert 1.8 * soon < late < 2.6 * soon

    def test_decoding_that_takes_longer_by_itself(self) -> None:
        """A prompt still advances; and as much again is its share when it has waited."""
        pace = _learned(Pace(0.01, 0.5))
        decoding = [100] * 64
        assert pace.budget(decoding, 0, 0.0, 4096) == 64 + LADDER
        alone = _seconds(64, 6400)
        chunk = pace.budget(decoding, 0, 1.0, 4096) - 64
        assert _seconds(64 + chunk, 6400 + chunk * chunk / 2) == pytest.approx(2 * alone, rel=0.2)

    def test_nobody_decodes(self) -> None:
        pace = _learned(Pace(0.05, 0.5))
        budget = pace.budget([], 0, 0.0, 4096)
        assert _seconds(budget, budget * budget / 2) == pytest.approx(0.2, rel=0.05)

    def test_decoding_alone_for_long_does_not_make_prompts_crawl(self) -> None:
        pace = _learned(Pace(0.1, 0.5))
        before = pace.budget([200], 0, 0.0, 4096)
        chance = random.Random(0)
        for i in range(2000):
            seconds = _seconds(1, 200 + i) * chance.uniform(0.9, 1.1)
            pace.observe(StepPlan((StepEntry(1, 200 + i, 1, 0, True),), 1), seconds)
        assert 0.8 * before < pace.budget([200], 0, 0.0, 4096) < 1.2 * before

    def test_the_bound_holds(self) -> None:
        pace = _learned(Pace(10.0, 0.5))
        assert pace.budget([5], 0, 0.0, 100) == 100

    def test_steps_grow_by_and_by(self) -> None:
        """Of steps larger than any before, nothing is known."""
        pace = Pace(0.1, 0.5)
        assert pace.budget([5] * 3, 0, 0.0, 4096) == 128
        entry = StepEntry(1, 100, 64, 0, False)
        for _ in range(8):
            pace.observe(StepPlan((entry,), 64), 0.001)
        assert pace.budget([], 0, 0.0, 4096) == 128
