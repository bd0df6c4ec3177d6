"""Mixers with a state that compute all tokens of a step in one call.

The recurrent mixers of transformers are of one kind: they project, convolve, scan, gate, project back. What mixes
tokens are two functions that the mixer's module knows by name, and what they go on from comes from the cache:

    cache.update_conv_state ─► causal_conv1d_fn ─► a scan ─► cache.update_recurrent_state

So a mixer's own forward runs once over the packed tokens, where these names mean functions of ours, which scan each
row from the state in its slot (see `recurrence`); and a cache that says that everything begins, so that the forward
takes the way of a whole prompt. The forward is a copy that only the view has: nobody else sees the names changed.

Legend: T packed tokens, C channels, H heads, N size of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiocb.model.eager.handlers import AttentionCall, Handler
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.passes import current, entered
from aiocb.model.eager.recurrence import ConvolutionWeights, PackedRows, Scans
from aiocb.model.eager.scans import plain_forward
from aiocb.model.eager.states import StateKey, StateStorage

__all__ = ["PackedStates", "scan_packed"]

_CONVOLUTION = "causal_conv1d_fn"


class PackedStates(Handler):
    """What answers a mixer that computes all rows of a step at once.

    Args:
        storage: the slots of all states.
        rows: of the step.
        scans: the arithmetic.
    """

    def __init__(self, storage: StateStorage, rows: PackedRows, scans: Scans) -> None:
        super().__init__()
        self._tensors = storage.tensors
        self.rows = rows
        self.scans = scans
        self._convolved: StateKey | None = None
        self._scanned: StateKey | None = None
        self._num_scans = 0

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Refuse: what caches keys, too, is called in parts."""
        raise NotPlainError("it caches keys within a mixer that keeps a state")

    def attend(self, call: AttentionCall) -> Tensor:
        """Refuse, as `update`."""
        raise NotPlainError("it attends within a mixer that keeps a state")

    def get_state(self, key: StateKey) -> None:
        """Say that everything begins; note what the next scan is about."""
        if key.kind == "recurrent":
            self._scanned, self._num_scans = key, 0

    def put_state(self, key: StateKey, state: Tensor) -> None:
        """Take nothing: the new states are in their slots."""

    def convolve(self, key: StateKey, inputs: Tensor, width: int | None) -> Tensor:
        """Return the inputs as they are; note what the next convolution is about."""
        self._convolved = key
        return inputs

    def convolution(self) -> Tensor:
        """Return the slots [S, C, width] of the convolution that comes now."""
        if self._convolved is None:
            raise NotPlainError("it convolves what its cache does not know")
        state, self._convolved = self._tensors[self._convolved], None
        return state

    def recurrence(self, num_dims: int) -> Tensor:
        """Return the slots of the scan that comes now: with more dimensions, of the next of its heads."""
        if self._scanned is None:
            raise NotPlainError("it scans what its cache does not know")
        state, number = self._tensors[self._scanned], self._num_scans
        self._num_scans += 1
        return state if state.dim() == num_dims else state[:, number]


_DONE = torch.empty(0)
"""What comes back as new state: it is in its slot already."""


def _answering() -> PackedStates:
    states = current().handler
    assert isinstance(states, PackedStates)
    return states


class _Convolution:
    """In place of `causal_conv1d_fn`: keeps the weights as the scans want them.

    The view's, of which there is a new one whenever its owner says that weights have changed.
    """

    def __init__(self) -> None:
        self._weights: dict[int, ConvolutionWeights] = {}

    def __call__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Convolve [1, C, T]."""
        states = _answering()
        weights = self._weights.get(weight.data_ptr())
        if weights is None:
            weights = self._weights[weight.data_ptr()] = ConvolutionWeights.of(weight, bias)
        inputs = hidden_states[0].t()
        return states.scans.convolve(inputs, weights, activation, states.convolution(), states.rows).t()[None]


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """In place of the chunked gated delta rules: query, key, value [1, T, heads, D]."""
    states = _answering()
    out = states.scans.delta_rule(
        query[0],
        key[0],
        value[0],
        g[0],
        beta[0],
        states.recurrence(4),
        states.rows,
        is_normed=use_qk_l2norm_in_kernel,
    )
    return out[None], _DONE


def _selective_heads(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803, as in transformers
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """In place of `mamba2_chunk_scan`: hidden_states [1, T, H, P]."""
    states = _answering()
    out = states.scans.selective_heads(
        hidden_states[0],
        dt[0],
        A,
        B[0],
        C[0],
        states.recurrence(4),
        states.rows,
        skip=D,
        bias=dt_bias,
        is_softplus=dt_softplus,
        limits=dt_limit,
    )[None]
    return (out, _DONE) if return_final_states else out


def _selective_channels(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """In place of `mamba_selective_scan`: hidden_states, dt, z [1, C, T], B and C [1, N, T]."""
    states = _answering()
    out = states.scans.selective_channels(
        hidden_states[0].t(),
        dt[0].t(),
        A,
        B[0].t(),
        C[0].t(),
        states.recurrence(3),
        states.rows,
        skip=D,
        bias=delta_bias,
        is_softplus=delta_softplus,
    ).t()[None]
    if z is not None:
        out = out * F.silu(z.float())
    return (out, _DONE) if return_last_state else out


_SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _selective_heads,
    "mamba_selective_scan": _selective_channels,
}


def scan_packed(module: nn.Module, own: Any, kinds: set[str]) -> str:
    """Let a mixer compute all tokens of a step in one call, wherever a pass says what answers it then.

    Args:
        module: of the view.
        own: its own forward; what it has now is called elsewhere.
        kinds: of the states that it keeps.

    Returns:
        Why this cannot be done; nothing was changed then. Empty where it was.
    """
    plain = plain_forward(own)
    if plain is None:
        return f"the forward of {type(module).__name__} is wrapped"
    used = [scan for scan in _SCANS if scan in plain.__code__.co_names]
    is_known = _CONVOLUTION in plain.__code__.co_names and len(used) == ("recurrent" in kinds)
    if not is_known or not kinds <= {"conv", "recurrent"}:
        return f"{type(module).__name__} is none of the mixers that can be scanned at once"
    names = {_CONVOLUTION: _Convolution(), **{scan: _SCANS[scan] for scan in used}}
    packed = FunctionType(
        plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    packed.__kwdefaults__ = plain.__kwdefaults__
    elsewhere = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        answering = current(None)
        if answering is None or answering.packed is None:
            return elsewhere(*args, **kwargs)
        with entered(answering.packed):
            return packed(module, *args, **kwargs)

    module.__dict__["forward"] = forward
    return ""
