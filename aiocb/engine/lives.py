"""The lives of an engine, one after the other: `Lives`. Any thread.

Whoever enters first begins a life, the last one to leave ends it; entering again begins another one.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

from aiocb.config import EngineConfig
from aiocb.engine.holders import Holders
from aiocb.engine.session import Session
from aiocb.engine.source import Source
from aiocb.engine.worker import Worker
from aiocb.errors import EngineClosed

__all__ = ["Lives"]


class Lives:
    """Who has entered an engine, and the session that they hold.

    Args:
        engine: whose end ends the life that it has left behind.
        source: outlives the lives.
        config: settings.

    Attributes:
        session: of the present life, or of the last one; None before the first.
    """

    def __init__(self, engine: Any, source: Source, config: EngineConfig) -> None:
        self.session: Session | None = None
        self._engine = weakref.ref(engine)
        self._source = source
        self._config = config
        self._lock = threading.Lock()  # guards entering and leaving only; never held across an await
        self._holders = Holders()
        self._finalizer: weakref.finalize[[weakref.ref[Worker]], Any] | None = None
        self._numbers = itertools.count(1)

    async def enter(self) -> None:
        """Start, or join a life that is there already; see `Engine.__aenter__`."""
        with self._lock:
            session = self._begin()
            self._holders.enter(session)
        try:
            await session.built.wait()
            error = session.worker.error
            if session.worker.state == "closed" and error is not None:
                session.worker.join(1.0)
                raise error
            if session.is_over and error is None:
                raise EngineClosed("the engine was closed while it was starting")
        except BaseException:
            with self._lock:
                if self._holders.leave() is session:
                    session.worker.stop()
                    if self.session is session:
                        self.session = None
            raise

    def _begin(self) -> Session:
        session = self.session
        if session is not None and session.worker.state in ("starting", "running", "draining"):
            session.raise_if_foreign()
        if session is not None and not session.is_over:
            return session
        previous, session = session, Session(self._source, self._config, next(self._numbers))
        session.start()
        self.session = session
        if previous is not None:
            self._holders.hand_over(previous, session)
        if self._finalizer is not None:
            self._finalizer.detach()  # or every session of this engine would be kept by its own
        # Weak on both sides: the worker's error may have the engine in its traceback.
        self._finalizer = weakref.finalize(self._engine(), _stop, weakref.ref(session.worker))
        return session

    def leave(self) -> Session | None:
        """Take one holder away; return the session that nobody holds any more, if it was the last one."""
        with self._lock:
            return self._holders.leave()

    def release(self) -> Session | None:
        """Take all holders away; return their session, if there is one."""
        with self._lock:
            session = self.session
            if session is not None:
                self._holders.forget(session)
            return session


def _stop(reference: weakref.ref[Worker]) -> None:
    worker = reference()  # alive as long as its thread
    if worker is not None:
        worker.stop()
