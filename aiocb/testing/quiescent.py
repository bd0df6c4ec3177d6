"""`assert_quiescent`: nothing is left of any request. Runs in the test's loop; looks at the worker from inside."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import anyio

from aiocb.engine.bridge import Signal
from aiocb.engine.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiocb.engine.engine import Engine
    from aiocb.engine.session import Session

__all__ = ["assert_quiescent", "settle", "submitted", "what_is_left"]

_TIMEOUT_S = 20.0


async def assert_quiescent(engine: Engine) -> None:
    """Check that no request has left anything behind.

    In a running engine: no request is known to the worker, every block of the cache is free (cached prefixes count as
    free), the scheduler's invariants hold, no stream of any live event loop is open, nobody waits for the queue, and
    the engine has no task in this loop. In a closed one also: its thread is gone. There is no sleeping and no
    retrying: the check is a command that the worker carries out after everything that was asked of it before.

    Streams that are still referenced by somebody who has not closed them are found, as they should be.

    Raises:
        AssertionError: naming everything that was found.
        TimeoutError: the worker does not answer.
    """
    session = engine._lives.session
    if session is None:
        return
    worker = session.worker
    found: list[str] = []
    if worker.state in ("running", "draining") and not worker.is_stopping:
        await submitted(engine)
        await _barrier(session, lambda core: found.extend(what_is_left(core)))
    else:
        worker.join(_TIMEOUT_S)
        session.encoder.join(_TIMEOUT_S)
        if worker.is_alive or session.encoder.is_alive:
            found.append("a thread is alive")
        if worker.core is not None and worker.state == "closed":
            found += what_is_left(worker.core)
    await _end_of_dispatch(session)
    for loop, bridge in tuple(session._bridges.items()):
        if loop.is_closed():
            continue
        if bridge.open_lanes:
            found.append(f"{bridge.open_lanes} outputs are open in {loop}")
        if bridge.line.is_waiting or bridge.line.num_taken != bridge.line.num_entered:
            found.append(f"somebody waits for room in the queue in {loop}")
        elif bridge._dispatcher is not None and loop is asyncio.get_running_loop():
            found.append("the engine's task is left in this loop")
    if found:
        raise AssertionError("the engine is not quiescent: " + "; ".join(found))


async def settle(engine: Engine) -> None:
    """Return when the worker has applied everything that was asked of it before, and what followed has been delivered.

    Afterwards the abort of a stream that was left is done, and `stats()` shows it. With a `Gate`, open it first.

    Raises:
        TimeoutError: the worker does not answer.
    """
    session = engine._lives.session
    if session is not None:
        await submitted(engine)
        await _barrier(session)
        for _ in range(3):  # passes in which this loop's dispatcher hands out what has arrived in it
            await asyncio.sleep(0)


async def submitted(engine: Engine) -> None:
    """Return when every stream that this loop has begun is in the worker's inbox, was refused, or waits for room.

    Streams of tasks that were made just before count; the worker itself may stand still (see `Gate`).
    """
    session = engine._lives.session
    if session is not None and session.encoder.is_alive:
        await asyncio.sleep(0)
        await session.encoder.submit(int)  # a job after all others


async def _barrier(session: Session, look: Callable[[EngineCore], object] | None = None) -> None:
    """One command through the inbox. What the worker did before it has then reached this loop."""
    done = Signal()
    errors: list[BaseException] = []

    def arrive(core: EngineCore) -> None:
        try:
            if look is not None:
                look(core)
        except BaseException as error:
            errors.append(error)
        done.set()

    session.put((EngineCore.call, arrive))
    with anyio.move_on_after(_TIMEOUT_S) as scope:
        await done.wait()
    if scope.cancelled_caught:
        raise TimeoutError(f"the worker has not answered for {_TIMEOUT_S} s (state: {session.worker.state})")
    if errors:
        raise errors[0]


def what_is_left(core: EngineCore) -> list[str]:
    """Name what is left of any request in a core; in its thread, or after the thread has ended.

    Raises:
        AssertionError: an invariant does not hold.
    """
    core.check_invariants()
    scheduler = core.scheduler
    found = []
    if core.delivery.num_streams:
        names = ", ".join(sorted(repr(slot.request_id) for slot, _ in core.delivery.streams()))
        found.append(f"{core.delivery.num_streams} requests are alive ({names})")
    if scheduler.num_requests:
        found.append(f"the scheduler has {scheduler!r}")
    used = [pool.num_used for pool in scheduler.cache.pools]
    if any(used):
        found.append(f"blocks in use, by group: {used}")
    swap, states = scheduler.cache.swap, scheduler.cache.states
    if swap is not None and swap.usage:
        found.append(f"places of the swap space in use: {swap!r}")
    if states is not None and states.pool.num_used:
        found.append(f"slots of states in use: {states.pool.num_used}")
    return found


async def _end_of_dispatch(session: Session) -> None:
    """The dispatcher of a loop ends by itself when the last output of that loop has ended: let it."""
    bridge = session._bridges.get(asyncio.get_running_loop())
    if bridge is not None and bridge._dispatcher is not None:
        core = session.worker.core
        has_ended = core is not None and core.delivery.num_streams == 0
        await asyncio.wait([bridge._dispatcher], timeout=_TIMEOUT_S if has_ended else 0.0)


def worker_threads() -> list[threading.Thread]:
    """The worker threads of all engines of this process."""
    return [thread for thread in threading.enumerate() if thread.name == "aiocb worker"]
