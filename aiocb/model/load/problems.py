"""Errors while loading, said so that one knows what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from aiocb.errors import ConfigError

__all__ = ["explained", "reason"]

_MACHINE = {
    errno.ENOSPC: "the disk is full: make room, or take another disk",
    errno.EDQUOT: "the quota of the disk is used up: make room, or take another disk",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "there is no permission to do so",
    errno.EMFILE: "too many files are open: close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open in the whole system",
    errno.ENOMEM: "there is not enough memory: close other programs, or take a smaller model or dtype",
}
_TEXTS = {
    "allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "No space left": errno.ENOSPC,
}  # of torch's and safetensors' own classes
_UNREACHABLE = "it is not on this machine and the hub cannot be reached: go online, or give a local folder"
_HUB = {
    "GatedRepoError": "it is gated: accept its terms on its page of the hub, then log in or pass token=",
    "RepositoryNotFoundError": "the hub has no model of that name, or it is private: check the name, or pass token=",
    "RevisionNotFoundError": "it has no such revision",
    "LocalEntryNotFoundError": _UNREACHABLE,
    "OfflineModeIsEnabled": _UNREACHABLE,
    "ConnectionError": _UNREACHABLE,
    "HTTPError": _UNREACHABLE,
}


@contextlib.contextmanager
def explained(task: str) -> Iterator[None]:
    """Turn what the machine lacks (memory, disk, files) into a ConfigError that begins "cannot {task}".

    Raises:
        ConfigError: the block ran out of something, or met a file that cannot be read or written.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (MemoryError, OSError)) or any(text in str(error) for text in _TEXTS):
            raise ConfigError(f"cannot {task}: {reason(error)}") from error
        raise


def reason(error: BaseException) -> str:
    """What went wrong, in one line, and what to do where that is known; the hub's reasons are down the chain."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    cause: BaseException | None = error
    while cause is not None:
        kinds = [kind.__name__ for kind in type(cause).__mro__]
        number = errno.ENOMEM if isinstance(cause, MemoryError) else getattr(cause, "errno", None)
        number = next((number for sign, number in _TEXTS.items() if sign in str(cause)), number)
        known = next((_HUB[kind] for kind in kinds if kind in _HUB), None) or _MACHINE.get(number or 0)
        if known is not None:
            return f"{known} ({text})"
        cause = cause.__cause__ or cause.__context__
    return text
