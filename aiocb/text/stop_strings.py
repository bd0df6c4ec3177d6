"""Worker thread: stop strings, found while the text is still arriving."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds stop strings in a text that arrives in parts, and cuts the text there.

    The match that is complete first wins; of several that end together, the one that started first. Only a live
    prefix of a stop string is held back; a false start is released at once. Cost per character does not depend on the
    number or length of the stop strings (Aho and Corasick, 1975).

    Args:
        stops: non-empty strings.
        include: keep the matched string in the text.
    """

    __slots__ = ("_children", "_depth", "_fail", "_found", "_held", "_include", "_matched", "_may_start", "_state")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._held = ""
        self._matched: str | None = None
        self._state = 0
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            state = 0
            for character in stop:
                following = self._children[state].get(character)
                if following is None:
                    following = self._children[state][character] = len(self._children)
                    self._children.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(None)
                state = following
            if state:
                self._found[state] = stop
        self._fail = [0] * len(self._children)
        queue = list(self._children[0].values())
        for state in queue:  # grows while it is walked: breadth first
            for character, following in self._children[state].items():
                queue.append(following)
                fallback = self._fail[state]
                while fallback and character not in self._children[fallback]:
                    fallback = self._fail[fallback]
                self._fail[following] = self._children[fallback].get(character, 0)
                if self._found[following] is None:
                    self._found[following] = self._found[self._fail[following]]
        starts = "".join(re.escape(character) for character in self._children[0])
        self._may_start = re.compile(f"[{starts}]" if starts else "(?!)").search

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Take further text; return what may be shown now, and the stop string once one is complete.

        Text after a match is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        state = self._state
        begin = 0
        if not state:
            start = self._may_start(text)
            if start is None:
                return text, None
            begin = start.start()
        children, fail, found = self._children, self._fail, self._found
        for index in range(begin, len(text)):
            character = text[index]
            following = children[state].get(character)
            while following is None and state:
                state = fail[state]
                following = children[state].get(character)
            state = following or 0
            stop = found[state]
            if stop is not None:
                self._matched = stop
                whole = self._held + text[: index + 1]
                self._held = ""
                return (whole if self._include else whole[: len(whole) - len(stop)]), stop
        self._state = state
        text = self._held + text
        length = self._depth[state]
        self._held = text[len(text) - length :]
        return text[: len(text) - length], None

    def flush(self) -> str:
        """Return what is held: the text has ended without completing a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
