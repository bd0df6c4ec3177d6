"""Endpoints as plain ASGI applications: no layer between them and the server buffers, or hides that a client left."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from aiocb.errors import AiocbError
from aiocb.serve.body import ClientGone, Receive, Scope, Send
from aiocb.serve.errors import ApiError, error_of

__all__ = ["Endpoint", "send_bytes", "send_error", "send_json"]

log = logging.getLogger("aiocb.serve")


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole response."""
    head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    head += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send a value as JSON."""
    body = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    await send_bytes(send, status, body, b"application/json", headers)


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error."""
    await send_bytes(send, error.status, error.body, b"application/json", error.headers)


class Endpoint:
    """A route. `handle` may raise what `error_of` knows, as long as it has not begun its response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_started = False

        async def noting(message: Any) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self.handle(scope, receive, noting)
        except ClientGone:
            pass
        except Exception as error:
            if not isinstance(error, (ApiError, AiocbError)):
                log.exception("a request has failed: %s %s", scope["method"], scope["path"])
            if is_started:
                raise  # the server cuts the connection: a half response must not look whole
            await send_error(send, error_of(error))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        raise NotImplementedError
