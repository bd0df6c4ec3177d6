"""The modules below this package: each answers as the module of that name below `transformers` does, ours first.

    aiocb.compat.transformers.generation.utils   is made for `import` by the finder
        .ContinuousMixin    one of `OURS`, whichever module is asked: ours, without importing transformers
        .GenerationMixin    anything else: what transformers.generation.utils has at that moment
        .logging            a module of transformers: the one below this package that stands for it

Nothing is copied, so a mirror never disagrees with what it mirrors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["ADDED", "OURS", "install", "look_up", "names"]

PACKAGE = __name__.rpartition(".")[0]
REFERENCE = "transformers"
OURS = {
    "ContinuousBatchingManager": "manager",
    "ContinuousMixin": "auto",
    "GenerationOutput": "results",
    "RequestStatus": "results",
}
"""Names of the reference that are this package's, with the file here that has them. The auto classes are ours too."""

ADDED = {
    "RequestQueueFull": "results",
    "continuous_batching_context_manager": "entry",
    "destroy_cached_continuous_batching_manager": "entry",
    "enable": "entry",
    "generate_batch": "entry",
    "init_continuous_batching": "entry",
}
"""Names that only this package has."""

_FORWARDED = ("__all__", "__version__")
"""The dunder names that a program asks for. The import system and debuggers ask for others, of every module there is:
nothing is imported for those.
"""

_CHEAP = ("", ".continuous_batching", ".continuous_batching.continuous_api", ".continuous_batching.requests")
"""Below `generation`: where our names are at home. They are imported without transformers."""


def install() -> None:
    """Let the modules below this package be found; idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # In front: folders of stubs would be taken for namespace packages.
        sys.meta_path.insert(0, _Finder())


def look_up(reference: str, name: str) -> Any:
    """Return what a module of transformers is to answer for a name.

    Raises:
        AttributeError: it has no such name.
    """
    if name in OURS:
        return getattr(importlib.import_module(f"{PACKAGE}.{OURS[name]}"), name)
    if name.startswith("__") and name not in _FORWARDED:
        raise AttributeError(f"module {PACKAGE + reference.removeprefix(REFERENCE)!r} has no attribute {name!r}")
    module = importlib.import_module(reference)
    if name == "__all__":
        return getattr(module, name, None) or [one for one in dir(module) if not one.startswith("_")]
    value = getattr(module, name)
    if isinstance(value, ModuleType):
        is_theirs = f"{value.__name__}.".startswith(f"{REFERENCE}.")
        return importlib.import_module(PACKAGE + value.__name__.removeprefix(REFERENCE)) if is_theirs else value
    if isinstance(value, type) and value.__module__ == f"{REFERENCE}.models.auto.modeling_auto":
        from aiocb.compat.transformers.auto import served

        return served(value)
    return value


def names(reference: str) -> list[str]:
    """What `dir` lists for a module of transformers."""
    return sorted(dir(importlib.import_module(reference)))


class _Finder(MetaPathFinder, Loader):
    """Makes the modules; every one is a package, because which ones are is known only to transformers."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        head, _, rest = fullname.partition(f"{PACKAGE}.")
        if head or not rest or Path(__file__).with_name(f"{rest.partition('.')[0]}.py").exists():
            return None
        if not _is_cheap(rest) and not _exists(f"{REFERENCE}.{rest}"):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        rest = module.__name__.removeprefix(f"{PACKAGE}.")
        reference = f"{REFERENCE}.{rest}"
        if not _is_cheap(rest):
            importlib.import_module(reference)
        module.__dict__["__getattr__"] = functools.partial(look_up, reference)
        module.__dict__["__dir__"] = functools.partial(names, reference)


def _is_cheap(name: str) -> bool:
    return name.startswith("generation") and name.removeprefix("generation") in _CHEAP


def _exists(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what should be its package is none
        return False
