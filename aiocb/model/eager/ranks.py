"""The processes that run one model together: `Ranks`. Every process has one.

    worker thread ──call──► rank thread: collectives, forward passes     may hang for ever where another process is gone
         ▲                       │ done
         └───────── answers ◄────┴──── watch: somebody is lost

The worker never enters a collective itself: it waits for the rank thread, for bad news and for a limit, whichever comes
first. A rank thread that hangs is left behind; it is a daemon.
"""

from __future__ import annotations

import datetime
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from aiocb.errors import AiocbError, ConfigError, EngineError
from aiocb.model.eager.watch import Watch, listen

__all__ = ["LOAD_LIMIT_S", "Ranks", "join_world"]

T = TypeVar("T")

LOAD_LIMIT_S = 7200.0
"""For loading a model, of which one process may do much more than another: what transformers gives its own groups."""

_FOR_EVER = datetime.timedelta(days=3650)
"""Of the control group: in it processes wait for work, as long as there is none. The watch knows who is gone."""

_GRACE_S = 0.5

_INLINE = 8192 - 8
"""Bytes of a message that go with its length; a longer one needs a second broadcast."""


def join_world(device_type: str) -> None:
    """Join the processes that `torchrun` has started, unless the program has done so itself.

    Raises:
        ConfigError: it has not been started by `torchrun`, or in another way that says how many they are.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"several processes were asked for, and this one was not started as one of them ({', '.join(missing)} not "
            "set): start the program with `torchrun --nproc-per-node N`"
        )
    options: dict[str, Any] = {}
    if device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if device_type == "cuda":
        options["device_id"] = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    backend = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}.get(device_type)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=LOAD_LIMIT_S), **options)


def _host() -> str:
    """Where others find this process, as the first of its group."""
    given = os.environ.get("MASTER_ADDR")  # of rank 0 of the world
    return given if given and dist.get_rank() == 0 else socket.gethostname()


class Ranks:
    """A group of processes with one model; number 0 decides, the others follow.

    Args:
        members: numbers of its processes in the world.
        limit: seconds after which a process that does not answer, and a step that does not end, is given up; None waits
            for ever.

    Attributes:
        rank, size: of this process, and how many they are.
        lost: why they cannot go on, once that is known.
    """

    def __init__(self, members: list[int], limit: float | None) -> None:
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        self.limit = limit
        self.lost: AiocbError | None = None
        self._first = members[0]
        self._answers: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._on_lost: Callable[[AiocbError], None] | None = None
        self._watch: Watch | None = None
        self._has_lost = threading.Event()
        self._is_working = True
        self._is_closed = False
        self._buffer = torch.zeros(_INLINE + 8, dtype=torch.uint8)
        self._thread = threading.Thread(target=self._run, name="aiocb rank", daemon=True)
        self._thread.start()
        self.call(lambda: self._connect(members), self.load_limit)

    def _connect(self, members: list[int]) -> None:
        is_part = len(members) < dist.get_world_size()
        self._control: Any = dist.new_group(members, _FOR_EVER, "gloo", use_local_synchronization=is_part)
        if self.rank == 0:
            server, address = listen(_host())
            self.send_object(address)
            self._watch = Watch.accept(server, address, self.size, self.limit, self._lose)
        else:
            self._watch = Watch.connect(self.rank, self.receive_object(), self.limit, self._lose)
        self.watch.expect(self.load_limit)

    @property
    def load_limit(self) -> float | None:
        """Seconds for what takes its time on some processes only: loading, and entering the engine again."""
        return None if self.limit is None else max(self.limit, LOAD_LIMIT_S)

    def work(self) -> None:
        """Be at work from now on: whoever is silent for longer than the limit, or leaves, is lost for all."""
        self._is_working = True
        self.watch.expect(self.limit)

    def rest(self) -> None:
        """Be at work no more: others may leave. Only a later call is refused for it."""
        self._is_working = False
        self.watch.rest()

    @property
    def watch(self) -> Watch:
        """Who else is there."""
        assert self._watch is not None
        return self._watch

    # ── from the worker to the rank thread ───────────────────────────────────────────────────────────────────────

    def call(self, work: Callable[[], T], limit: float | None) -> T:
        """Run something in the rank thread.

        Raises:
            EngineError, ConfigError: a process is lost, or it took longer than the limit; from then on, every call is
                refused.
            Exception: what the work itself has raised; the other processes have been told.
        """
        if self.lost is not None:
            raise self._lost_error(self.lost)
        number = next(self._numbers)
        self._calls.put((number, work))
        try:
            while True:
                answered, result, error = self._answers.get(timeout=limit)
                if answered == number:
                    break
                if error is not None:  # bad news
                    raise self._lost_error(error)
        except queue.Empty:
            self.fail(EngineError(f"the processes have not finished a step within {limit:g} s (cpu_group_timeout)"))
            assert self.lost is not None
            raise self._lost_error(self.lost) from None
        if error is not None:
            raise self.explained(error) from error
        done: T = result
        return done

    def start(self, work: Callable[[], None], on_end: Callable[[BaseException | None], None]) -> None:
        """Run something in the rank thread that goes on; `on_end` is called there with what it has raised."""

        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:
                error = raised
            on_end(error)

        self._calls.put((0, run))

    def on_lost(self, callback: Callable[[AiocbError], None]) -> None:
        """Call back when a process is lost, also where that is known already (in the watch's thread, or here)."""
        self._on_lost = callback
        if self.lost is not None:
            callback(self.lost)

    def fail(self, error: BaseException) -> None:
        """Let nobody go on: this process cannot (any thread)."""
        if self.lost is None:
            self.lost = error if isinstance(error, AiocbError) else EngineError(f"{type(error).__name__}: {error}")
        if self._watch is not None:
            self._watch.tell(error)

    def explained(self, error: BaseException) -> BaseException:
        """Return what is to be raised here for what went wrong here, and tell the others if it is not their doing."""
        if isinstance(error.__cause__ or error, RuntimeError):
            self._has_lost.wait(_GRACE_S)  # a collective fails, within a step too, a moment before the watch knows why
        if self.lost is not None:
            return self._lost_error(self.lost)
        self.fail(error)
        return error

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch is not None:
            self._watch.close()
        self._calls.put(None)
        if self.lost is None:  # else it may hang for ever
            self._thread.join(1.0)
        self._on_lost = None

    def _lose(self, error: AiocbError) -> None:
        if self.lost is None:
            self.lost = error
        self._has_lost.set()
        if not self._is_working:
            return
        self._answers.put((-1, None, error))
        callback = self._on_lost
        if callback is not None:
            callback(error)

    @staticmethod
    def _lost_error(error: BaseException) -> BaseException:
        """One of its own for every raise."""
        return type(error)(*error.args)

    # ── rank thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            number, work = call
            try:
                answer = (number, work(), None)
            except BaseException as error:
                self._answers.put((number, None, error))
            else:
                self._answers.put(answer)
            del call, work

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all others."""
        length, buffer = len(message), self._buffer
        buffer[:8] = torch.frombuffer(bytearray(length.to_bytes(8, "little")), dtype=torch.uint8)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if length <= _INLINE:
            buffer[8 : 8 + length] = data
        self._broadcast(buffer)
        if length > _INLINE:
            self._broadcast(data)

    def receive(self) -> bytes:
        """Wait for a message of rank 0."""
        buffer = self._buffer
        self._broadcast(buffer)
        length = int.from_bytes(buffer[:8].numpy().tobytes(), "little")
        if length <= _INLINE:
            return buffer[8 : 8 + length].numpy().tobytes()
        data = torch.empty(length, dtype=torch.uint8)
        self._broadcast(data)
        return data.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=self._first, group=self._control)

    def send_object(self, value: Any) -> None:
        """Send something from rank 0 that is not a plan."""
        dist.broadcast_object_list([value], src=self._first, group=self._control)

    def receive_object(self) -> Any:
        """Wait for what rank 0 sends so."""
        holder = [None]
        dist.broadcast_object_list(holder, src=self._first, group=self._control)
        return holder[0]

    def gather(self, value: T) -> list[T]:
        """Tell all processes a value, and return those of all."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def meet(self) -> None:
        """Wait until every process is here."""
        dist.barrier(group=self._control)
