"""Whole random lives of an `EngineCore`: synchronous, with a virtual clock, replayed from a seed.

    $ python -m aiocb.testing.simulator --seed 7 --steps 5000

A step of the simulation is: random events (arrivals, cancels, faults, pauses, new weights, clock jumps ...), one
`EngineCore.step`, delivery to readers of all tempers, and every invariant. The runner is a `KVOracle`, so that a wrong
block is noticed when it is read and the right output of every request is known. At the end everything is let go and has
to be quiescent: each output has had exactly one end, its tokens are what a solo run gives, no block, request or waiter
is left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiocb.cache.manager import CacheManager
from aiocb.config import EngineConfig
from aiocb.engine.core import Command, EngineCore
from aiocb.engine.delivery import failed
from aiocb.engine.output import Submission
from aiocb.engine.prepare import Limits, prepare_tokens
from aiocb.engine.room import Room
from aiocb.engine.slot import Slot
from aiocb.engine.source import Built, Source
from aiocb.errors import EngineClosed, EngineDead, EngineError, InvalidRequest, RequestFailed
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.scheduler.request import Request, RequestStatus
from aiocb.scheduler.scheduler import Scheduler
from aiocb.step import StepPlan
from aiocb.testing.clients import Client, Letters, PlannedFault, PlannedInterrupt, Sink
from aiocb.testing.oracle import KVOracle, simple_layout
from aiocb.testing.workload import (
    EOS_TOKEN_ID,
    LAYOUTS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Layout,
    random_spec,
    random_tokens,
)
from aiocb.text.output import TextOutput
from aiocb.text.stop_strings import StopMatcher

__all__ = ["LAYOUTS", "Layout", "Report", "Simulation", "SimulationError"]

_LOG_LENGTH = 40
MAX_DRAFTS = 3


class SimulationError(AssertionError):
    """Something did not hold; the message has the seed and the latest events."""


@dataclass(slots=True)
class Report:
    """What a run has done.

    Attributes:
        digest: of everything that was read: equal seeds give equal digests.
        events: how often what happened.
    """

    seed: int
    layout: str
    num_steps: int
    num_clients: int
    num_tokens: int
    elapsed_s: float
    digest: str
    events: Counter[str]


class _Text:
    """As much of a `TextProcessor` as `prepare` asks for."""

    has_tokenizer = True


class _OracleSource(Source):
    """Keeps one oracle for all lives, as `from_pretrained` keeps its runner, until it dies."""

    def __init__(self, make_oracle: Callable[[], KVOracle]) -> None:
        super().__init__("oracle")
        self._make_oracle = make_oracle
        self._kept: KVOracle | None = None

    def _open(self, config: EngineConfig) -> Built:
        if self._kept is None:
            self._kept = self._make_oracle()
        defaults = ModelDefaults(VOCAB_SIZE, MAX_MODEL_LEN, (EOS_TOKEN_ID,))
        return Built(self._kept, _Text(), defaults)  # type: ignore[arg-type]

    def _close(self, built: Built) -> None:
        assert self._kept is not None and self._kept.num_open == 0, (
            "the runner remembers requests of a life that is over"
        )

    def _discard(self, built: Built) -> None:
        self._kept = None


class Simulation:
    """One random history: lives of an engine over one runner, one after the other, each asked for by the one before.

    Args:
        seed: decides everything.
        layout: of the cache; None lets the seed choose.
        max_clients: most streams alive at once.
        faults: also let steps, samplers, tokenizers, files and new weights fail, and event loops vanish.
        depth: plans in flight; None lets the seed choose.
    """

    def __init__(
        self,
        seed: int,
        *,
        layout: Layout | None = None,
        max_clients: int = 24,
        faults: bool = True,
        depth: int | None = None,
    ) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.layout = layout or self.chance.choice(LAYOUTS)
        self.depth = depth or self.chance.choice((1, 1, 2))
        self.max_clients = max_clients
        self.now = 1000.0
        self.num_steps = 0
        self.num_clients = 0
        self.num_tokens = 0
        self.events: Counter[str] = Counter()
        self._log: deque[str] = deque(maxlen=_LOG_LENGTH)
        self._digest = hashlib.blake2b(digest_size=8)
        self._clients: list[Client] = []
        self._errors: deque[Exception] = deque(maxlen=64)
        self._prefixes = [random_tokens(self.chance, 40) for _ in range(3)]
        self._source = _OracleSource(self._make_oracle)
        self._num_lives = 0
        self._may_fail = faults
        self._begin()

    # ── the lives of an engine ───────────────────────────────────────────────────────────────────────────────────

    def _make_oracle(self) -> KVOracle:
        if self._may_fail and self.chance.random() < 0.3:
            self.events["opening failed"] += 1
            raise PlannedFault("a file is damaged")
        layout = simple_layout(self.layout.num_blocks, page_size=self.layout.page_size, windows=self.layout.windows)
        return KVOracle(
            layout,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            depth=self.depth,
            errors=self._faults_of,
            interrupt=self._interrupt,
            salt_of=self._salt_of,
        )

    def _begin(self) -> None:
        """Lease the runner for a new life: a core with budgets of its own."""
        chance = self.chance
        self._num_lives += 1
        self._life = f"life {self._num_lives}"
        self._built = self._lease()
        self.oracle: KVOracle = self._built.runner  # type: ignore[assignment]
        cache = CacheManager(self.oracle.cache_layout, sharing=chance.random() < 0.85)
        self.scheduler = Scheduler(
            cache,
            max_batch_tokens=chance.choice((3, 8, 16, 64)),
            max_requests_per_batch=chance.choice((1, 4, 16, 16)),
            max_prefill_chunk=chance.choice((None, 2, 8)),
            scheduler_type=chance.choice(("fifo", "prefill_first", "priority")),
            safety_margin=chance.choice((0.0, 0.15)),
            drafter=self._guess if chance.random() < 0.3 else None,
        )
        self.room = Room(chance.choice((0, 2, 6)))
        self.core = EngineCore(
            self.oracle,
            self.scheduler,
            room=self.room,
            request_ids=self._source.request_ids,
            clock=lambda: self.now,
            random_source=random.Random(chance.random()),
        )
        self.limits = Limits(self._built.defaults, cache.max_request_tokens)
        self.sinks = [Sink(self.room.open_line()), Sink(self.room.open_line())]  # a busy event loop and a quiet one
        self._num_pauses = 0
        self._num_idle = 0
        self._dies_in: str | None = None
        self._is_draining = False
        self._fault: Exception | None = None
        self._note(f"{self._life}: {self.scheduler!r}, {self.room!r}, layout {self.layout.name}, depth {self.depth}")

    def _lease(self) -> Built:
        """Enter until it succeeds: an opening that failed leaves the source as it was."""
        while True:
            with contextlib.suppress(PlannedFault):
                return self._source.lease(EngineConfig(), self._life, lambda: False)

    def _guess(self, request: Request) -> list[int]:
        """Drafts for a request, as good as chance will have it."""
        known = request.num_output_tokens
        tokens = self.oracle.expected_output(
            request.tokens[: request.num_prompt_tokens],
            request.sampling,
            max_tokens=min(request.max_tokens, request.num_tokens + MAX_DRAFTS),
            seed=request.seed,
        )
        drafts = tokens[known:]
        if drafts and self.chance.random() < 0.5:
            drafts[self.chance.randrange(len(drafts))] = self.chance.randrange(VOCAB_SIZE)
        return drafts

    def _put(self, command: Command) -> None:
        self.core.inbox.put(command)

    def _faults_of(self, plan: StepPlan) -> dict[int, Exception] | None:
        """Called by the oracle in every step: what was planned for it."""
        self._interrupt("submit")
        if self._fault is None:
            return None
        entry = self.chance.choice(plan.entries)
        fault, self._fault = self._fault, None
        slot = self._requests()[entry.request_id].payload.slot
        for client in self._clients:
            if client.slot is slot:
                client.may_fail = True
        return {entry.request_id: fault}

    def _interrupt(self, what: str) -> None:
        """Called by the oracle in every step and when weights change."""
        if self._dies_in == what:
            raise PlannedFault(f"{what} raises")

    def _requests(self) -> dict[int, Request]:
        return {request.id: request for _, requests in self.core.delivery.streams() for request in requests}

    def _salt_of(self, request_id: int) -> object:
        return self._requests()[request_id].cache_salt

    def _end_life(self) -> None:
        """What leaving does once nothing is to be waited for: end what is alive, give the runner back, begin anew."""
        self._note("the life ends")
        try:
            self.core.end_all(lambda: EngineClosed("the engine was closed"))
        except PlannedFault as error:
            self._die(error)
            return
        self.events["lives ended"] += 1
        self._bury()
        self._check_left()
        self._source.give_back(self._built, is_dead=False)
        self._begin()

    def _die(self, error: PlannedFault) -> None:
        """What `Worker` does when a step raises, and then a new life over a new runner."""
        self._note(f"the engine dies: {error}")
        self.events[f"died: {error}"] += 1

        def make_error() -> EngineDead:
            dead = EngineDead("the engine has died")
            dead.__cause__ = error
            return dead

        self.core.end_all_dead(make_error)
        self._bury()
        self._source.give_back(self._built, is_dead=True)
        self._begin()

    def _bury(self) -> None:
        """Every stream of a life that is over has its end; nobody stays in line."""
        for sink in self.sinks:
            sink.line.clear()
            sink.deliver()
        for client in self._clients:
            client.laziness = 0.0
        self._read()
        left = [client.name for client in self._clients if client.submission is not None]
        assert not left, f"streams outlive their engine: {left}"
        self._clients = []

    def _try_next_life(self) -> None:
        """Somebody enters while this life goes on: he has to wait, and is told for whom."""
        try:
            self._source.lease(EngineConfig(start_timeout=0.0), "the next life", lambda: False)
        except EngineError as error:
            assert self._life in str(error), error
        else:
            raise AssertionError("two lives have one runner")

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, num_steps: int) -> Report:
        """Take so many steps, let everything go, and check that it does.

        Raises:
            SimulationError: an invariant does not hold; the seed and the latest events are in the message.
        """
        start = time.perf_counter()
        try:
            for _ in range(num_steps):
                self.step()
            self.finish()
        except Exception as error:
            events = "\n  ".join(self._log)
            raise SimulationError(
                f"seed {self.seed}, layout {self.layout.name!r}, step {self.num_steps}: "
                f"{type(error).__name__}: {error}\n  {events}"
            ) from error
        elapsed = time.perf_counter() - start
        digest = self._digest.hexdigest()
        return Report(
            self.seed, self.layout.name, self.num_steps, self.num_clients, self.num_tokens, elapsed, digest, self.events
        )

    def step(self) -> None:
        """Random events, one step of the core, delivery, checks."""
        self._disturb()
        self._turn()
        if self._is_draining and not self.core.delivery.num_streams and self.core.inbox.empty():
            self._end_life()

    def finish(self) -> None:
        """Let everything that is alive come to its end, and check that nothing is left."""
        self._may_fail, self._dies_in, self._fault = False, None, None
        while self._num_pauses:
            self._unpause()
        state, num_still = None, 0
        while self._clients or self.core.has_work:
            for client in self._clients:
                client.laziness = 0.0
            self.now += 0.01
            self._turn()
            before, state = state, (self.oracle.num_steps, self.num_tokens, len(self._clients))
            num_still = num_still + 1 if state == before else 0
            assert num_still < 100, f"{len(self._clients)} clients do not end: {self.scheduler!r}"
        self._turn()
        self._check_left()

    def _check_left(self) -> None:
        core, scheduler = self.core, self.scheduler
        core.check_invariants()
        assert core.delivery.num_streams == 0 and scheduler.num_requests == 0, f"left: {scheduler!r}"
        assert not any(pool.num_used for pool in scheduler.cache.pools), f"blocks are left: {scheduler!r}"
        assert self.oracle.num_open == 0, "the runner keeps records of requests that ended"
        assert sum(core.recorder.finished.values()) == core._num_received, "ends and requests do not balance"

    def _turn(self) -> None:
        self.num_steps += 1
        num_posts = [sink.num_posts for sink in self.sinks]
        num_executed = self.oracle.num_steps
        num_in_flight = self.scheduler.num_in_flight
        try:
            self.core.step()
        except PlannedFault as error:
            self._die(error)
            return
        self.core.check_invariants()
        self.oracle.check_records(self.scheduler.open_requests())
        for sink, before in zip(self.sinks, num_posts, strict=True):
            assert sink.num_posts <= before + 1, "more than one wake-up in a step"
        if self.core.has_work and self.oracle.num_steps == num_executed and not num_in_flight:
            self._num_idle += 1
            assert self._num_idle < 3, f"there is work, but nothing is done: {self.scheduler!r}"
        else:
            self._num_idle = 0
        self._check_queue()
        for sink in self.sinks:
            if self.chance.random() < 0.8:
                sink.deliver()
        self._read()

    def _check_queue(self) -> None:
        if self.room.limit:
            requests = (request for _, requests in self.core.delivery.streams() for request in requests)
            fresh = sum(request.status is RequestStatus.WAITING for request in requests)
            assert fresh <= self.room.limit, f"{fresh} wait in a queue of {self.room.limit}"

    def _read(self) -> None:
        chance = self.chance
        alive = []
        for client in self._clients:
            if client.submission is not None:
                if client.laziness == 0.0 or chance.random() >= client.laziness:
                    self.num_tokens += client.read()
                if client.is_over or client.sink.is_closed:
                    self._end(client)
                    continue
                bound = client.spec.max_unread_tokens
                interval = client.spec.stream_interval
                if bound is not None and interval is not None:
                    slot = client.submission.slot
                    unread = slot.num_sent - slot.num_read
                    # Each sample may add what one step brings when the bound is reached, and what an end releases;
                    # plans that are in flight then bring more.
                    most = max(interval, 1 + MAX_DRAFTS) * (1 + self.depth)
                    assert unread <= bound + most * len(client.lanes), f"{client.name}: {unread} unread"
            alive.append(client)
        self._clients = alive

    def _end(self, client: Client) -> None:
        client.check(self.oracle, self.now)
        if client.error is not None:
            assert all(client.error is not error for error in self._errors), "two streams have one error"
            self._errors.append(client.error)
            self.events[type(client.error).__name__] += 1
        for chunk in client.last:
            if chunk is not None:
                self.events[f"ended: {chunk.finish_reason}"] += 1
        self._digest.update(repr((client.name, client.tokens, client.texts, type(client.error).__name__)).encode())

    # ── random events ────────────────────────────────────────────────────────────────────────────────────────────

    def _disturb(self) -> None:
        chance = self.chance
        self.now += chance.expovariate(100.0)
        if len(self._clients) < self.max_clients and chance.random() < 0.3 and not self._is_draining:
            for _ in range(chance.choice((1, 1, 1, 1, 8))):
                self._arrive()
        for client in [client for client in self._clients if chance.random() < 0.004]:
            if client.submission is None:
                self._withdraw(client)
            elif chance.random() < 0.3:
                self._note(f"{client.name} finishes early")
                client.may_end_early = True
                assert client.stream is not None
                client.stream.finish()
            else:
                self._note(f"{client.name} is left")
                client.leave(chance)
        roll = chance.random()
        if roll < 0.005:
            self.now += chance.choice((0.3, 5.0, 1e6))
            self._note(f"the clock jumps to {self.now}")
        elif roll < 0.010:
            self._note("the prefix cache is reset")
            self._put((EngineCore.reset_prefix_cache, None))
        elif roll < 0.014:
            self._note("a pause, for other weights")
            self._num_pauses += 1
            self._put((EngineCore.pause, lambda: None))
        elif roll < 0.015:
            self._try_next_life()
        elif roll < 0.017 and not self._is_draining:
            self._leave()
        elif self._may_fail and roll < 0.025:
            fault = PlannedFault("a processor raises")
            self._fault = chance.choice((RequestFailed("planned"), fault, failed(PlannedInterrupt())))
        elif self._may_fail and roll < 0.0265:
            self._close_sink()
        elif self._may_fail and roll < 0.0275:
            self._dies_in = chance.choice(("submit", "collect", "reload_weights"))
        if self._num_pauses and chance.random() < 0.2:
            self._unpause()

    def _unpause(self) -> None:
        self._num_pauses -= 1
        self._put((EngineCore.unpause, None))

    def _leave(self) -> None:
        """The engine is left: at once, or when what is open has come to its end."""
        self._is_draining = self.chance.random() < 0.6
        if not self._is_draining:
            self._end_life()
            return
        self._note("the life drains")
        while self._num_pauses:
            self._unpause()
        for sink in self.sinks:
            sink.line.clear()
        self._clients = [client for client in self._clients if client.submission is not None]

    def _close_sink(self) -> None:
        """An event loop vanishes with its streams, without a word to the engine."""
        self._note("an event loop is closed")
        index = self.chance.randrange(len(self.sinks))
        sink = self.sinks[index]
        sink.close()
        self._clients = [client for client in self._clients if client.submission is not None or client.sink is not sink]
        self.room.close_line(sink.line)
        self.sinks[index] = Sink(self.room.open_line())

    def _arrive(self) -> None:
        chance = self.chance
        self.num_clients += 1
        spec = random_spec(chance, f"client-{self.num_clients}", self._prefixes)
        try:
            prepared = prepare_tokens(spec, spec.prompt, self.limits, _Text())  # type: ignore[arg-type]
        except InvalidRequest:
            self.events["refused"] += 1
            return
        if prepared.max_output_tokens == 0:
            return
        client = Client(spec, prepared, self.sinks[chance.random() < 0.1], chance.choice((0.0, 0.0, 0.5, 0.97)))
        line, count = client.sink.line, prepared.sampling.n
        if not line.can_enter(count):
            if count > self.room.limit or chance.random() < 0.3:
                self.events["queue full"] += 1
                return
            client.place = line.join(count, lambda: self._submit(client))
            self._put((EngineCore.watch_room, client.sink))
            line.let_in()
            self.events["waited for room"] += 1
        else:
            self._submit(client)
        self._clients.append(client)

    def _withdraw(self, client: Client) -> None:
        assert client.place is not None
        client.sink.line.leave(client.place)
        client.sink.line.let_in()
        self._clients.remove(client)

    def _submit(self, client: Client) -> None:
        spec, prepared, sink, chance = client.spec, client.prepared, client.sink, self.chance
        slot = Slot(spec.request_id, sink, prepared.sampling.n)
        lanes = slot.make_lanes()
        sink.open.update(lanes)
        if client.place is not None:
            sink.line.leave(client.place)
            client.place = None  # it refers to the client, which has to be freed when it is dropped
        sink.line.enter(len(lanes))
        fail_after = chance.randrange(12) if self._may_fail and chance.random() < 0.02 else None
        client.may_fail |= fail_after is not None
        fault = chance.choice((None, PlannedInterrupt()))
        has_text = bool(prepared.sampling.stop) or chance.random() < 0.8
        submission = Submission(
            slot,
            lanes,
            prepared.prompt_token_ids,
            prepared.sampling,
            prepared.max_output_tokens,
            self.now,
            spec.priority,
            None if spec.timeout is None else self.now + spec.timeout,
            None if spec.queue_timeout is None else self.now + spec.queue_timeout,
            spec.cache_salt,
            spec.stream_interval,
            spec.max_unread_tokens,
            spec.on_unread,
            prepared.drop_output,
            tuple([_text(Letters(fail_after, fault), prepared.sampling) for _ in lanes]) if has_text else (),
        )
        client.has_text = has_text
        client.open(submission, self._put)
        self._put((EngineCore.submit, submission))

    def _note(self, event: str) -> None:
        self._log.append(f"{self.num_steps}: {event}")


def _text(detokenizer: Letters, sampling: SamplingParams) -> TextOutput:
    matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
    return TextOutput(detokenizer, matcher, min_new_tokens=sampling.min_new_tokens or 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one or several seeds and say how fast."""
    parser = argparse.ArgumentParser(prog="python -m aiocb.testing.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each")
    parser.add_argument("--layout", choices=[layout.name for layout in LAYOUTS], help="instead of a random one")
    given = parser.parse_args(arguments)
    layout = next((layout for layout in LAYOUTS if layout.name == given.layout), None)
    for seed in range(given.seed, given.seed + given.seeds):
        report = Simulation(seed, layout=layout).run(given.steps)
        events = ", ".join(f"{name} {count}" for name, count in sorted(report.events.items()))
        sys.stdout.write(
            f"seed {seed} ({report.layout}): {report.num_steps} steps, {report.num_clients} clients, "
            f"{report.num_tokens} tokens, {report.num_steps / report.elapsed_s:.0f} steps/s, digest {report.digest}\n"
            f"  {events}\n"
        )


if __name__ == "__main__":
    main()
