"""The waiting queue and the deadlines: order, O(1) removal, no stale entries that pile up."""

from __future__ import annotations

import random

from aiocb.sampling_params import SamplingParams
from aiocb.scheduler import Request
from aiocb.scheduler.queue import Deadlines, WaitingQueue


def make(
    number: int, priority: int = 0, *, deadline: float | None = None, queue_deadline: float | None = None
) -> Request:
    request = Request(
        [1],
        id=number,
        sampling=SamplingParams(),
        max_tokens=2,
        priority=priority,
        deadline=deadline,
        queue_deadline=queue_deadline,
    )
    request.arrival = number
    request.rank = (priority, number)
    return request


def test_order_is_rank_and_a_returning_request_is_in_front() -> None:
    queue = WaitingQueue()
    requests = [make(i) for i in range(5)]
    for request in requests:
        queue.push(request)
    assert queue.discard(requests[0]) and queue.discard(requests[1])
    queue.push(requests[1])
    assert [r.id for r in queue] == [1, 2, 3, 4] and queue.peek() is requests[1]
    urgent = make(9, priority=-1)
    queue.push(urgent)
    assert queue.peek() is urgent
    queue.check_invariants()


def test_a_request_that_left_and_came_back_is_there_once() -> None:
    queue = WaitingQueue()
    request = make(1)
    for _ in range(3):
        queue.push(request)
        assert len(queue) == 1
        assert queue.discard(request) and not queue.discard(request)
    assert queue.peek() is None and not queue


def test_stale_entries_are_swept() -> None:
    queue, rng = WaitingQueue(), random.Random(0)
    head = make(-1)
    queue.push(head)
    alive: list[Request] = []
    for number in range(5000):
        request = make(number)
        queue.push(request)
        alive.append(request)
        if len(alive) > 10:
            assert queue.discard(alive.pop(rng.randrange(len(alive))))
        if number % 100 == 0:
            queue.check_invariants()
    assert queue.peek() is head and len(queue) == 11
    assert "11 waiting" in repr(queue)


def test_deadlines_come_in_order_and_only_when_due() -> None:
    deadlines = Deadlines()
    late, soon, never = make(1, deadline=9.0), make(2, deadline=3.0), make(3)
    for request in (late, soon, never):
        deadlines.push(request)
    assert deadlines.next_at == 3.0
    assert deadlines.pop_due(2.9) is None
    assert deadlines.pop_due(10.0) is soon
    assert deadlines.pop_due(10.0) is late
    assert deadlines.pop_due(10.0) is None and len(deadlines) == 0
    assert "0 watched" in repr(deadlines)


def test_a_queue_deadline_no_longer_counts_once_it_has_run() -> None:
    deadlines = Deadlines()
    waiting, running = make(1, queue_deadline=1.0), make(2, queue_deadline=1.0, deadline=5.0)
    running.has_run = True
    deadlines.push(waiting)
    deadlines.push(running)
    assert deadlines.pop_due(2.0) is waiting
    assert deadlines.pop_due(2.0) is None
    assert deadlines.pop_due(5.0) is running


def test_ended_requests_do_not_stay_until_their_deadline() -> None:
    deadlines = Deadlines()
    for number in range(2000):
        request = make(number, deadline=1e9)
        deadlines.push(request)
        request.transition("finish")
        deadlines.discard(request)
    assert len(deadlines) < 300
