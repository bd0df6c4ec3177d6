"""What a model takes for its cache: it holds nothing, and hands everything to what answers the pass.

Legend: T packed tokens, K key/value heads, D head dim, B requests of a part, C channels, L tokens of one request.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.passes import current
from aiocb.model.eager.states import StateKey

__all__ = ["StepCache", "cache_for"]


class _Unanswered(NotPlainError, AttributeError):
    """Asked of the cache, which has no such thing: `hasattr` says no, and a model that goes on is refused."""


class _Layer:
    """One layer, of which nothing can be had but an indexer's keys (MiniMax M3)."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotPlainError("it works on its cache by itself, layer by layer")

    def update_index(self, states: Tensor) -> Tensor:
        """Take new keys of an indexer [B, 1, L, D]; return all of the requests."""
        return current().handler.update_indexer(states[:, 0], self._index).unsqueeze(1)


class _Layers(list[Any]):
    """Of the cache: there are none to look at, and who wants something of a certain one is refused."""

    def __getitem__(self, index: Any) -> Any:
        return _Layer(index)


class StepCache(Cache):
    """What the model takes for its cache: hands everything to the active handler and holds nothing itself."""

    def __init__(self) -> None:
        Cache.__init__(self, layers=_Layers())

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

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return a state [B, ...] of MiniMax, None at the beginning."""
        return current().handler.get_state(StateKey("linear", layer_idx))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Take a new state [B, ...] of MiniMax."""
        current().handler.put_state(StateKey("linear", layer_idx), linear_cache)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: nothing is kept that would take tokens back."""
        return False

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take new keys of an indexer [B, L, D]; return all of the requests."""
        return current().handler.update_indexer(indexer_key_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return 0, as positions are passed explicitly, unless the model counts positions from it."""
        return current().past

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: no bound of its own."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many keys a mask covers, and the position of the first."""
        return current().handler.key_sizes(query_length)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first query, where it is not passed explicitly."""
        return current().handler.query_offset


def cache_for(model: nn.Module) -> StepCache:
    """Return a cache that passes for the model's own kind, where it has one and insists on it."""
    kinds = {
        kind
        for module in {type(one).__module__ for one in model.modules()} & sys.modules.keys()
        for kind in vars(sys.modules[module]).values()
        if isinstance(kind, type) and issubclass(kind, Cache) and kind.__module__ == module
    }
    made: StepCache = type("StepCache", (StepCache, *kinds), {})() if kinds else StepCache()
    return made
