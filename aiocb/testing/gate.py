"""`Gate`: manual stepping. The worker thread stops at it before every step, the test lets it pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from aiocb.engine.bridge import Signal

__all__ = ["Gate"]


class Gate:
    """Holds every step of a `FakeRunner` until the test lets it pass.

        gate = Gate()
        async with fake_engine(gate=gate) as engine:
            task = asyncio.create_task(engine.generate("a long prompt"))
            await gate.held()       # the worker is in its first step
            task.cancel()           # so this comes in the middle of it
            gate.open()             # from now on steps pass by themselves

    Every wait is bounded: a test that forgets to open its gate fails, with a message, and does not hang.

    Args:
        is_open: let steps pass until `close()` is called.
        timeout: seconds until a wait, on either side, gives up.

    Attributes:
        num_arrived: steps that have come to the gate.
        num_finished: steps that have passed it and been computed.
    """

    def __init__(self, *, is_open: bool = False, timeout: float = 20.0) -> None:
        self._condition = threading.Condition()
        self._is_open = is_open
        self._permits = 0
        self._timeout = timeout
        self._is_held = False
        self._changed = Signal()  # another one after each change
        self.num_arrived = 0
        self.num_finished = 0

    # ── worker thread ────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self) -> None:
        """Stand at the gate until a step may pass (called by the runner).

        Raises:
            TimeoutError: nobody let it pass.
        """
        with self._condition:
            self.num_arrived += 1
            self._is_held = True
            self._tell()
            if not self._condition.wait_for(lambda: self._is_open or self._permits > 0, self._timeout):
                raise TimeoutError(f"step {self.num_arrived} was held at the gate for {self._timeout} s")
            self._is_held = False
            if not self._is_open:
                self._permits -= 1

    def leave(self) -> None:
        """The step has been computed (called by the runner)."""
        with self._condition:
            self.num_finished += 1
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, Signal()
        changed.set()

    # ── the test, any thread ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_held(self) -> bool:
        """True while a step stands at the gate."""
        return self._is_held

    def release(self, count: int = 1) -> None:
        """Let so many steps pass, now or when they come."""
        with self._condition:
            self._permits += count
            self._condition.notify_all()

    def open(self) -> None:
        """Let every step pass from now on."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def close(self) -> None:
        """Hold every step again, the next one first."""
        with self._condition:
            self._is_open = False
            self._permits = 0

    # ── the test, in its event loop ──────────────────────────────────────────────────────────────────────────────

    async def held(self) -> None:
        """Return when a step stands at the gate: what the steps before it have delivered has been handed to the loop.

        Raises:
            TimeoutError: none has come.
        """
        await self._wait(lambda: self._is_held and self._permits == 0, "a step to come to the gate")

    async def step(self, count: int = 1) -> None:
        """Let so many steps pass and return when they have been computed.

        Raises:
            TimeoutError: there was nothing to compute.
        """
        target = self.num_finished + count
        self.release(count)
        await self._wait(lambda: self.num_finished >= target, f"{count} steps to be computed")

    async def _wait(self, predicate: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                changed = self._changed  # before the look: what changes after it ends the wait
                while not predicate():
                    await changed.wait()
                    changed = self._changed
        except TimeoutError:
            raise TimeoutError(f"waited {self._timeout} s for {what}") from None
