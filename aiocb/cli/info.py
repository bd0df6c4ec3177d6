"""`aiocb info`: what was chosen for a model, and why."""

from __future__ import annotations

import sys

from aiocb.cli.terminal import ModelOptions, open_engine

__all__ = ["show_info"]


def show_info(options: ModelOptions) -> None:
    """Load the model and print every choice with its reason: a table on a terminal, tabs elsewhere."""
    with open_engine(options) as (_, engine):
        choices = engine.describe()
    if not sys.stdout.isatty():
        for name, value, reason in choices:
            print(name, value, reason, sep="\t")
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, title=options.model, title_justify="left")
    table.add_column("setting", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold", ratio=2)
    table.add_column("reason", style="dim", overflow="fold", ratio=3)
    for choice in choices:
        table.add_row(*map(Text, choice))
    Console().print(table)
