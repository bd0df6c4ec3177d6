"""What models carry from token to token in place of keys and values: recurrent states and the ends of convolutions.

    slot     states of all layers of one request, or of one snapshot: row `slot` of every tensor
    storage  one tensor per state [slots, ...]; slot 0 is the null slot, which nobody reads

A mixer works on the rows of one call (`StateRows`), as it would on the cache of `generate`: it asks for a state, gives
a new one back, or writes into what it was given. A request that begins has no state, whatever is in its slot: some
mixers begin with something else than zeros.

Legend: B rows of a call, k width of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aiocb.errors import ConfigError
from aiocb.step import StateCopy

__all__ = ["StateKey", "StateRows", "StateSpec", "StateStorage", "convolved"]


class StateKey(NamedTuple):
    """Names one state of a model.

    Attributes:
        kind: "conv" or "recurrent", or what a model of its own calls it.
        layer: index that the layer gives to the cache.
        number: of several states of one layer.
    """

    kind: str
    layer: int
    number: int = 0


class StateSpec(NamedTuple):
    """Shape of one request's part of a state, and its type, learned in the dry run."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in one slot."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateStorage:
    """The slots of all states.

    Raises:
        ConfigError: the memory cannot be allocated.
    """

    def __init__(self, specs: Mapping[StateKey, StateSpec], num_slots: int, device: torch.device) -> None:
        try:
            # Zeroed: what nobody wrote must be finite.
            self.tensors = {key: _zeros(num_slots, spec, key.kind == "conv", device) for key, spec in specs.items()}
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"{num_slots} slots of states do not fit into memory; lower max_state_memory or max_requests_per_batch"
            ) from error

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """Copy whole slots, in order."""
        for source, target in copies:
            for tensor in self.tensors.values():
                tensor[target].copy_(tensor[source])

    def close(self) -> None:
        """Free the storage."""
        self.tensors = {}


def _zeros(num_slots: int, spec: StateSpec, is_convolution: bool, device: torch.device) -> Tensor:
    if not is_convolution or len(spec.shape) != 2:
        return torch.zeros(num_slots, *spec.shape, dtype=spec.dtype, device=device)
    # Of a convolution [C, k], the channels lie side by side: it is computed for many of them at once.
    return torch.zeros(num_slots, *reversed(spec.shape), dtype=spec.dtype, device=device).transpose(1, 2)


class StateRows:
    """The states of the requests of one call.

    Args:
        storage: read, and written to.
        slots: of the requests, in the order of the call's rows.
        is_fresh: they have computed nothing yet.
    """

    def __init__(self, storage: StateStorage, slots: Sequence[int], is_fresh: bool) -> None:
        self._tensors = storage.tensors
        self.is_fresh = is_fresh
        self._first, self._count = slots[0], len(slots)
        follow = all(slot == self._first + index for index, slot in enumerate(slots))
        device = next(iter(storage.tensors.values())).device
        # Slots that follow each other are worked on in place; others are gathered and written back.
        self._slots = None if follow else torch.tensor(slots, device=device)
        self._taken: dict[StateKey, Tensor] = {}
        self.initial: Tensor | None = None

    def get(self, key: StateKey) -> Tensor | None:
        """Return a state [B, ...] that may be written to, or None where the requests have none yet."""
        if self.is_fresh:
            return None
        if self._slots is None:
            state = self._tensors[key][self._first : self._first + self._count]
        elif key in self._taken:
            state = self._taken[key]
        else:
            state = self._taken[key] = self._tensors[key].index_select(0, self._slots)
        if key.kind == "recurrent":
            self.initial = state
        return state

    def put(self, key: StateKey, state: Tensor) -> None:
        """Store a state [B, ...]."""
        if self._slots is None:
            own = self._tensors[key][self._first : self._first + self._count]
            if own.data_ptr() != state.data_ptr():  # else it was changed in place
                own.copy_(state)
        else:
            self._taken.pop(key, None)  # what was given out is out of date
            self._tensors[key].index_copy_(0, self._slots, state.to(self._tensors[key].dtype))

    def convolve(self, key: StateKey, inputs: Tensor) -> Tensor:
        """Store the last k columns of a convolution's inputs [B, C, L]; return these behind the k before them."""
        all_inputs = convolved(self.get(key), inputs, self._tensors[key].shape[-1])
        self.put(key, all_inputs[..., -self._tensors[key].shape[-1] :])
        return all_inputs

    def finish(self) -> None:
        """Write back what was given out, and may have been written to."""
        assert self._slots is not None or not self._taken
        for key, state in self._taken.items():
            self._tensors[key].index_copy_(0, self._slots, state)  # type: ignore[arg-type]
        self._taken.clear()
        self.initial = None


def convolved(before: Tensor | None, inputs: Tensor, width: int) -> Tensor:
    """Put what came before in front of a convolution's inputs; where nothing did, fill them up to its width."""
    if before is not None:
        return torch.cat([before, inputs], dim=-1)
    return F.pad(inputs, (max(width - inputs.shape[-1], 0), 0))
