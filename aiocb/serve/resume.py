"""Streams that outlive their connection: `Replay`, the frames of one stream by number, and all of them. Event loop.

A client that sends `"resume": true` gets an `id:` with every event. When its connection breaks, the stream goes on for
`ServeConfig.resume_window` seconds; `GET /v1/streams/{id}` with the `Last-Event-ID` that it saw last goes on there,
from the same tokens: nothing is computed twice. Of a stream that grows beyond `resume_buffer` the oldest events are
dropped; a client that needs them is told so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiocb.serve.errors import ApiError

__all__ = ["Replay", "Replays"]


class Replay:
    """The events of one stream, numbered from 1, for one reader at a time.

    Args:
        stream_id: before the number of every event.
        most: bytes that are kept.
        window: seconds that it goes on without a reader.
        abandon: called when they are over.
    """

    def __init__(self, stream_id: str, most: int, window: float, abandon: Callable[[], object]) -> None:
        self.stream_id = stream_id
        self.is_ended = False
        self._frames: deque[bytes] = deque()
        self._first = 1
        self._size = 0
        self._most = most
        self._window = window
        self._abandon = abandon
        self._reader: object | None = None
        self._arrived = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _next(self) -> int:
        return self._first + len(self._frames)

    def write(self, frames: bytes) -> None:
        """Add what an answer has written: events, each ended by an empty line."""
        for frame in frames.split(b"\n\n"):
            if frame:
                numbered = b"id: %s:%d\n%s\n\n" % (self.stream_id.encode(), self._next, frame)
                self._frames.append(numbered)
                self._size += len(numbered)
        while self._size > self._most and len(self._frames) > 1:
            self._size -= len(self._frames.popleft())
            self._first += 1
        self._arrived.set()

    def end(self) -> None:
        """Nothing will follow; it can be read again until the window is over."""
        self.is_ended = True
        self._arrived.set()

    def attach(self, last_event_id: str | None) -> tuple[object, int]:
        """Become the reader, behind an event that was seen; who read before is sent away.

        Returns:
            The reader's token, and the number of its first event.

        Raises:
            ApiError: no event of this stream, or one whose successors are gone.
        """
        number = 0
        if last_event_id:
            stream_id, _, text = last_event_id.rpartition(":")
            if stream_id != self.stream_id or not (text.isascii() and text.isdigit() and len(text) < 10):
                raise ApiError(400, "Last-Event-ID is no event of this stream", param="Last-Event-ID")
            number = int(text)
        if number + 1 < self._first or number >= self._next:
            raise ApiError(
                410,
                f"events {self._first} to {self._next - 1} of this stream are kept: it cannot go on behind {number}",
                code="events_gone",
            )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._reader = reader = object()
        self._arrived.set()  # the one before sees that it is no longer
        return reader, number + 1

    async def read(self, reader: object, number: int) -> tuple[bytes, int] | None:
        """What has come from an event on, and the number of the next; None at the end, or for a reader sent away."""
        while self._reader is reader:
            if number < self._first:
                return None  # it has been too slow for what is kept
            if number < self._next:
                skipped = number - self._first
                frames = b"".join([frame for place, frame in enumerate(self._frames) if place >= skipped])
                return frames, self._next
            if self.is_ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def detach(self, reader: object) -> None:
        """Stop reading; the window begins, unless somebody else reads."""
        if self._reader is reader:
            self._reader = None
            self._arrived.set()
            self._timer = asyncio.get_running_loop().call_later(self._window, self._abandon)


class Replays:
    """All streams that can be resumed.

    Args:
        most: how many at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: dict[str, Replay] = {}

    def add(self, replay: Replay) -> None:
        """Keep one.

        Raises:
            ApiError: there are too many.
        """
        if len(self._all) >= self._most:
            raise ApiError(
                429, f"{self._most} streams are kept to be resumed, the most here; send it without resume",
                param="resume", code="too_many_resumable", headers={"retry-after": "5"},
            )  # fmt: skip
        self._all[replay.stream_id] = replay

    def find(self, stream_id: str) -> Replay:
        """The one of an id.

        Raises:
            ApiError: 404.
        """
        replay = self._all.get(stream_id)
        if replay is None:
            raise ApiError(
                404, "no stream of this id can be resumed: it never could, or its time is over", code="stream_not_found"
            )
        return replay

    def remove(self, replay: Replay) -> None:
        """Keep it no longer."""
        self._all.pop(replay.stream_id, None)
