"""What a model takes for its cache: it holds nothing, and hands everything to what answers the pass.

Legend: T packed tokens, K key/value heads, D head dim, B requests of a part, C channels, L tokens of one request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.passes import current
from aiocb.model.eager.states import StateKey

__all__ = ["StepCache"]


class _Unanswered(NotPlainError, AttributeError):
    """Asked of the cache, which has no such thing: `hasattr` says no, and a model that goes on is refused."""


class _NoLayers(list[Any]):
    """Of the cache: there are none to look at, and who wants a certain one is refused."""

    def __getitem__(self, index: Any) -> Any:
        raise NotPlainError("it works on its cache by itself, layer by layer")


def _refuses(reason: str) -> Callable[..., Any]:
    """Make a method of the cache that ends the dry run."""

    def method(self: StepCache, *_: Any, **__: Any) -> Any:
        raise NotPlainError(reason)

    return method


class StepCache(Cache):
    """What the model takes for its cache: hands everything to the active handler and holds nothing itself."""

    update_indexer = _refuses("it selects keys with an indexer")

    def __init__(self) -> None:
        super().__init__(layers=_NoLayers())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Unanswered(f"it works on its cache by itself ({name})")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Hand new keys and values [1, K, T, D] to the active handler."""
        return current().handler.update(key_states, value_states, layer_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution [B, C, k], None at the beginning."""
        return current().handler.get_state(StateKey("conv", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take new inputs of a convolution [B, C, L]; return them behind the last ones."""
        return current().handler.convolve(StateKey("conv", layer_idx, state_idx), conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a state [B, ...], None at the beginning."""
        return current().handler.get_state(StateKey("recurrent", layer_idx, state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take a new state [B, ...]."""
        current().handler.put_state(StateKey("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: nothing is kept that would take tokens back."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return 0, as positions are passed explicitly, unless the model counts positions from it."""
        return current().past

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: no bound of its own."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask over this step's tokens alone."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: positions are passed explicitly."""
        return 0
