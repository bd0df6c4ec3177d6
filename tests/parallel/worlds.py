"""Several processes with one model, forked from a server that has imported all; what they do is in `programs`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

Program = Callable[["Rank"], Coroutine[Any, Any, Any]]

_PRELOADED = ["tests.parallel.programs", "transformers.models.llama.modeling_llama", "torch.distributed.tensor"]
_ANSWER_S = 60.0


class Rank:
    """What a program knows of its place."""

    def __init__(self, number: int, size: int, connection: Connection, folder: str) -> None:
        self.number = number
        self.size = size
        self.folder = folder
        self._connection = connection

    def say(self, word: Any) -> None:
        self._connection.send(("says", word))


class World:
    """The processes as the test sees them."""

    def __init__(self, program: Program, size: int, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        port = _free_port()
        self.processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        for number in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(program, number, size, port, theirs, folder), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)

    def hear(self, number: int) -> Any:
        """Return what a rank says next, or its result."""
        connection = self._connections[number]
        assert connection.poll(_ANSWER_S), f"rank {number} says nothing"
        kind, value = connection.recv()
        assert kind in ("says", "done"), f"rank {number}:\n{value}"
        return value

    def results(self) -> list[Any]:
        return [self.hear(number) for number in range(len(self.processes))]

    def signal(self, number: int, which: signal.Signals) -> None:
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, which)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()


@contextmanager
def world_of(program: Program, size: int, folder: str) -> Iterator[World]:
    world = World(program, size, folder)
    try:
        yield world
    finally:
        world.end()


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _run(program: Program, number: int, size: int, port: int, connection: Connection, folder: str) -> None:
    import torch

    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        result = asyncio.run(program(Rank(number, size, connection, folder)))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
    else:
        connection.send(("done", result))
