"""Modules of transformers that keep their states in another way than in the cache: on themselves, or passed along.

In the view of a model their forwards are replaced: the state comes from whoever answers the pass, and goes back there.
Only the classes as transformers has them are taken, and nothing that somebody has patched; the self-check compares the
result with the model's own forward, as for any other. Each is called in parts, like every mixer that keeps a state.

Legend: B requests of a part, L tokens of one request, C channels, k width of a convolution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiocb.model.eager.handlers import Handler
from aiocb.model.eager.passes import current
from aiocb.model.eager.scans import is_untouched
from aiocb.model.eager.states import StateKey

__all__ = ["keep_states"]

_Forward = Callable[..., Any]
"""Of the module, its own forward, what answers the pass, the number of the layer, and the arguments."""


def _griffin(
    module: Any, own: Any, handler: Handler, layer: int, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> Any:
    """RecurrentGemma: its own forward forgets the convolution's window when a prompt goes on."""
    gate = module.act_fn(module.linear_y(input_states))
    inputs = module.linear_x(input_states).transpose(1, 2)  # [B, C, L]
    before, conv = module.conv1d_width - 1, module.conv_1d
    seen = handler.convolve(StateKey("conv", layer), inputs, before)
    seen = F.pad(seen, (before, 0))[..., -(inputs.shape[-1] + before) :]
    mixed = F.conv1d(seen, conv.weight, conv.bias, groups=conv.groups).transpose(1, 2)
    key, unit = StateKey("recurrent", layer), module.rg_lru
    unit.recurrent_states = handler.get_state(key)
    mixed = unit(mixed, position_ids)
    handler.put_state(key, unit.recurrent_states)
    unit.recurrent_states = None
    return module.linear_out(mixed * gate), None


def _shifted(handler: Handler, key: StateKey, hidden: Tensor) -> Tensor:
    """Each token's predecessor; zeros before the first."""
    before = handler.get_state(key)
    first = torch.zeros_like(hidden[:, 0]) if before is None else before
    shifted = torch.cat([first.unsqueeze(1), hidden[:, :-1]], dim=1)
    handler.put_state(key, hidden[:, -1])
    return shifted


def _rwkv_attention(
    module: Any, own: Any, handler: Handler, layer: int, hidden: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """RWKV: its own forward mixes the requests of a batch when each has one token."""
    shifted = _shifted(handler, StateKey("attention shift", layer), hidden)
    mixes = module.time_mix_key, module.time_mix_value, module.time_mix_receptance
    key, value, receptance = (hidden * mix + shifted * (1 - mix) for mix in mixes)
    keys = [StateKey("wkv", layer, number) for number in range(3)]
    states = [handler.get_state(each) for each in keys]
    attended, last = sys.modules[type(module).__module__].rwkv_linear_attention(
        module.time_decay,
        module.time_first,
        module.key(key),
        module.value(value),
        state=None if states[0] is None else states,
        return_state=True,
    )
    for each, state in zip(keys, last, strict=True):
        handler.put_state(each, state)
    return module.output(torch.sigmoid(module.receptance(receptance)) * attended), None


def _rwkv_feed_forward(
    module: Any, own: Any, handler: Handler, layer: int, hidden: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    shifted = _shifted(handler, StateKey("feed forward shift", layer), hidden)
    mixes = module.time_mix_key, module.time_mix_receptance
    key, receptance = (hidden * mix + shifted * (1 - mix) for mix in mixes)
    value = module.value(torch.square(torch.relu(module.key(key))))
    return torch.sigmoid(module.receptance(receptance)) * value, None


def _xlstm(module: Any, own: Any, handler: Handler, layer: int, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    keys = [StateKey("mlstm", layer, number) for number in range(3)]
    states = tuple(handler.get_state(each) for each in keys)
    hidden, last = own(x, None if states[0] is None else states)
    for each, state in zip(keys, last, strict=True):
        handler.put_state(each, state.to(x.dtype))  # as the model's own cache keeps them: its scan takes no other type
    return hidden, None


_TABLE: dict[str, _Forward] = {
    "recurrent_gemma.RecurrentGemmaRecurrentBlock": _griffin,
    "rwkv.RwkvFeedForward": _rwkv_feed_forward,
    "rwkv.RwkvSelfAttention": _rwkv_attention,
    "xlstm.xLSTMLayer": _xlstm,
}
"""By package and name of the class."""

WITHOUT_CACHE = ("rwkv.", "xlstm.")
"""Whose models know no cache, or another one: they get none."""


def keep_states(model: nn.Module) -> tuple[set[nn.Module], bool]:
    """Replace the forwards of all such modules of a view.

    Returns:
        the modules; and whether the model gets no cache.
    """
    replaced: set[nn.Module] = set()
    counts: dict[str, int] = {}
    for module in model.modules():
        kind = type(module)
        where = kind.__module__.removeprefix("transformers.models.").partition(".")[0]
        name = f"{where}.{kind.__qualname__.rpartition('.')[2]}"
        known = _TABLE.get(name)
        if known is None or not kind.__module__.startswith("transformers.models.") or not is_untouched(module.forward):
            continue
        layer = counts[name] = counts.get(name, -1) + 1
        module.__dict__["forward"] = _replaced(module, known, layer)
        replaced.add(module)
    return replaced, any(name.startswith(WITHOUT_CACHE) for name in counts)


def _replaced(module: Any, known: _Forward, layer: int) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        answering = current(None)
        if answering is None:
            return own(*args, **kwargs)
        return known(module, own, answering.handler, layer, *args, **kwargs)

    return forward
