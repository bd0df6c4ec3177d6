"""What answers a model during one forward pass: set for a step or a dry run, and anew for each part of a split mixer.

Worker thread only. A context variable, because a model hands its attention and its cache nothing of ours.

Legend: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from aiocb.model.eager.handlers import Handler

__all__ = ["AdaptedRows", "Part", "Pass", "current", "entered"]


AdaptedRows = Sequence[tuple[str, Tensor]]
"""By the key of an adapter, the packed tokens [M] that go through it, in ascending order."""


class Pass(NamedTuple):
    """What answers the model.

    Attributes:
        handler: of its attention and its states.
        positions: of the packed tokens. [1, T]
        past: what it is told when it asks for the length of its cache.
        parts: in which split mixers are called; None where they are called as a whole.
        single_parts: the same, no two requests in one.
        packed: what answers in mixers that scan all rows at once; None where these are called in parts, too.
        adapted: which of the packed tokens go through an adapter; empty where none do.
    """

    handler: Handler
    positions: Tensor
    past: Any
    parts: Sequence[Part] | None = None
    single_parts: Sequence[Part] | None = None
    packed: Pass | None = None
    adapted: AdaptedRows = ()


class Part(NamedTuple):
    """Packed tokens that a split mixer computes in one call.

    Attributes:
        start, stop: the tokens.
        is_batch: each is a request's only one: the call is on [B, 1, ...]; else they are one request's: [1, L, ...].
        inner: what answers within the call.
    """

    start: int
    stop: int
    is_batch: bool
    inner: Pass


_PASS: ContextVar[Pass] = ContextVar("aiocb_pass")
current = _PASS.get
"""Only a step, or a dry run, has one: a LookupError elsewhere, or the default that is passed."""


@contextmanager
def entered(one: Pass) -> Iterator[None]:
    """Let this answer, until the block ends."""
    token = _PASS.set(one)
    try:
        yield
    finally:
        _PASS.reset(token)
