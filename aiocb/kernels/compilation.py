"""Compiling the native kernels, in a process of its own: `python compilation.py JOB`. Nothing of aiocb is imported.

The process leaves the one that started it, so that a build which outlives its starter's patience goes on and is there
at the next start. It inherits the lock on its target, which ends with it. It writes the reason of a failure, or null.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Job", "Unit", "processor_features", "stamp", "supported", "unneeded"]

_NEEDS = {
    "avx512bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "bmi2"},
}
_SLOWER_ON = {"avx512bf16": "GenuineIntel"}  # than the next best, see is_worth_it in dispatch.cpp


class Unit(NamedTuple):
    """One object file: a source and its own flags."""

    name: str
    source: str
    flags: tuple[str, ...]


class Job(NamedTuple):
    """What to build, and where to.

    Attributes:
        command: the compiler.
        sources: the folder of the sources.
        common: flags of every unit.
        units: the slowest first, so that the short ones fill the gap at the end of a parallel build.
        every_instruction_set: build all instruction sets, not only the best one of this processor.
        scratch, target: an empty folder to be, and the library; both on one file system.
        limit_s: after which a compiler counts as hung.
    """

    command: list[str]
    sources: str
    common: tuple[str, ...]
    units: tuple[Unit, ...]
    every_instruction_set: bool
    scratch: str
    target: str
    limit_s: float


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


def unneeded(units: tuple[Unit, ...], accepts: Callable[[tuple[str, ...]], bool]) -> set[str]:
    """All instruction sets but the best one that this processor can run, or the portable one, if it runs no other."""
    features = processor_features()
    if features is None:
        return set()
    sets = [unit for unit in units if unit.source == "instruction_set.cpp"]  # best first
    best = next(
        (
            unit.name
            for unit in sets
            if unit.name not in _NEEDS
            or (features >= _NEEDS[unit.name] and _SLOWER_ON.get(unit.name) not in features and accepts(unit.flags))
        ),
        None,
    )
    return {unit.name for unit in sets if unit.name != best}


def supported(
    units: tuple[Unit, ...], accepts: Callable[[tuple[str, ...]], bool], skipped: Collection[str] = ()
) -> tuple[Unit, ...]:
    """Leave out instruction sets that are skipped or that an older compiler does not know, and tell the dispatcher."""
    dropped = {
        unit.name
        for unit in units
        if unit.source == "instruction_set.cpp" and (unit.name in skipped or not accepts(unit.flags))
    }
    missing = tuple(f"-DAIOCB_NO_{name.upper()}" for name in sorted(dropped))
    return tuple(
        unit._replace(flags=unit.flags + missing) if unit.source == "dispatch.cpp" else unit
        for unit in units
        if unit.name not in dropped
    )


def stamp(library: Path) -> str:
    """Size and checksum of a library, as they are written beside it.

    Raises:
        OSError: it cannot be read.
    """
    content = library.read_bytes()
    return f"{len(content)} {zlib.crc32(content):08x}"


def _build(job: Job) -> str | None:
    """Compile, link, put in place; the reason when that fails."""
    deadline = time.monotonic() + job.limit_s

    def run(arguments: list[str]) -> str | None:
        done = subprocess.run(
            [*job.command, *arguments],
            cwd=job.sources,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(1.0, deadline - time.monotonic()),
            check=False,
        )
        lines = done.stderr.strip().splitlines()
        return None if done.returncode == 0 else next((x for x in lines if "error" in x), lines[-1] if lines else "?")

    @functools.cache
    def accepts(flags: tuple[str, ...]) -> bool:
        return run([*flags, "-fsyntax-only", "-x", "c++", os.devnull]) is None

    def compile_unit(pair: tuple[Unit, str]) -> str | None:
        unit, output = pair
        return run([*job.common, *unit.flags, "-c", unit.source, "-o", output])

    try:
        os.mkdir(job.scratch)
        units = supported(job.units, accepts, () if job.every_instruction_set else unneeded(job.units, accepts))
        objects = [os.path.join(job.scratch, f"{unit.name}.o") for unit in units]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as executor:
            failures = [message for message in executor.map(compile_unit, zip(units, objects)) if message]
        library = Path(job.scratch, "library.so")
        failure = failures[0] if failures else run(["-shared", "-pthread", "-o", str(library), *objects])
        if failure is None:
            # Between the two renames the stamp is that of another library: it is then built once more.
            Path(job.scratch, "stamp").write_text(stamp(library), encoding="ascii")
            os.replace(library, job.target)
            os.replace(Path(job.scratch, "stamp"), f"{job.target}.sum")
        return failure
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        shutil.rmtree(job.scratch, ignore_errors=True)


def _main() -> None:
    values: dict[str, Any] = json.loads(sys.argv[1])
    values["units"] = tuple(Unit(name, source, tuple(flags)) for name, source, flags in values["units"])
    if os.fork():
        os._exit(0)  # the starter has nobody to wait for; the output's end tells it that the build is over
    failure = _build(Job(**values))
    with contextlib.suppress(OSError):  # nobody waits any more
        sys.stdout.write(json.dumps(failure))
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
