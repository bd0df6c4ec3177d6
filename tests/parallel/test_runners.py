"""The two halves of a runner in one process: messages go through a queue, and the rank thread of each is one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiocb.errors import AiocbError, EngineError
from aiocb.model.eager.parallel import FollowingRunner, LeadingRunner
from aiocb.sampling_params import SamplingParams
from aiocb.step import OpenedRequest, StepEntry, StepOutOfMemory, StepPlan
from aiocb.testing.oracle import KVOracle

WAIT_S = 10.0
STEP = StepPlan(
    (StepEntry(1, 0, 3, 1, True, (), 0, ((1,),)),), 3, (OpenedRequest(1, (1, 2, 3), 3, SamplingParams(), 0),)
)


class LocalRanks:
    """What `Ranks` is to a runner."""

    def __init__(self, rank: int, messages: queue.SimpleQueue[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.limit, self.load_limit = rank, 2, WAIT_S, WAIT_S
        self.lost: AiocbError | None = None
        self.told: list[BaseException] = []
        self.is_working = False
        self._messages, self._barrier = messages, barrier

    def call(self, work: Callable[[], Any], limit: float | None) -> Any:
        return work()

    def start(self, work: Callable[[], None], on_end: Callable[[BaseException | None], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                on_end(error)
            else:
                on_end(None)

        threading.Thread(target=run, daemon=True).start()

    def on_lost(self, callback: Callable[[AiocbError], None]) -> None: ...

    def work(self) -> None:
        self.is_working = True

    def rest(self) -> None:
        self.is_working = False

    def fail(self, error: BaseException) -> None:
        self.told.append(error)
        self.lost = EngineError(str(error))

    def explained(self, error: BaseException) -> BaseException:
        self.fail(error)
        return error

    def send(self, message: bytes) -> None:
        self._messages.put(message)

    def receive(self) -> bytes:
        return self._messages.get(timeout=WAIT_S)

    def meet(self) -> None:
        self._barrier.wait(WAIT_S)

    def close(self) -> None: ...


class Both:
    def __init__(self) -> None:
        messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        barrier = threading.Barrier(2)
        ranks: list[Any] = [LocalRanks(number, messages, barrier) for number in range(2)]
        self.ranks = ranks
        self.oracles = [KVOracle(), KVOracle()]
        self.leader = LeadingRunner(self.oracles[0], ranks[0])
        self.follower = FollowingRunner(self.oracles[1], ranks[1])
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        beginning = threading.Thread(target=self.follower.begin, args=(self.ended.put,))
        beginning.start()
        self.leader.begin(lambda error: None)
        beginning.join(WAIT_S)

    def reload(self) -> threading.Thread:
        thread = threading.Thread(target=self.leader.reload_weights)
        thread.start()
        return thread


@pytest.fixture
def both() -> Iterator[Both]:
    yield Both()


def end(both: Both) -> None:
    both.leader.release()
    assert both.ended.get(timeout=WAIT_S) is None
    assert not any(ranks.is_working or ranks.told for ranks in both.ranks)
    both.follower.release()  # its own life is over then, too
    assert not both.ranks[1].told
    assert all(oracle.is_released for oracle in both.oracles)


def test_steps_are_taken_by_both(both: Both) -> None:
    (token_ids,) = both.leader.execute(STEP).token_ids
    assert len(token_ids) == 1
    both.leader.execute(StepPlan((), 0, closed=(1,)))
    end(both)
    assert [oracle.num_steps for oracle in both.oracles] == [1, 1]


def test_a_follower_makes_no_plans(both: Both) -> None:
    with pytest.raises(EngineError, match="follows rank 0"):
        both.follower.execute(STEP)
    end(both)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_pause_begins_when_rank_0_stands_still_and_ends_when_all_have_left(both: Both, is_early: bool) -> None:
    held, leader_held = threading.Event(), threading.Event()
    if is_early:
        both.follower.hold(held.set)
        assert not held.is_set()
    both.leader.hold(leader_held.set)
    assert leader_held.is_set()
    reloading = both.reload()
    if not is_early:  # rank 0 has left its own pause already
        both.follower.hold(held.set)
    assert held.wait(WAIT_S)
    assert reloading.is_alive()
    both.follower.reload_weights()
    reloading.join(WAIT_S)
    assert [oracle._version for oracle in both.oracles] == [1, 1]
    end(both)


def test_a_pause_that_is_given_up_counts_for_nothing(both: Both) -> None:
    given_up, held = threading.Event(), threading.Event()
    both.follower.hold(given_up.set)
    both.follower.reload_weights()
    both.leader.hold(lambda: None)
    reloading = both.reload()
    both.follower.hold(held.set)
    assert held.wait(WAIT_S) and not given_up.is_set() and reloading.is_alive()
    both.follower.reload_weights()
    reloading.join(WAIT_S)
    end(both)


def test_who_waits_for_a_pause_is_let_go_when_the_life_ends(both: Both) -> None:
    held = threading.Event()
    both.follower.hold(held.set)
    end(both)
    assert held.is_set()


def test_leaving_early_is_told(both: Both) -> None:
    both.follower.release()
    assert "rank 1 has left" in str(both.ranks[1].told[0])


def test_what_a_follower_raises_is_told(both: Both) -> None:
    both.leader._ranks.send(both.leader._outgoing.message("step", STEP._replace(num_tokens=4)))
    error = both.ended.get(timeout=WAIT_S)
    assert isinstance(error, EngineError) and "rank 1 has failed in a step" in str(error)
    assert both.ranks[1].told == [error]


def test_a_step_without_memory_is_not_taken_again(both: Both) -> None:
    def fail(_: StepPlan) -> None:
        raise StepOutOfMemory("all is taken")

    both.oracles[0]._errors = fail
    with pytest.raises(EngineError, match="rank 0 has failed in a step .*all is taken"):
        both.leader.execute(STEP)


def test_nothing_is_sent_to_those_who_are_lost(both: Both) -> None:
    both.ranks[0].lost = EngineError("rank 1 has ended")
    both.leader.release()
    assert both.ranks[0].is_working and both.ranks[0]._messages.empty()
