"""LoRA adapters beside the linears of a view: each row of a step has its own. Worker thread only.

A hook behind each adapted module of the view adds `scaling * B (A x)` to the rows that ask for it, so that the base's
weights, packed or not, are left as they are, and a step without such rows adds nothing.

Legend: T packed tokens, M of them of one adapter, R rank, N columns, K depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aiocb.errors import ConfigError
from aiocb.model.eager.handlers import Recorder
from aiocb.model.eager.passes import AdaptedRows, current

if TYPE_CHECKING:
    from aiocb.model.eager.adapter import ModelAdapter
    from aiocb.model.eager.batch import PackedStep
    from aiocb.model.load.peft import LoraWeights
    from aiocb.records import Record

__all__ = ["Adapters", "adapted_rows"]

_PROBE_TOKENS = 5
_MAX_NAMED = 5

Factors = dict[str, tuple[Tensor, Tensor]]
"""Of one module, by the key of an adapter: A [R, K], and B [N, R] with the scaling in it."""


class Adapters:
    """Those that are loaded, by key; as a container, it has their keys.

    Args:
        model: whose view's modules they are added to.
    """

    def __init__(self, model: ModelAdapter) -> None:
        self._weights: dict[str, LoraWeights] = {}
        self._hooks: dict[str, tuple[Any, Factors]] = {}
        self._model = model

    def __contains__(self, key: object) -> bool:
        return key in self._weights

    @property
    def is_any(self) -> bool:
        """There is one."""
        return bool(self._weights)

    def load(self, key: str, weights: LoraWeights) -> None:
        """Take an adapter; nothing where its content is here already.

        Raises:
            ConfigError: a module of it cannot be adapted; nothing has changed.
        """
        if key in self._weights:
            return
        modules = self._modules(weights)
        dtype, device = self._model.view.model.dtype, self._model.device
        for name, module in modules.items():
            if name not in self._hooks:
                factors: Factors = {}
                self._hooks[name] = module.register_forward_hook(_Added(factors)), factors
            down, up = weights.pairs[name]
            self._hooks[name][1][key] = down.to(device, dtype), (up * weights.scaling).to(device, dtype)
        self._weights[key] = weights

    def drop(self, key: str) -> None:
        """Forget an adapter, and the hooks of modules that no other one adapts."""
        del self._weights[key]
        for name, (hook, factors) in list(self._hooks.items()):
            factors.pop(key, None)
            if not factors:
                hook.remove()
                del self._hooks[name]

    def clear(self) -> None:
        """Forget all."""
        for key in list(self._weights):
            self.drop(key)

    def move_to(self, model: ModelAdapter) -> None:
        """Add them to another view of the model.

        Raises:
            ConfigError: a module of one cannot be adapted any more.
        """
        before = dict(self._weights)
        self.clear()
        self._model = model
        for key, weights in before.items():
            self.load(key, weights)

    def _modules(self, weights: LoraWeights) -> dict[str, nn.Module]:
        """The module of each pair: linears of their shapes, which see all packed rows of a step."""
        known = dict(self._model.view.model.named_modules())
        found, wrong = {}, []
        for name, (down, up) in weights.pairs.items():
            module = known.get(name)
            weight = None if module is None else module._parameters.get("weight")
            if module is None:
                wrong.append(f"{name} (the model has no such module)")
            elif type(module).forward is not nn.Linear.forward or weight is None:
                wrong.append(f"{name} (a {type(module).__name__}, not a plain linear)")
            elif (len(up), down.shape[1]) != tuple(weight.shape):
                wrong.append(
                    f"{name} ({len(up)} x {down.shape[1]}, the model's is {' x '.join(map(str, weight.shape))})"
                )
            else:
                found[name] = module
        wrong += [f"{name} (not called with all tokens of a step)" for name in self._unsuited(found)]
        if wrong:
            more = f", and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
            raise ConfigError(f"the adapter cannot be applied to {', '.join(wrong[:_MAX_NAMED])}{more}")
        return found

    def _unsuited(self, modules: dict[str, nn.Module]) -> list[str]:
        """Names of modules that a dry run does not call once with [1, T, K]: experts, heads, parts of split mixers."""
        model = self._model
        if model.mixers:
            split = {id(inner) for mixer in model.mixers for inner in mixer.module.modules()}
            return [name for name, module in modules.items() if id(module) in split]
        calls: dict[str, list[torch.Size]] = {name: [] for name in modules}
        hooks = [
            module.register_forward_hook(lambda _m, inputs, _o, seen=calls[name]: seen.append(inputs[0].shape[:-1]))
            for name, module in modules.items()
        ]
        try:
            with torch.inference_mode():
                ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=model.device)
                positions = torch.arange(_PROBE_TOKENS, device=model.device).unsqueeze(0)
                model.forward(ids, positions, positions[0, -1:], Recorder())
        finally:
            for hook in hooks:
                hook.remove()
        return [name for name, seen in calls.items() if seen != [torch.Size((1, _PROBE_TOKENS))]]


class _Added:
    """A forward hook: adds to each adapter's rows of a linear what it makes of them."""

    def __init__(self, factors: Factors) -> None:
        self._factors = factors

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        for key, rows in current().adapted:
            pair = self._factors.get(key)
            if pair is not None:
                down, up = pair
                out[0].index_add_(0, rows, inputs[0][0].index_select(0, rows) @ down.T @ up.T)  # [M, N]


def adapted_rows(packed: PackedStep, owners: Sequence[Record]) -> AdaptedRows:
    """Packed tokens of each adapter of a step. owners: the requests' records, in packed order."""
    spans: dict[str, list[Tensor]] = {}
    starts = packed.batch.starts
    for row, record in enumerate(owners):
        if record.adapter is not None:
            spans.setdefault(record.adapter, []).append(torch.arange(int(starts[row]), int(starts[row + 1])))
    return [(key, torch.cat(parts).to(packed.batch.device)) for key, parts in spans.items()]
