"""Layers around the routes: request ids, access log, keys, bounds. Plain ASGI: none holds a message back."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiocb.serve.body import Receive, Scope, Send
from aiocb.serve.config import ServeConfig
from aiocb.serve.errors import ApiError
from aiocb.serve.metrics import Metrics
from aiocb.serve.respond import send_error

__all__ = ["Guard", "Observer"]

App = Callable[[Scope, Receive, Send], Awaitable[None]]

access = logging.getLogger("aiocb.serve.access")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_CLIENT_GONE = 499
"""For requests whose client left before anything was sent; nginx has this number, no standard does."""
_OPEN_PREFIXES = ("/static/",)


class Observer:
    """Gives every response its request's id, and writes the access log.

    The id is the client's where it has sent one that is short and plain; it names nothing inside.

    Args:
        metrics: where requests are counted.
        paths: of the routes.
    """

    def __init__(self, app: App, config: ServeConfig, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        # By what comes before a name in the path: labels must not grow with what clients send.
        self._routes = {path.partition("{")[0]: path for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        started = time.perf_counter()
        status = 0

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.count_request(self._route_of(scope["path"]), status or _CLIENT_GONE)
            if self._config.access_log and access.isEnabledFor(logging.INFO):
                client = scope.get("client")
                line = {
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": status or _CLIENT_GONE,
                    "seconds": round(time.perf_counter() - started, 4),
                    "request_id": request_id.decode(),
                    "client": client[0] if client else None,
                }
                access.info("%s", json.dumps(line))

    def _route_of(self, path: str) -> str:
        route = self._routes.get(path) or self._routes.get(path[: path.rfind("/") + 1])
        return route or "other"


class Guard:
    """Asks for a key, and bounds how many requests are open.

    Args:
        open_paths: what needs no key.
    """

    def __init__(self, app: App, config: ServeConfig, open_paths: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in config.api_key]
        self._open_paths = frozenset(open_paths)
        self._most = config.max_connections
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        error = None
        if self._num_open >= self._most:
            error = ApiError(
                503, f"{self._most} requests are open, the most here", code="too_busy", headers={"retry-after": "1"}
            )
        elif self._keys and scope["path"] not in self._open_paths and not scope["path"].startswith(_OPEN_PREFIXES):
            error = self._check_key(scope)
        if error is not None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": error.message})
            else:
                await send_error(send, error)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1

    def _check_key(self, scope: Scope) -> ApiError | None:
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, given = header.partition(b" ")
        # Every key is compared, each in constant time: how long it takes says nothing of them.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() == b"bearer" and any(matches):
            return None
        return ApiError(
            401,
            "this server asks for a key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
