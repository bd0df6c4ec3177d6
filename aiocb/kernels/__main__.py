"""`python -m aiocb.kernels build | info`: build the native kernels ahead of time (images), or say what there is."""

from __future__ import annotations

import argparse
import sys

from aiocb.kernels import KernelUnavailable, cache_dir, find_compiler, find_or_build, load

_PATIENCE_S = 3600.0  # who builds an image waits for it


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 1 when there are no kernels."""
    parser = argparse.ArgumentParser(prog="python -m aiocb.kernels", description=__doc__)
    parser.add_argument("command", choices=["build", "info"])
    parser.add_argument("--force", action="store_true", help="build again even when a library is cached")
    parser.add_argument("--native", action="store_true", help="build for this processor only (quicker)")
    options = parser.parse_args(arguments)
    if options.command == "build":
        path = find_or_build(force=options.force, every_instruction_set=not options.native, patience_s=_PATIENCE_S)
        print(path.reason if isinstance(path, KernelUnavailable) else path)
        return int(isinstance(path, KernelUnavailable))
    compiler = find_compiler()
    print("compiler:", compiler.reason if isinstance(compiler, KernelUnavailable) else compiler[1])
    print("cache:   ", cache_dir())
    library = load()
    if isinstance(library, KernelUnavailable):
        print("library: ", library.reason)
        return 1
    print("library: ", library.path, f"({library.origin})")
    print("sets:    ", ", ".join(library.instruction_sets()), f"(this processor: {library.instruction_set()})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
