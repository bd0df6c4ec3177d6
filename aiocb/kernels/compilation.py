"""Compiling the native kernels, as `python compilation.py SOURCES SCRATCH TARGET best|all|package COMPILER...`.

SCRATCH is a folder to be, on the file system of TARGET. Nothing of aiocb is imported, so that the build of a wheel can
use this file too. The process leaves the one that
started it, so that a build which outlives its starter's patience goes on and is there at the next start. It inherits
the lock on its target, which ends with it. It writes the reason of a failure, or null.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["chosen_sets", "compile_library", "library_name", "processor_features", "stamp", "target_machine"]

_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w", "-O2")
_ALIGNED = "-falign-functions=64"  # where the short loops lie in their cache lines is worth up to 4 %
_AVX2 = ("avx2", "fma", "bmi2", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_SETS = {
    "avx512bf16": (*_AVX512, "avx512_bf16", "avx512_vnni"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
"""Instruction sets and what each needs of a processor, the best first: they also take the longest to compile."""
_SLOWER_ON = {"avx512bf16": "GenuineIntel"}  # than the next best, see is_worth_it in dispatch.cpp
# A library that travels brings its C++ runtime along: its compiler's is newer than that of the machines it comes to.
# What it does not use of that is left out, and nothing of it is seen by the other libraries of the process.
_PACKAGE_LINK = ("-static-libstdc++", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL", "-s")
_LIMIT_S = 3600.0  # after which a compiler counts as hung


def processor_features() -> set[str] | None:
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


def target_machine(command: list[str]) -> str:
    """The machine that a compiler compiles for, by the name that it has there.

    Raises:
        OSError, subprocess.SubprocessError: it does not say.
    """
    done = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().split("-")[0]


def library_name(sources: Path, machine: str, features: Collection[str] | None) -> str:
    """A library's name without its compiler: of the sources, how they are compiled, and the processor it is for.

    Args:
        sources: their folder.
        machine: what `platform.machine()` says there.
        features: of the processor; None for a library with every instruction set.
    """
    digest = hashlib.sha256()
    for path in (Path(__file__), *(path for path in sorted(sources.iterdir()) if path.suffix in (".h", ".cpp"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((platform.system(), machine, None if features is None else sorted(features))).encode())
    return f"aiocb-{digest.hexdigest()[:16]}"


def _set_names(machine: str) -> tuple[str, ...]:
    return tuple(_SETS) if machine.lower() in ("x86_64", "amd64") else ("portable",)


def _flags(name: str) -> tuple[str, ...]:
    return (_ALIGNED, f"-DAIOCB_ISA={name}", *(f"-m{feature.replace('_', '')}" for feature in _SETS[name]))


def chosen_sets(accepts: Callable[[tuple[str, ...]], bool], machine: str, *, best_only: bool) -> list[str]:
    """The instruction sets to build: all that the compiler knows, or of those the best one for this processor."""
    known = (name for name in _set_names(machine) if accepts(_flags(name)))
    features = processor_features() if best_only else None
    if features is None:
        return list(known)
    usable = (name for name in known if features.issuperset(_SETS[name]) and _SLOWER_ON.get(name) not in features)
    return [next(usable, "portable")]


def _units(sources: Path, machine: str, sets: Collection[str]) -> dict[str, list[str]]:
    """The compiler's arguments for each object file; the dispatcher is told which instruction sets there are not."""
    missing = [f"-DAIOCB_NO_{name.upper()}" for name in _set_names(machine) if name not in sets]
    units = {path.stem: [path.name] for path in sorted(sources.glob("*.cpp"))}
    if "dispatch" in units:
        units["dispatch"] += missing
    source = units.pop("instruction_set", None)
    # The slowest first, so that the short ones fill the gap at the end.
    return {**({name: [*_flags(name), *source] for name in sets} if source else {}), **units}


def stamp(library: Path) -> str:
    """Size and checksum of a library, as they are written beside it.

    Raises:
        OSError: it cannot be read.
    """
    content = library.read_bytes()
    return f"{len(content)} {zlib.crc32(content):08x}"


def compile_library(sources: Path, scratch: Path, target: Path, extent: str, command: list[str]) -> str | None:
    """Compile, link, put in place with its checksum beside it; the reason when that fails.

    Args:
        sources: their folder.
        scratch: a folder to be, on the file system of `target`.
        target: the library.
        extent: "best" instruction set of this processor, "all" of them, or all of them in a "package" for others.
        command: the compiler; one for other machines makes a package.
    """
    deadline = time.monotonic() + _LIMIT_S

    def run(*arguments: str) -> str | None:
        done = subprocess.run(
            [*command, *arguments],
            cwd=sources,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(1.0, deadline - time.monotonic()),
            check=False,
        )
        lines = done.stderr.strip().splitlines()
        return None if done.returncode == 0 else next((x for x in lines if "error" in x), lines[-1] if lines else "?")

    def accepts(flags: tuple[str, ...]) -> bool:
        return run(*flags, "-fsyntax-only", "-x", "c++", os.devnull) is None

    try:
        machine = target_machine(command) if extent == "package" else platform.machine()
        scratch.mkdir()
        units = _units(sources, machine, chosen_sets(accepts, machine, best_only=extent == "best"))
        objects = {name: str(scratch / f"{name}.o") for name in units}
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as executor:
            done = executor.map(lambda name: run(*_COMMON, *units[name], "-c", "-o", objects[name]), units)
            failures = [message for message in done if message]
        library, note = scratch / "library.so", scratch / "stamp"
        link = ("-shared", "-pthread", *(_PACKAGE_LINK if extent == "package" and sys.platform == "linux" else ()))
        failure = failures[0] if failures else run(*link, "-o", str(library), *objects.values())
        if failure is None:
            # Between the two renames the stamp is that of another library: it is then built once more.
            note.write_text(stamp(library), encoding="ascii")
            library.replace(target)
            note.replace(f"{target}.sum")
        return failure
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _main(sources: str, scratch: str, target: str, extent: str, *command: str) -> None:
    if os.fork():
        os._exit(0)  # the starter has nobody to wait for; the output's end tells it that the build is over
    failure = compile_library(Path(sources), Path(scratch), Path(target), extent, list(command))
    with contextlib.suppress(OSError):  # nobody waits any more
        sys.stdout.write(json.dumps(failure))
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
