"""Which models are on this machine: packages, what was downloaded from the hub, and what was made of them here.

The hub's own cache is read and cleared by the hub's own client. What aiocb keeps of a model (converted weights,
snapshots) is found by the names of its folders, which follow from the model's content or commit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aiocb import files
from aiocb.errors import ConfigError
from aiocb.model.load.choose import model_files, tagged
from aiocb.model.load.gguf import PACKAGES, find_package, kept_name
from aiocb.model.load.problems import explained

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

__all__ = ["Kept", "Shelf", "read_shelf"]

_IN_PROGRESS_S = 120.0


class Kept(NamedTuple):
    """A model on this machine.

    Attributes:
        name: by which it is loaded.
        form: `safetensors`, `GGUF`, `GGUF package`, or `no weights` where a download was not finished.
        num_bytes: of what was downloaded or installed.
        folders: what aiocb has made of it.
        last_used: seconds since the epoch; 0.0 when it was never loaded.
        repository: on the hub; empty of a package.
        files: of the hub's cache.
    """

    name: str
    form: str
    num_bytes: int
    folders: tuple[Path, ...]
    last_used: float
    repository: str = ""
    files: tuple[CachedFileInfo, ...] = ()

    @property
    def num_made_bytes(self) -> int:
        """Of what aiocb has made of it."""
        return sum(path.stat().st_size for folder in self.folders for path in folder.rglob("*") if path.is_file())


class Shelf(NamedTuple):
    """All of them, and the cache of the hub they lie in.

    Attributes:
        models: by name.
        unfinished: parts of downloads that nobody goes on with.
    """

    models: tuple[Kept, ...]
    unfinished: tuple[Path, ...]
    cache: HFCacheInfo | None = None

    def find(self, name: str) -> list[Kept]:
        """The model of that name, or all of a repository.

        Raises:
            ConfigError: there is none.
        """
        found = [kept for kept in self.models if kept.name == name]
        found = found or [kept for kept in self.models if kept.repository == name]
        if not found:
            raise ConfigError(f"{name} is not on this machine; `aiocb list` shows what is")
        return found

    def remove(self, models: Sequence[Kept]) -> None:
        """Remove downloaded files and all that was made of them; of a package only the latter.

        Raises:
            ConfigError: something cannot be removed.
        """
        with explained("remove the model"):
            for folder in (folder for kept in models for folder in kept.folders):
                shutil.rmtree(folder)
                folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
            if self.cache is not None:
                _remove_downloads(self.cache, models, {kept.repository for kept in self.models if kept not in models})

    def remove_unfinished(self) -> None:
        """Remove what killed downloads have left.

        Raises:
            ConfigError: something cannot be removed.
        """
        with explained("remove unfinished downloads"):
            for path in self.unfinished:
                path.unlink(missing_ok=True)


def read_shelf() -> Shelf:
    """Look at what is on this machine; nothing is loaded, and no file is read but small ones.

    Raises:
        ConfigError: the cache of the hub cannot be read.
    """
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    packages = [_package(name, parts) for name in PACKAGES if (parts := find_package(name))]
    try:
        with explained("read the cache of the hub"):
            cache = scan_cache_dir(constants.HF_HUB_CACHE)
            downloads = [kept for repo in cache.repos if repo.repo_type == "model" for kept in _downloads(repo)]
            unfinished = [each.file_path for each in cache.incomplete_files]
            old = [path for path in unfinished if time.time() - path.stat().st_mtime > _IN_PROGRESS_S]
    except CacheNotFound:
        return Shelf(tuple(packages), ())
    return Shelf((*packages, *sorted(downloads, key=lambda kept: kept.name)), tuple(old), cache)


def _package(name: str, parts: Sequence[Path]) -> Kept:
    folders = _made(kept_name(parts))
    return Kept(name, "GGUF package", sum(part.stat().st_size for part in parts), folders, _used(folders))


def _downloads(repo: CachedRepoInfo) -> list[Kept]:
    """The models in what there is of a repository, by revision."""
    return [kept for revision in repo.revisions for kept in _of_revision(repo, revision)]


def _of_revision(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> list[Kept]:
    by_path = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
    refs = sorted(revision.refs)
    suffix = "" if "main" in refs else f"@{refs[0] if refs else revision.commit_hash[:12]}"
    found = [
        (f"{repo.repo_id}:{tag}{suffix}", "GGUF", paths, kept_name([by_path[path].file_path for path in paths]))
        for tag, paths in tagged(by_path)
    ]
    others = tuple(sorted(by_path.keys() - set(model_files(by_path))))
    has_weights = any(path.endswith((".safetensors", ".bin")) for path in others)
    if has_weights or (others and not found):
        form = "safetensors" if has_weights else "no weights"
        found.append((f"{repo.repo_id}{suffix}", form, others, revision.commit_hash))
    return [
        _download(name, form, [by_path[path] for path in paths], _made(stem), repo.repo_id)
        for name, form, paths, stem in found
    ]


def _download(
    name: str, form: str, cached: Sequence[CachedFileInfo], folders: tuple[Path, ...], repository: str
) -> Kept:
    size, read = sum(file.size_on_disk for file in cached), max(file.blob_last_accessed for file in cached)
    return Kept(name, form, size, folders, max(read, _used(folders)), repository, tuple(cached))


def _made(stem: str | None) -> tuple[Path, ...]:
    """Folders of converted weights and of snapshots whose names begin with a digest or a commit."""
    if stem is None:
        return ()
    found = (path for kind in ("gguf", "native") for path in (files.cache_dir() / kind).glob(f"{stem}-*"))
    return tuple(sorted(path for path in found if path.is_dir()))


def _used(folders: Iterable[Path]) -> float:
    return max((path.stat().st_atime for folder in folders for path in folder.iterdir()), default=0.0)


def _remove_downloads(cache: HFCacheInfo, models: Sequence[Kept], remaining: set[str]) -> None:
    """Whole repositories where nothing of them remains, else files."""
    for repository in {kept.repository for kept in models if kept.repository}:
        commits = [
            revision.commit_hash
            for repo in cache.repos
            if repo.repo_id == repository and repo.repo_type == "model"
            for revision in repo.revisions
        ]
        if repository in remaining:
            cache.delete_files(
                *(file for kept in models if kept.repository == repository for file in kept.files)
            ).execute()
        else:
            cache.delete_revisions(*commits).execute()
