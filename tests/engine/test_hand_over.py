"""Where two threads pass each other something without a lock: the orders that tests by chance do not hit."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

import pytest

from aiocb.engine.bridge import Mailbox
from aiocb.engine.delivery import Delivery
from aiocb.scheduler.scheduler import Scheduler

from .helpers import running, spin


class Box(deque[str]):
    """Something is put in right after it was found empty for the given time."""

    num_looks = 0

    def __init__(self, at: int, put: threading.Thread) -> None:
        super().__init__()
        self.at = at
        self.put = put

    def __len__(self) -> int:
        count = super().__len__()
        if not count:
            self.num_looks += 1
            if self.num_looks == self.at:
                self.put.start()
                self.put.join()
        return count


@pytest.mark.parametrize("at", [1, 2])
async def test_what_is_posted_while_the_loop_finds_nothing_more_wakes_it_again(at: int) -> None:
    taken: list[str] = []
    mailbox = Mailbox(asyncio.get_running_loop(), taken.append)
    mailbox._items = Box(at, threading.Thread(target=mailbox.post, args=("late",)))
    mailbox.post("first")
    for _ in range(4):
        await asyncio.sleep(0)
    assert taken == ["first", "late"]


async def test_a_reader_that_catches_up_while_it_is_held_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not seen the flag, so it will not ask to be resumed."""
    pause, check = Scheduler.pause, Delivery._check_reader
    num_pauses, flags = 0, []

    def pause_late(self: Scheduler, request: Any) -> None:
        nonlocal num_pauses
        pause(self, request)
        num_pauses += 1
        if num_pauses == 1:
            slot = request.payload.slot
            slot.num_read = slot.num_sent

    def watched(self: Delivery, request: Any, output: Any, now: float) -> None:
        before = num_pauses
        check(self, request, output, now)
        if num_pauses > before:
            flags.append(output.slot.is_paused)

    monkeypatch.setattr(Scheduler, "pause", pause_late)
    monkeypatch.setattr(Delivery, "_check_reader", watched)
    async with running() as setup, setup.endless(max_unread_tokens=2):
        await spin(lambda: bool(flags))
        assert flags[0] is False
        await spin(lambda: len(flags) == 2)
        assert flags[1] is True
