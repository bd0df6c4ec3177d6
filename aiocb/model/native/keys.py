"""Thread: the worker's only. Keys whose channels are of one size, for a cache in which they share a scale.

A few channels of the keys are up to a hundred times larger than the others, always the same ones: a bias or the weight
of a norm makes them so. What their projection or norm loses, that of the queries gains: the products stay as they are,
and factors that are powers of two round nothing. The two channels that a rotation mixes have one factor.

Shape legend: H query heads, K key/value heads, D head dim, N hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from aiocb.model.native.families import ModelDescription, Projection

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["even_norms", "even_projections"]


def even_norms(d: ModelDescription, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of both norms, each [D], or [H * D] and [K * D]."""
    factors = _factors(d, key.float().abs())
    return query * _of_queries(factors, len(query)), key / factors.reshape(-1)


def even_projections(d: ModelDescription, parts: Sequence[Projection], vectors: Mapping[str, Tensor]) -> Projection:
    """Return queries, keys and values in one. `vectors`: of the layer, whose norm says how large the inputs are."""
    weight = torch.cat([part.weight.detach() for part in parts])  # [(H + 2 * K) * D, N]
    biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias.detach() for part in parts]
    bias = torch.cat(biases)
    queries, keys = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    rows = slice(queries, queries + keys)
    key, constant = weight[rows].float(), bias[rows].float()
    if "input" in vectors:
        if "input_bias" in vectors:
            constant = constant + key @ vectors["input_bias"].detach().float()
        key = key * vectors["input"].detach().float()
    factors = _factors(d, (key.square().sum(1) + constant.square()).sqrt())
    factors = factors.to(weight.dtype)
    scales = torch.cat([_of_queries(factors, queries), 1 / factors.reshape(-1)])
    weight[: rows.stop] *= scales[:, None]
    bias[: rows.stop] *= scales
    return Projection(weight, bias)


def _factors(d: ModelDescription, sizes: Tensor) -> Tensor:
    """Factors [K, D], or [1, D] for all heads, of channels of these sizes."""
    sizes, half = sizes.reshape(-1, d.head_dim), d.rotary_dim // 2
    pairs = torch.maximum(sizes[:, :half], sizes[:, half : d.rotary_dim])
    sizes = torch.cat([pairs, pairs, sizes[:, d.rotary_dim :]], dim=1)
    return sizes.clamp_min(1e-3).log2().round().exp2()


def _of_queries(factors: Tensor, count: int) -> Tensor:
    """Those of the query heads, each group of which shares a key."""
    return factors.repeat_interleave(count // factors.numel(), dim=0).reshape(-1)
