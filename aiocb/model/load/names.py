"""What a name of a model on the hub says: `owner/repo`, `owner/repo:Q4_K_M`, `owner/repo@revision`, links. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from aiocb.errors import ConfigError

__all__ = ["HubName", "is_local", "parse_name"]

_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TAG = re.compile(r"([\w.-][\w./ +-]*)?")


class HubName(NamedTuple):
    """A model on the hub, as it was named.

    Attributes:
        repository: `owner/repo`, or the name alone of an old one.
        tag: which of its GGUF files: the quantization in the file's name, or the whole name; None leaves it open.
        revision: a branch, tag or commit; None is the main branch.
        file: one file of the repository, where a link names it.
    """

    repository: str
    tag: str | None = None
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        """As people write it."""
        parts = (self.repository, self.tag and f":{self.tag}", self.revision and f"@{self.revision}")
        return "".join(part for part in parts if part) + (f" ({self.file})" if self.file else "")


def is_local(name: str) -> bool:
    """Whether the name is a path: one that exists, or one that can be nothing else."""
    return name.startswith((".", "/", "~")) or Path(name).exists() or (name.endswith(".gguf") and ":" not in name)


def parse_name(name: str) -> HubName | None:
    """Read a name or a link; None when it can be no name on the hub.

    Raises:
        ConfigError: it is a link to the hub, or has a tag or revision, and is not complete.
    """
    text, is_link = name.strip(), False
    for host in _HOSTS:
        for prefix in (f"https://{host}/", f"http://{host}/", f"{host}/"):
            if text.lower().startswith(prefix):
                text, is_link = text[len(prefix) :], True
    if is_link:
        text = unquote(urlsplit(f"//{host}/{text}").path).strip("/")
        owner, _, rest = text.partition("/")
        repository, _, rest = rest.partition("/")
        kind, _, rest = rest.partition("/")
        if kind in ("tree", "blob", "resolve") and rest:
            return _of_page(f"{owner}/{repository}", kind, rest)
        if not repository or kind:
            raise ConfigError(f"{name} is no link to a model: it looks like https://hf.co/owner/repo")
    head, has_tag, tag = text.partition(":")
    head, has_revision, revision = head.partition("@")
    tag, has_another, another = tag.partition("@")
    if not _REPOSITORY.fullmatch(head) or not _TAG.fullmatch(tag):
        return None
    if (has_tag and not tag) or (has_revision and not revision) or (has_another and not another):
        raise ConfigError(f"{name} ends where a tag or a revision should come: owner/repo:Q4_K_M, owner/repo@revision")
    if revision and another:
        raise ConfigError(f"{name} names two revisions: leave one out")
    return HubName(head, tag or None, revision or another or None)


def _of_page(repository: str, kind: str, rest: str) -> HubName:
    """A page of the hub: of a revision, whose name may have slashes only as `refs/pr/1`, or of one file."""
    parts = rest.split("/")
    count = 3 if parts[0] == "refs" else 1
    revision, file = "/".join(parts[:count]), "/".join(parts[count:])
    revised = None if revision == "main" else revision
    return HubName(repository, None, revised, file if kind != "tree" and file else None)
