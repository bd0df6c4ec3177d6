"""Whole random lives of an `EngineCore`: synchronous, with a virtual clock, replayed from a seed.

    $ python -m aiocb.testing.simulator --seed 7 --steps 5000

A step of the simulation is: random events (arrivals, cancels, faults, pauses, clock jumps ...), one `EngineCore.step`,
delivery to readers of all tempers, and every invariant. The runner is a `KVOracle`, so that a wrong block is noticed
when it is read and the right output of every request is known. At the end everything is let go and has to be quiescent:
each output has had exactly one end, its tokens are what a solo run gives, no block, request or waiter is left.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from aiocb.cache.manager import CacheManager
from aiocb.engine.admission import Limits, plan_request
from aiocb.engine.core import Command, EngineCore
from aiocb.engine.limits import most_tokens
from aiocb.engine.output import Submission
from aiocb.engine.slot import Slot
from aiocb.errors import EngineDead, InvalidRequest, RequestFailed
from aiocb.sampling_params import ModelDefaults
from aiocb.scheduler.request import RequestStatus
from aiocb.scheduler.scheduler import Scheduler
from aiocb.step import StepPlan
from aiocb.testing.clients import Client, Letters, PlannedFault, Sink
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

__all__ = ["LAYOUTS", "Layout", "Report", "Simulation", "SimulationError"]

_LOG_LENGTH = 40


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
    """As much of a `TextProcessor` as admission asks for."""

    has_tokenizer = True

    def special_id(self, text: str) -> int | None:
        return None


class Simulation:
    """One random history.

    Args:
        seed: decides everything.
        layout: of the cache; None lets the seed choose.
        max_clients: most streams alive at once.
        faults: also let steps raise, processors fail and event loops vanish.
    """

    def __init__(self, seed: int, *, layout: Layout | None = None, max_clients: int = 24, faults: bool = True) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.layout = layout or self.chance.choice(LAYOUTS)
        self.max_clients = max_clients
        self.faults = faults
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
        self._start()

    # ── one life of a core ───────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """A new core with budgets of its own, as after a death."""
        chance = self.chance
        name, num_blocks, page_size, windows = self.layout
        del name
        layout = simple_layout(num_blocks, page_size=page_size, windows=windows)
        self.oracle = KVOracle(layout, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, errors=self._faults_of)
        cache = CacheManager(layout, sharing=chance.random() < 0.85)
        max_batch_tokens = chance.choice((3, 8, 16, 64))
        self.scheduler = Scheduler(
            cache,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=chance.choice((1, 4, 16, 16)),
            max_prefill_chunk=chance.choice((None, 2, 8)),
            scheduler_type=chance.choice(("fifo", "prefill_first", "priority")),
            safety_margin=chance.choice((0.0, 0.15)),
        )
        self.core = EngineCore(
            self.oracle, self.scheduler, clock=lambda: self.now, random_source=random.Random(chance.random())
        )
        defaults = ModelDefaults(VOCAB_SIZE, MAX_MODEL_LEN, (EOS_TOKEN_ID,))
        self.limits = Limits(defaults, most_tokens(cache, MAX_MODEL_LEN))
        self.max_queue_size = chance.choice((0, 2, 6))
        self.sinks = [Sink(), Sink()]  # a busy event loop and a quiet one
        self._num_submitted_before = 0
        self._num_pauses = 0
        self._num_idle = 0
        self._is_dying = False
        self._fault: Exception | None = None
        self._note(f"a core with {self.scheduler!r}, queue {self.max_queue_size}, layout {self.layout.name}")

    def _put(self, command: Command) -> None:
        self.core.inbox.put(command)

    def _faults_of(self, plan: StepPlan) -> dict[int, Exception] | None:
        """Called by the oracle in every step: what was planned for it."""
        if self._is_dying:
            raise PlannedFault("the step raises")
        if self._fault is None:
            return None
        entry = self.chance.choice(plan.entries)
        fault, self._fault = self._fault, None
        for slot, requests in self.core._requests.items():
            if any(request.id == entry.request_id for request in requests):
                for client in self._clients:
                    if client.slot is slot:
                        client.may_fail = True
        return {entry.request_id: fault}

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

    def finish(self) -> None:
        """Let everything that is alive come to its end, and check that nothing is left."""
        while self._num_pauses:
            self._unpause()
        self._fault = None
        state, num_still = None, 0
        while self._clients or any(sink.waiting for sink in self.sinks):
            for client in self._clients:
                client.laziness = 0.0
            self.now += 0.01
            self._turn()
            before, state = state, (self.oracle.num_steps, self.num_tokens, len(self._clients))
            num_still = num_still + 1 if state == before else 0
            assert num_still < 100, f"{len(self._clients)} clients do not end: {self.scheduler!r}"
        self._turn()
        self.core.check_invariants()
        core, scheduler = self.core, self.scheduler
        assert core.num_requests == 0 and scheduler.num_requests == 0, f"left: {scheduler!r}"
        assert not any(pool.num_used for pool in scheduler.cache.pools), f"blocks are left: {scheduler!r}"
        assert self.oracle.num_tracked <= len(scheduler._released), "the runner keeps state of requests that ended"
        assert sum(core.recorder.finished.values()) == core._num_received, "ends and requests do not balance"

    def _turn(self) -> None:
        self.num_steps += 1
        num_posts = [sink.num_posts for sink in self.sinks]
        num_executed = self.oracle.num_steps
        try:
            self.core.step()
        except PlannedFault as error:
            self._die(error)
            return
        self.core.check_invariants()
        for sink, before in zip(self.sinks, num_posts, strict=True):
            assert sink.num_posts <= before + 1, "more than one wake-up in a step"
        if self.core.has_work and self.oracle.num_steps == num_executed:
            self._num_idle += 1
            assert self._num_idle < 3, f"there is work, but nothing is done: {self.scheduler!r}"
        else:
            self._num_idle = 0
        self._check_queue()
        for sink in self.sinks:
            if self.chance.random() < 0.8 and sink.deliver():
                self._admit_waiting(sink)
        self._read()

    def _check_queue(self) -> None:
        if self.max_queue_size:
            requests = (request for requests in self.core._requests.values() for request in requests)
            fresh = sum(request.status is RequestStatus.WAITING for request in requests)
            assert fresh <= self.max_queue_size, f"{fresh} wait in a queue of {self.max_queue_size}"

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
                    # Each sample may add one delivery in the step that reaches the bound, and what an end releases.
                    assert unread <= bound + 2 * interval * len(client.lanes), f"{client.name}: {unread} unread"
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

    def _die(self, error: PlannedFault) -> None:
        """What `Worker` does when a step raises, and then a new life."""
        self._note("the step raises")
        self.events["engine death"] += 1

        def make_error() -> EngineDead:
            dead = EngineDead("the engine has died")
            dead.__cause__ = error
            return dead

        self.core.end_all_dead(make_error)
        for sink in self.sinks:
            sink.deliver()
            sink.waiting.clear()
        for client in self._clients:
            client.laziness = 0.0
        self._read()
        left = [client.name for client in self._clients if client.submission is not None]
        assert not left, f"streams outlive the engine: {left}"
        self._clients = []
        self._start()

    # ── random events ────────────────────────────────────────────────────────────────────────────────────────────

    def _disturb(self) -> None:
        chance = self.chance
        self.now += chance.expovariate(100.0)
        if len(self._clients) < self.max_clients and chance.random() < 0.3:
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
            self._note("a pause")
            self._num_pauses += 1
            self._put((EngineCore.pause, lambda: None))
        elif self.faults and roll < 0.022:
            self._fault = chance.choice((RequestFailed("planned"), PlannedFault("a processor raises")))
        elif self.faults and roll < 0.0235:
            self._close_sink()
        elif self.faults and roll < 0.0245:
            self._is_dying = True
        if self._num_pauses and chance.random() < 0.2:
            self._unpause()

    def _unpause(self) -> None:
        self._num_pauses -= 1
        self._put((EngineCore.unpause, None))

    def _close_sink(self) -> None:
        """An event loop vanishes with its streams, without a word to the engine."""
        self._note("an event loop is closed")
        index = self.chance.randrange(len(self.sinks))
        sink = self.sinks[index]
        sink.close()
        for client in sink.waiting:
            self._clients.remove(client)
        self._num_submitted_before += sink.num_submitted
        self.sinks[index] = Sink()

    def _arrive(self) -> None:
        chance = self.chance
        self.num_clients += 1
        spec = random_spec(chance, f"client-{self.num_clients}", self._prefixes)
        try:
            plan = plan_request(spec, spec.prompt, self.limits, _Text())  # type: ignore[arg-type]
        except InvalidRequest:
            self.events["refused"] += 1
            return
        if plan.max_output_tokens == 0:
            return
        spec.prompt_token_ids = plan.prompt_token_ids
        client = Client(spec, plan, self.sinks[chance.random() < 0.1], chance.choice((0.0, 0.0, 0.5, 0.97)))
        if self.max_queue_size and (client.sink.waiting or not self._has_room(plan.sampling.n)):
            if plan.sampling.n > self.max_queue_size or chance.random() < 0.3:
                self.events["queue full"] += 1
                return
            client.sink.waiting.append(client)
            self._put((EngineCore.watch_room, client.sink))
            self.events["waited for room"] += 1
        else:
            self._submit(client)
        self._clients.append(client)

    def _has_room(self, count: int) -> bool:
        """As `Session.has_room`."""
        submitted = self._num_submitted_before + sum(sink.num_submitted for sink in self.sinks)
        return submitted - self.core.recorder.num_left_queue + count <= self.max_queue_size

    def _admit_waiting(self, sink: Sink) -> None:
        while sink.waiting and self._has_room(sink.waiting[0].plan.sampling.n):
            self._submit(sink.waiting.popleft())

    def _withdraw(self, client: Client) -> None:
        client.sink.waiting.remove(client)
        self._clients.remove(client)
        self._admit_waiting(client.sink)

    def _submit(self, client: Client) -> None:
        spec, plan, sink, chance = client.spec, client.plan, client.sink, self.chance
        slot = Slot(spec.request_id, sink, plan.sampling.n)
        lanes = slot.make_lanes()
        sink.open.update(lanes)
        sink.num_submitted += len(lanes)
        fail_after = chance.randrange(12) if self.faults and chance.random() < 0.02 else None
        client.may_fail |= fail_after is not None
        has_text = bool(plan.sampling.stop) or chance.random() < 0.8
        submission = Submission(
            slot,
            lanes,
            plan.prompt_token_ids,
            plan.sampling,
            plan.max_output_tokens,
            self.now,
            spec.priority,
            None if spec.timeout is None else self.now + spec.timeout,
            None if spec.queue_timeout is None else self.now + spec.queue_timeout,
            spec.cache_salt,
            spec.stream_interval,
            spec.max_unread_tokens,
            spec.on_unread,
            plan.drop_output,
            (lambda skip_special_tokens: Letters(fail_after)) if has_text else None,
        )
        client.has_text = has_text
        client.open(submission, self._put)
        self._put((EngineCore.submit, submission))

    def _note(self, event: str) -> None:
        self._log.append(f"{self.num_steps}: {event}")


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
