"""Native CPU kernels: C++17 behind a C interface, built on first use, called with the GIL released.

`load()` returns the library or the reason why there is none; nothing here raises because a compiler is missing.
"""

from __future__ import annotations

from aiocb.kernels.build import KernelUnavailable, cache_dir, find_compiler, find_or_build
from aiocb.kernels.library import KernelError, Library, NativeModel, load

__all__ = [
    "KernelError",
    "KernelUnavailable",
    "Library",
    "NativeModel",
    "cache_dir",
    "find_compiler",
    "find_or_build",
    "load",
]
