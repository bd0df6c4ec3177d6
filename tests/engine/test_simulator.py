"""Random histories of the whole core, and proof that they would notice a mistake."""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import pytest

from aiocb.cache import manager
from aiocb.cache.prefix import root_hash
from aiocb.engine.core import EngineCore
from aiocb.engine.delivery import Delivery
from aiocb.scheduler.scheduler import Scheduler
from aiocb.testing.simulator import LAYOUTS, Layout, Simulation, SimulationError
from aiocb.testing.simulator.__main__ import main

EVENTS = (
    "EngineClosed",
    "EngineDead",
    "RequestFailed",
    "RequestTimeout",
    "ended: cancelled",
    "ended: length",
    "ended: stop",
    "died: collect raises",
    "died: reload_weights raises",
    "died: submit raises",
    "lives ended",
    "opening failed",
    "out of memory",
    "queue full",
    "refused",
    "waited for room",
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_short_histories_hold(layout: Layout) -> None:
    Simulation(1, layout=layout).run(850)


def test_equal_seeds_give_equal_histories() -> None:
    first, second = Simulation(11).run(300), Simulation(11).run(300)
    assert first.digest == second.digest
    assert first.events == second.events
    assert Simulation(12).run(300).digest != first.digest


def test_without_faults_nothing_fails() -> None:
    report = Simulation(5, faults=False).run(400)
    assert report.events["EngineDead"] == report.events["RequestFailed"] == 0
    assert report.events["ended: length"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_event_occurs() -> None:
    """`make simulate` goes on from here, to 200,000 steps."""
    seen: set[str] = set()
    for seed, layout in enumerate(layout for layout in LAYOUTS for _ in range(2)):
        seen.update(Simulation(100 + seed, layout=layout).run(1200).events)
    assert seen == set(EVENTS), "some kind of event has not occurred"


def test_the_command_replays_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    report = Simulation(3, layout=LAYOUTS[1], depth=2, faults=False).run(200)
    main(["--seed", "3", "--steps", "200", "--layout", "tiny", "--depth", "2", "--no-faults"])
    out = capsys.readouterr().out
    assert out.startswith("seed 3 (tiny, depth 2): ") and f"digest {report.digest}\n" in out


def test_what_a_seed_chooses_may_be_given() -> None:
    own = Simulation(8).run(100)
    given = Simulation(8, layout=own.layout, depth=own.depth).run(100)
    assert (given.digest, given.events) == (own.digest, own.events)


@pytest.mark.parametrize("options", [{}, {"layout": LAYOUTS[3], "depth": 2, "faults": False}], ids=["own", "given"])
def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    def check(self: Scheduler) -> None:
        if sum(request.num_output_tokens for request in self.open_requests()) >= 20:
            raise AssertionError("a mistake")

    monkeypatch.setattr(Scheduler, "check_invariants", check)
    with pytest.raises(SimulationError, match="a mistake") as failure:
        Simulation(3, **options).run(300)
    (line,) = (line for line in str(failure.value).splitlines() if line.startswith("replay: "))
    command = shlex.split(line)
    assert command[1:4] == ["python", "-m", "aiocb.testing.simulator"]
    with pytest.raises(SimulationError) as again:
        main(command[4:])
    assert str(again.value) == str(failure.value)


class TestMistakesAreNoticed:
    """Each of these breaks one promise in the core; a simulator that stays silent would prove nothing."""

    @staticmethod
    def fails(match: str) -> None:
        for seed in range(12):
            try:
                Simulation(seed, layout=LAYOUTS[seed % len(LAYOUTS)]).run(400)
            except SimulationError as error:
                assert match in str(error), error
                assert f"seed {seed}" in str(error)
                return
        pytest.fail("the simulator has not noticed")

    def test_a_pause_without_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(EngineCore, "resume", lambda self, slot: None)
        self.fails("do not end")

    def test_an_abort_that_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(EngineCore, "abort", lambda self, slot: None)
        self.fails("")

    def test_an_end_that_is_delivered_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = Delivery.end

        def end(self: Delivery, finished: Any, now: float, *rest: Any, **options: Any) -> None:
            original(self, finished, now, *rest, **options)
            if finished is not None and (request := finished.request).id % 16 == 5:
                self.post(request.payload.slot, request.payload.take(request.payload.lane.end))
                self.post(request.payload.slot, request.payload.take(None))

        monkeypatch.setattr(Delivery, "end", end)
        self.fails("a delivery after the end")

    def test_a_token_that_is_swallowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        update, count = Scheduler.update, itertools.count(1)

        def forget(self: Scheduler, *arguments: Any, **options: Any) -> list[Any]:
            updates = update(self, *arguments, **options)
            return updates if next(count) % 50 else [each for each in updates if each.finished]

        monkeypatch.setattr(Scheduler, "update", forget)
        self.fails("")

    def test_room_that_nobody_is_told_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(EngineCore, "_tell_watchers", lambda self: None)
        self.fails("do not end")

    def test_prefixes_of_other_salts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manager, "root_hash", lambda salt, *others: root_hash(None, *others))
        self.fails("sees other KV than its own")

    @pytest.mark.parametrize("name", ["preempt_all", "reset_prefix_cache"])
    def test_keys_of_old_weights(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr(Scheduler, name, lambda self: None)
        self.fails("sees other KV than its own")

    def test_blocks_that_do_not_come_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        finish = Scheduler.finish

        def leak(self: Scheduler, request: Any, reason: Any, **options: Any) -> Any:
            if request.tables and request.id % 8 == 1:
                self.cache.pools[0].retain(request.tables[0][-1])
            return finish(self, request, reason, **options)

        monkeypatch.setattr(Scheduler, "finish", leak)
        self.fails("disagree")
