"""What the routes share: the engine, the names of its model, and the calls that are in progress. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from aiocb.serve.config import ServeConfig
from aiocb.serve.errors import ApiError
from aiocb.serve.metrics import LagMeter, Metrics
from aiocb.serve.resume import Replays

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine
    from aiocb.engine.stream import Stream
    from aiocb.text.processor import TextProcessor

__all__ = ["Call", "LoadProgress", "Service"]

log = logging.getLogger("aiocb.serve")

_STOPPING = "the server is stopping; send the request again"


class LoadProgress:
    """How far the loading of a model is: pass it to `Engine.from_pretrained(progress=)` and to `create_app`.

    Attributes:
        stage, fraction: as the worker's thread has told them last.
    """

    def __init__(self) -> None:
        self.stage = "starting"
        self.fraction = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        """Note it; called in the worker's thread."""
        self.stage, self.fraction = stage, fraction


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

    def finish(self) -> None:
        """End it, and deliver what is there."""
        for stream in self.streams:
            stream.finish()

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
        names: of the model on the wire, and behind them those of adapters; the first is shown.
        created: when it was started, in seconds of the epoch.
        progress: how far the loading is.
        loaded: set when it has ended, well or not.
        failure: why the engine could not be started.
        is_draining: nothing new is accepted.
        replays: streams that can be resumed.
        metrics, lag: what `/metrics` shows.
    """

    def __init__(self, engine: Engine, config: ServeConfig, progress: LoadProgress) -> None:
        self.engine = engine
        self.config = config
        self.names = (*(config.served_model_name or (engine.name,)), *config.adapters)
        self.created = int(time.time())
        self.progress = progress
        self.loaded = asyncio.Event()
        self.failure: BaseException | None = None
        self.is_draining = False
        self.lag = LagMeter()
        self.metrics = Metrics(engine, self.names[0], config.metrics_prefix, self.lag)
        self.replays = Replays(config.max_resumable)
        self._calls: set[Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.Future[None] | None = None
        self._on_failure: Callable[[], object] = lambda: None

    @property
    def is_loading(self) -> bool:
        """The model is not there yet."""
        return not self.loaded.is_set()

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

    def adapter_of(self, name: str) -> str | None:
        """The adapter that a name of the wire stands for; None where it is the model's own."""
        return name if name in self.config.adapters else None

    def check_open(self) -> None:
        """Raise where no request can be taken.

        Raises:
            ApiError: 503, draining or still loading.
        """
        if self.is_draining:
            raise ApiError(503, _STOPPING, code="draining", headers={"retry-after": "5"})
        if self.is_loading:
            raise ApiError(
                503,
                f"the model is still being loaded ({self.progress.stage}, {self.progress.fraction:.0%}): wait",
                code="loading",
                headers={"retry-after": "5"},
            )

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

    async def run(self) -> None:
        """Keep the engine running until this is cancelled; a failure to start it is kept in `failure`."""
        try:
            async with self.engine:
                for name, path in self.config.adapters.items():
                    await self.engine.load_adapter(name, path)
                self.loaded.set()
                await asyncio.Event().wait()
        except Exception as error:
            self.failure = error
            self.loaded.set()
            log.error("the engine could not be started: %s", error)
            self._on_failure()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something that outlives the request that began it; ended with the server."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Cancel what still runs, and wait for it."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            self.hurry()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let calls go on for so long (or until `hurry`), and end the rest with an error."""
        self.is_draining = True
        if self._calls:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle], timeout=seconds)
        for call in tuple(self._calls):
            call.abort(ApiError(503, _STOPPING, code="draining"))

    def hurry(self) -> None:
        """Do not wait for calls any longer."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self.engine.stats().num_requests_waiting

    def stats(self) -> dict[str, Any]:
        """See `aiocb.serve.stats`."""
        from aiocb.serve.stats import stats_document

        return stats_document(self.engine)
