"""Engines as replicas of a Ray Serve deployment, and an OpenAI-compatible ingress in front of them. Extra `ray`.

```
client ─► Ray's proxy ─► Ingress ─► PrefixAffinityRouter ─► EngineReplica ─► create_app's routes ─► Engine
             leaves ─► cancelled ─► cancelled ──────────────► cancelled ────► Stream.close: the slot is free
```

Scheduling, placing, health checks, restarts and scaling of replicas are Ray's. The ingress has no model: it reads a
body, finds the blocks of its prompt, and passes on what the replica sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

try:
    from ray import serve
except ModuleNotFoundError as error:
    raise ImportError("aiocb.contrib.ray needs Ray: pip install 'aiocb[ray]'", name=error.name) from error
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import Response

from aiocb.contrib.ray_affinity import chain_of_body
from aiocb.contrib.ray_asgi import Piece, respond, scope_of
from aiocb.contrib.ray_router import PrefixAffinityRouter
from aiocb.errors import ConfigError
from aiocb.serve import ServeConfig, create_app
from aiocb.serve.body import ClientGone, Receive, Scope, Send, read_body
from aiocb.serve.errors import ApiError
from aiocb.serve.respond import send_error

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine
    from aiocb.outputs import Chunk, Completion

__all__ = ["EngineReplica", "Ingress", "build_app"]

log = logging.getLogger("aiocb.contrib.ray")

_MAX_ONGOING = 1024
"""Requests that Ray lets a replica have: the engine queues better than a router does."""
_MAX_PIECES = 1500
"""Of responses, a second and replica: beyond that Ray's processes fall behind, and all streams with them."""
_RETRY_S = "1"


class EngineReplica:
    """One engine, in a process of Ray's; a class for `serve.deployment`.

    Methods for handles: `stream` (with `options(stream=True)`), `generate`, `stats`, and `http` for an ingress.
    """

    async def __init__(  # type: ignore[misc]
        self, make_engine: Callable[[], Engine], config: ServeConfig | None = None
    ) -> None:
        """Load the model: Ray sends nothing before this has returned, and tries anew when it raises.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        self.engine = make_engine()
        self._app = create_app(self.engine, config)
        self._num_open = 0
        self._is_over = asyncio.Event()
        ready = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        await asyncio.wait([ready, self._life], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._life

    async def _live(self, ready: asyncio.Future[None]) -> None:
        """The engine is entered and left in one task, whichever tasks Ray calls us in."""
        async with self.engine, self._app.router.lifespan_context(self._app):
            await self._app.state.service.loaded.wait()
            ready.set_result(None)
            await self._is_over.wait()

    async def stream(self, prompt: Any, **arguments: Any) -> AsyncGenerator[Chunk, None]:
        """Stream an answer, see `Engine.stream`; cancelling the response frees the slot.

        Raises:
            RequestError: the request was refused or has failed.
        """
        async with self.engine.stream(prompt, **arguments) as stream:
            async for chunk in stream:
                yield chunk

    async def generate(self, prompt: Any, **arguments: Any) -> Completion:
        """Return an answer when it is complete, see `Engine.generate`.

        Raises:
            RequestError: the request was refused or has failed.
        """
        completion: Completion = await self.engine.generate(prompt, **arguments)
        return completion

    async def http(
        self, scope: dict[str, Any], body: bytes, prefix: tuple[int, ...] = ()
    ) -> AsyncGenerator[Piece, None]:
        """Answer an HTTP request by the routes of `create_app`; the router has looked at `prefix`."""
        pieces = respond(self._app, scope, body, lambda: self._num_open / _MAX_PIECES)
        self._num_open += 1
        try:
            async for piece in pieces:
                yield piece
        finally:
            self._num_open -= 1
            await pieces.aclose()

    async def stats(self) -> dict[str, Any]:
        """What `/stats` shows, of this replica."""
        document: dict[str, Any] = self._app.state.service.stats()
        return document

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For a policy of one's own in Ray's `AutoscalingConfig`: gauges of this replica."""
        stats = self.engine.stats()
        return {
            "num_requests_running": float(stats.num_requests_running),
            "num_requests_waiting": float(stats.num_requests_waiting),
            "kv_cache_usage_perc": float(stats.kv_cache_usage_perc),
        }

    async def check_health(self) -> None:
        """Ray asks periodically, and replaces a replica that raises.

        Raises:
            EngineDead: a step has raised, or hangs.
            EngineError: the engine does not run.
        """
        self.engine.health().raise_if_bad()

    async def __del__(self) -> None:
        """Ray calls it when the replica has drained, or its time for that is over."""
        await self._app.state.service.drain(0)
        self._is_over.set()
        await self._life


