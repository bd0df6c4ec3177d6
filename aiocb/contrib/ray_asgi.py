"""An ASGI application behind a generator: one request in, its response out in pieces. Event loop only; no Ray.

The generator's pieces travel between processes, where a few thousand a second are the most. So whatever the application
has sent since the last piece is one piece, and the more streams there are, the more time is between two of one stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

__all__ = ["Head", "Piece", "respond", "scope_of"]

Head = tuple[int, list[tuple[bytes, bytes]]]
"""Status and headers of a response."""
Piece = Head | bytes
App = Callable[[Any, Any, Any], Awaitable[None]]

_MAX_UNREAD = 256 << 10
_PLAIN = ("http_version", "method", "path", "raw_path", "query_string", "scheme", "root_path")


def scope_of(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """What of a request's scope can be sent to another process: plain values."""
    sent = {name: scope[name] for name in _PLAIN if name in scope}
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return {"type": "http", **sent, "headers": headers, "client": scope.get("client"), "server": scope.get("server")}


async def respond(
    app: App, scope: dict[str, Any], body: bytes, interval: Callable[[], float] = lambda: 0.0
) -> AsyncGenerator[Piece, None]:
    """Let an application answer a request: yields the head first, then bytes.

    Leaving the generator, or cancelling who reads it, cancels the application: to it, the client has left.

    Args:
        app: the application.
        scope: of the request.
        body: of the request, whole.
        interval: the least seconds between two pieces; asked for after each.

    Raises:
        Exception: what the application has raised.
    """
    exchange = _Exchange(body)
    task = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))
    task.add_done_callback(lambda _: exchange.end())
    try:
        while True:
            pieces = await exchange.take()
            if pieces is None:
                break
            for piece in pieces:
                yield piece
            await exchange.rest(interval())
        task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it was raised above, or nobody is there to hear it


class _Exchange:
    """What an application sees of its client."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._head: Head | None = None
        self._unread: list[bytes] = []
        self._size = 0
        self._is_over = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def receive(self) -> dict[str, Any]:
        """The body, whole; then nothing for as long as the client stays."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Keep a part of the response; waits while much of it is unread."""
        if message["type"] == "http.response.start":
            self._head = (message["status"], [(bytes(name), bytes(value)) for name, value in _headers(message)])
            return  # it goes with the first part of the body
        part = message.get("body", b"")
        self._unread.append(part)
        self._size += len(part)
        self._changed.set()
        if self._size > _MAX_UNREAD:
            self._has_room.clear()
        await self._has_room.wait()

    def end(self) -> None:
        """Nothing more will be sent."""
        self._is_over.set()
        self._changed.set()

    async def rest(self, seconds: float) -> None:
        """Let so much time pass, unless the end comes before."""
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._is_over.wait()

    async def take(self) -> list[Piece] | None:
        """Wait for something; everything that was sent meanwhile, or None at the end."""
        await self._changed.wait()
        if not self._is_over.is_set():
            self._changed.clear()
        pieces: list[Piece] = [] if self._head is None else [self._head]
        body = b"".join(self._unread)
        if body:
            pieces.append(body)
        if not pieces and self._is_over.is_set():
            return None
        self._head, self._size = None, 0
        self._unread.clear()
        self._has_room.set()
        return pieces


def _headers(message: MutableMapping[str, Any]) -> Iterable[tuple[bytes, bytes]]:
    headers: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
    return headers
