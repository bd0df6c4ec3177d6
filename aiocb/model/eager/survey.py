"""Which modules attend in a way that cannot be packed, found out in one dry run; and what they cache.

Such a module does with keys, masks or scores what the attention interface does not know: it selects keys with an
indexer, works on its mask, or passes tensors of its own. It is called in parts (see `mixers`), with the keys of its
requests alone, real masks, and the attention function of its own model.

Legend: B requests of a part, L tokens of one request, K key/value heads, D head dim.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from aiocb.attention.base import LayerSpec
from aiocb.attention.paged import additive
from aiocb.model.eager.handlers import HARMLESS, KEPT_KEYS, AttentionCall, Handler, Recorder
from aiocb.model.eager.masks import MaskFunction, NotPlainError
from aiocb.model.eager.states import StateKey

__all__ = ["INDEX_LAYERS", "Outside", "Surveyor", "attend_as_model", "indexed"]

INDEX_LAYERS = 1 << 16
"""Added to a layer's index: where the keys of its indexer are cached."""


def attend_as_model(call: AttentionCall) -> Tensor:
    """Attend by the function of the module's own model, which knows what the module passes.

    Raises:
        NotPlainError: there is none.
    """
    own = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if own is None:
        raise NotPlainError(f"{type(call.module).__name__} calls the attention interface, and has no function for it")
    attended: Tensor = own(
        call.module, call.query, call.key, call.value, call.mask, scaling=call.scaling, **call.options
    )[0]
    return attended


def indexed(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys of an indexer [B, L, D] as keys and values of one head: the halves of each, bit for bit in another type."""
    states = states if states.dtype == dtype else states.contiguous().view(dtype)
    half = states.shape[-1] // 2
    return states[:, None, :, :half], states[:, None, :, half:]


class Outside(Handler):
    """Answers a module that attends across layers, and caches nothing."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend as the model does."""
        return attend_as_model(call)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Refuse, as everything else."""
        raise NotPlainError("it caches keys where it did not in the dry run")

    def get_state(self, key: StateKey) -> None:
        """Refuse."""
        raise NotPlainError("it asks for a state where it did not in the dry run")

    def put_state(self, key: StateKey, state: Tensor) -> None:
        """Refuse."""
        self.get_state(key)

    def convolve(self, key: StateKey, inputs: Tensor, width: int | None) -> Tensor:
        """Refuse."""
        raise NotPlainError("it asks for a state where it did not in the dry run")


class Surveyor(Handler):
    """Answers as the cache of one request that begins, whatever is asked, and writes down who asks for what.

    Args:
        recorder: what is cached and kept is noted there.

    Attributes:
        reasons: by the module that must be called in parts, why.
        alone: those among them that work with the positions of a single request.
        outside: modules that attend to what they have not cached: across layers.
        has_own_code: somebody attends without calling the interface: there, nothing can be known of masks and tokens.
    """

    def __init__(self, recorder: Recorder, layers: set[nn.Module]) -> None:
        super().__init__()
        self._recorder = recorder
        self._layers = layers
        self._masks: dict[int, Tensor] = {}
        self._unattended: dict[nn.Module, int] = {}
        self.reasons: dict[nn.Module, str] = {}
        self.alone: set[nn.Module] = set()
        self.outside: set[nn.Module] = set()
        self.has_own_code = False

    @property
    def stack(self) -> list[nn.Module]:
        """Modules that take the cache and are being called."""
        return self._recorder.stack

    def _mixer(self) -> nn.Module | None:
        """The topmost module below a layer."""
        below = [index for index, module in enumerate(self.stack) if module in self._layers]
        return self.stack[below[-1] + 1] if below and below[-1] + 1 < len(self.stack) else None

    def _must_split(self, why: str) -> None:
        mixer = self._mixer()
        if mixer is not None:
            self.reasons.setdefault(mixer, why)

    def make_mask(self, mask_function: MaskFunction, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Make a causal mask as models write it out: [1, 1, num_queries, num_keys]."""
        visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device).tril()
        mask = additive(visible, torch.get_default_dtype())
        self._masks[mask.untyped_storage().data_ptr()] = mask
        return mask

    def made(self, mask: Any) -> bool:
        """True for a mask of `make_mask`."""
        return isinstance(mask, Tensor) and mask.untyped_storage().data_ptr() in self._masks

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Note what is cached."""
        recorder = self._recorder
        heads, size = key.shape[1], (key.shape[-1], value.shape[-1])
        recorder.specs[layer] = LayerSpec(layer, heads, heads, *size, scaling=1.0, is_gathered=True)
        recorder.updates[layer] = key, value
        recorder.attentive.update(self.stack)
        mixer = self._mixer()
        if mixer is not None and layer < INDEX_LAYERS:
            self._unattended[mixer] = self._unattended.get(mixer, 0) + 1
        return key, value

    def update_indexer(self, states: Tensor, layer: int) -> Tensor:
        """Note an indexer's keys [B, L, D]."""
        self._must_split("selects keys with an indexer")
        self.update(*indexed(states, self._recorder.dtype or states.dtype), INDEX_LAYERS + layer)
        return states

    def attend(self, call: AttentionCall) -> Tensor:
        """Note what the interface would not know; what comes of it is nothing."""
        mixer = self._mixer()
        nothing = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1]).transpose(1, 2).contiguous()
        if mixer is None:
            self.outside.add(call.module)
            return nothing
        self._unattended[mixer] = 0
        unknown = [key for key, option in call.options.items() if key not in HARMLESS and isinstance(option, Tensor)]
        if unknown:
            self._must_split(f"passes {', '.join(unknown)} to its attention function")
        if isinstance(call.mask, Tensor) and not self.made(call.mask) and not hasattr(call.module, KEPT_KEYS):
            self._must_split("brings its own attention mask")
        return nothing

    def key_sizes(self, num_queries: int) -> tuple[int, int]:
        """Note who works with positions of its own."""
        mixer = self._mixer()
        if mixer is not None:
            self.alone.add(mixer)
        return num_queries, 0

    def get_state(self, key: StateKey) -> None:
        """Return nothing: the request begins."""
        self._recorder.get_state(key)

    def put_state(self, key: StateKey, state: Tensor) -> None:
        """Note what the state is."""
        self._recorder.put_state(key, state)

    def convolve(self, key: StateKey, inputs: Tensor, width: int | None) -> Tensor:
        """Go on as at the beginning of a request."""
        return self._recorder.convolve(key, inputs, width)

    def finish(self) -> None:
        """Note who keeps a state and attends, and whether somebody has cached keys and not called the interface."""
        for module in set(self._recorder.owners) & self._recorder.attentive:
            self.reasons.setdefault(module, "keeps a state and attends")
        self.has_own_code = any(self._unattended.values())
