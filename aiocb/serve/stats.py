"""What `GET /stats` shows: the engine's counters as JSON. `aiocb top` and the chat page poll it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = ["stats_document"]


def stats_document(engine: Engine) -> dict[str, Any]:
    """All fields of `Stats`, histograms as their bounds, cumulative counts, count and sum.

    Raises:
        EngineClosed: the engine has not run yet.
    """
    return dataclasses.asdict(engine.stats())
