"""What a growing token sequence forbids or penalises, kept up with the new tokens only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BannedSequences", "NGrams", "TokenCounts"]


class TokenCounts:
    """The distinct tokens of a growing sequence and how often each occurs; O(1) for a new token."""

    __slots__ = ("_counts", "_ids", "_places", "_vocab_size")

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: dict[int, int] = {}
        self._ids: npt.NDArray[np.int64] = np.empty(64, dtype=np.int64)
        self._counts: npt.NDArray[np.float32] = np.empty(64, dtype=np.float32)

    def extend(self, tokens: Iterable[int]) -> None:
        """Count further tokens; ids outside the vocabulary (placeholders of other modalities) are passed over."""
        places = self._places
        for token in tokens:
            place = places.get(token)
            if place is not None:
                self._counts[place] += 1.0
            elif 0 <= token < self._vocab_size:
                place = places[token] = len(places)
                if place == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                    self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
                self._ids[place] = token
                self._counts[place] = 1.0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens in order of appearance, [U]; a view, valid until the next `extend`."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` occurs, [U]; a view, valid until the next `extend`."""
        return self._counts[: len(self._places)]


class NGrams:
    """Which tokens would complete an n-gram that a growing sequence already holds; O(n) for a new token."""

    __slots__ = ("_following", "_history", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._history: list[int] = []
        self._following: dict[tuple[int, ...], set[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in further tokens."""
        history, prefix_size = self._history, self._size - 1
        for token in tokens:
            if len(history) >= prefix_size:
                prefix = tuple(history[len(history) - prefix_size :])
                self._following.setdefault(prefix, set()).add(token)
            history.append(token)

    def banned(self) -> Iterable[int]:
        """The tokens that may not come next."""
        start = len(self._history) - (self._size - 1)
        return self._following.get(tuple(self._history[start:]), ()) if start >= 0 else ()


class BannedSequences:
    """Token sequences that must not be produced, found by what stands before their last token.

    Attributes:
        single_ids: those of one token, [U].
    """

    def __init__(self, sequences: Iterable[Sequence[int]], eos_token_ids: Iterable[int]) -> None:
        # As in the reference, an end-of-sequence id alone is not a bad word: a request could then never end.
        single = {words[0] for words in sequences if len(words) == 1}.difference(eos_token_ids)
        self.single_ids: npt.NDArray[np.int64] = np.fromiter(single, dtype=np.int64, count=len(single))
        self._following: dict[tuple[int, ...], list[int]] = {}
        for words in sequences:
            if len(words) > 1:
                self._following.setdefault(tuple(words[:-1]), []).append(words[-1])
        self._sizes = sorted({len(prefix) for prefix in self._following})

    def banned(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that would complete a sequence after `tokens`."""
        length = len(tokens)
        endings = (tuple(tokens[length - size :]) for size in self._sizes if size <= length)
        return [token for ending in endings for token in self._following.get(ending, ())]
