"""Who has entered an engine, and so how long a session lives."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiocb.engine.session import Session

__all__ = ["Holders"]


class Holders:
    """Pairs exits with entries by the task that made both.

    `aclose()` ends a session whoever has entered it; those holders leave later, perhaps when another session runs, and
    must not close that one. An exit in a task that has not entered belongs to an entry whose task has ended (fixtures
    enter and leave in tasks of their own), else to the latest one.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[asyncio.Task[Any]] | None, Session]] = []
        self._forgotten: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._num_forgotten = 0  # forgotten entries whose task had ended

    def enter(self, session: Session) -> None:
        """Note that the current task has entered."""
        task = asyncio.current_task()
        self._entries.append((None if task is None else weakref.ref(task), session))

    def hand_over(self, old: Session, new: Session) -> None:
        """The old session has died, and another takes its place for all who hold it."""
        self._entries = [(owner, new if held is old else held) for owner, held in self._entries]

    def leave(self) -> Session | None:
        """Note that the current task leaves; returns the session when nobody else holds it any more."""
        place = self._place(asyncio.current_task())
        if place is None:
            return None
        _, session = self._entries.pop(place)
        return None if any(other is session for _, other in self._entries) else session

    def forget(self, session: Session) -> None:
        """The session is closed whoever holds it: their exits will mean nothing."""
        kept = []
        for owner, held in self._entries:
            task = _alive(owner)
            if held is not session:
                kept.append((owner, held))
            elif task is None:
                self._num_forgotten += 1
            else:
                self._forgotten[task] = self._forgotten.get(task, 0) + 1
        self._entries = kept

    def _place(self, task: asyncio.Task[Any] | None) -> int | None:
        """Which entry an exit of this task belongs to; None when it is one that was forgotten."""
        owners = [_alive(owner) for owner, _ in self._entries]
        for owner in (task, None):
            if owner in owners:
                return len(owners) - 1 - owners[::-1].index(owner)
        if task is not None and self._forgotten.get(task, 0):
            self._forgotten[task] -= 1
            return None
        if self._num_forgotten:
            self._num_forgotten -= 1
            return None
        return len(owners) - 1 if owners else None


def _alive(owner: weakref.ref[asyncio.Task[Any]] | None) -> asyncio.Task[Any] | None:
    task = None if owner is None else owner()
    return None if task is None or task.done() else task
