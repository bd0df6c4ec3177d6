"""What answers a model's attention during one forward pass: writing down in the dry run, pages in a step.

Knows torch and the attention backends; that the caller is a transformers model is `adapter`'s business.

Legend: T packed tokens, H query heads, K key/value heads, G = H / K, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aiocb.attention.base import Alibi, Attention, AttentionBackend, LayerSpec, StepBatch
from aiocb.attention.paged import RowKeys, additive, causal_mask, row_attention
from aiocb.model.eager.masks import MaskFunction, MaskKind, NotPlainError, kind_of
from aiocb.model.eager.states import StateKey, StateSpec, convolved
from aiocb.model.kv import PagedCache

__all__ = ["HARMLESS", "KEPT_KEYS", "AttentionCall", "Handler", "PagedHandler", "Recorder"]

HARMLESS = {
    "cache", "cache_position", "dropout", "is_causal", "layer_idx", "logits_to_keep", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "scaling", "sliding_window", "softcap", "s_aux", "slopes",
    "use_cache",
}  # fmt: skip
"""Keywords of an attention call that change nothing here, or are honoured."""


KEPT_KEYS = "keep_window_size"
"""Attribute of modules that add a bias of their own to the scores, and hide all but so many keys (Doge)."""


class AttentionCall:
    """What an attention module asks for, read from the arguments that it gives to its attention function.

    Attributes:
        module: that asks.
        query: [1, H, T, Dk]
        key, value: [1, K, L, Dk] and [1, K, L, Dv]
        mask: what the module adds to the scores; models whose masks are not built pass None.
        scaling, window, softcap, sinks, alibi, slopes: as in `LayerSpec` and `Attention`.
        options: all keywords.
    """

    __slots__ = (
        "alibi", "key", "mask", "module", "options", "query", "scaling", "sinks", "slopes", "softcap", "value", "window"
    )  # fmt: skip

    def __init__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> None:
        self.module, self.query, self.key, self.value, self.mask = module, query, key, value, attention_mask
        # None that is passed means full attention; only where nothing is passed does the module's own value count.
        window = options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)
        softcap = options.get("softcap")
        self.window: int | None = int(window) if window else None
        self.softcap: float | None = float(softcap) if softcap else None
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        self.sinks: Tensor | None = options.get("s_aux")
        # Only what stands in for a module's own code (see `own_attention`) passes these two.
        self.alibi: Alibi | None = options.get("alibi")
        self.slopes: Tensor | None = options.get("slopes")
        self.options = options


class Handler(ABC):
    """What answers the model during one forward pass.

    Attributes:
        updates: keys and values by layer, in the order in which they came; they are recognised by identity.
    """

    def __init__(self) -> None:
        self.updates: dict[int, tuple[Tensor, Tensor]] = {}

    def owner(self, call: AttentionCall) -> int | None:
        """Return the layer whose keys and values these are, or None when they were worked on since."""
        for layer, (key, value) in reversed(self.updates.items()):
            if key is call.key and value is call.value:
                return layer
        return None

    def made(self, mask: Any) -> bool:
        """True for a mask that was made in this pass, to find out what the model hides."""
        return False

    @abstractmethod
    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take new keys and values [1, K, T, D]; return what the layer goes on with."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend: query [1, H, T, D] -> [1, T, H, Dv]."""

    @abstractmethod
    def get_state(self, key: StateKey) -> Tensor | None:
        """Return a state [B, ...] that may be written to, or None where there is none yet."""

    @abstractmethod
    def put_state(self, key: StateKey, state: Tensor) -> None:
        """Take a new state [B, ...]."""

    @abstractmethod
    def convolve(self, key: StateKey, inputs: Tensor, width: int | None) -> Tensor:
        """Take new inputs of a convolution [B, C, L]; return them behind those that it has to see as well."""

    def make_mask(self, mask_function: MaskFunction, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Make what the model passes for its mask: [1, 1, num_queries, num_keys]."""
        raise NotPlainError("it builds masks where none were asked for")

    def update_indexer(self, states: Tensor, layer: int) -> Tensor:
        """Take new keys of an indexer [B, L, D]; return all of the requests."""
        raise NotPlainError("it selects keys with an indexer")

    def key_sizes(self, num_queries: int) -> tuple[int, int]:
        """How many keys a mask covers, and the position of the first: here, this step's tokens alone."""
        return num_queries, 0

    @property
    def query_offset(self) -> int:
        """The position of the first query: 0, where positions are passed explicitly."""
        return 0

    @property
    def initial_state(self) -> Tensor | None:
        """The recurrent state [B, ...] that the mixer has asked for; None where its requests begin."""
        return None

    def finish_part(self) -> None:  # noqa: B027, most have nothing to do
        """End the call of a mixer for one part of a step."""


class Recorder(Handler):
    """Handler of the dry runs: one request from position 0, plain attention, everything written down.

    Attributes:
        specs: by layer.
        attending: modules that have attended (their ids), the layers that they attended to, and what they are.
        unsure: by layer, the module that does not say that it is causal: its mask has to.
        masks: what they hide, by layer, where masks were asked for and arrived unchanged.
        states: one request's part of each state.
        stack: modules that take the cache and are being called, where somebody watches.
        owners: the states that each of them works on, of the innermost one that was called.
        attentive: those within which keys were cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[int, LayerSpec] = {}
        self.attending: dict[tuple[int, int], str] = {}
        self.unsure: dict[int, str] = {}
        self.masks: dict[int, MaskKind] = {}
        self.states: dict[StateKey, StateSpec] = {}
        self.stack: list[torch.nn.Module] = []
        self.owners: dict[torch.nn.Module, set[StateKey]] = {}
        self.attentive: set[torch.nn.Module] = set()
        self._pending: int | None = None
        self._handed_out: dict[int, tuple[Tensor, MaskFunction]] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """Of keys and values; None where there are none."""
        return next((key.dtype for key, _ in self.updates.values()), None)

    def get_state(self, key: StateKey) -> None:
        """Return nothing: the request begins."""
        if self.stack:
            self.owners.setdefault(self.stack[-1], set()).add(key)

    def put_state(self, key: StateKey, state: Tensor) -> None:
        """Note what the state is."""
        self.get_state(key)
        self.states[key] = StateSpec(tuple(state.shape[1:]), state.dtype)

    def convolve(self, key: StateKey, inputs: Tensor, width: int | None) -> Tensor:
        """Note what the state is, and go on as at the beginning of a request."""
        all_inputs = convolved(None, inputs, width or inputs.shape[-1])
        self.put_state(key, all_inputs[..., all_inputs.shape[-1] - (width or inputs.shape[-1]) :])
        return all_inputs

    def make_mask(self, mask_function: MaskFunction, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Make a causal mask that is recognised when it comes back: [1, 1, num_queries, num_keys]."""
        mask = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device).tril()
        self._handed_out[mask.untyped_storage().data_ptr()] = (mask, mask_function)
        return mask

    def made(self, mask: Any) -> bool:
        """True for a mask of `make_mask`."""
        return isinstance(mask, Tensor) and mask.untyped_storage().data_ptr() in self._handed_out

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Note the keys and values, and hand back what came."""
        self._check_attended()
        self.attentive.update(self.stack)
        if key.dim() != 4 or value.dim() != 4 or len(key) != 1 or key.shape[:3] != value.shape[:3]:
            raise NotPlainError(f"layer {layer} caches tensors of shape {tuple(key.shape)} and {tuple(value.shape)}")
        first = next(iter(self.updates.values()), (key, value))[0]
        if key.dtype != first.dtype or value.dtype != first.dtype:
            raise NotPlainError(f"layer {layer} caches {key.dtype} and {value.dtype} where others use {first.dtype}")
        if key.device != first.device:
            raise NotPlainError(f"layer {layer} is on {key.device}, others on {first.device}; put it on one device")
        if layer in self.updates:
            raise NotPlainError(f"layer {layer} updates the cache twice in one pass")
        self.updates[layer] = key, value
        self._pending = layer
        return key, value

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend plainly, and write down what the layer asked for."""
        module, query, name = call.module, call.query, type(call.module).__name__
        bias = None if self._handed_out else call.mask
        if bias is not None and not hasattr(module, KEPT_KEYS):
            raise NotPlainError(f"{name} brings its own attention mask")
        unknown = [key for key, option in call.options.items() if key not in HARMLESS and isinstance(option, Tensor)]
        if unknown:
            raise NotPlainError(f"{name} passes {', '.join(unknown)} to its attention function")
        owner = self.owner(call)
        # Keys that were worked on belong to the layer that updated last (which may attend to them several times).
        layer = next(reversed(self.updates), None) if owner is None else owner
        if layer is None or call.key.shape[2] != query.shape[2]:
            raise NotPlainError(f"{name} attends to keys that did not come from the cache")
        self._pending = None
        if call.options.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.unsure[layer] = name
        key, value = self.updates[layer]
        spec = LayerSpec(
            layer,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
            is_gathered=owner is None or bias is not None,
            alibi=call.alibi,
        )
        # Two users of one layer's keys (shared keys) may have different settings: each call brings its own.
        known = self.specs.setdefault(layer, spec)
        if known.window != spec.window:
            raise NotPlainError(f"layer {layer} is attended to with windows {known.window} and {spec.window}")
        self.specs[layer] = known._replace(is_gathered=known.is_gathered or spec.is_gathered)
        self.attending[id(module), layer] = name
        if self._handed_out:
            self._note_mask(call, layer)
        length = query.shape[2]
        mask = additive(causal_mask(0, length, 0, length, call.window, query.device), query.dtype)
        attention = Attention(spec, query[0].transpose(0, 1), key, value, call.sinks, slopes=call.slopes)
        keys = RowKeys(call.key[0], call.value[0], 0, None if bias is None else bias[0]).biased(attention, 0, length)
        return row_attention(spec, attention.query, keys, mask, call.sinks).unsqueeze(0).contiguous()

    def _note_mask(self, call: AttentionCall, layer: int) -> None:
        if not isinstance(call.mask, Tensor):
            return
        known = self._handed_out.get(call.mask.untyped_storage().data_ptr())
        if hasattr(call.module, KEPT_KEYS) and len(self._handed_out) == 1:  # put into a bias
            known = next(iter(self._handed_out.values()))
        if known is not None:
            kind = kind_of(known[1])
            if self.masks.setdefault(layer, kind) != kind:
                raise NotPlainError(f"layer {layer} is attended to with different masks")

    def check_finished(self) -> None:
        """Raise when the last update was never attended to."""
        self._check_attended()
        if not self.specs and not self.states:
            raise NotPlainError("no layer uses the cache and the attention interface")

    def _check_attended(self) -> None:
        if self._pending is not None:
            raise NotPlainError(f"layer {self._pending} updates the cache but has its own attention code")


