"""What answers a model's attention during one forward pass: writing down in the dry run, pages in a step.

Knows torch and the attention backends; that the caller is a transformers model is `adapter`'s business.

Legend: T packed tokens, H query heads, K key/value heads, G = H / K, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from aiocb.attention.base import Attention, AttentionBackend, LayerSpec, StepBatch
from aiocb.attention.paged import additive, causal_mask, explicit_attention
from aiocb.model.kv import PagedCache

__all__ = ["KEPT_KEYS", "AttentionCall", "Handler", "NotPlainError", "PagedHandler", "Recorder"]

_MISSING = object()

_HARMLESS = {
    "cache", "cache_position", "dropout", "is_causal", "layer_idx", "logits_to_keep", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "scaling", "sliding_window", "softcap", "s_aux", "use_cache",
}  # fmt: skip
"""Keywords of an attention call that change nothing here, or are honoured."""


KEPT_KEYS = "keep_window_size"
"""Attribute of modules that add a bias of their own to the scores, and hide all but so many keys (Doge)."""


class NotPlainError(Exception):
    """The model asks something of its cache or its attention that packed execution does not answer."""


class Handler(Protocol):
    """What answers the model during one forward pass."""

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take new keys and values [1, K, T, D]; return what the layer goes on with."""

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Attend: query [1, H, T, D] -> [1, T, H, Dv]."""


class AttentionCall:
    """The parts of an attention call that a `LayerSpec` is made of."""

    __slots__ = ("scaling", "sinks", "softcap", "window")

    def __init__(
        self, module: torch.nn.Module, query: Tensor, scaling: float | None, options: Mapping[str, Any]
    ) -> None:
        # None that is passed means full attention; only where nothing is passed does the module's own value count.
        window = options.get("sliding_window", _MISSING)
        if window is _MISSING:
            window = getattr(module, "sliding_window", None)
        self.window: int | None = int(window) if window else None
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        softcap = options.get("softcap")
        self.softcap: float | None = float(softcap) if softcap else None
        self.sinks: Tensor | None = options.get("s_aux")


class Recorder:
    """Handler of the dry run: one request from position 0, plain attention, everything written down.

    Attributes:
        specs: by layer.
        attending: ids of the modules that have attended, and the layers that they attended to.
        dtype: of keys and values.
        layer: whose keys were attended to last.
        unsure: by layer, the module that does not say that it is causal: its mask has to.
    """

    def __init__(self) -> None:
        self.layer: int | None = None
        self.unsure: dict[int, str] = {}
        self.specs: dict[int, LayerSpec] = {}
        self.attending: set[tuple[int, int]] = set()
        self.dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._owners: dict[tuple[int, int], int] = {}
        self._held: list[Tensor] = []
        self._pending: int | None = None
        self._last: int | None = None
        self._shapes: dict[int, tuple[int, int, int]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Note the shapes and hand back what came."""
        if self._pending is not None:
            raise NotPlainError(f"layer {self._pending} updates the cache but has its own attention code")
        if key.dim() != 4 or key.shape[0] != 1 or value.dim() != 4 or key.shape[2] != value.shape[2]:
            raise NotPlainError(f"layer {layer} caches tensors of shape {tuple(key.shape)} and {tuple(value.shape)}")
        self.dtype = self.dtype or key.dtype
        if key.dtype != self.dtype or value.dtype != self.dtype:
            raise NotPlainError(f"layer {layer} caches {key.dtype} and {value.dtype} where others use {self.dtype}")
        self._device = self._device or key.device
        if key.device != self._device:
            raise NotPlainError(f"layer {layer} is on {key.device}, others on {self._device}; put it on one device")
        if layer in self._shapes:
            raise NotPlainError(f"layer {layer} updates the cache twice in one pass")
        self._shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        if value.shape[1] != key.shape[1]:
            raise NotPlainError(f"layer {layer} has {key.shape[1]} key and {value.shape[1]} value heads")
        self._pending = self._last = layer
        self._owners[id(key), id(value)] = layer
        self._held += (key, value)
        return key, value

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Attend plainly, and write down what the layer asked for."""
        if mask is not None and not hasattr(module, KEPT_KEYS):
            raise NotPlainError(f"{type(module).__name__} brings its own attention mask")
        unknown = [name for name, option in options.items() if name not in _HARMLESS and isinstance(option, Tensor)]
        if unknown:
            raise NotPlainError(f"{type(module).__name__} passes {', '.join(unknown)} to its attention function")
        call = AttentionCall(module, query, scaling, options)
        owner = self._owners.get((id(key), id(value)))
        is_gathered = owner is None or mask is not None
        # Keys that were worked on belong to the layer that updated last (which may attend to them several times).
        layer = owner if owner is not None else self._last
        if layer is None or key.shape[2] != query.shape[2]:
            raise NotPlainError(f"{type(module).__name__} attends to keys that did not come from the cache")
        self._pending = None
        self.layer = layer
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.unsure[layer] = type(module).__name__
        num_kv_heads, key_dim, value_dim = self._shapes[layer]
        spec = LayerSpec(
            layer,
            query.shape[1],
            num_kv_heads,
            key_dim,
            value_dim,
            call.scaling,
            call.window,
            call.softcap,
            call.sinks is not None,
            is_gathered,
        )
        known = self.specs.setdefault(layer, spec)
        if known.window != spec.window:
            raise NotPlainError(f"layer {layer} is attended to with windows {known.window} and {spec.window}")
        if known != spec:
            # Two users of one layer's keys (shared keys) with different settings: each call brings its own.
            self.specs[layer] = known._replace(is_gathered=known.is_gathered or spec.is_gathered)
        self.attending.add((id(module), layer))
        return _plain_attention(call, query, key, value, mask)

    def check_finished(self) -> None:
        """Raise when the last update was never attended to."""
        if self._pending is not None:
            raise NotPlainError(f"layer {self._pending} updates the cache but has its own attention code")
        if not self.specs:
            raise NotPlainError("no layer uses the cache and the attention interface")


def _plain_attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attend for one request from position 0: query [1, H, T, D], bias [1, H, T, T] -> [1, T, H, Dv]."""
    num_kv_heads = key.shape[1]
    spec = LayerSpec(0, query.shape[1], num_kv_heads, key.shape[3], value.shape[3], call.scaling, softcap=call.softcap)
    q = query.reshape(1, num_kv_heads, -1, query.shape[2], query.shape[3])  # [1, K, G, T, D]
    mask = additive(causal_mask(0, query.shape[2], 0, key.shape[2], call.window, query.device), query.dtype)
    if bias is not None:
        mask = mask + bias.reshape(*q.shape[:4], -1)
    out = explicit_attention(spec, q, key, value, mask, call.sinks)
    return out.flatten(1, 2).transpose(1, 2).contiguous()


