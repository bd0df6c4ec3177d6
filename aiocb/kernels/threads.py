"""How many threads a step should use on this machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["default_num_threads"]


def default_num_threads() -> int:
    """Return one thread per physical core that this process may use, bounded by its container's CPU quota.

    The second thread of a core shares its arithmetic units and only adds waiting at every barrier.
    """
    try:
        available = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = {_siblings(cpu) for cpu in available}
    return max(1, min(len(cores), math.ceil(_quota())))


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> float:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1e9 if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        return 1e9
