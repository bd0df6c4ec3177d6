"""Random histories of an engine: `Simulation`."""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Callable

from aiocb.engine.core import EngineCore
from aiocb.engine.delivery import failed
from aiocb.errors import EngineClosed, EngineDead, RequestFailed
from aiocb.step import StepOutOfMemory, StepPlan
from aiocb.testing.oracle import KVOracle
from aiocb.testing.records import simple_layout
from aiocb.testing.simulator.clients import PlannedFault, PlannedInterrupt
from aiocb.testing.simulator.lives import Life, OracleSource
from aiocb.testing.simulator.report import Report
from aiocb.testing.simulator.workload import LAYOUTS, MAX_MODEL_LEN, VOCAB_SIZE, Layout, random_spec, random_tokens

__all__ = ["Simulation", "SimulationError"]

_MAX_CLIENTS = 24


class SimulationError(AssertionError):
    """Something did not hold; the message has the latest events, and the command that replays them."""


class Simulation:
    """One random history: lives of an engine over one runner, one after the other, each asked for by the one before.

    Args:
        seed: decides everything.
        layout: of the cache; None lets the seed choose. What the seed chooses may be given: it is the same history.
        depth: plans in flight; None lets the seed choose.
        faults: also let steps, samplers, tokenizers, files and new weights fail, and event loops vanish.

    Attributes:
        life: the one that goes on now.
        report: what has happened.
    """

    def __init__(
        self, seed: int, *, layout: Layout | None = None, depth: int | None = None, faults: bool = True
    ) -> None:
        self.chance = chance = random.Random(seed)
        chosen = chance.choice(LAYOUTS), chance.choice((1, 1, 2))
        self.report = Report(seed, layout or chosen[0], depth or chosen[1])
        self.now = 1000.0
        self._faults = faults
        self._fault: Exception | None = None  # of the next step, for one of its requests
        self._dies_in: str | None = None
        self._room: int | None = None  # tokens of a step that there is memory for
        self._num_lives = 0
        self._prefixes = [random_tokens(chance, 40) for _ in range(3)]
        self._source = OracleSource(self._make_oracle)
        self._events: list[tuple[float, Callable[[], None]]] = [
            (0.005, self._jump),
            (0.005, self._reset_prefixes),
            (0.004, self._pause),
            (0.001, self._enter_beside),
            (0.002, self._leave),
        ]
        if faults:
            self._events += [(0.008, self._break_request), (0.0015, self._close_sink), (0.001, self._break_engine)]
            self._events += [(0.003, self._run_short)]
        self._begin()

    def run(self, num_steps: int) -> Report:
        """Take so many steps, let everything go, and check that it does.

        Raises:
            SimulationError: an invariant does not hold.
        """
        report = self.report
        start = time.perf_counter()
        try:
            for _ in range(num_steps):
                self.step()
            self.finish()
        except Exception as error:
            what = f"seed {report.seed}, layout {report.layout.name!r}, depth {report.depth}, step {report.num_steps}"
            replay = ["--seed", report.seed, "--steps", num_steps, "--layout", report.layout.name]
            replay += ["--depth", report.depth] + ["--no-faults"] * (not self._faults)
            raise SimulationError(
                f"{what}: {type(error).__name__}: {error}\n"
                f"replay: python -m aiocb.testing.simulator {shlex.join(map(str, replay))}\n  "
                + "\n  ".join(report.latest)
            ) from error
        report.elapsed_s = time.perf_counter() - start
        return report

    def step(self) -> None:
        """Random events, one step of the core, delivery, checks."""
        self._disturb()
        self._turn()
        life = self.life
        if life.is_draining and not life.core.delivery.num_streams and life.core.inbox.empty():
            self._end_life()

    def finish(self) -> None:
        """Let everything that is alive come to its end, and check that nothing is left."""
        state, num_still = None, 0
        self._room = None
        while self.life.clients or self.life.core.has_work or self.life.num_pauses:
            while self.life.num_pauses:
                self.life.unpause()
            for client in self.life.clients:
                client.laziness = 0.0
            self.now += 0.01
            self._turn()
            before, state = state, (self.report.num_tokens, len(self.life.clients))
            num_still = num_still + 1 if state == before else 0
            assert num_still < 3000, f"{len(self.life.clients)} clients do not end: {self.life.scheduler!r}"
        self._turn()
        self.life.check_left()

    def _turn(self) -> None:
        try:
            self.life.turn()
        except PlannedFault as error:
            self._die(error)

    # ── lives ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        self._num_lives += 1
        self._fault = self._dies_in = None
        name = f"life {self._num_lives}"
        self.life = Life(name, self._source, self.report, self.chance, lambda: self.now, faults=self._faults)

    def _end_life(self) -> None:
        """What leaving does once nothing is to be waited for: end what is alive, give the runner back, begin anew."""
        self.report.note("the life ends")
        try:
            self.life.core.end_all(lambda: EngineClosed("the engine was closed"))
        except PlannedFault as error:
            self._die(error)
            return
        self.report.events["lives ended"] += 1
        self.life.give_back(is_dead=False)
        self._begin()

    def _die(self, error: PlannedFault) -> None:
        """What `Worker` does when a step raises, and then a new life over a new runner."""
        self.report.note(f"the engine dies: {error}")
        self.report.events[f"died: {error}"] += 1

        def make_error() -> EngineDead:
            dead = EngineDead("the engine has died")
            dead.__cause__ = error
            return dead

        self.life.core.end_all_dead(make_error)
        self.life.give_back(is_dead=True)
        self._begin()

    # ── what the oracle asks ─────────────────────────────────────────────────────────────────────────────────────

    def _make_oracle(self) -> KVOracle:
        if self._faults and self.chance.random() < 0.3:
            self.report.events["opening failed"] += 1
            raise PlannedFault("a file is damaged")
        layout = self.report.layout
        return KVOracle(
            simple_layout(
                layout.num_blocks,
                page_size=layout.page_size,
                windows=layout.windows,
                num_slots=layout.num_slots,
                interval=layout.interval,
                swap_places=layout.swap_places,
            ),
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            depth=self.report.depth,
            errors=self._faults_of,
            interrupt=self._interrupt,
            salt_of=lambda request_id: self.life.requests()[request_id].cache_salt,
        )

    def _faults_of(self, plan: StepPlan) -> dict[int, Exception] | None:
        self._interrupt("submit")
        if self._room is not None and plan.num_tokens > self._room:
            if plan.num_tokens == 1:
                self._expect_failure(plan.entries[0].request_id)
            self._run_out()
        if self._fault is None:
            return None
        entry = self.chance.choice(plan.entries)
        fault, self._fault = self._fault, None
        self._expect_failure(entry.request_id)
        return {entry.request_id: fault}

    def _expect_failure(self, request_id: int) -> None:
        slot = self.life.requests()[request_id].payload.slot
        for client in self.life.clients:
            client.may_fail |= client.submission is not None and client.submission.slot is slot

    def _interrupt(self, what: str) -> None:
        if self._dies_in == what:
            raise PlannedFault(f"{what} raises")
        if what == "collect" and self._room is not None and self.life.oracle.oldest_tokens > max(self._room, 1):
            self._run_out()

    def _run_out(self) -> None:
        self.report.events["out of memory"] += 1
        self.report.note("a step runs out of memory")
        raise StepOutOfMemory("planned")

    # ── random events ────────────────────────────────────────────────────────────────────────────────────────────

    def _disturb(self) -> None:
        chance = self.chance
        self.now += chance.expovariate(100.0)
        if len(self.life.clients) < _MAX_CLIENTS and chance.random() < 0.3 and not self.life.is_draining:
            for _ in range(chance.choice((1, 1, 1, 1, 8))):
                self.report.num_clients += 1
                self.life.arrive(random_spec(chance, f"client-{self.report.num_clients}", self._prefixes))
        for client in [client for client in self.life.clients if chance.random() < 0.004]:
            self.life.disturb(client)
        for rate, happen in self._events:
            if chance.random() < rate:
                happen()
        if self.life.num_pauses and chance.random() < 0.2:
            self.life.unpause()
        if self._room is not None and chance.random() < 0.1:
            self._room = None

    def _jump(self) -> None:
        self.now += self.chance.choice((0.3, 5.0, 1e6))
        self.report.note(f"the clock jumps to {self.now}")

    def _reset_prefixes(self) -> None:
        self.report.note("the prefix cache is reset")
        self.life.put((EngineCore.reset_prefix_cache, None))

    def _pause(self) -> None:
        self.report.note("a pause, for other weights")
        self.life.num_pauses += 1
        self.life.put((EngineCore.pause, lambda: None))

    def _enter_beside(self) -> None:
        self.life.check_that_nobody_else_enters()

    def _leave(self) -> None:
        """The engine is left: at once, or when what is open has come to its end."""
        life = self.life
        if life.is_draining or self.chance.random() < 0.4:
            self._end_life()
            return
        self.report.note("the life drains")
        life.is_draining = True
        while life.num_pauses:
            life.unpause()
        life.send_away(*life.sinks)

    def _break_request(self) -> None:
        fault = PlannedFault("a processor raises")
        self._fault = self.chance.choice((RequestFailed("planned"), fault, failed(PlannedInterrupt())))

    def _close_sink(self) -> None:
        self.report.note("an event loop is closed")
        self.life.close_sink()

    def _run_short(self) -> None:
        self._room = self.chance.choice((0, 1, 3, 10))
        self.report.note(f"there is memory for {self._room} tokens")

    def _break_engine(self) -> None:
        self._dies_in = self.chance.choice(("submit", "collect", "reload_weights"))
