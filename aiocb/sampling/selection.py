"""From processed logits to token ids: argmax, and inverse-CDF sampling with one uniform number per row.

Legend: N rows, V vocabulary, C candidates, B values per block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aiocb.sampling.rows import BLOCK, SMALL_VOCABULARY, parts, per_block, probabilities, row_argmax, take
from aiocb.sampling.truncation import Kept, SelectionParams, iterate_kept

__all__ = ["EMPTY_ROW", "INVALID_ROW", "draw", "draw_whole", "select"]

INVALID_ROW = -1
"""Returned in place of a token id: the row holds NaN."""
EMPTY_ROW = -2
"""Returned in place of a token id: every token of the row is banned."""

_HIGHEST = torch.finfo(torch.float32).max


def select(logits: Tensor, params: SelectionParams, uniforms: Tensor | None) -> Tensor:
    """Choose one token id for each row.

    Args:
        logits: processed, not yet divided by the temperature, [N, V] float32 (any float when all rows are greedy).
            Not changed.
        params: aligned with the rows.
        uniforms: one number in [0, 1) for each row, [N] float64; None when all rows are greedy.

    Returns:
        Token ids, [N] int64; `INVALID_ROW` or `EMPTY_ROW` where there is none.
    """
    token_ids, maxima = row_argmax(logits)
    if uniforms is not None and params.has_samples:
        if torch.isposinf(maxima).any():
            # A processor may force a token with +inf; inf - inf would be NaN.
            logits, maxima = logits.clamp(max=_HIGHEST), maxima.clamp(max=_HIGHEST)
        rows = params.whole_rows
        if len(rows):
            for part in parts(rows, logits, logits.shape[1]):
                drawn = draw_whole(logits[part], maxima[part], params.temperature[part], uniforms[part])
                token_ids[part] = drawn
        rows = params.truncated_rows
        if len(rows):
            # A row of NaN or -inf cannot be sorted: it goes along as zeros, and its result is overwritten below.
            for indices, kept in iterate_kept(take(logits, rows), maxima[rows], params.subset(rows)):
                chosen = rows[indices]
                token_ids[chosen] = draw(kept, uniforms[chosen])
    bad = ~(maxima > -math.inf)
    if bad.any():
        token_ids = torch.where(bad, torch.where(maxima.isnan(), INVALID_ROW, EMPTY_ROW), token_ids)
    return token_ids


def draw_whole(logits: Tensor, maxima: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """Sample from the whole vocabulary, in the order of the token ids: first a block, then a token in it."""
    weights = probabilities(logits, maxima, temperature)  # [N, V]
    vocab_size = weights.shape[1]
    if vocab_size < SMALL_VOCABULARY:
        return _invert(weights.cumsum(dim=1, dtype=torch.float64), uniforms).clamp_(max=vocab_size - 1)
    sums = per_block(weights, "sum").to(torch.float64)  # [N, V / B]
    cumulative = sums.cumsum(dim=1)
    block = _invert(cumulative, uniforms).clamp_(max=sums.shape[1] - 1)[:, None]
    mass = sums.gather(1, block)
    rest = uniforms[:, None] * cumulative[:, -1:] - (cumulative.gather(1, block) - mass)
    columns = block * BLOCK + torch.arange(BLOCK, device=logits.device)  # [N, B]
    within = weights.gather(1, columns.clamp(max=vocab_size - 1)).to(torch.float64)
    within = within.masked_fill_(columns >= vocab_size, 0.0).cumsum(dim=1)
    # A share of the block, because the sum in float32 and the sum in float64 differ in the last bits.
    share = (rest / mass).clamp_(0.0, 1.0)
    return block[:, 0] * BLOCK + _invert(within, share[:, 0]).clamp_(max=BLOCK - 1)


def draw(kept: Kept, uniforms: Tensor) -> Tensor:
    """Sample from the kept tokens, in the order of their weight."""
    index = _invert(kept.weights.cumsum(dim=1), uniforms).clamp_(max=kept.ids.shape[1] - 1)
    return kept.ids.gather(1, index[:, None])[:, 0]


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Index of the first element whose cumulative weight passes u * total; its own weight is never 0. [N, C] -> [N]."""
    totals = cumulative[:, -1]
    # Each stays under its total, so that nothing runs off the end.
    limits = torch.minimum(uniforms * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return (cumulative <= limits[:, None]).sum(dim=1)
