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
        bodies = [self._lines(column, max(1, width - _FRAME), most) for column in columns]
        height = max(_MIN_BODY, *map(len, bodies)) + 2
        grid = Table.grid()
        for _ in range(self._num_columns):
            grid.add_column(width=width)
        grid.add_row(
            *(
                Panel(
                    Text("\n").join(lines),
                    title=Text(column.label),
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

    def _lines(self, column: Column, width: int, most: int | None) -> list[Text]:
        """The prompt in bold, then the answer; at most `most` lines: the prompt's first, the answer's last."""
        prompt = Text(printable(column.prompt).strip("\n"), style="bold").wrap(self._console, width)
        answer = Text(printable(column.text).strip("\n"))
        if column.error is not None:
            answer.append(f"\n{printable(column.error)}" if answer else printable(column.error), style="red")
        lines = list(answer.wrap(self._console, width)) if answer else []
        if most is None:
            return [*prompt, *lines]
        head = list(prompt[: max(1, most // 3)])
        rest = most - len(head)
        return [*head, *lines[-rest:]]


def _status(column: Column) -> str:
    state = column.finish_reason or ("failed" if column.error is not None else "")
    return f"{column.num_tokens} tokens{', ' if state else ''}{state}"
