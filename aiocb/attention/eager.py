"""Explicit softmax in the model's own dtype, one sequence after the other.

Honours everything: sinks, soft caps, windows, unequal head sizes.
"""

from __future__ import annotations

from aiocb.attention.paged import TorchBackend

__all__ = ["EagerBackend"]


class EagerBackend(TorchBackend):
    """Explicit attention per sequence, the query group folded into rows."""

    name = "eager"
