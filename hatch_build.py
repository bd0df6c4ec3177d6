"""Build hook: with AIOCB_BUILD_KERNELS=1 a wheel carries the native kernels, compiled by $CXX or else c++.

CXX may be a cross compiler: the wheel is then one for its machines. Without the variable the wheel is pure, and the
kernels are compiled on first use. An editable install never carries any: its sources change.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("aiocb") / "kernels"


def platform_tag(machine: str) -> str:
    """The wheel's platform as the build knows it; auditwheel finds out which systems that fits."""
    if sys.platform == "linux":
        return f"linux_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compiled(root: Path, folder: Path, command: list[str]) -> tuple[Path, str]:
    """Compile the library of the tree at `root` into `folder`; returns it and the machine it is for.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    spec = importlib.util.spec_from_file_location("aiocb_compilation", root / KERNELS / "compilation.py")
    assert spec is not None and spec.loader is not None
    compilation: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compilation)
    sources = root / KERNELS / "csrc"
    machine: str = compilation.target_machine(command)
    library = folder / f"{compilation.library_name(sources, machine, None)}.so"
    failure = compilation.compile_library(sources, folder / "scratch", library, "package", command)
    if failure is not None:
        raise RuntimeError(f"the native kernels cannot be compiled with {shlex.join(command)}: {failure}")
    return library, machine


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the library, puts it into the wheel with its checksum, and names the platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is written."""
        if version == "editable" or os.environ.get("AIOCB_BUILD_KERNELS", "0") in ("", "0"):
            return
        self.folder = Path(tempfile.mkdtemp(prefix="aiocb-kernels-"))
        library, machine = compiled(Path(self.root), self.folder, shlex.split(os.environ.get("CXX") or "c++"))
        for path in (library, library.with_name(f"{library.name}.sum")):
            build_data["force_include"][str(path)] = (KERNELS / "lib" / path.name).as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(machine)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After it."""
        folder = getattr(self, "folder", None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
