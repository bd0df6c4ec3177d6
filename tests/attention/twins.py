"""Plain torch with the signatures of device kernels, as strict as they are: what backends pack is tried on the CPU.

They see what the kernels would see, and no more: rows by their bounds, keys by block table and length, the causal mask
aligned to the last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aiocb.attention.flash import FlashKernels


def attend_row(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: tuple[int, int], softcap: float
) -> tuple[Tensor, Tensor]:
    """query [n, H, D], key and value [l, K, D] -> [n, H, D] and [H, n]."""
    count, num_keys = len(query), len(key)
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1).float() for part in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.float(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(count)[:, None] + num_keys - count
    keys = torch.arange(num_keys)[None]
    left, right = window
    assert right == 0, "causal"
    visible = keys <= queries
    if left >= 0:
        visible &= keys >= queries - left
    scores = scores.masked_fill(~visible, float("-inf"))
    out = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), value)
    return out.to(query.dtype), scores.logsumexp(-1)


def check(query: Tensor, *keys: Tensor) -> None:
    for tensor in (query, *keys):
        assert tensor.stride(-1) == 1, "the values of a head lie side by side"
        assert tensor.shape[-1] == query.shape[-1] <= 256 and query.shape[-1] % 8 == 0, tensor.shape
        assert tensor.dtype == query.dtype
    assert query.shape[1] % keys[0].shape[-2] == 0


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    check(query, key, value)
    assert starts.dtype == key_starts.dtype == torch.int32
    assert starts[-1] == len(query) and key_starts[-1] <= len(key), "rows cover all queries"
    assert int(starts.diff().max()) <= max_q and int(key_starts.diff().max()) <= max_k
    return rows(query, [(key[a:b], value[a:b]) for a, b in key_starts.unfold(0, 2, 1).tolist()], starts, **options)


def paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    table: Tensor,
    lengths: Tensor,
    multiple: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    check(query, key, value)
    assert table.dtype == lengths.dtype == torch.int32 and key.dim() == 4 and key.shape[1] % multiple == 0
    assert table.stride(-1) == 1
    parts = []
    for blocks, length in zip(table.tolist(), lengths.tolist(), strict=True):
        held = blocks[: -(-length // key.shape[1])]
        assert length <= len(blocks) * key.shape[1]
        parts.append(tuple(pages[held].flatten(0, 1)[:length] for pages in (key, value)))
    return rows(query, parts, starts, **options)


def rows(query: Tensor, keys: Any, starts: Tensor, scale: float, window: Any, softcap: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.full_like(query, float("nan")), torch.full((query.shape[1], len(query)), float("nan"))
    for (begin, end), (key, value) in zip(starts.unfold(0, 2, 1).tolist(), keys, strict=True):
        out[begin:end], lse[:, begin:end] = attend_row(query[begin:end], key, value, scale, tuple(window), softcap)
    return out, lse


def flash_2_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    assert causal and softmax_scale is not None
    options: Any = {"scale": softmax_scale, "window": window_size, "softcap": softcap}
    if block_table is None:
        out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
    else:
        out, lse = paged(q, k, v, cu_seqlens_q, block_table, cu_seqlens_k.diff(), 256, **options)
    return (out, lse, None) if return_attn_probs else out


def flash_2_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, rotary_cos: None = None,
    rotary_sin: None = None, cache_seqlens: Tensor | None = None, cache_batch_idx: None = None,
    cache_leftpad: None = None, block_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    assert causal and softmax_scale is not None and cache_seqlens is not None and block_table is not None
    assert q.dim() == 4 and q.shape[1] == 1 and num_splits == 1
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    options: Any = {"scale": softmax_scale, "window": window_size, "softcap": softcap}
    out, lse = paged(q[:, 0], k_cache, v_cache, starts, block_table, cache_seqlens, 256, **options)
    return (out[:, None], lse.T[..., None]) if return_softmax_lse else out[:, None]


def flash_3_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: None = None, seqused_k: None = None, softmax_scale: float | None = None, causal: bool = False,
    qv: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    assert causal and softmax_scale is not None and num_splits == 1
    options: Any = {"scale": softmax_scale, "window": window_size, "softcap": softcap}
    out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
    return (out, lse) if return_attn_probs else out


def flash_3_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
    rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: None = None,
    num_splits: int = 0, pack_gqa: None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    assert causal and softmax_scale is not None and num_splits == 1
    assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None and max_seqlen_q
    options: Any = {"scale": softmax_scale, "window": window_size, "softcap": softcap}
    out, lse = paged(q, k_cache, v_cache, cu_seqlens_q, page_table, cache_seqlens, 1, **options)
    return (out, lse) if return_softmax_lse else out


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:  # fmt: skip
    assert scale is not None and enable_gqa == (query.shape[1] != key.shape[-2])
    options: Any = {"scale": scale, "window": window_size, "softcap": 0.0}
    if block_table is None:
        assert cu_seq_k is not None
        out, lse = packed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
    else:
        assert seqused_k is not None and cu_seq_k is None and num_splits == 1
        out, lse = paged(query, key, value, cu_seq_q, block_table, seqused_k, 1, **options)
    return (out, lse) if return_aux is not None and return_aux.lse else out


FLASH_2 = FlashKernels(flash_2_varlen, flash_2_with_kvcache)
FLASH_3 = FlashKernels(flash_3_varlen, flash_3_with_kvcache)
