"""Random histories: hypothesis drives scheduler and oracle through every move, in every order.

Each step is checked three times over: the invariants of all parts, the oracle (every position that a token attends to
holds this request's own history), and at the end that every request ended once with the output it has when it runs
alone, and that every block is free.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiocb.config import SchedulerType
from aiocb.scheduler import Request
from aiocb.step import StepOutOfMemory, StepPlan
from tests.scheduler.helpers import VOCAB, Harness

WINDOWS: list[tuple[int | None, ...]] = [(None,), (6,), (1,), (None, 5), (None, 3, 9)]
POLICIES: list[SchedulerType] = ["fifo", "prefill_first", "priority"]
PREFIXES = [[(seed + i * i * (seed + 2)) % VOCAB for i in range(40)] for seed in range(3)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 5]),
        windows=st.sampled_from(WINDOWS),
        is_chunked=st.sampled_from([False, False, True]),
        num_blocks=st.lists(st.integers(6, 24), min_size=3, max_size=3),
        sharing=st.sampled_from([True, True, True, False]),
        max_batch_tokens=st.sampled_from([2, 5, 16, 64]),
        max_requests=st.sampled_from([1, 3, 8]),
        chunk=st.sampled_from([None, 1, 3, 8]),
        policy=st.sampled_from(POLICIES),
        margin=st.sampled_from([0.0, 0.15, 0.5]),
        depth=st.sampled_from([1, 1, 2]),
        draft_len=st.sampled_from([0, 0, 3]),
        states=st.sampled_from([(0, 1), (0, 1), (2, 1), (3, 4), (6, 2), (30, 3)]),
        swap_places=st.sampled_from([0, 3, 12, 100]),
    )
    def build(
        self,
        page_size: int,
        windows: tuple[int | None, ...],
        is_chunked: bool,
        num_blocks: list[int],
        sharing: bool,
        max_batch_tokens: int,
        max_requests: int,
        chunk: int | None,
        policy: SchedulerType,
        margin: float,
        depth: int,
        draft_len: int,
        states: tuple[int, int],
        swap_places: int,
    ) -> None:
        self.plan: StepPlan | None = None
        self.fault = False
        self.h = Harness(
            num_blocks=num_blocks[: len(windows)],
            page_size=page_size,
            windows=windows,
            is_chunked=is_chunked,
            sharing=sharing,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            chunk=chunk,
            policy=policy,
            margin=margin,
            depth=depth,
            draft_len=draft_len,
            num_slots=states[0],
            interval=states[1] * page_size,
            swap_places=swap_places,
            errors=self.errors,
            interrupt=self.interrupt,
        )
        self.room = 1 << 30
        self.forgets = False

    def interrupt(self, what: str) -> None:
        if what == "collect" and self.forgets:
            self.forgets = False
            if self.h.oracle.oldest_tokens:
                raise StepOutOfMemory("planned")

    def errors(self, plan: StepPlan) -> Mapping[int, Exception] | None:
        if plan.num_tokens > self.room:
            raise StepOutOfMemory("planned")
        if not self.fault:
            return None
        self.fault = False
        return {plan.entries[-1].request_id: RuntimeError("planned")}

    @property
    def alive(self) -> list[Request]:
        return [r for r in self.h.requests if r.arrival >= 0 and not r.is_finished]

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 40),
        suffix=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        num_output=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "tenant"]),
        timeouts=st.tuples(st.sampled_from([None, None, 2.0, 9.0]), st.sampled_from([None, None, 1.0, 4.0])),
        ends=st.tuples(st.sampled_from([(), (), (3,)]), st.sampled_from([(), (), (5,)]), st.sampled_from([0, 0, 3])),
        temperature=st.sampled_from([0.0, 1.0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self,
        prefix: list[int],
        length: int,
        suffix: list[int],
        num_output: int,
        n: int,
        priority: int,
        salt: str | None,
        timeouts: tuple[float | None, float | None],
        ends: tuple[tuple[int, ...], tuple[int, ...], int],
        temperature: float,
        prompt_logprobs: int | None,
    ) -> None:
        prompt = [*prefix[:length], *suffix]
        if len(self.alive) > 12 or len(prompt) + num_output > self.h.cache.max_request_tokens:
            return
        deadline, queue_deadline = (None if t is None else self.h.now + t for t in timeouts)
        options = {
            "priority": priority,
            "salt": salt,
            "deadline": deadline,
            "queue_deadline": queue_deadline,
            "eos_token_id": ends[0],
            "stop_token_ids": ends[1],
            "min_new_tokens": ends[2],
            "temperature": temperature,
            "prompt_logprobs": prompt_logprobs,
        }
        if n == 1:
            self.h.add(prompt, num_output, seed=len(self.h.requests), **options)
        else:
            self.h.add_group(n, prompt, num_output, **options)

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.alive))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.h.finish(self.pick(data))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.h.scheduler.pause(self.pick(data))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.h.scheduler.resume(self.pick(data))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def expire(self, seconds: float) -> None:
        self.h.expire(self.h.now + seconds)

    @rule(preempt=st.booleans())
    def change_weights(self, preempt: bool) -> None:
        self.h.scheduler.reset_prefix_cache()
        if preempt:
            self.h.scheduler.preempt_all()

    @rule()
    def break_one(self) -> None:
        self.fault = True

    @rule(room=st.sampled_from([0, 1, 4, 1 << 30]), forgets=st.booleans())
    def run_short(self, room: int, forgets: bool) -> None:
        self.room, self.forgets = room, forgets

    @precondition(lambda self: self.plan is None)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.h.step()

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        plan = self.h.schedule()
        self.plan = plan if plan.entries or plan.closed or self.h.flights else None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end_step(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        self.h.execute(plan)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "h"):
            self.h.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.room = 1 << 30
        if self.plan is not None:
            self.end_step()
        while self.alive or self.h.flights:
            for request in self.alive:
                self.h.scheduler.resume(request)
            self.h.run()
        self.h.assert_quiescent()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(24))
def test_a_long_random_history(seed: int) -> None:
    """Longer and denser than hypothesis goes: hundreds of requests through a small cache."""
    rng = random.Random(seed)
    windows = WINDOWS[seed % len(WINDOWS)]
    page_size = rng.choice([2, 4, 8])
    h = Harness(
        num_blocks=[rng.randint(14, 30) for _ in windows],
        page_size=page_size,
        windows=windows,
        is_chunked=seed % 5 < 2 and seed >= 5,
        max_batch_tokens=rng.choice([8, 16, 48]),
        max_requests=rng.choice([4, 8]),
        chunk=rng.choice([None, 4, 8]),
        policy=POLICIES[seed % 3],
        margin=rng.choice([0.0, 0.15]),
        depth=1 + seed % 2,
        draft_len=rng.choice([0, 2]),
        num_slots=rng.choice([2, 5, 12]) if seed >= 12 else 0,
        interval=rng.choice([1, 3]) * page_size,
        swap_places=rng.choice([0, 10, 200]),
    )
    alive: list[Request] = []
    for _ in range(120):
        for _ in range(rng.randrange(3)):
            prompt = [*rng.choice(PREFIXES)[: rng.randint(1, 40)], *rng.choices(range(VOCAB), k=rng.randint(0, 3))]
            num_output = rng.randint(1, 12)
            if len(alive) < 30 and len(prompt) + num_output <= h.cache.max_request_tokens:
                options = {"priority": rng.randrange(3), "eos_token_id": rng.choice([(), (3,)])}
                if rng.random() < 0.2:
                    alive += h.add_group(rng.randint(2, 4), prompt, num_output, **options)
                else:
                    alive.append(h.add(prompt, num_output, **options))
        plan = h.schedule()
        alive = [request for request in alive if not request.is_finished]
        for move in (h.finish, h.scheduler.pause, h.scheduler.resume, h.scheduler.resume):
            if alive and rng.random() < 0.15:
                move(rng.choice(alive))
        h.execute(plan)
    while alive:
        for request in alive:
            h.scheduler.resume(request)
        h.run()
        alive = [request for request in alive if not request.is_finished]
    h.assert_quiescent()
    assert h.oracle.num_steps > 100 and len(h.requests) > 50
