"""Word wrap for text that arrives in pieces: a word is written when it is known to be whole, and never cut in two."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len, chop_cells

__all__ = ["WordWrap"]

# Chinese, Japanese and Korean writing has no spaces: a line may end before any of its characters. (Their punctuation
# is left out, so it stays with the character before it.)
_CJK = "\u1100-\u11ff\u2e80-\u3000\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff"
_PIECES = re.compile(rf"\n|[ \t]+|[{_CJK}]|[^ \t\n{_CJK}]+")


class WordWrap:
    """Writes text in lines that are not wider than a terminal.

    Args:
        write: takes text, with its line ends.
        get_width: cells of a line; asked for every word, so that a window may change its size.
    """

    def __init__(self, write: Callable[[str], object], get_width: Callable[[], int]) -> None:
        self._write = write
        self._get_width = get_width
        self._column = 0
        self._spaces = ""
        self._word = ""

    def push(self, text: str) -> None:
        """Write what is whole of the text so far."""
        for piece in _PIECES.findall(text):
            if piece == "\n":
                self.flush()
                self._write("\n")
                self._column = 0
                self._spaces = ""
            elif piece[0] in " \t":
                self.flush()
                self._spaces += piece.replace("\t", "    ")
            else:
                if re.match(rf"[{_CJK}]", piece):
                    self.flush()
                self._word += piece
                if cell_len(self._word) >= self._get_width():  # no line could hold it: do not wait for its end
                    self.flush()

    def flush(self) -> None:
        """Write the last word, which may still have been growing."""
        word, self._word = self._word, ""
        if not word:
            return
        spaces, self._spaces = self._spaces, ""
        width = max(self._get_width(), 2)  # the widest character has two cells
        column = self._column + len(spaces) + cell_len(word)
        if column <= width:
            self._write(spaces + word)
            self._column = column
        else:
            lines = chop_cells(word, width)  # more than one when no line could hold the word
            self._write(("\n" if self._column else "") + "\n".join(lines))
            self._column = cell_len(lines[-1])
