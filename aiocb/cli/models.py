"""`aiocb pull | list | rm`: models on this machine."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aiocb.cli.terminal import INTERRUPTED, loading
from aiocb.errors import ConfigError

if TYPE_CHECKING:
    from aiocb.model.load.kept import Kept

__all__ = ["list_models", "pull", "remove"]

_COLUMNS = ("name", "format", "size", "made here", "last used")
_UNITS = ("B", "kB", "MB", "GB", "TB")


def pull(name: str) -> int:
    """Download a model and say where it is; Ctrl-C leaves at once, with whole files only.

    Raises:
        ConfigError: it cannot be had.
    """
    from aiocb.model.load.download import locate
    from aiocb.model.load.gguf import find_package

    outcome: list[Any] = []
    with loading(f"Pulling {name}") as progress:

        def work() -> None:
            try:
                outcome.append(locate(name, {}, progress or (lambda stage, share: None)))
            except BaseException as error:
                outcome.append(error)

        # In a thread of its own: the hub's client would not leave before the files under way are whole.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            thread.join()
        except KeyboardInterrupt:
            return INTERRUPTED
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    if not result.choices and not find_package(name) and not Path(name).expanduser().exists():
        raise ConfigError(f"{name} is no name of a model on the hub (owner/repo, owner/repo:Q4_K_M), and no path here")
    for _, value, reason in result.choices:
        print(f"{value} ({reason})", file=sys.stderr)
    print(result.name if result.choices else f"{name} is on this machine already")
    return 0


def list_models() -> None:
    """Print what is on this machine: a table on a terminal, tabs elsewhere.

    Raises:
        ConfigError: the cache of the hub cannot be read.
    """
    from aiocb.model.load.kept import read_shelf

    shelf = read_shelf()
    rows = [_row(kept) for kept in shelf.models]
    if sys.stdout.isatty():
        _print_table(rows)
    else:
        for row in (_COLUMNS, *rows):
            print(*row, sep="\t")
    num_bytes = sum(path.stat().st_size for path in shelf.unfinished)
    if num_bytes:
        print(f"{size(num_bytes)} of unfinished downloads: `aiocb rm --unfinished` removes them", file=sys.stderr)


def remove(names: Sequence[str], *, is_sure: bool, unfinished: bool) -> None:
    """Remove models, what was made of them and, if asked, what killed downloads have left.

    Raises:
        ConfigError: there is no such model, or it cannot be removed.
        typer.BadParameter: nobody is there who could be asked.
    """
    from aiocb.model.load.gguf import PACKAGES
    from aiocb.model.load.kept import read_shelf

    shelf = read_shelf()
    models = [kept for name in names for kept in shelf.find(name)]
    total = 0
    for kept in models:
        gone = kept.num_made_bytes + (kept.num_bytes if kept.repository else 0)
        total += gone
        print(f"{kept.name}\t{size(gone)}", file=sys.stderr)
        if not kept.repository:
            print(f"the package stays: pip uninstall {PACKAGES[kept.name].pip}", file=sys.stderr)
    if unfinished:
        total += sum(path.stat().st_size for path in shelf.unfinished)
    if not is_sure:
        if not sys.stdin.isatty():
            raise typer.BadParameter("nobody can be asked here: say --yes", param_hint="--yes")
        if not _is_confirmed(f"Remove {size(total)}?"):
            return
    shelf.remove(models)
    if unfinished:
        shelf.remove_unfinished()
    print(f"removed {size(total)}")


def _is_confirmed(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C, Ctrl-D
        return False


def size(num_bytes: float) -> str:
    """A number of bytes as people read it."""
    power = 0
    while num_bytes >= 999.5 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.{0 if power == 0 or num_bytes >= 99.95 else 1}f} {_UNITS[power]}"


def _row(kept: Kept) -> tuple[str, ...]:
    made = kept.num_made_bytes
    used = time.strftime("%Y-%m-%d", time.localtime(kept.last_used)) if kept.last_used else "never"
    return kept.name, kept.form, size(kept.num_bytes), size(made) if made else "", used


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE)
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, overflow="fold", justify="right" if index in (2, 3) else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
