"""The bounded queue: who may enter, and who stands in line for it. One `Room` per life, one `Line` per event loop.

```
loop thread                                │ worker thread
Line.try_enter ─► entered ── submit ───────┼─► running, refused or cancelled: `num_left` grows
Line.join ─► waits ─► let_in() ► reserved ─┼─◄ the step's batch says that there is news
```

Everything is synchronous and has one writer: a line its own thread, `num_left` the worker. A number that is read late
only makes somebody wait for the next word, and the worker gives it as long as somebody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aiocb.errors import QueueFull

__all__ = ["Line", "Place", "Room"]


class Place:
    """Where a submission stands in line; `let_in` is called once there is room for its `count` requests."""

    __slots__ = ("count", "is_let_in", "let_in")

    def __init__(self, count: int, let_in: Callable[[], None]) -> None:
        self.count = count
        self.let_in = let_in
        self.is_let_in = False


class Line:
    """The submissions of one event loop, first come, first served.

    Attributes:
        num_entered: requests that were handed to the worker, so far.
        num_reserved: requests that were let in from the line and have not entered yet.
    """

    __slots__ = ("_places", "_room", "num_entered", "num_reserved")

    def __init__(self, room: Room) -> None:
        self._room = room
        self._places: deque[Place] = deque()
        self.num_entered = 0
        self.num_reserved = 0

    @property
    def is_waiting(self) -> bool:
        """True when somebody stands in line (read by the worker without a lock)."""
        return bool(self._places)

    @property
    def num_taken(self) -> int:
        """Places of the queue that were taken from here, so far."""
        return self.num_entered + self.num_reserved

    def can_enter(self, count: int) -> bool:
        """True when `count` requests may enter without standing in line."""
        return not self._places and self._room.has_room(count)

    def enter(self, count: int) -> None:
        """Count requests that are handed to the worker now."""
        self.num_entered += count

    def join(self, count: int, let_in: Callable[[], None]) -> Place:
        """Stand in line. Ask the worker for news next, and then call `let_in`: it looks only where somebody waits."""
        place = Place(count, let_in)
        self._places.append(place)
        return place

    def let_in(self) -> None:
        """Let in, from the front, those for whom there is room."""
        while self._places and self._room.has_room(self._places[0].count):
            place = self._places.popleft()
            place.is_let_in = True
            self.num_reserved += place.count
            place.let_in()

    def leave(self, place: Place) -> None:
        """Give up a place: before it was let in, or after, because its holder enters or does not come any more."""
        if place.is_let_in:
            place.is_let_in = False
            self.num_reserved -= place.count
        elif place in self._places:
            self._places.remove(place)

    def clear(self) -> list[Place]:
        """Send everybody away; returns the places that were waiting."""
        places = list(self._places)
        self._places.clear()
        return places


class Room:
    """How many may wait in the queue.

    Args:
        limit: most requests that wait; 0 is no bound.

    Attributes:
        num_left: requests that have left the queue, for whatever reason; the worker writes it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_left = 0
        self._lines: list[Line] = []
        self._num_gone = 0  # entered from lines that are gone

    def open_line(self) -> Line:
        """Make a line for one more event loop."""
        line = Line(self)
        self._lines.append(line)
        return line

    def close_line(self, line: Line) -> None:
        """Forget a line: its loop is gone, what has entered from there remains."""
        line.clear()
        self._num_gone += line.num_entered
        self._lines.remove(line)

    def has_room(self, count: int) -> bool:
        """Whether so many more requests may enter (any thread)."""
        if not self.limit:
            return True
        num_taken = self._num_gone + sum(line.num_taken for line in tuple(self._lines))
        return num_taken - self.num_left + count <= self.limit

    def check(self, count: int) -> None:
        """Refuse what could never enter.

        Raises:
            QueueFull: more at once than the queue holds.
        """
        if self.limit and count > self.limit:
            raise QueueFull(f"{count} samples cannot enter a queue of {self.limit} (max_queue_size)")

    def __repr__(self) -> str:
        taken = self._num_gone + sum(line.num_taken for line in self._lines)
        return f"<Room {taken - self.num_left}/{self.limit or '∞'}>"
