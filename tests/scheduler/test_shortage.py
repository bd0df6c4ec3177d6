"""Steps that run out of memory: smaller ones, then nobody beside, then the end of one request, and growing again."""

from __future__ import annotations

import pytest

from aiocb.errors import RequestFailed
from aiocb.scheduler.shortage import FIRST_PATIENCE
from aiocb.step import StepOutOfMemory, StepPlan
from tests.scheduler.helpers import Harness, ids

LONG = [(7 * i + 3) % 11 for i in range(40)]


class Memory:
    """Steps of more tokens than `room` fail, and all steps of the requests in `heavy`."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.heavy: set[int] = set()
        self.fails_on_collect = 0
        self.failed: list[int] = []

    def errors(self, plan: StepPlan) -> None:
        if plan.num_tokens > self.room or self.heavy.intersection(ids(plan)):
            self.failed.append(plan.num_tokens)
            raise StepOutOfMemory("planned")

    def interrupt(self, what: str) -> None:
        if what == "collect" and self.fails_on_collect:
            self.fails_on_collect -= 1
            raise StepOutOfMemory("planned")


def test_steps_are_halved_until_they_fit() -> None:
    memory = Memory(room=5)
    h = Harness(errors=memory.errors)
    first, second = h.add(LONG, 6), h.add([5, 2], 6)
    h.run()
    assert memory.failed == [42, 21, 10]
    assert h.scheduler.max_step_tokens == 5 and h.scheduler.num_steps_out_of_memory == 3
    assert first.finish_reason == second.finish_reason == "length"
    h.assert_quiescent()


def test_what_was_computed_before_is_found_again() -> None:
    memory = Memory()
    h = Harness(errors=memory.errors, max_batch_tokens=16)
    request = h.add(LONG, 6)
    h.step()
    memory.room = 8
    h.step()  # fails: its 16 tokens are gone, those of the step before are not
    plan = h.step()
    assert request.num_preemptions == 1
    assert [(entry.num_computed_tokens, entry.num_new_tokens) for entry in plan.entries] == [(16, 8)]
    h.assert_quiescent()


def test_the_budget_grows_again_and_more_slowly_when_that_fails() -> None:
    memory = Memory(room=16)
    h = Harness(errors=memory.errors, max_batch_tokens=64, num_blocks=200)
    h.add(LONG, 1)
    h.run()
    assert h.scheduler.max_step_tokens == 10 and memory.failed == [40, 20]
    runner = h.add([1, 2], 600)
    for _ in range(FIRST_PATIENCE):
        h.step()
    assert h.scheduler.max_step_tokens == 20
    h.add(LONG[::-1], 1)
    while len(memory.failed) < 3:
        h.step()
    assert memory.failed[2] == 20 and h.scheduler.max_step_tokens == 10
    for _ in range(2 * FIRST_PATIENCE - 1):
        h.step()
    assert h.scheduler.max_step_tokens == 10
    memory.room = 64
    for _ in range(8 * FIRST_PATIENCE):
        h.step()
    assert h.scheduler.max_step_tokens == 64, "back at what is configured, and no further"
    assert not runner.is_finished
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_only_the_request_fails_that_nothing_helps(depth: int) -> None:
    memory = Memory()
    h = Harness(errors=memory.errors, depth=depth)
    others = [h.add([i, 2, 3], 30) for i in range(5)]
    heavy = h.add(LONG, 30)
    for _ in range(4):
        h.step()
    memory.heavy = {heavy.id}
    h.run()
    end = h.ends[heavy.id]
    assert end.reason == "error" and isinstance(end.error, RequestFailed)
    assert isinstance(end.error.__cause__, StepOutOfMemory) and "num_blocks" in str(end.error)
    assert memory.failed.count(1) == 2, "once beside others, once alone in the cache"
    assert all(request.finish_reason == "length" for request in others)
    h.assert_quiescent()


def test_it_is_tried_alone_before_it_fails() -> None:
    memory = Memory(room=0)
    h = Harness(errors=memory.errors)
    first, second = h.add([1, 2], 3), h.add([3, 4], 3)
    while not memory.failed or memory.failed[-1] != 1:
        h.step()
    assert not first.tables and not second.tables, "nobody holds anything while it is tried once more"
    memory.room = 1 << 30
    h.run()
    assert first.finish_reason == second.finish_reason == "length"
    h.assert_quiescent()


@pytest.mark.parametrize("paused", [False, True])
def test_those_who_end_or_pause_meanwhile_are_left_alone(paused: bool) -> None:
    memory = Memory()
    h = Harness(depth=2, errors=memory.errors, interrupt=memory.interrupt)
    request, other = h.add([1, 2, 3], 20), h.add([4, 5, 6], 20)
    for _ in range(3):
        h.step()
    plan = h.schedule()
    if paused:
        h.scheduler.pause(request)
    else:
        h.finish(request)
    memory.fails_on_collect = 1
    h.execute(plan)
    assert not h.flights and not request.tables and not other.tables
    if paused:
        h.scheduler.resume(request)
    h.run()
    assert other.finish_reason == "length" and request.is_finished
    h.assert_quiescent()


def test_a_failure_at_collect_takes_back_all_that_is_behind_it() -> None:
    memory = Memory()
    h = Harness(depth=2, interrupt=memory.interrupt, errors=memory.errors)
    h.add_group(3, [1, 2, 3, 4, 5], 12)
    h.add(LONG, 12)
    while h.scheduler.has_work:
        memory.fails_on_collect = h.oracle.num_steps in (4, 9, 14)
        h.step()
    assert h.scheduler.num_steps_out_of_memory >= 3
    h.assert_quiescent()


def test_without_sharing_all_is_computed_again() -> None:
    memory = Memory(room=9)
    h = Harness(errors=memory.errors, sharing=False)
    h.add(LONG, 4)
    h.add(LONG, 4)
    h.run()
    h.assert_quiescent()
