"""Whether the other processes of a parallel model are there: `Watch`. A thread of its own in every process.

    rank 0  ◄── one connection ──►  rank 1, rank 2, ...        a beat each way, several times per limit

A collective that waits for a process which is gone or frozen may never return, so nothing here is one. What is noticed:
a connection that closes (the process has ended), no beat for longer than the limit (it is frozen), and words: a process
says why it has failed, or that it leaves. Rank 0 hands on what it learns. Beats come from this thread: a process that
computes, or loads a model, beats on.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from aiocb.errors import AiocbError, ConfigError, EngineError

__all__ = ["Address", "Watch", "listen"]

BEAT, FAILED, REFUSED, LEFT = range(4)
"""What a frame says: nothing but being there; why its sender has failed; why it cannot start; that it leaves."""

CONNECT_S = 60.0
_HELLO_S = 5.0
_SLOWEST_BEAT_S = 1.0
_BEATS_PER_LIMIT = 10
_PATIENCE = 0.75
"""Of the limit: everybody is to know within it, and words take a while."""

_MAX_TEXT = 4000
_HEAD = struct.Struct("!BH")
_HELLO = struct.Struct("!16sI")


class Address(NamedTuple):
    """Where rank 0 listens, and the word that lets others in."""

    host: str
    port: int
    key: bytes


def listen(host: str) -> tuple[socket.socket, Address]:
    """Listen on the interface that has this name; on all of them where it is not one of this machine's."""
    try:
        server = socket.create_server((host, 0))
    except OSError:
        server = socket.create_server(("", 0))
    return server, Address(host, server.getsockname()[1], secrets.token_bytes(16))


class _Peer:
    """Another process: its connection, what has come of an unfinished frame, and when it was last heard."""

    __slots__ = ("connection", "heard_at", "pending", "rank")

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.rank = rank
        self.connection = connection
        self.pending = bytearray()
        self.heard_at = time.monotonic()