class PagedHandler(Handler):
    """Handler of a step: keys go to pages, attention goes to the backend."""

    def __init__(
        self, backend: AttentionBackend, cache: PagedCache, specs: Mapping[int, LayerSpec], batch: StepBatch
    ) -> None:
        super().__init__()
        self._masks: dict[int, tuple[Tensor, MaskFunction]] = {}
        self._backend = backend
        self._cache = cache
        self._specs = specs
        self._batch = batch
        self._metadata: dict[int, Any] = {}
        self._last = -1

    def _metadata_of(self, layer: int) -> Any:
        group = self._cache.group_of_layer[layer]
        metadata = self._metadata.get(group)
        if metadata is None:
            metadata = self._metadata[group] = self._backend.prepare(self._batch, group)
        return metadata

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] to their pages; return them, or all of them where the layer needs all."""
        storage, metadata = self._cache.storage[layer], self._metadata_of(layer)
        self._backend.write(storage, metadata, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._last = layer
        if self._specs[layer].is_gathered:
            all_keys, all_values = self._backend.gather(storage, metadata)
            return all_keys.unsqueeze(0), all_values.unsqueeze(0)
        self.updates[layer] = key, value
        return key, value

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend: query [1, H, T, D] -> [1, T, H, Dv]."""
        query, key, value = call.query[0].transpose(0, 1), call.key[0], call.value[0]  # [T, H, D], [K, L, D]
        layer = self.owner(call)
        spec = self._specs[self._last if layer is None else layer]
        if spec.scaling != call.scaling or spec.softcap != call.softcap:
            spec = spec._replace(scaling=call.scaling, softcap=call.softcap)
        metadata = self._metadata_of(spec.layer)
        if layer is None:
            spec = spec._replace(
                num_heads=query.shape[1], num_kv_heads=len(key), key_dim=key.shape[2], value_dim=value.shape[2]
            )
            bias = None if call.mask is None or self.made(call.mask) else call.mask[0]  # [H, T, sum of L]
            attention = Attention(spec, query, key, value, call.sinks, bias, call.slopes)
            out = self._backend.attend_gathered(attention, metadata)
        else:
            attention = Attention(
                spec, query, key.transpose(0, 1), value.transpose(0, 1), call.sinks, None, call.slopes
            )
            out = self._backend.attend(attention, self._cache.storage[layer], metadata)
        return out.contiguous().unsqueeze(0)

    def make_mask(self, mask_function: MaskFunction, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Make what stands for a mask, of no size, until a split mixer gets it: then it is that of its requests."""
        mask = torch.zeros(1, dtype=self._batch.dtype, device=device)
        self._masks[mask.untyped_storage().data_ptr()] = mask, mask_function
        return mask.expand(1, 1, num_queries, num_keys)

    def mask_function(self, mask: Tensor) -> MaskFunction:
        """Return the function of a mask that was made here."""
        return self._masks[mask.untyped_storage().data_ptr()][1]

    def made(self, mask: Any) -> bool:
        """True for a mask of `make_mask`."""
        return isinstance(mask, Tensor) and mask.untyped_storage().data_ptr() in self._masks

    def get_state(self, key: StateKey) -> Tensor | None:
        """Refuse: states are there within the parts of a step."""
        raise NotPlainError("states are asked for outside of the modules that were learned")

    def put_state(self, key: StateKey, state: Tensor) -> None:
        """Refuse, likewise."""
        self.get_state(key)

    def convolve(self, key: StateKey, inputs: Tensor, width: int | None) -> Tensor:
        """Refuse, likewise."""
        raise NotPlainError("states are asked for outside of the modules that were learned")
