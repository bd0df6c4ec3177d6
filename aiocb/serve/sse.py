"""Server-sent events: frames, comments in silence, and streams that can be resumed. Event loop only.

A frame is written whole in one call of `send`, so that comments may come from another task between two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quote

from aiocb.serve.body import ClientGone, Send

__all__ = ["DONE", "EventStream", "Heartbeats", "data", "quote"]

DONE = b"data: [DONE]\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def data(json_text: str) -> bytes:
    """One frame. The JSON is ASCII: line ends of Unicode, which some clients split at, are escaped in it."""
    return f"data: {json_text}\n\n".encode("ascii")


class Heartbeats:
    """Writes a comment into every stream in which nothing has moved for `interval` seconds.

    One task for all streams: a timer per chunk would cost more than the chunk.

    Args:
        interval: seconds; 0 writes none.
        count_waiting: how many requests stand in the queue.
    """

    def __init__(self, interval: float, count_waiting: Callable[[], int]) -> None:
        self.interval = interval
        self._count_waiting = count_waiting
        self._streams: set[EventStream] = set()

    def add(self, stream: EventStream) -> None:
        """Watch a stream."""
        self._streams.add(stream)

    def remove(self, stream: EventStream) -> None:
        """No longer."""
        self._streams.discard(stream)

    async def run(self) -> None:
        """Do so until cancelled."""
        while self.interval:
            await asyncio.sleep(self.interval / 4)
            before = time.monotonic() - self.interval
            silent = [each for each in self._streams if each.written_at <= before]
            if silent:
                comment = b": still here; %d requests wait\n\n" % self._count_waiting()
                for stream in silent:
                    with contextlib.suppress(ClientGone):  # its own task hears of it
                        await stream.comment(comment)


class EventStream:
    """The response of a request that is streamed.

    Attributes:
        written_at: when something was written last.
    """

    __slots__ = ("_heartbeats", "_is_ended", "_is_writing", "_send", "written_at")

    def __init__(self, send: Send, heartbeats: Heartbeats) -> None:
        self._send = send
        self._heartbeats = heartbeats
        self._is_ended = False
        self._is_writing = False
        self.written_at = 0.0

    async def start(self, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send the head: from here on, what fails is told by an event."""
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *headers]})
        self.written_at = time.monotonic()
        self._heartbeats.add(self)

    async def write(self, frames: bytes) -> None:
        """Write some frames; waits while the client is behind."""
        if frames:
            self._is_writing = True
            try:
                await self._send({"type": "http.response.body", "body": frames, "more_body": True})
            except OSError:  # what `send` raises once the client has left, from ASGI 2.4 on
                raise ClientGone from None
            finally:
                self._is_writing = False
            self.written_at = time.monotonic()

    async def comment(self, comment: bytes) -> None:
        """Write a comment, which clients skip; nothing while the client is behind."""
        if not self._is_ended and not self._is_writing:
            await self.write(comment)

    async def end(self, frames: bytes) -> None:
        """Write the last frames."""
        self.close()
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})

    def close(self) -> None:
        """No more comments."""
        self._is_ended = True
        self._heartbeats.remove(self)