class Watch:
    """Tells once when another process is lost.

    Args:
        limit: the shortest that will be asked for; beats come several times in it. None: now and then.
        peers: connections by rank: rank 0 has one to each, the others one to rank 0.
        on_lost: called with the error that is to be raised here, in the watch's thread.
    """

    def __init__(
        self, limit: float | None, peers: dict[int, socket.socket], on_lost: Callable[[AiocbError], None]
    ) -> None:
        self._interval_s = _SLOWEST_BEAT_S if limit is None else min(limit / _BEATS_PER_LIMIT, _SLOWEST_BEAT_S)
        self._peers = {number: _Peer(number, connection) for number, connection in peers.items()}
        self._on_lost = on_lost
        self._connections = tuple(peers.values())
        self._limit: float | None = None
        self._is_working = True
        self._lock = threading.Lock()  # over writing to connections
        self._is_over = False
        self._waker, self._wakened = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="aiocb watch", daemon=True)
        self._thread.start()

    @classmethod
    def accept(
        cls,
        server: socket.socket,
        address: Address,
        size: int,
        limit: float | None,
        on_lost: Callable[[AiocbError], None],
    ) -> Watch:
        """Wait on rank 0 for the others.

        Raises:
            EngineError: one of them has not come.
        """
        peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + CONNECT_S
        with server:
            while len(peers) < size - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, _ = server.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, size)) - peers.keys())
                    raise EngineError(f"rank {missing[0]} has not connected within {CONNECT_S:g} s") from error
                key, rank = _read_hello(connection)
                if hmac.compare_digest(key, address.key) and 0 < rank < size:
                    peers[rank] = connection
                else:
                    connection.close()
        return cls(limit, peers, on_lost)

    @classmethod
    def connect(cls, rank: int, address: Address, limit: float | None, on_lost: Callable[[AiocbError], None]) -> Watch:
        """Connect to rank 0.

        Raises:
            EngineError: it cannot be reached.
        """
        try:
            connection = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
            connection.sendall(_HELLO.pack(address.key, rank))
        except OSError as error:
            raise EngineError(f"rank 0 cannot be reached at {address.host}:{address.port}: {error}") from error
        return cls(limit, {0: connection}, on_lost)

    def expect(self, limit: float | None) -> None:
        """From now on, every process is to be heard at least once in so many seconds; None does not ask for it."""
        now = time.monotonic()
        for peer in tuple(self._peers.values()):
            peer.heard_at = now
        self._is_working, self._limit = True, limit

    def rest(self) -> None:
        """From now on, others may leave or be silent; who has left is told once all the same."""
        self._is_working, self._limit = False, None

    def tell(self, error: BaseException) -> None:
        """Let the others know why this process cannot go on (any thread)."""
        kind = REFUSED if isinstance(error, ConfigError) else FAILED
        self._send_all(kind, f"{error}" if kind == REFUSED else f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Say that this process leaves, and end the thread. Idempotent."""
        self._send_all(LEFT)
        self._is_over = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_SLOWEST_BEAT_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wakened.send(b"\0")

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._waker, selectors.EVENT_READ)
        for peer in self._peers.values():
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        next_beat = 0.0
        while not self._is_over:
            now = time.monotonic()
            limit = self._limit
            if now >= next_beat:
                self._send_all(BEAT)
                next_beat = now + self._interval_s
            for key, _ in selector.select(next_beat - now):
                if key.data is None:
                    self._waker.recv(4096)
                elif not self._read(key.data):
                    selector.unregister(key.fileobj)
            if time.monotonic() - now > 2 * self._interval_s:
                # This process has been away itself: what it has not heard meanwhile says nothing about the others.
                for peer in self._peers.values():
                    peer.heard_at = time.monotonic()
            elif limit is not None:
                self._judge(limit)
        selector.close()
        for connection in self._connections:
            connection.close()
        self._waker.close()
        self._wakened.close()

    def _judge(self, limit: float) -> None:
        now = time.monotonic()
        for peer in tuple(self._peers.values()):
            silent_s = now - peer.heard_at
            if silent_s > limit * _PATIENCE:
                self._lose(
                    peer, f"rank {peer.rank} has not been heard for {silent_s:.1f} s (cpu_group_timeout={limit:g})"
                )

    def _read(self, peer: _Peer) -> bool:
        """Take what has come from another process; False when it was the last."""
        try:
            data = peer.connection.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._lose(peer, f"rank {peer.rank} has ended")
            return False
        peer.heard_at = time.monotonic()
        peer.pending += data
        while len(peer.pending) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(peer.pending)
            if len(peer.pending) < _HEAD.size + length:
                break
            text = peer.pending[_HEAD.size : _HEAD.size + length].decode(errors="replace")
            del peer.pending[: _HEAD.size + length]
            if kind == LEFT:
                self._lose(peer, f"rank {peer.rank} has left while the others were at work")
                return False
            if kind != BEAT:
                self._lose(peer, text if text.startswith("rank ") else f"rank {peer.rank}: {text}", kind)
        return True

    def _lose(self, peer: _Peer, why: str, kind: int = FAILED) -> None:
        if self._peers.pop(peer.rank, None) is None:
            return
        if self._is_working:
            self._send_all(kind, why)
        self._on_lost(ConfigError(why) if kind == REFUSED else EngineError(why))

    def _send_all(self, kind: int, text: str = "") -> None:
        payload = text.encode()[:_MAX_TEXT]
        with self._lock:
            for peer in tuple(self._peers.values()):
                # Full buffers are those of somebody who does not read; closed ones are noticed by reading.
                with contextlib.suppress(OSError):
                    peer.connection.send(_HEAD.pack(kind, len(payload)) + payload)


def _read_hello(connection: socket.socket) -> tuple[bytes, int]:
    """Return the word and the rank that a new connection begins with; nothing where it does not."""
    connection.settimeout(_HELLO_S)
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < _HELLO.size and (more := connection.recv(_HELLO.size - len(data))):
            data += more
    return _HELLO.unpack(data) if len(data) == _HELLO.size else (b"", 0)
