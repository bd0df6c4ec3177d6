"""Sampling: from a step's logits to its tokens and log-probabilities. Torch; used in the worker thread only."""

from __future__ import annotations

from aiocb.sampling.sampler import Sampler
from aiocb.sampling.selection import EMPTY_ROW, INVALID_ROW
from aiocb.sampling.truncation import SelectionParams

__all__ = ["EMPTY_ROW", "INVALID_ROW", "Sampler", "SelectionParams"]
