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
_BROKEN = "the connection to the hub broke: try again, whole files are kept"
_HUB = {
    "GatedRepoError": "it is gated: accept its terms on its page, then log in (hf auth login) or pass token=",
    "RepositoryNotFoundError": "the hub has no model of that name, or it is private: check the name, or pass token=",
    "RevisionNotFoundError": "it has no such revision",
    "EntryNotFoundError": "it has no such file",
    "HFValidationError": "that is no name on the hub: owner/repo, owner/repo:Q4_K_M",
    "RemoteProtocolError": _BROKEN,
    "ReadError": _BROKEN,
    "ReadTimeout": _BROKEN,
    "LocalEntryNotFoundError": _UNREACHABLE,
    "OfflineModeIsEnabled": "it is not on this machine, and HF_HUB_OFFLINE forbids to ask the hub: unset it",
    "ConnectionError": _UNREACHABLE,
    "HTTPError": _UNREACHABLE,
}
_STATUS = {
    401: "the hub does not accept the token: log in again (hf auth login), or set HF_TOKEN or pass token=",
    403: "the hub gives no access: ask for it on the model's page, then log in (hf auth login) or pass token=",
    429: "the hub has had too many requests from here: wait a few minutes, or log in (hf auth login)",
}
"""Of answers that have no class of their own."""


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
        kind = next((kind for kind in kinds if kind in _HUB), "")
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        known = _MACHINE.get(number or 0) or _HUB.get(kind)
        if kind == "HTTPError" and status:
            known = _STATUS.get(status, f"the hub answers {status}: try again later")
        if known is not None:
            return f"{known} ({text})"
        cause = cause.__cause__ or cause.__context__
    return text
