from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from aiocb.errors import AiocbError, ConfigError, EngineError
from aiocb.model.eager import watch as module
from aiocb.model.eager.ranks import Ranks
from aiocb.model.eager.watch import Address, Watch, listen

WAIT_S = 10.0
LIMIT_S = 0.4


class Group:
    """The watches of three processes, in one."""

    def __init__(self) -> None:
        self.lost: list[queue.SimpleQueue[AiocbError]] = [queue.SimpleQueue() for _ in range(3)]
        server, address = listen("localhost")
        made: dict[int, Watch] = {}

        def connect(rank: int) -> None:
            made[rank] = Watch.connect(rank, address, LIMIT_S, self.lost[rank].put)

        others = [threading.Thread(target=connect, args=(rank,)) for rank in (1, 2)]
        for thread in others:
            thread.start()
        made[0] = Watch.accept(server, address, 3, LIMIT_S, self.lost[0].put)
        for thread in others:
            thread.join()
        self.watches = [made[rank] for rank in range(3)]

    def hears(self, rank: int) -> AiocbError:
        return self.lost[rank].get(timeout=WAIT_S)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    for watch in group.watches:
        watch.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "aiocb watch"]


def test_all_are_told_what_one_says(group: Group) -> None:
    group.watches[1].tell(ValueError("no"))
    for rank in (0, 2):
        error = group.hears(rank)
        assert isinstance(error, EngineError) and str(error) == "rank 1: ValueError: no"


def test_a_refusal_is_one_for_all(group: Group) -> None:
    group.watches[2].tell(ConfigError("no such model"))
    for rank in (0, 1):
        error = group.hears(rank)
        assert isinstance(error, ConfigError) and str(error) == "rank 2: no such model"


def test_a_process_that_ends_is_noticed_at_once(group: Group) -> None:
    for watch in group.watches:
        watch.expect(None)
    group.watches[1]._connections[0].shutdown(socket.SHUT_RDWR)
    assert str(group.hears(0)) == str(group.hears(2)) == "rank 1 has ended"


def test_a_process_that_is_silent_is_noticed_within_the_limit(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.watches[2], "_send_all", lambda *_: None)
    for watch in group.watches:
        watch.expect(LIMIT_S)
    assert "rank 2 has not been heard" in str(group.hears(0)) and f"cpu_group_timeout={LIMIT_S}" in str(group.hears(1))


def test_leaving_is_fine_when_nobody_works(group: Group) -> None:
    group.watches[0].rest()
    group.watches[1].close()
    assert "left" in str(group.hears(0))  # for whoever wants to go on
    assert group.lost[2].empty()


def test_leaving_is_not_fine_for_those_who_work(group: Group) -> None:
    group.watches[1].close()
    assert "rank 1 has left" in str(group.hears(0)) and "rank 1 has left" in str(group.hears(2))


def test_strangers_are_sent_away() -> None:
    server, address = listen("localhost")
    strangers = [
        Address(address.host, address.port, b"\0" * 16),
        address._replace(key=b"\1" * 16),
    ]
    connections = [socket.create_connection((stranger.host, stranger.port)) for stranger in strangers]
    connections[0].sendall(b"GET / HTTP/1.1\r\n\r\n and more of it")
    connections[1].close()
    watch: list[Watch] = []
    accepting = threading.Thread(target=lambda: watch.append(Watch.accept(server, address, 2, None, lambda _: None)))
    accepting.start()
    mine = Watch.connect(1, address, None, lambda _: None)
    accepting.join(WAIT_S)
    assert watch
    with contextlib.suppress(ConnectionResetError):
        assert connections[0].recv(1) == b""
    connections[0].close()
    for one in (*watch, mine):
        one.close()


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.05)
    server, address = listen("localhost")
    with pytest.raises(EngineError, match="rank 1 has not connected"):
        Watch.accept(server, address, 2, None, lambda _: None)
    with pytest.raises(EngineError, match="rank 0 cannot be reached"):
        Watch.connect(1, address, None, lambda _: None)


def test_an_address_that_is_not_here_listens_everywhere() -> None:
    with contextlib.closing(listen("192.0.2.1")[0]) as server:
        assert server.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("is_in_a_step", [False, True])
def test_a_collective_that_fails_is_explained_by_who_is_gone(is_in_a_step: bool) -> None:
    ranks = object.__new__(Ranks)
    ranks.lost = None

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            ranks.lost = EngineError("rank 1 is gone")
            return True

    ranks._has_lost = Late()
    error: Exception = RuntimeError("connection closed by peer")
    if is_in_a_step:
        wrapped = EngineError("rank 0 has failed in a step")
        wrapped.__cause__ = error
        error = wrapped
    assert str(ranks.explained(error)) == "rank 1 is gone"
