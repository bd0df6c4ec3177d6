"""All prompts of a step in one call of a mixer that scans, and its single tokens without a needless pass over memory.

The mixers of transformers take one row per request, of one length, when there is a cache. What stands between that and
a packed row is small: the window of the convolution, and the scan itself. So a copy of the mixer's forward looks up
other functions under the same names; everything around them (projections, gates, norms) works on the packed row.

    packed [1, T, ...] ─► filled up [R, P, ...] ─► the model's own scan, from the states [R, ...] ─► packed [1, T, ...]

What is filled up changes no state: a key of zeros with a rate of zero (gated delta rule), a step of length zero (Mamba
2). Models whose steps have a shortest length run prompt by prompt.

Legend: T packed tokens, R requests, P tokens of the longest, C channels, k width of a convolution, H heads, D head dim.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from aiocb.model.eager.passes import current
from aiocb.model.eager.states import StateKey, StateStorage

__all__ = ["Packing", "can_pack", "decoding", "packed", "rebound"]

_CONVOLUTION = "causal_conv1d_fn"
MAX_WASTE = 2
"""How many times as much as there are tokens may be filled up."""


class Packing:
    """The rows of a packed part, and their states.

    Args:
        storage: read, and written to.
        slots: of the requests.
        is_fresh: by request, whether it has computed nothing yet.
        lengths: their tokens in this step.
    """

    def __init__(
        self, storage: StateStorage, slots: Sequence[int], is_fresh: Sequence[bool], lengths: Sequence[int]
    ) -> None:
        self._tensors = storage.tensors
        device = next(iter(storage.tensors.values())).device
        self._slots = torch.tensor(slots, device=device)
        self._fresh = torch.tensor(
            [row for row, fresh in enumerate(is_fresh) if fresh], dtype=torch.long, device=device
        )
        self._lengths = torch.tensor(lengths, device=device)
        self._longest = max(lengths)
        is_token = np.arange(self._longest) < np.array(lengths)[:, None]
        self._places = torch.from_numpy(np.flatnonzero(is_token)).to(device)  # [T] of R * P

    @staticmethod
    def is_worth_it(lengths: Sequence[int]) -> bool:
        """True where there are several, and not too unequal."""
        return len(lengths) > 1 and len(lengths) * max(lengths) <= MAX_WASTE * sum(lengths)

    def fill_up(self, states: Tensor, value: float = 0.0) -> Tensor:
        """[1, T, ...] -> [R, P, ...]."""
        rows = states.new_full((len(self._slots) * self._longest, *states.shape[2:]), value)
        return rows.index_copy_(0, self._places, states[0]).view(-1, self._longest, *states.shape[2:])

    def pack(self, rows: Tensor) -> Tensor:
        """[R, P, ...] -> [1, T, ...]."""
        return rows.flatten(0, 1).index_select(0, self._places).unsqueeze(0)

    def get(self, key: StateKey) -> Tensor:
        """Return a state [R, ...]; of who begins, zeros."""
        return self._tensors[key].index_select(0, self._slots).index_fill_(0, self._fresh, 0.0)

    def put(self, key: StateKey, state: Tensor) -> None:
        """Store a state [R, ...]."""
        self._tensors[key].index_copy_(0, self._slots, state.to(self._tensors[key].dtype))

    def convolve(self, key: StateKey, inputs: Tensor) -> Tensor:
        """Store the last k inputs of each request [1, C, T]; return all of them behind the k before: [R, C, k + P]."""
        before = self.get(key)
        width = before.shape[-1]
        rows = self.fill_up(inputs.transpose(1, 2)).transpose(1, 2)
        seen = torch.cat([before.to(rows.dtype), rows], dim=-1)
        last = self._lengths[:, None] + torch.arange(width, device=seen.device)
        self.put(key, seen.gather(2, last[:, None].expand(-1, seen.shape[1], -1)))
        return seen

    def convolved(self, out: Tensor) -> Tensor:
        """[R, C, k + P] -> [1, C, T]."""
        return self.pack(out[..., out.shape[-1] - self._longest :].transpose(1, 2)).transpose(1, 2)


def rebound(own: Callable[..., Any], names: Mapping[str, Callable[[Any], Any]]) -> Callable[..., Any] | None:
    """Return a copy of a module's forward in which functions are replaced; None where it knows none of the names.

    Args:
        own: a bound method of a class; whatever somebody has patched is left alone.
        names: of functions, and what makes the new one of the old one.
    """
    plain = _plain(own)
    found = [name for name in names if plain is not None and name in plain.__code__.co_names]
    if plain is None or not found:
        return None
    namespace = {**plain.__globals__, **{name: names[name](plain.__globals__[name]) for name in found}}
    copied = FunctionType(plain.__code__, namespace, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__
    return functools.partial(copied, own.__self__)  # type: ignore[attr-defined]


def _plain(own: Callable[..., Any]) -> FunctionType | None:
    if not isinstance(own, MethodType):
        return None
    plain = inspect.unwrap(own.__func__)
    return plain if isinstance(plain, FunctionType) else None


def can_pack(own: Callable[..., Any], module: Any, keys: Sequence[StateKey]) -> bool:
    """True for a mixer whose convolution and scan are known here."""
    plain = _plain(own)
    names = () if plain is None else plain.__code__.co_names
    needs_scan = any(key.kind != "conv" for key in keys)
    shortest = getattr(module, "time_step_limit", (0.0,))[0]
    return _CONVOLUTION in names and shortest == 0.0 and (not needs_scan or any(name in names for name in _SCANS))


def packed(own: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the forward for several prompts at once."""
    return rebound(own, {_CONVOLUTION: _pack_convolution, **_SCANS})


