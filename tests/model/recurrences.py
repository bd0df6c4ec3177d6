"""Recurrences over packed rows, and what transformers' own functions make of one request of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from aiocb.model.eager.recurrence import ConvolutionWeights, PackedRows, Scans

LENGTHS = (1, 1, 1, 70, 5, 200, 2, 64)
"""Single tokens first; chunks of 64, 16 and 1 with and without a rest."""
SLOTS = (3, 9, 1, 4, 7, 2, 8, 6)
FRESH = (False, True, False, False, True, True, False, True)
NUM_SLOTS = 10


def packed_rows(lengths: tuple[int, ...] = LENGTHS, slots: tuple[int, ...] = SLOTS, fresh: Any = FRESH) -> PackedRows:
    starts = np.cumsum((0, *lengths))
    return PackedRows(starts, np.array(slots), np.array(fresh), torch.device("cpu"))


def _random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


class Case:
    """One recurrence: its packed inputs, our function, and what transformers makes of one request."""

    def __init__(
        self,
        state: Tensor,
        inputs: tuple[Tensor, ...],
        ours: Callable[..., Tensor],
        own: Callable[..., tuple[Tensor, Tensor]],
    ) -> None:
        self.state, self.inputs, self.ours, self.own = state, inputs, ours, own

    def run(self, scans: Scans, state: Tensor, rows: PackedRows, tokens: Tensor | None = None) -> Tensor:
        """Run ours over some of the tokens."""
        taken = self.inputs if tokens is None else tuple(x[tokens] for x in self.inputs)
        return self.ours(scans, *taken, state=state, rows=rows)


T = sum(LENGTHS)


def _convolution(activation: str | None = "silu", channels: int = 24, width: int = 4, has_bias: bool = True) -> Case:
    weight, bias = _random(channels, width, seed=1), _random(channels, seed=2) if has_bias else None
    weights = ConvolutionWeights.of(weight, bias)

    def ours(scans: Scans, x: Tensor, state: Tensor, rows: PackedRows) -> Tensor:
        return scans.convolve(x, weights, activation, state, rows)

    def own(x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        known = x.T[None] if before is None else torch.cat([before[None], x.T[None]], -1)
        out = mamba2.causal_conv1d_fn(known, weight, bias, activation=activation)[0, :, -len(x) :]
        return out.T, F.pad(known, (width, 0))[0, :, -width:]

    # The channels of a slot lie side by side.
    state = _random(NUM_SLOTS, width, channels, seed=3).transpose(1, 2)
    return Case(state, (_random(T, channels, seed=4),), ours, own)


def _delta(
    key_heads: int = 2, heads: int = 4, key_dim: int = 16, value_dim: int = 24, by_channel: bool = False
) -> Case:
    query, key = _random(T, key_heads, key_dim, seed=1), _random(T, key_heads, key_dim, seed=2)
    value, beta = _random(T, heads, value_dim, seed=3), torch.sigmoid(_random(T, heads, seed=4))
    shape = (T, heads, key_dim) if by_channel else (T, heads)
    decay = -F.softplus(_random(*shape, seed=5))
    chunked = kimi.chunk_kimi_delta_attention if by_channel else qwen.torch_chunk_gated_delta_rule

    def ours(scans: Scans, *inputs: Tensor, state: Tensor, rows: PackedRows) -> Tensor:
        q, k, v, g, b = inputs
        return scans.delta_rule(q, k, v, g, b, state, rows, is_normed=True)

    def own(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        out, after = chunked(
            q[None],
            k[None],
            v[None],
            g=g[None],
            beta=b[None],
            initial_state=None if before is None else before[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0], after[0]

    return Case(_random(NUM_SLOTS, heads, key_dim, value_dim, seed=6), (query, key, value, decay, beta), ours, own)


def _mamba2(heads: int = 4, groups: int = 2, head_dim: int = 6, size: int = 16, limits: Any = (0.0, 1e9)) -> Case:
    rates, skip, bias = -_random(heads, seed=1).exp(), _random(heads, seed=2), _random(heads, seed=3)
    x, dt = _random(T, heads, head_dim, seed=4), _random(T, heads, seed=5)
    write, read = _random(T, groups, size, seed=6), _random(T, groups, size, seed=7)

    def ours(scans: Scans, *inputs: Tensor, state: Tensor, rows: PackedRows) -> Tensor:
        x, dt, write, read = inputs
        return scans.selective_heads(
            x, dt, rates, write, read, state, rows, skip=skip, bias=bias, is_softplus=True, limits=limits
        )

    def own(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        if len(x) == 1 and before is not None:
            state = before[None].clone()
            wide = (-1, head_dim)
            out = mamba2.mamba2_selective_state_update(
                state,
                x,
                dt[..., None].expand(-1, *wide),
                rates[:, None, None].expand(*wide, size),
                b,
                c,
                skip[:, None].expand(*wide),
                dt_bias=bias[:, None].expand(*wide),
                dt_softplus=True,
            )
            return out, state[0]
        out, after = mamba2.mamba2_chunk_scan(
            x[None],
            dt[None],
            rates,
            b[None],
            c[None],
            chunk_size=32,
            D=skip,
            dt_bias=bias,
            dt_softplus=True,
            dt_limit=limits,
            initial_states=None if before is None else before[None],
            return_final_states=True,
        )
        return out[0], after[0]

    return Case(_random(NUM_SLOTS, heads, head_dim, size, seed=8), (x, dt, write, read), ours, own)


def _mamba(channels: int = 20, size: int = 16) -> Case:
    rates, skip, bias = -_random(channels, size, seed=1).exp(), _random(channels, seed=2), _random(channels, seed=3)
    x, dt = _random(T, channels, seed=4), _random(T, channels, seed=5)
    write, read = _random(T, size, seed=6), _random(T, size, seed=7)

    def ours(scans: Scans, *inputs: Tensor, state: Tensor, rows: PackedRows) -> Tensor:
        x, dt, write, read = inputs
        return scans.selective_channels(x, dt, rates, write, read, state, rows, skip=skip, bias=bias, is_softplus=True)

    def own(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        state = torch.zeros(1, channels, size) if before is None else before[None].clone()
        steps = [  # the scan itself begins at zero, always
            mamba.mamba_selective_state_update(
                state, x[t : t + 1], dt[t : t + 1], rates, b[t : t + 1], c[t : t + 1], skip, dt_bias=bias,
                dt_softplus=True,
            )
            for t in range(len(x))
        ]  # fmt: skip
        return torch.cat(steps), state[0]

    return Case(_random(NUM_SLOTS, channels, size, seed=8), (x, dt, write, read), ours, own)


CASES: dict[str, Callable[[], Case]] = {
    "convolution": _convolution,
    "wide convolution": lambda: _convolution(None, channels=150, width=3, has_bias=False),
    "gelu convolution": lambda: _convolution("gelu", channels=7, width=2),
    "delta": _delta,
    "delta of large heads": lambda: _delta(1, 2, key_dim=128, value_dim=64),
    "delta of odd heads": lambda: _delta(1, 1, key_dim=7, value_dim=5),
    "delta by channel": lambda: _delta(3, 3, by_channel=True),
    "mamba 2": _mamba2,
    "mamba 2 of large heads": lambda: _mamba2(2, 1, head_dim=64, size=128),
    "mamba 2 of odd heads": lambda: _mamba2(3, 3, head_dim=5, size=7),
    "mamba 2 with limits": lambda: _mamba2(limits=(0.7, 1.1)),
    "mamba 1": _mamba,
    "odd mamba 1": lambda: _mamba(channels=5, size=3),
}
