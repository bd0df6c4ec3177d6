"""A pseudo-terminal to run the command in: real key presses, real signals, a real screen size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FAKE = [sys.executable, str(Path(__file__).with_name("fake_aiocb.py"))]
REAL = [sys.executable, "-m", "aiocb.cli"]
CTRL_C, CTRL_D = "\x03", "\x04"
READY = "\\$ "
"""Matches the prompt of a chat that waits for input (the editor asks the terminal to mark pasted text)."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x01|\x02|\r")


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", **extra}


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], *, rows: int = 40, columns: int = 120, **extra: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command, env=environment(**extra), preexec_fn=lambda: os.login_tty(slave), pass_fds=(slave,)
        )
        os.close(slave)
        self.output = ""  # everything, without escape sequences
        self._seen = 0

    def expect(self, pattern: str, timeout: float = 60.0) -> str:
        """Wait for the pattern in the output after the last match; return what was matched."""
        deadline = time.monotonic() + timeout
        while True:
            match = re.compile(pattern).search(self.output, self._seen)
            if match is not None:
                self._seen = match.end()
                return match[0]
            if time.monotonic() > deadline or not self._read(deadline):
                raise AssertionError(f"{pattern!r} is not in {self.output[self._seen :]!r}")

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self, timeout: float = 30.0) -> int:
        """Read on until the program has ended; return its exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        try:
            return self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on; its output: {self.output!r}") from None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, min(1.0, deadline - time.monotonic())))
        if not ready:
            return time.monotonic() < deadline
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux reports the end of a terminal as EIO
            return False
        self.output += _ESCAPES.sub("", data.decode(errors="replace").replace("\x1b[?2004h", "$ "))
        return bool(data)


Spawn = Callable[..., Terminal]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Start programs on terminals, with a history of their own; whatever still runs is killed at the end."""
    terminals: list[Terminal] = []

    def start(command: list[str], **options: object) -> Terminal:
        terminals.append(Terminal(command, **{"XDG_STATE_HOME": str(tmp_path), **options}))  # type: ignore[arg-type]
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def run_plain(command: list[str], *, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a program with pipes instead of a terminal."""
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=400, env=environment(**extra))


def without_build(stderr: str) -> str:
    """Standard error without the note that the native kernels have been compiled, once per machine."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "kernels" not in line)