def decoding(own: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the forward for single tokens; None where there is nothing to gain."""
    return rebound(own, {"causal_conv1d_update": _next_input, "torch_recurrent_gated_delta_rule": _next_delta})


def _packing() -> Packing:
    handler: Any = current().handler
    packing: Packing = handler.packing
    return packing


def _pack_convolution(original: Any) -> Any:
    def convolution(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        packing = _packing()
        return packing.convolved(original(inputs, *args, **kwargs))

    return convolution


def _pack_delta_rule(original: Any) -> Any:
    def rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> Any:
        packing = _packing()
        filled = (packing.fill_up(states) for states in (query, key, value))
        out, state = original(*filled, g=packing.fill_up(g), beta=packing.fill_up(beta), **options)
        return packing.pack(out), state

    return rule


def _pack_mamba2(original: Any) -> Any:
    def scan(inputs: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Any:  # noqa: N803
        packing = _packing()
        steps = packing.fill_up(dt, float("-inf"))  # of length zero, once they have gone through the softplus
        filled = (packing.fill_up(states) for states in (B, C))
        out, state = original(packing.fill_up(inputs), steps, A, *filled, **options)
        return packing.pack(out), state

    return scan


_SCANS = {"torch_chunk_gated_delta_rule": _pack_delta_rule, "mamba2_chunk_scan": _pack_mamba2}


def _next_input(original: Any) -> Any:
    """On the CPU, a convolution of one column is a sum: a library's takes a millisecond to be set up."""

    def update(
        inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        if inputs.device.type != "cpu" or inputs.shape[-1] != 1:
            updated: Tensor = original(inputs, state, weight, bias, activation=activation)
            return updated
        seen = torch.cat([state, inputs.to(state.dtype)], dim=-1)
        state.copy_(seen[..., 1:])
        out = (seen[..., -weight.shape[-1] :].float() * weight.float()).sum(-1, keepdim=True)
        if bias is not None:
            out = out + bias.float()[:, None]
        out = out.to(weight.dtype)
        return (out if activation is None else ACT2FN[activation](out)).to(inputs.dtype)

    return update


def _next_delta(original: Any) -> Any:
    """On the CPU, one token of the gated delta rule: the state is read three times and written twice, in place."""

    def rule(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, initial_state: Tensor, **options: Any
    ) -> Any:
        state = initial_state
        if state.device.type != "cpu" or state.dtype != torch.float32 or not options.get("use_qk_l2norm_in_kernel"):
            return original(query, key, value, g=g, beta=beta, initial_state=state, **options)
        repeats = value.shape[2] // key.shape[2]
        q, k = (_normed(states[:, 0]).repeat_interleave(repeats, dim=1) for states in (query, key))  # [R, H, D]
        state.mul_(g[:, 0].float().exp()[..., None, None])
        known = torch.matmul(k.unsqueeze(-2), state).squeeze(-2)
        delta = (value[:, 0].float() - known) * beta[:, 0].float().unsqueeze(-1)
        state.addcmul_(k.unsqueeze(-1), delta.unsqueeze(-2))
        out = torch.matmul((q * q.shape[-1] ** -0.5).unsqueeze(-2), state).squeeze(-2)
        return out.to(query.dtype).unsqueeze(1), state

    return rule


def _normed(states: Tensor) -> Tensor:
    states = states.float()
    return states * torch.rsqrt(states.square().sum(-1, keepdim=True) + 1e-6)
