"""One life of an engine, from entering to closing: a leased runner, a worker and its core. Knows no event loop.

Any thread, except `_open` and `_close` (worker thread). What belongs to a life refers to it, and never to the next one:
a stream that is closed after its engine has been entered again still reaches the core that it came from.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from typing import TYPE_CHECKING

from aiocb.config import Choice, EngineConfig
from aiocb.engine.core import EngineCore
from aiocb.engine.limits import make_scheduler
from aiocb.engine.room import Room
from aiocb.engine.stats import LATENCY_BUCKETS
from aiocb.engine.tracing import Tracer
from aiocb.engine.worker import Worker
from aiocb.errors import EngineClosed, EngineError

if TYPE_CHECKING:
    from aiocb.engine.core import Command
    from aiocb.engine.prepare import Limits
    from aiocb.engine.source import Built, Source
    from aiocb.engine.stats import EngineState
    from aiocb.text.processor import TextProcessor

__all__ = ["Life"]

logger = logging.getLogger("aiocb")


class Life:
    """Leases a runner, serves, and gives it back.

    Args:
        source: whose runner it is.
        config: the engine's settings.
        number: which life of its engine this is, for messages.

    Attributes:
        limits, text, choices: of the runner, once there is one.
        rank: of this process among those that run the model together; 0 decides, and takes the requests.
        room: of the bounded queue.
        tracer: makes spans of requests, where somebody wants them.
    """

    def __init__(self, source: Source, config: EngineConfig, number: int = 1) -> None:
        self.source = source
        self.config = config
        self.limits: Limits | None = None
        self.text: TextProcessor | None = None
        self.choices: list[Choice] = []
        self.rank = 0
        self.room = Room(config.max_queue_size)
        self.tracer: Tracer | None = None
        self.worker = Worker(self._open, self._close, source.interrupt)
        self._number = number
        self._built: Built | None = None
        self._process = os.getpid()

    def __str__(self) -> str:
        return f"life {self._number} of the engine over {self.source.name} ({self.state})"

    # ── worker thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> EngineCore:
        built = self._built = self.source.lease(self.config, self, lambda: self.worker.is_stopping)
        built.text.prepare()
        scheduler, limits, choices = make_scheduler(self.config, built)
        self.text, self.limits = built.text, limits
        self.choices = [*built.choices, *choices, *_parser_choices(built.text, limits.parsers)]
        self.tracer = Tracer.detect(self.config, self.source.name)
        core = EngineCore(
            built.runner,
            scheduler,
            room=self.room,
            request_ids=self.source.request_ids,
            random_source=random.Random(self.config.seed) if self.config.seed is not None else None,
            debug_checks=self.config.debug_checks,
            hold=None if built.parallel is None else built.parallel.hold,
            buckets=self.config.latency_buckets or LATENCY_BUCKETS,
        )
        if built.parallel is not None:
            self.rank = built.parallel.rank
            built.parallel.begin(lambda error: core.inbox.put((self._end, error)))
        for choice in self.choices:
            logger.info("%s = %s (%s)", choice.name, choice.value, choice.reason)
        if self.config.freeze_gc:
            gc.collect()
            gc.freeze()
        return core

    def _end(self, _core: EngineCore, error: BaseException | None) -> None:
        """Another process has ended this life: rank 0, orderly, or one that is lost."""
        if error is not None:
            raise error
        self.worker.stop()

    def _close(self) -> None:
        if self.tracer is not None:
            self.tracer.close()
        built, self._built = self._built, None
        if built is not None:
            self.source.give_back(built, is_dead=self.worker.state == "dead")

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_foreign(self) -> bool:
        """True in a process that was forked from the one in which this life began: its thread is not here."""
        return os.getpid() != self._process

    @property
    def state(self) -> EngineState:
        """Where it is."""
        return "closed" if self.is_foreign else self.worker.state

    @property
    def is_over(self) -> bool:
        """True when it takes no more requests, now or soon: a new entry needs a new life."""
        return self.worker.is_stopping or self.worker.state in ("draining", "closed", "dead")

    def put(self, command: Command) -> None:
        """Hand a command to the core; safe in destructors and in any thread."""
        self.worker.put(command)

    @property
    def follows(self) -> bool:
        """True where another process decides what is run, and takes the requests."""
        return self.rank > 0

    def raise_if_foreign(self) -> None:
        """Refuse to be used in a forked process.

        Raises:
            EngineClosed: the worker is a thread of another process.
        """
        if self.is_foreign:
            raise EngineClosed(
                f"the engine was running when process {self._process} forked this one, {os.getpid()}, where it has no "
                "worker: make the engine here, or fork before it is entered"
            )

    def raise_if_following(self) -> None:
        """Refuse a request where another process takes them.

        Raises:
            EngineError: this is not rank 0.
        """
        if self.follows:
            raise EngineError("this process runs what rank 0 decides and takes no requests: submit them on rank 0")

    def raise_if_unusable(self) -> None:
        """Refuse a submission while the engine cannot serve.

        Raises:
            EngineDead: the worker has died.
            EngineClosed: the engine is closing or closed, or belongs to another process.
        """
        state = self.worker.state
        if state == "running" and not self.worker.is_stopping and not self.is_foreign:
            return
        self.raise_if_foreign()
        if state == "dead":
            raise self.worker.make_dead_error()
        what = "closing" if state == "running" else state
        raise EngineClosed(f"the engine is {what}; it accepts no new requests")


def _parser_choices(text: TextProcessor, parsers: tuple[str, str]) -> list[Choice]:
    """How answers to messages are read."""
    dialect = text.find_dialect(parsers)
    if dialect is None:
        return []
    return [
        Choice(name, value, "set by the user" if asked != "auto" else "by the marks in the chat template")
        for name, value, asked in zip(("tool_parser", "reasoning_parser"), dialect.names, parsers, strict=True)
    ]
