"""Operations on rows as wide as the vocabulary that give each row the same bits whatever the other rows are.

torch's own are safe where they work on one row at a time and in order: maxima, softmax, cumulative sums, sorts. A
plain sum is not: for a single row it is split among threads, and rounds otherwise than the same row in a batch.

Legend: N rows, V vocabulary, B values per block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["BLOCK", "SMALL_VOCABULARY", "parts", "per_block", "probabilities", "row_argmax", "take"]

BLOCK = 256
SMALL_VOCABULARY = 1024
"""Below this the simple ways are as fast as the ones in blocks."""

_PART_VALUES = 2**18


def row_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each row's maximum and the maximum (NaN when the row holds one), both [N].

    Two levels, because torch vectorises a maximum but not an argmax: six times as fast at a vocabulary of 49152.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size < SMALL_VOCABULARY or not num_rows:
        maxima, token_ids = logits.max(dim=-1)
        return token_ids, maxima
    blocks = per_block(logits, "amax")  # [N, V / B]
    maxima, block = blocks.max(dim=-1)
    start = block * BLOCK
    columns = start[:, None] + torch.arange(BLOCK, device=logits.device)  # [N, B]
    # The last block may be short: repeating its last value does not change the first maximum.
    within = logits.gather(1, columns.clamp_(max=vocab_size - 1))
    return start + within.argmax(dim=-1), maxima


def per_block(rows: Tensor, reduction: str) -> Tensor:
    """Reduce each block of a row, [N, V] to [N, ceil(V / B)]; "amax" or "sum"."""
    num_blocks, rest = divmod(rows.shape[1], BLOCK)
    whole = rows[:, : num_blocks * BLOCK].view(len(rows), num_blocks, BLOCK)
    parts = [whole.amax(dim=2) if reduction == "amax" else whole.sum(dim=2)]
    if rest:
        tail = rows[:, num_blocks * BLOCK :]
        parts.append(tail.amax(dim=1, keepdim=True) if reduction == "amax" else tail.sum(dim=1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def parts(rows: Tensor, logits: Tensor, width: int) -> Iterator[slice | Tensor]:
    """Split row indices of `logits` so that temporaries of `width` values per row stay in the processor's cache.

    They are then served from memory that is already mapped, too: fresh pages cost more than the arithmetic. All rows
    come as slices, which index without a copy.
    """
    size = len(rows)
    if logits.device.type == "cpu":
        size = _PART_VALUES * torch.get_num_threads() // width
    size = max(1, size)  # no rows, or very wide ones
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        yield part if len(rows) == len(logits) else rows[part]


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows of a tensor, without a copy when it is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def probabilities(logits: Tensor, maxima: Tensor, temperature: Tensor) -> Tensor:
    """Return softmax(logits / temperature) without overflow for any temperature > 0, [N, V] float32."""
    # Shifted first: a tiny temperature then only pushes the others to -inf. The clamp keeps 0 / 0 and inf / inf out.
    divisor = temperature.clamp(1e-30, 1e30).to(torch.float32)
    return torch.sub(logits, maxima[:, None]).div_(divisor[:, None]).softmax(dim=-1)
