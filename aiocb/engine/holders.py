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
    must not close that one. An exit in a task that has not entered (fixtures do that) belongs to the latest entry.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[asyncio.Task[Any]] | None, Session]] = []
        self._forgotten: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()

    def enter(self, session: Session) -> None:
        """Note that the current task has entered."""
        task = asyncio.current_task()
        self._entries.append((None if task is None else weakref.ref(task), session))

    def hand_over(self, old: Session, new: Session) -> None:
        """The old session has died, and another takes its place for all who hold it."""
        self._entries = [(owner, new if held is old else held) for owner, held in self._entries]

    def leave(self) -> Session | None:
        """Note that the current task leaves; returns the session when nobody else holds it any more."""
        task = asyncio.current_task()
        places = [place for place, (owner, _) in enumerate(self._entries) if owner is not None and owner() is task]
        if task is not None and not places:
            forgotten = self._forgotten.get(task, 0)
            if forgotten:
                self._forgotten[task] = forgotten - 1
                return None
        if not self._entries:
            return None
        _, session = self._entries.pop(places[-1] if places else -1)
        return None if any(other is session for _, other in self._entries) else session

    def forget(self, session: Session) -> None:
        """The session is closed whoever holds it: their exits will mean nothing."""
        kept = []
        for owner, held in self._entries:
            if held is not session:
                kept.append((owner, held))
                continue
            task = None if owner is None else owner()
            if task is not None:
                self._forgotten[task] = self._forgotten.get(task, 0) + 1
        self._entries = kept