class PagedHandler:
    """Handler of a step: keys go to pages, attention goes to the backend."""

    __slots__ = ("_backend", "_batch", "_cache", "_held", "_metadata", "_owners", "_pending", "_specs")

    def __init__(
        self, backend: AttentionBackend, cache: PagedCache, specs: Mapping[int, LayerSpec], batch: StepBatch
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._specs = specs
        self._batch = batch
        self._metadata: dict[int, Any] = {}
        self._owners: dict[tuple[int, int], int] = {}
        self._held: list[Tensor] = []
        self._pending = -1

    def _group_metadata(self, group: int) -> Any:
        metadata = self._metadata.get(group)
        if metadata is None:
            metadata = self._metadata[group] = self._backend.prepare(self._batch, group)
        return metadata

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] to their pages; return them, or all of them where the layer needs all."""
        group = self._cache.group_of_layer[layer]
        storage = self._cache.storage[layer]
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, K, D]
        metadata = self._group_metadata(group)
        self._backend.write(storage, metadata, k, v)
        self._pending = layer
        if self._specs[layer].is_gathered:
            all_keys, all_values = self._backend.gather(storage, metadata)
            return all_keys.unsqueeze(0), all_values.unsqueeze(0)
        # Keys and values are recognised by identity; held, so that no id is used twice within the step.
        self._owners[id(key), id(value)] = layer
        self._held += (key, value)
        return key, value

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Attend: query [1, H, T, D] -> [1, T, H, Dv]."""
        call = AttentionCall(module, query, scaling, options)
        q = query[0].transpose(0, 1)  # [T, H, D]
        layer = self._owners.get((id(key), id(value)))
        spec = self._specs[self._pending if layer is None else layer]
        if spec.scaling != call.scaling or spec.softcap != call.softcap:
            spec = spec._replace(scaling=call.scaling, softcap=call.softcap)
        metadata = self._group_metadata(self._cache.group_of_layer[spec.layer])
        if layer is None:
            spec = spec._replace(
                num_heads=query.shape[1], num_kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3]
            )
            bias = None if mask is None else mask[0]  # [H, T, sum of L]
            out = self._backend.attend_gathered(Attention(spec, q, key[0], value[0], call.sinks, bias), metadata)
        else:
            k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
            out = self._backend.attend(Attention(spec, q, k, v, call.sinks), self._cache.storage[layer], metadata)
        return out.contiguous().unsqueeze(0)
