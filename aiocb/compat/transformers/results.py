"""What a request returns: `GenerationOutput` and `RequestStatus`, with the fields and names of the reference."""

from __future__ import annotations

import enum
import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from aiocb.errors import QueueFull, RequestError

__all__ = ["GenerationOutput", "Prefix", "RequestQueueFull", "RequestStatus", "StoppedError"]

T = TypeVar("T")


class StoppedError(RequestError, RuntimeError):
    """The request was cancelled, or its manager was stopped or destroyed before it was complete."""


class RequestQueueFull(QueueFull, queue.Full):
    """The waiting queue (`max_queue_size`) had no room for as long as `add_request` waits: 10 seconds."""


class RequestStatus(enum.IntEnum):
    """Where a request is. Members are equal to those of transformers' own `RequestStatus`."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


class Prefix(Sequence[T]):
    """The first elements of a list that only grows: a snapshot that costs nothing to take.

    A stream's outputs are cumulative; as lists, n tokens would cost n²/2 copies. Slices are lists.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[T], length: int) -> None:
        self._items = items
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._length)[index]
        if isinstance(places, range):
            return [self._items[place] for place in places]
        return self._items[places]

    def __iter__(self) -> Iterator[T]:
        return itertools.islice(self._items, self._length)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple, Prefix)):
            return len(other) == self._length and all(mine == its for mine, its in zip(self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to lists, so unhashable as they are

    def __add__(self, other: Sequence[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Sequence[T]) -> list[T]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self[:])

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle or a deep copy is a plain list: it must not carry what came later.
        return list, (self[:],)


@dataclass(slots=True)
class GenerationOutput:
    """The result of a request, or with `streaming=True` what it is after one more token.

    Attributes:
        request_id: as given or generated; further samples of a prompt are `"{id}__child#{i}"`.
        prompt_ids: the prompt's token ids.
        generated_tokens: *all* tokens so far, the end-of-sequence token included. In an unfinished output it is a
            `Prefix`, else a list.
        logprobs: log-probabilities of those tokens under the distribution that they were drawn from, with
            `return_logprobs=True`; else empty.
        error: what ended the request, None for a success.
        status: `FINISHED` or `FAILED` in the last output of a request, else `DECODING`.
        created_time: of submission, `time.perf_counter()`.
        lifespan: when the request left the queue and when it ended, -1 where that has not happened. While it streams,
            the first value is the time of its first token; the last output has the exact one.
        timestamps: of every token, with `record_timestamps=True`.
        exception: the error as an exception; not part of the reference.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: Sequence[int] = field(default_factory=list)
    logprobs: Sequence[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: Sequence[float] | None = None
    exception: Exception | None = field(default=None, repr=False, compare=False)

    def is_finished(self) -> bool:
        """True when nothing more comes of this request, successful or not."""
        return self.status >= RequestStatus.FINISHED
