"""Stop strings, found while the text is still arriving."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

__all__ = ["StopMatcher", "StopStrings"]

_MAX_MOVES = 1024


class StopStrings:
    """A set of stop strings, prepared for `StopMatcher`; one serves all samples of a request, in one thread.

    What a text may still complete is told by its longest end that begins a stop string: the states of the automaton
    of Aho and Corasick (1975). They are worked out when a text first reaches them, from the sorted strings, and not
    ahead: a table of a megabyte of stop strings would take seconds to build, and almost none of it is ever visited.

    Args:
        stops: non-empty strings.

    Attributes:
        first: the characters that stop strings begin with.
    """

    __slots__ = ("_all", "_lengths", "_moves", "_sorted", "first")

    def __init__(self, stops: Iterable[str]) -> None:
        self._all = frozenset(stops)
        self._sorted = sorted(self._all)
        self._lengths = sorted({len(stop) for stop in self._all}, reverse=True)
        self._moves: dict[str, tuple[str, str | None]] = {}
        self.first = frozenset(stop[0] for stop in self._sorted)

    def move(self, text: str) -> tuple[str, str | None]:
        """Look at a text that began as a stop string does, and got one more character.

        Returns:
            Its longest end that begins a longer stop string, and the longest stop string that it ends with.
        """
        known = self._moves.get(text)
        if known is None:
            size = len(text)
            found = next((text[-n:] for n in self._lengths if n <= size and text[-n:] in self._all), None)
            begin = next((i for i in range(size) if text[i] in self.first and self._is_begun(text[i:])), size)
            if len(self._moves) >= _MAX_MOVES:
                self._moves.clear()
            known = self._moves[text] = text[begin:], found
        return known

    def _is_begun(self, text: str) -> bool:
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


class StopMatcher:
    """Finds stop strings in a text that arrives in parts, and cuts the text there.

    The match that is complete first wins; of several that end together, the one that started first. Only a live
    prefix of a stop string is held back; a false start is released at once. Cost per character does not depend on the
    number or length of the stop strings.

    Args:
        stops: the stop strings.
        include: keep the matched string in the text.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: StopStrings | Sequence[str], include: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str | None]:
        """Take further text; return what may be shown now, and the stop string once one is complete.

        What follows a match in the text is dropped; nothing is to be pushed after it.
        """
        return self._walk(text, counts=True)

    def skip(self, text: str) -> str:
        """Take text in which no stop string counts that is complete; return what may be shown now.

        What may be the beginning of one is held all the same: it may become complete with the next `push`.
        """
        return self._walk(text, counts=False)[0]

    def _walk(self, text: str, *, counts: bool) -> tuple[str, str | None]:
        first, move, held = self._stops.first, self._stops.move, self._held
        if not held and first.isdisjoint(text):
            return text, None
        whole = held + text
        for index in range(len(held), len(whole)):
            character = whole[index]
            if not held and character not in first:
                continue
            held, found = move(held + character)
            if found is not None and counts:
                return whole[: index + 1 if self._include else index + 1 - len(found)], found
        self._held = held
        return whole[: len(whole) - len(held)], None

    def flush(self) -> str:
        """Return what is held: the text has ended without completing a stop string."""
        held, self._held = self._held, ""
        return held
