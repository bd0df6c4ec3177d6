"""The lives of an engine over one runner: `OracleSource` keeps it, a `Life` has it from entering to leaving."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiocb.cache.manager import CacheManager
from aiocb.config import EngineConfig
from aiocb.engine.core import Command, EngineCore
from aiocb.engine.prepare import Limits, StreamSpec, prepare_tokens
from aiocb.engine.room import Room
from aiocb.engine.source import Built, RunnerSource
from aiocb.errors import EngineError, InvalidRequest
from aiocb.records import Record
from aiocb.sampling_params import ModelDefaults
from aiocb.scheduler.pace import Pace
from aiocb.scheduler.request import Request, RequestStatus
from aiocb.scheduler.scheduler import Scheduler
from aiocb.testing.oracle import KVOracle
from aiocb.testing.quiescent import what_is_left
from aiocb.testing.simulator.clients import Client, Letters, PlannedFault, PlannedInterrupt, Sink
from aiocb.testing.simulator.workload import EOS_TOKEN_ID, MAX_MODEL_LEN, VOCAB_SIZE
from aiocb.text.output import TextOutput
from aiocb.text.stop_strings import StopMatcher

if TYPE_CHECKING:
    from aiocb.testing.simulator.report import Report

__all__ = ["Life", "OracleSource"]

_MAX_DRAFTS = 3


class OracleSource(RunnerSource):
    """Keeps one oracle for all lives, as `from_pretrained` keeps its runner, until it dies."""

    def __init__(self, make_oracle: Callable[[], KVOracle]) -> None:
        # Any object stands for a tokenizer: prompts are token ids here, and clients bring their own text.
        super().__init__(lambda _: make_oracle(), ModelDefaults(VOCAB_SIZE, MAX_MODEL_LEN, (EOS_TOKEN_ID,)), object())
        self._kept: Built | None = None

    def _open(self, config: EngineConfig) -> Built:
        if self._kept is None:
            self._kept = super()._open(config)
        return self._kept

    def _close(self, built: Built) -> None:
        """Keep it."""

    def _discard(self, built: Built) -> None:
        self._kept = None


class Life:
    """One life of an engine: a core with budgets of its own, two event loops and who reads from them.

    Args:
        name: for messages.
        source: whose runner it leases; it is tried until it succeeds, since an opening that fails changes nothing.
        report: is told what happens.
        chance: decides everything.
        clock: of the core.
        faults: some detokenizers raise.

    Attributes:
        sinks: a busy event loop and a quiet one.
        clients: those that are alive.
        num_pauses: that have not been ended.
        is_draining: nobody is let in any more.
    """

    def __init__(
        self,
        name: str,
        source: OracleSource,
        report: Report,
        chance: random.Random,
        clock: Callable[[], float],
        *,
        faults: bool,
    ) -> None:
        self.name = name
        self.source = source
        self.report = report
        self.chance = chance
        self.clock = clock
        self.faults = faults
        self.built: Built | None = None
        while self.built is None:
            with contextlib.suppress(PlannedFault):
                self.built = source.lease(EngineConfig(), name, lambda: False)
        self.oracle: KVOracle = self.built.runner  # type: ignore[assignment]
        assert self.oracle.is_released, "the runner remembers the life that had it before"
        cache = CacheManager(self.oracle.cache_layout, sharing=chance.random() < 0.85)
        self.scheduler = Scheduler(
            cache,
            max_batch_tokens=chance.choice((3, 8, 16, 64)),
            max_requests_per_batch=chance.choice((1, 4, 16, 16)),
            max_prefill_chunk=chance.choice((None, 2, 8)),
            scheduler_type=chance.choice(("fifo", "prefill_first", "priority")),
            safety_margin=chance.choice((0.0, 0.15)),
            drafter=self._guess if chance.random() < 0.3 else None,
            pace=Pace(chance.choice((0.001, 0.1)), 0.5) if chance.random() < 0.3 else None,
        )
        self.oracle.foretell = self._foretell if chance.random() < 0.3 else None
        self.limits = Limits(self.built.defaults, cache.max_request_tokens)
        self.room = Room(chance.choice((0, 2, 6)))
        self.core = EngineCore(
            self.oracle,
            self.scheduler,
            room=self.room,
            request_ids=source.request_ids,
            clock=clock,
            random_source=random.Random(chance.random()),
        )
        self.sinks = [Sink(self.room.open_line()), Sink(self.room.open_line())]
        self.clients: list[Client] = []
        self.num_pauses = 0
        self.is_draining = False
        self._num_idle = 0
        report.note(f"{name}: {self.scheduler!r}, {self.room!r}")

    def _guess(self, request: Request) -> list[int]:
        """Drafts for a request, as good as chance will have it."""
        tokens = self.oracle.expected_output(
            request.tokens[: request.num_prompt_tokens],
            request.sampling,
            max_tokens=min(request.max_tokens, request.num_tokens + _MAX_DRAFTS),
            seed=request.seed,
        )
        drafts = tokens[request.num_output_tokens :]
        if drafts and self.chance.random() < 0.5:
            drafts[self.chance.randrange(len(drafts))] = self.chance.randrange(VOCAB_SIZE)
        return drafts

    def _foretell(self, record: Record) -> tuple[int, ...]:
        """What has to follow, as a structure would say: sometimes something, and then the truth."""
        if self.chance.random() < 0.7 or len(record.tokens) == record.num_prompt_tokens:
            return ()
        tokens = self.oracle.expected_output(
            record.tokens[: record.num_prompt_tokens],
            record.sampling,
            max_tokens=len(record.tokens) + self.chance.randrange(_MAX_DRAFTS + 1),
            seed=record.seed,
        )
        return tuple(tokens[len(record.tokens) - record.num_prompt_tokens :])

    def put(self, command: Command) -> None:
        """Hand a command to the core."""
        self.core.inbox.put(command)

    def requests(self) -> dict[int, Request]:
        """All that the core knows of, by id."""
        return {request.id: request for _, requests in self.core.delivery.streams() for request in requests}

    def unpause(self) -> None:
        """End one pause."""
        self.num_pauses -= 1
        self.put((EngineCore.unpause, None))

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, spec: StreamSpec) -> None:
        """Take a request as a session does: refuse it, let it wait for room, or submit it."""
        chance, events = self.chance, self.report.events
        assert self.built is not None
        try:
            prepared = prepare_tokens(spec, spec.prompt, self.limits, self.built.text)  # type: ignore[arg-type]
        except InvalidRequest:
            events["refused"] += 1
            return
        if prepared.max_output_tokens == 0:
            return
        client = Client(spec, prepared, self.sinks[chance.random() < 0.1], chance.choice((0.0, 0.0, 0.5, 0.97)))
        line, count = client.sink.line, prepared.sampling.n
        if line.can_enter(count):
            self._submit(client)
        elif count > self.room.limit or chance.random() < 0.3:
            events["queue full"] += 1
            return
        else:
            client.place = line.join(count, lambda: self._submit(client))
            self.put((EngineCore.watch_room, client.sink))
            line.let_in()
            events["waited for room"] += 1
        self.clients.append(client)

    def _submit(self, client: Client) -> None:
        chance, sampling = self.chance, client.prepared.sampling
        fault: BaseException | None = None
        if self.faults and chance.random() < 0.02:
            fault = chance.choice((PlannedFault("the detokenizer raises"), PlannedInterrupt()))
            client.may_fail = True
        fail_after = chance.randrange(12)
        texts = []
        if sampling.stop or chance.random() < 0.8:
            for _ in range(sampling.n):
                matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
                minimum = sampling.min_new_tokens or 0
                texts.append(TextOutput(Letters(fault, fail_after), matcher, min_new_tokens=minimum))
        client.submit(self.clock(), tuple(texts), self.put)

    def disturb(self, client: Client) -> None:
        """Let a client think better of it."""
        if client.submission is None:
            assert client.place is not None
            client.sink.line.leave(client.place)
            client.sink.line.let_in()
            self.clients.remove(client)
        elif self.chance.random() < 0.3:
            self.report.note(f"{client.name} finishes early")
            client.may_end_early = True
            assert client.stream is not None
            client.stream.finish()
        else:
            self.report.note(f"{client.name} is left")
            client.leave(self.chance)

    def send_away(self, *sinks: Sink) -> None:
        """Nobody of these event loops waits for room any more."""
        for sink in sinks:
            sink.line.clear()
        self.clients = [each for each in self.clients if each.submission is not None or each.sink not in sinks]

    def close_sink(self) -> None:
        """Let an event loop vanish with its streams, without a word to the engine, and another one come."""
        index = self.chance.randrange(len(self.sinks))
        sink = self.sinks[index]
        sink.close()
        self.send_away(sink)
        self.room.close_line(sink.line)
        self.sinks[index] = Sink(self.room.open_line())

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self) -> None:
        """One step of the core, delivery, reading, checks.

        Raises:
            PlannedFault: the engine has died of it.
            AssertionError: something does not hold.
        """
        self.report.num_steps += 1
        num_posts = [sink.num_posts for sink in self.sinks]
        num_executed = self.oracle.num_steps + self.scheduler.num_steps_out_of_memory
        num_in_flight = self.scheduler.num_in_flight
        self.core.step()
        self.core.check_invariants()
        self.oracle.check_records(self.scheduler.open_requests())
        for sink, before in zip(self.sinks, num_posts, strict=True):
            assert sink.num_posts <= before + 1, "more than one wake-up in a step"
        num_executed -= self.oracle.num_steps + self.scheduler.num_steps_out_of_memory
        is_idle = self.core.has_work and not num_executed and not num_in_flight
        self._num_idle = self._num_idle + 1 if is_idle else 0
        assert self._num_idle < 3, f"there is work, but nothing is done: {self.scheduler!r}"
        if self.room.limit:
            num_waiting = sum(each.status is RequestStatus.WAITING for each in self.requests().values())
            assert num_waiting <= self.room.limit, f"{num_waiting} wait in a queue of {self.room.limit}"
        for sink in self.sinks:
            if self.chance.random() < 0.8:
                sink.deliver()
        self.read()

    def read(self) -> None:
        """Let clients read, and take leave of those whose output is over."""
        for client in tuple(self.clients):
            if client.submission is None:
                continue
            if client.laziness == 0.0 or self.chance.random() >= client.laziness:
                self.report.num_tokens += client.read()
            if client.is_over:
                client.check(self.oracle, self.clock())
                self.clients.remove(client)
                self.report.take(client)
                continue
            bound, interval = client.spec.max_unread_tokens, client.spec.stream_interval
            if bound is not None and interval is not None:
                slot = client.submission.slot
                unread = slot.num_sent - slot.num_read
                # Each sample may add what one step brings when the bound is reached, and what an end releases;
                # plans that are in flight then bring more.
                most = max(interval, 1 + _MAX_DRAFTS) * (1 + self.oracle.depth)
                assert unread <= bound + most * len(client.last), f"{client.name}: {unread} unread"

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def check_that_nobody_else_enters(self) -> None:
        """Somebody wants the runner while this life goes on: he has to wait, and is told for whom."""
        try:
            self.source.lease(EngineConfig(start_timeout=0.0), "the next life", lambda: False)
        except EngineError as error:
            assert self.name in str(error), error
        else:
            raise AssertionError("two lives have one runner")

    def give_back(self, *, is_dead: bool) -> None:
        """Check that every stream has its end now, and, unless it died, that nothing is left; give the runner back."""
        self.send_away(*self.sinks)
        for sink in self.sinks:
            sink.deliver()
        for client in self.clients:
            client.laziness = 0.0
        self.read()
        assert not self.clients, f"streams outlive their engine: {[client.name for client in self.clients]}"
        if not is_dead:
            self.check_left()
        assert self.built is not None
        self.source.give_back(self.built, is_dead=is_dead)

    def check_left(self) -> None:
        """Check that nothing is left of any request.

        Raises:
            AssertionError: naming what is.
        """
        found = what_is_left(self.core)
        assert not found, "; ".join(found)
        assert self.oracle.num_open == 0, "the runner keeps records of requests that ended"
        assert sum(self.core.recorder.finished.values()) == self.core._num_received, "ends and requests do not balance"
