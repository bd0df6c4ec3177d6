"""Find the native kernels: those that came with the package, else compiled with the system's compiler, once per user.

The wheels for some machines carry a library, which is taken when it is whole and made of the sources that are there. A
compiled one is cached under a key of everything that shapes it (sources, flags, processor, compiler) with a checksum
beside it. It is built under a lock so that two processes do not build at once, and put in place with an atomic rename.
Nothing here raises into an engine: `find_or_build` returns a path or a `KernelUnavailable` that says why there is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from aiocb import files
from aiocb.kernels import compilation
from aiocb.kernels.compilation import library_name, processor_features, stamp

__all__ = [
    "PACKAGED_DIR",
    "KernelUnavailable",
    "announce",
    "cache_dir",
    "find_compiler",
    "find_or_build",
    "find_packaged",
]

logger = logging.getLogger("aiocb.kernels")

_SOURCE_DIR = Path(__file__).parent / "csrc"
PACKAGED_DIR = Path(__file__).parent / "lib"  # where a wheel has it, see hatch_build.py
_PATIENCE_S = 300.0
_ANSWER_S = 10.0  # of a compiler that is asked for its version


class KernelUnavailable(NamedTuple):
    """Why there are no native kernels, in one line."""

    reason: str


def cache_dir() -> Path:
    """Return the folder of built libraries in the user's cache."""
    return files.cache_dir() / "kernels"


def find_compiler() -> tuple[list[str], str] | KernelUnavailable:
    """Return the first compiler that runs of `$CXX`, `c++`, `g++`, `clang++`, with its version line."""
    problems = []
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        command = shlex.split(candidate) if candidate else []
        if not command or shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                [*command, "--version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"; {error}")
            continue
        if done.returncode == 0 and done.stdout:
            return command, done.stdout.splitlines()[0]
    return KernelUnavailable(f"no C++ compiler found (set CXX, or install g++ or clang++{''.join(problems)})")


def _name(every_instruction_set: bool) -> str:
    features = None if every_instruction_set else processor_features() or ()
    return library_name(_SOURCE_DIR, platform.machine(), features)


def find_packaged(folder: Path) -> Path | KernelUnavailable | None:
    """Return the library that came with the package and lies in `folder`; None when none came."""
    try:
        libraries = sorted(folder.glob("aiocb-*.so"))
        if not libraries:
            return None
        library = folder / f"{_name(True)}.so"
        if library not in libraries:
            return KernelUnavailable(f"{libraries[0]} is of another version or for other machines")
        flaw = _flaw(library)
        return library if flaw is None else KernelUnavailable(f"{library} {flaw}")
    except OSError as error:
        return KernelUnavailable(f"{folder} cannot be read: {error}")


def _flaw(library: Path) -> str | None:
    """Why a library cannot be used, None when it can; empty when there is none."""
    try:
        if not library.exists():
            return ""
        return None if library.with_name(f"{library.name}.sum").read_text() == stamp(library) else "is damaged"
    except FileNotFoundError:
        return "has no checksum"


def _is_whole(library: Path) -> bool:
    """Whether a library can be used; a damaged one is removed, and that is said."""
    flaw = _flaw(library)
    if not flaw:
        return flaw is None
    with contextlib.suppress(OSError), files.Lock(library) as is_free:  # else somebody is just building it
        if is_free and _flaw(library):
            library.unlink()
            announce(f"{library} {flaw} and was removed")
    return _flaw(library) is None


def find_or_build(
    *, force: bool = False, every_instruction_set: bool = False, patience_s: float = _PATIENCE_S
) -> Path | KernelUnavailable:
    """Return the library compiled for this machine, building it when there is no undamaged one in the cache.

    A build takes some seconds, prints one line before and one after to stderr, and blocks a second process that wants
    the same library until it is there. One that takes longer than `patience_s` goes on by itself, for the next start.

    Args:
        force: build again even when a library is cached.
        every_instruction_set: build all instruction sets, for images that run elsewhere (and for tests); else the best
            one of this processor. A library with every instruction set is taken wherever it is cached.
        patience_s: how long to wait for a build.
    """
    if sys.platform == "win32":
        return KernelUnavailable("native kernels are not supported on Windows")
    try:
        compiler = find_compiler()
        names = [_name(True)] if every_instruction_set else [_name(True), _name(False)]
        if isinstance(compiler, KernelUnavailable):
            # What another compiler has built before is as good.
            cached = [path for name in names for path in sorted(cache_dir().glob(f"{name}-*.so"))]
        else:
            suffix = hashlib.sha256(compiler[1].encode()).hexdigest()[:8]
            cached = [cache_dir() / f"{name}-{suffix}.so" for name in names]
        for library in () if force else cached:
            if _is_whole(library):
                return library
        if isinstance(compiler, KernelUnavailable):
            return compiler
        return _build(cached[-1], compiler, force, every_instruction_set, patience_s)
    except OSError as error:
        return KernelUnavailable(f"the kernel cache cannot be used (AIOCB_CACHE names another): {error}")


def _build(
    target: Path, compiler: tuple[list[str], str], force: bool, every_instruction_set: bool, patience_s: float
) -> Path | KernelUnavailable:
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = files.Lock(target)
    try:
        while not lock.try_acquire():
            if time.monotonic() > started + patience_s:
                return KernelUnavailable(
                    f"another process has been building the native kernels for more than {patience_s:.0f} s; "
                    "they are there at the next start"
                )
            time.sleep(0.05)
        if not force and _flaw(target) is None:
            return target
        files.sweep(target)
        announce(f"building native kernels with {compiler[1]} (once)")
        extent = "all" if every_instruction_set else "best"
        scratch = target.with_name(f"{files.SCRATCH}{target.name}")
        job = [str(_SOURCE_DIR), str(scratch), str(target), extent, *compiler[0]]
        failure = _run(job, lock, started + patience_s)
        if failure is not None:
            return KernelUnavailable(failure)
        announce(f"native kernels built in {time.monotonic() - started:.1f} s: {target}")
        return target
    finally:
        lock.release()


def _run(job: list[str], lock: files.Lock, deadline: float) -> str | None:
    """Have the job done by a process that outlives this one; the reason when there is no library."""
    # A server that embeds Python names itself there.
    is_python = Path(sys.executable or "").name.startswith(("python", "pypy"))
    python = sys.executable if is_python else os.path.join(sys.exec_prefix, "bin", "python3")
    command = [python, "-I", compilation.__file__, *job]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process only
        pass_fds=() if lock.descriptor is None else (lock.descriptor,),
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            message = "building the native kernels takes long here; it goes on by itself, for the next start"
            announce(message)
            return message
    try:
        failure: str | None = json.loads(output)
    except ValueError:
        failure = "it ended without a word (not enough memory?)"
    return failure and f"building the native kernels failed: {failure}"


def announce(message: str) -> None:
    """Say something about the kernels on stderr, and in the log."""
    # Ten silent seconds look like a hang, and most programs do not show INFO records.
    sys.stderr.write(f"aiocb: {message}\n")
    sys.stderr.flush()
    logger.info("%s", message)
