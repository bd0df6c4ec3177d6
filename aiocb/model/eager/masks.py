"""What a model's own masks hide, per layer: learned at load by asking the mask functions that the model builds.

Attention modules do not always say that they have a window: some models leave it to the mask alone. Steps build no
masks, so this is found out once, with a second attention name that is registered among the mask functions as well, and
that no step ever uses. The mask counts where it and the module disagree: it is what the model's own forward obeys.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["MaskFunction", "MaskKind", "NotPlainError", "kind_of"]

_FAR = 1 << 24

MaskFunction = Callable[..., Any]
"""Of (batch, head, query, key): True where the query sees the key."""


class NotPlainError(Exception):
    """The model asks something of its cache, its masks or its attention that packed execution does not answer."""


class MaskKind(NamedTuple):
    """What a query sees: all before it, the last `window` tokens, or its own chunk of `chunk` tokens up to itself."""

    window: int | None = None
    chunk: int | None = None


def kind_of(mask_function: MaskFunction) -> MaskKind:
    """Find out what a mask function hides by asking about single pairs far from the start.

    Raises:
        NotPlainError: it is neither causal, nor causal with a window or in chunks.
    """

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    query = _FAR + 3
    if not sees(query, query) or sees(query, query + 1):
        raise NotPlainError("its mask is not causal")
    if sees(query, 0):
        return MaskKind()
    oldest = bisect.bisect_left(range(query), True, key=lambda key: sees(query, key))
    window = query - oldest + 1
    if sees(query + 1, oldest + 1) and not sees(query + 1, oldest):
        samples = {oldest, oldest + window // 2, *range(query - 8, query)}
        if all(sees(query, key) == (key >= oldest) for key in samples):
            return MaskKind(window=window)
    elif not sees(query + _FAR, query):
        boundary = query + bisect.bisect_left(
            range(query, query + _FAR), True, key=lambda later: not sees(later, query)
        )
        if boundary - oldest > 0 and oldest % (boundary - oldest) == 0:
            return MaskKind(chunk=boundary - oldest)
    raise NotPlainError("its mask is neither full, nor a window, nor in chunks")