class Ingress:
    """Passes HTTP requests on to replicas; a class for `serve.deployment`."""

    def __init__(self, engines: Any, config: ServeConfig | None = None) -> None:
        self._engines = engines.options(stream=True, method_name="http")
        self._config = config or ServeConfig()

    async def __call__(self, request: Request) -> Response:
        """Answer a request, in pieces as they come."""
        return _Relay(self._engines, self._config)


class _Relay(Response):
    """A response that comes from a replica."""

    def __init__(self, engines: Any, config: ServeConfig) -> None:
        super().__init__()
        self._engines = engines
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. What fails before its head is an error with its status, after it an error event."""
        try:
            body = await read_body(scope, receive, self._config)
        except ClientGone:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        pieces = self._engines.remote(scope_of(scope), body, prefix=chain_of_body(body))
        is_started = is_stream = False
        try:
            async for piece in pieces:
                if isinstance(piece, bytes):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    continue
                status, headers = piece
                is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
                await send({"type": "http.response.start", "status": status, "headers": headers})
                is_started = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            pieces.cancel()  # Ray would, too, some time
            raise
        except Exception as error:
            told = _told(error)
            if not is_started:
                await send_error(send, told)
            elif is_stream:
                await send({"type": "http.response.body", "body": b"data: " + told.body + b"\n\n", "more_body": False})
            else:
                raise  # the connection is cut: half a document must not look whole


def _told(error: Exception) -> ApiError:
    """What a client is told of a request that a replica has not answered."""
    if isinstance(error, RayActorError):
        message = "the replica that was answering has been lost; send the request again, another one will take it"
        return ApiError(503, message, code="replica_lost", headers={"retry-after": _RETRY_S})
    if isinstance(error, RayServeException):
        message = "no replica can take the request now: send it again"
        return ApiError(503, message, code="no_replica", headers={"retry-after": _RETRY_S})
    log.error("a replica has failed to answer", exc_info=error)
    return ApiError(500, "an error inside the server; its log says which", code="internal_error")


def build_app(
    model: str | Callable[[], Engine],
    *,
    options: Mapping[str, Any] | None = None,
    config: ServeConfig | None = None,
    replicas: Mapping[str, Any] | None = None,
    ingress: Mapping[str, Any] | None = None,
    max_imbalance: int = 8,
) -> serve.Application:
    """Return an application for `serve.run`: an OpenAI-compatible server over several engines.

    Args:
        model: a name, see `Engine.from_pretrained`, or a function that makes the engine in its replica.
        options: for `Engine.from_pretrained`.
        config: of the server. Host, port and what concerns connections are Ray's; `drain` is how long a replica that
            is stopped may go on.
        replicas: of the engines' deployment in Ray Serve: `num_replicas` or `autoscaling_config`, `ray_actor_options`
            (`num_gpus`, `num_cpus`), ...
        ingress: of the ingress's deployment, likewise.
        max_imbalance: see `PrefixAffinityRouter`.

    Raises:
        ConfigError: a setting needs one process that has all streams.
    """
    config = config or ServeConfig()
    if config.resume_window:
        raise ConfigError("resume_window: a stream is known to its replica only, so it cannot be resumed; leave it out")
    if not callable(model):
        model = _FromPretrained(model, dict(options or {}))
    elif options:
        raise ConfigError(f"{', '.join(options)}: the function makes the engine; pass options to it")
    router = RequestRouterConfig(
        request_router_class=PrefixAffinityRouter, request_router_kwargs={"max_imbalance": max_imbalance}
    )
    engines: Any = serve.deployment(EngineReplica)
    front: Any = serve.deployment(Ingress)
    settings = {
        "name": "engines",
        "max_ongoing_requests": _MAX_ONGOING,
        "request_router_config": router,
        "graceful_shutdown_timeout_s": config.drain,
        **(replicas or {}),
    }
    front_settings = {"name": "ingress", "max_ongoing_requests": config.max_connections, **(ingress or {})}
    application: serve.Application = front.options(**front_settings).bind(
        engines.options(**settings).bind(model, config), config
    )
    return application


class _FromPretrained:
    """Makes an engine by name; plain data, so that it travels to a replica."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name = name
        self._options = options

    def __call__(self) -> Engine:
        """Nothing is loaded before the engine is entered."""
        from aiocb.engine.engine import Engine

        return Engine.from_pretrained(self._name, **self._options)
