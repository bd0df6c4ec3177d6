"""The live view of `aiocb run`: one panel per prompt, side by side, drawn with rich."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aiocb.cli.terminal import printable

if TYPE_CHECKING:
    from aiocb.cli.run import Column

__all__ = ["Columns"]

_MIN_WIDTH = 32
_FRAME = 4  # border and padding, left and right together
_MIN_BODY = 3


class Columns:
    """Draws columns: while they run, the last lines that fit the screen; afterwards everything."""

    def __init__(self, columns: list[Column], console: Console | None = None) -> None:
        self._columns = columns
        self._console = console or Console(highlight=False)

    def live(self) -> Live:
        """The area of the screen that is drawn over and over; it is wiped at the end."""
        return Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def render(self) -> RenderableType:
        """The columns as they are now, cut to the height of the screen."""
        rows = list(self._rows())
        most = max(_MIN_BODY, (self._console.height - 1) // len(rows) - 2)
        return Group(*(self._row(row, most) for row in rows))

    def print_all(self) -> None:
        """Print the columns once more, whole."""
        for row in self._rows():
            self._console.print(self._row(row, None))

    @property
    def _num_columns(self) -> int:
        return max(1, min(len(self._columns), self._console.width // _MIN_WIDTH))

    def _rows(self) -> Iterator[list[Column]]:
        for start in range(0, len(self._columns), self._num_columns):
            yield self._columns[start : start + self._num_columns]

    def _row(self, columns: list[Column], most: int | None) -> RenderableType:
        width = self._console.width // self._num_columns
        bodies = [self._lines(column, width - _FRAME) for column in columns]
        if most is not None:
            bodies = [lines[-most:] for lines in bodies]
        height = max(_MIN_BODY, *map(len, bodies)) + 2
        grid = Table.grid()
        for _ in range(self._num_columns):
            grid.add_column(width=width)
        grid.add_row(
            *(
                Panel(
                    Text("\n").join(lines),
                    title=Text(printable(column.title).replace("\n", " "), overflow="ellipsis", no_wrap=True),
                    title_align="left",
                    subtitle=Text(_status(column)),
                    subtitle_align="right",
                    border_style="red" if column.error is not None else "green" if column.done.is_set() else "blue",
                    height=height,
                )
                for column, lines in zip(columns, bodies, strict=True)
            )
        )
        return grid

    def _lines(self, column: Column, width: int) -> list[Text]:
        text = Text(printable(column.text).strip("\n"))
        if column.error is not None:
            text.append(f"\n{printable(column.error)}" if text else printable(column.error), style="red")
        return list(text.wrap(self._console, max(width, 1)))


def _status(column: Column) -> str:
    state = column.finish_reason or ("failed" if column.error is not None else "")
    return f"{column.num_tokens} tokens{', ' if state else ''}{state}"
