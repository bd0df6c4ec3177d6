"""Files that are made once and kept in the user's cache: where they lie, how damage is noticed, who may replace them.

A kept folder is *sealed*: `seal.json` has a checksum of every other file and a word on who made it. It appears by one
rename, so it is whole or not there; what is short, flipped or half written since then no longer fits its seal. Only
damage and another maker are reasons to replace a folder; an error while it is used never is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "SCRATCH",
    "Lock",
    "cache_dir",
    "checksum",
    "digest",
    "flaw",
    "known_digest",
    "locked",
    "make_folder",
    "sweep",
]

logger = logging.getLogger("aiocb.files")

_SEAL = "seal.json"
_INDEX = "digests.json"
SCRATCH = ".making-"
_PIECE = 1 << 22


def cache_dir() -> Path:
    """The folder for everything that is kept: `$AIOCB_CACHE`, else the platform's per-user cache."""
    configured = os.environ.get("AIOCB_CACHE")
    return Path(configured).expanduser() if configured else Path(platformdirs.user_cache_dir("aiocb", appauthor=False))


def checksum(path: Path) -> str:
    """Size and CRC-32 of every 4 MiB of a file: with zlib's 1 to 7 GB/s a core it is cheap enough for every start.

    It notices damage, not malice: whoever can write to the cache can write a seal too.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size

    def piece(start: int) -> str:
        with path.open("rb") as file:
            file.seek(start)
            return f"{zlib.crc32(file.read(_PIECE)):08x}"

    if size <= _PIECE:
        joined = piece(0)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            joined = ",".join(pool.map(piece, range(0, size, _PIECE)))
    return f"{size} {hashlib.blake2b(joined.encode(), digest_size=12).hexdigest()}"


def flaw(folder: Path, maker: str) -> str | None:
    """Why a kept folder cannot be used; None when it can. The reason is empty when there is no such folder.

    Raises:
        OSError: it is there and cannot be read; that is not damage.
    """
    try:
        seal = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
        if seal["maker"] != maker:
            return f"made by {seal['maker']}"
        for name, expected in seal["files"].items():
            if checksum(folder / name) != expected:
                return f"{name} is damaged"
    except NotADirectoryError:
        return ""
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing" if folder.is_dir() else ""
    except (ValueError, LookupError, TypeError):
        return f"{_SEAL} is damaged"
    return None


@contextlib.contextmanager
def make_folder(folder: Path, maker: str) -> Iterator[Path]:
    """Make a kept folder: yields an empty one to fill; it is sealed and put in place when the block ends well.

    The caller holds `locked(folder)`. What killed makers have left beside it is removed on the way in.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    scratch = folder.parent / f"{SCRATCH}{folder.name}"
    scratch.mkdir()
    try:
        yield scratch
        files = {path.relative_to(scratch).as_posix(): checksum(path) for path in scratch.rglob("*") if path.is_file()}
        (scratch / _SEAL).write_text(json.dumps({"maker": maker, "files": files}), encoding="utf-8")
        old = folder.parent / f"{SCRATCH}{folder.name}.old"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        scratch.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sweep(path: Path) -> None:
    """Remove scratch folders beside `path` that nobody works on: its own (the caller has the lock) and the dead's."""
    for scratch in path.parent.glob(f"{SCRATCH}*"):
        name = scratch.name.removeprefix(SCRATCH).removesuffix(".old")
        with Lock(path.parent / name) as is_free:
            if name == path.name or is_free:
                shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the one lock between threads and processes for what lies at `path`; it ends with the process.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(path)
    with lock as is_free:
        if not is_free:
            logger.info("waiting for another process that makes %s", path)
            lock.acquire()
        yield


class Lock:
    """An exclusive lock on a file beside `path`; without locks in the system the renames alone have to do.

    It belongs to the open file: a process that inherits the descriptor holds it on when it was released here.

    Attributes:
        descriptor: the open file, to be inherited; None while the lock is not held.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.parent / f"{path.name}.lock"
        self.descriptor: int | None = None

    def __enter__(self) -> bool:
        return self.try_acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Wait for it."""
        self._flock(0)

    def try_acquire(self) -> bool:
        """Take it when it is free."""
        try:
            self._flock(fcntl.LOCK_NB if fcntl else 0)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Give it back; harmless when it is not held."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _flock(self, flags: int) -> None:
        if self.descriptor is None:
            self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        if fcntl is not None:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | flags)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise


def digest(path: Path) -> str:
    """A digest of a file's whole content; remembered in the cache for as long as size and times stay the same.

    Raises:
        OSError: the file cannot be read.
    """
    known = known_digest(path)
    if known is not None:
        return known
    state, index, key = _state(path), cache_dir() / _INDEX, str(path.resolve())
    with path.open("rb") as file:
        value = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    with contextlib.suppress(OSError), locked(index):  # without it the next start takes a second a gigabyte longer
        draft = index.with_suffix(".new")
        others = {path: known for path, known in _read_index(index).items() if os.path.exists(path)}
        draft.write_text(json.dumps({**others, key: [*state, value]}), encoding="utf-8")
        draft.replace(index)
    return value


def known_digest(path: Path) -> str | None:
    """The remembered digest of a file; None when it would have to be read.

    Raises:
        OSError: there is no such file.
    """
    known = _read_index(cache_dir() / _INDEX).get(str(path.resolve()))
    return str(known[-1]) if isinstance(known, list) and known[:-1] == _state(path) else None


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_index(index: Path) -> dict[str, object]:
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
