"""What the routes share: the engine, the names of its model, and the calls that are in progress. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiocb.serve.config import ServeConfig
from aiocb.serve.errors import ApiError

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine
    from aiocb.engine.stream import Stream
    from aiocb.text.processor import TextProcessor

__all__ = ["Call", "Service"]

log = logging.getLogger("aiocb.serve")

_STOPPING = "the server is stopping; send the request again"


class Call:
    """One request that makes text, from its submission to its end.

    Attributes:
        streams: of the engine, one per prompt.
        error: why the server has ended it.
        is_gone: its client has left.
    """

    __slots__ = ("error", "is_gone", "streams")

    def __init__(self, streams: Iterable[Stream]) -> None:
        self.streams = tuple(streams)
        self.error: ApiError | None = None
        self.is_gone = False

    def leave(self) -> None:
        """Its client has left: free what it holds."""
        self.is_gone = True
        self._close()

    def abort(self, error: ApiError) -> None:
        """End it with an error of the server's."""
        if self.error is None:
            self.error = error
        self._close()

    def _close(self) -> None:
        for stream in self.streams:
            stream.close()


class Service:
    """The state of one server.

    Attributes:
        engine, config: as given.
        names: of the model on the wire; the first is shown.
        created: when it was started, in seconds of the epoch.
        loading: stage and fraction of the model's loading, until it runs.
        failure: why the engine could not be started.
        is_draining: nothing new is accepted.
    """

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self.engine = engine
        self.config = config
        self.names = config.served_model_name or (engine.name,)
        self.created = int(time.time())
        self.loading: tuple[str, float] | None = ("starting", 0.0)
        self.failure: BaseException | None = None
        self.is_draining = False
        self._calls: set[Call] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._on_failure: Callable[[], object] = lambda: None

    # ── names and readiness ──────────────────────────────────────────────────────────────────────────────────────

    def name_of(self, asked: str | None) -> str:
        """The name to answer with: the one that was asked for.

        Raises:
            ApiError: 404, no such model.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(map(repr, self.names))
            raise ApiError(
                404, f"no model {asked[:200]!r} here; this server has {served}", param="model", code="model_not_found"
            )
        return asked

    def check_open(self) -> None:
        """Raise where no request can be taken.

        Raises:
            ApiError: 503, draining or still loading.
        """
        if self.is_draining:
            raise ApiError(503, _STOPPING, code="draining", headers={"retry-after": "5"})
        if self.loading is not None:
            stage, fraction = self.loading
            raise ApiError(
                503,
                f"the model is still being loaded ({stage}, {fraction:.0%}); try again soon",
                code="loading",
                headers={"retry-after": "5"},
            )

    def note_progress(self, stage: str, fraction: float) -> None:
        """Of loading; called in the worker's thread."""
        if self.loading is not None:
            self.loading = (stage, fraction)

    @property
    def text(self) -> TextProcessor:
        """The tokenizer as the engine uses it.

        Raises:
            EngineClosed: it does not run.
        """
        return self.engine.text_processor

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_failure(self, callback: Callable[[], object]) -> None:
        """Have it called when the engine cannot be started."""
        self._on_failure = callback

    async def run(self, started: asyncio.Event) -> None:
        """Keep the engine running until this is cancelled; a failure to start it is kept in `failure`."""
        try:
            async with self.engine:
                self.loading = None
                started.set()
                await asyncio.Event().wait()
        except Exception as error:
            self.failure = error
            self.loading = None
            started.set()
            log.error("the engine could not be started: %s", error)
            self._on_failure()

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_calls(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Note that a call has begun."""
        self._calls.add(call)

    def remove(self, call: Call) -> None:
        """Note that a call has ended."""
        self._calls.discard(call)
        if not self._calls:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let calls go on for so long, and end the rest with an error."""
        self.is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._until_idle()
        except TimeoutError:
            for call in tuple(self._calls):
                call.abort(ApiError(503, _STOPPING, code="draining"))

    async def _until_idle(self) -> None:
        if self._calls:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    def stats(self) -> dict[str, Any]:
        """See `aiocb.serve.stats`."""
        from aiocb.serve.stats import stats_document

        return stats_document(self.engine)
