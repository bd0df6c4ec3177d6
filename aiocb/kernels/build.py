"""Compile the native kernels with the system's compiler, once per user.

The library is cached under a key of everything that shapes it (sources, flags, compiler, processor), built under a lock
so that two processes do not build at once, and put in place with an atomic rename. Nothing here raises into an engine:
`find_or_build` returns a path or a `KernelUnavailable` that says why there is none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

__all__ = ["KernelUnavailable", "cache_dir", "find_compiler", "find_or_build"]

logger = logging.getLogger("aiocb.kernels")

_SOURCE_DIR = Path(__file__).parent / "csrc"
_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_ROOMS = ("dispatch", "model", "step", "operators", "bench", "executor", "pool", "memory", "layout")
_BUILD_TIMEOUT_S = 300.0


class KernelUnavailable(NamedTuple):
    """Why there are no native kernels, in one line."""

    reason: str


class _Unit(NamedTuple):
    """One object file: a source and its own flags."""

    name: str
    source: str
    flags: tuple[str, ...]


def _units() -> tuple[_Unit, ...]:
    # The slowest first, so that the short ones fill the gap at the end of a parallel build.
    levels: list[_Unit] = []
    if platform.machine().lower() in ("x86_64", "amd64"):
        levels = [
            _Unit("avx512bf16", "level.cpp", ("-O2", "-DAIOCB_ISA=avx512bf16", *_AVX512_BF16)),
            _Unit("avx512", "level.cpp", ("-O2", "-DAIOCB_ISA=avx512", *_AVX512)),
            _Unit("avx2", "level.cpp", ("-O2", "-DAIOCB_ISA=avx2", *_AVX2)),
        ]
    return (
        *levels,
        _Unit("portable", "level.cpp", ("-O2", "-DAIOCB_ISA=portable")),
        *(_Unit(name, f"{name}.cpp", ("-O2",)) for name in _ROOMS),
    )


_NEEDS = {
    "avx512bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "bmi2"},
}


_SLOWER_ON = {"avx512bf16": "GenuineIntel"}  # than the level below it, see is_worth_it in dispatch.cpp


def _processor_features() -> set[str] | None:
    """What /proc/cpuinfo says of this processor, its vendor among it; None where there is none to ask."""
    features: set[str] = set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(("flags", "vendor_id")):
                    features.update(line.split()[2:])
                elif not line.strip():
                    break  # the first processor only
    except OSError:
        return None
    return features or None


def _unneeded(units: tuple[_Unit, ...], accepts: Callable[[tuple[str, ...]], bool]) -> set[str]:
    """All levels but the best one that this processor can run, or the portable one where it can run no other."""
    features = _processor_features()
    if features is None:
        return set()
    levels = [unit for unit in units if unit.source == "level.cpp"]  # best first
    best = next(
        (
            unit.name
            for unit in levels
            if unit.name not in _NEEDS
            or (features >= _NEEDS[unit.name] and _SLOWER_ON.get(unit.name) not in features and accepts(unit.flags))
        ),
        None,
    )
    return {unit.name for unit in levels if unit.name != best}


def _supported(
    units: tuple[_Unit, ...], accepts: Callable[[tuple[str, ...]], bool], unneeded: Collection[str] = ()
) -> tuple[_Unit, ...]:
    """Leave out levels that are not needed or that an older compiler does not know, and tell the dispatcher."""
    dropped = {
        unit.name for unit in units if unit.source == "level.cpp" and (unit.name in unneeded or not accepts(unit.flags))
    }
    missing = tuple(f"-DAIOCB_NO_{name.upper()}" for name in sorted(dropped))
    return tuple(
        unit._replace(flags=unit.flags + missing) if unit.source == "dispatch.cpp" else unit
        for unit in units
        if unit.name not in dropped
    )


def cache_dir() -> Path:
    """Return the per-user directory of built libraries: `$AIOCB_CACHE`, else `$XDG_CACHE_HOME` or `~/.cache`."""
    explicit = os.environ.get("AIOCB_CACHE")
    if explicit:
        return Path(explicit) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "aiocb" / "kernels"


def find_compiler() -> tuple[list[str], str] | KernelUnavailable:
    """Return the first compiler that runs of `$CXX`, `c++`, `g++`, `clang++`, with its version line."""
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        command = shlex.split(candidate) if candidate else []
        if not command or shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout:
            return command, done.stdout.splitlines()[0]
    return KernelUnavailable("no C++ compiler found (set CXX, or install g++ or clang++)")


def _key(version: str, every_level: bool) -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCE_DIR.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    features = None if every_level else sorted(_processor_features() or ())
    digest.update(repr((_COMMON, _units(), version, platform.system(), platform.machine(), features)).encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; where the system has none, the atomic rename alone has to do."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released with the descriptor, also when the process dies
        yield


def _compile(command: list[str], target: Path, every_level: bool) -> KernelUnavailable | None:
    deadline = time.monotonic() + _BUILD_TIMEOUT_S

    def run(arguments: list[str]) -> str | None:
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=_SOURCE_DIR,
                capture_output=True,
                text=True,
                timeout=max(1.0, deadline - time.monotonic()),
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        lines = done.stderr.strip().splitlines()
        return None if done.returncode == 0 else next((x for x in lines if "error" in x), lines[-1] if lines else "?")

    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:

        @functools.cache
        def accepts(flags: tuple[str, ...]) -> bool:
            return run([*flags, "-fsyntax-only", "-x", "c++", os.devnull]) is None

        units = _units()
        units = _supported(units, accepts, () if every_level else _unneeded(units, accepts))
        objects = [os.path.join(scratch, f"{unit.name}.o") for unit in units]

        def compile_unit(pair: tuple[_Unit, str]) -> str | None:
            unit, output = pair
            return run([*_COMMON, *unit.flags, "-c", unit.source, "-o", output])

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as executor:
            failures = [message for message in executor.map(compile_unit, zip(units, objects)) if message]
        if not failures:
            library = os.path.join(scratch, "library.so")
            message = run(["-shared", "-pthread", "-o", library, *objects])
            if message is None:
                os.replace(library, target)
                return None
            failures = [message]
    return KernelUnavailable(f"building the native kernels failed: {failures[0]}")


def find_or_build(*, force: bool = False, every_level: bool = False) -> Path | KernelUnavailable:
    """Return the library for this machine, building it when it is not in the cache.

    A build takes some seconds, prints one line before and one after to stderr, and blocks a second process that wants
    the same library until it is there.

    Args:
        force: build again even when a library is cached.
        every_level: build all instruction-set levels, for images that run elsewhere (and for tests); else the best
            one of this processor. A library with every level is taken wherever it is cached.
    """
    if sys.platform == "win32":
        return KernelUnavailable("native kernels are not supported on Windows")
    found = find_compiler()
    try:
        directory = cache_dir()
        if isinstance(found, KernelUnavailable):
            return found
        command, version = found
        complete = directory / f"aiocb-{_key(version, True)}.so"
        target = complete if every_level else directory / f"aiocb-{_key(version, False)}.so"
        for cached in (complete, target):
            if cached.exists() and not force:
                return cached
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{target.stem}.lock"):
            if target.exists() and not force:
                return target
            started = time.monotonic()
            _announce(f"building native kernels with {version} (once)")
            failure = _compile(command, target, every_level)
            if failure is not None:
                return failure
            _announce(f"native kernels built in {time.monotonic() - started:.1f} s: {target}")
            return target
    except OSError as error:
        return KernelUnavailable(f"the kernel cache cannot be used: {error}")


def _announce(message: str) -> None:
    # Ten silent seconds look like a hang, and most programs do not show INFO records.
    sys.stderr.write(f"aiocb: {message}\n")
    sys.stderr.flush()
    logger.info("%s", message)
