"""Attention modules of transformers that do not call the attention interface, but compute their scores themselves.

What such a module does otherwise is short: it projects, tells its cache, attends, and projects again. Here is that for
each of them, with the attention that whoever answers the pass offers; in the view of a model it takes the place of the
module's own forward. Only the class as transformers has it is taken, and nothing that somebody has patched; the self-
check compares the result with the model's own forward, as for any other.

ALiBi is data here: slopes per head, read from what the model itself builds (see `attention.base.Alibi`).

Legend: T packed tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from aiocb.attention.base import Alibi
from aiocb.model.eager.handlers import AttentionCall, Handler
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.scans import is_untouched

__all__ = ["needs_masks", "take_over"]


class Attend(Protocol):
    """Keys and values go to the cache, and what the queries see of them comes back."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, **options: Any) -> Tensor:
        """Attend: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H * D]."""


class OwnAttention(NamedTuple):
    """One class.

    Attributes:
        forward: called with the module, what attends, and the arguments of the module's own forward by name, as far
            as they are given.
        is_causal: it hides what comes later by itself; else the mask that it is given has to say so.
        needs_mask: the model around it cannot do without a mask.
        slopes: of its heads, where it has ALiBi.
    """

    forward: Callable[[Any, Attend, dict[str, Any]], Any]
    is_causal: bool = False
    needs_mask: bool = False
    slopes: Callable[[Any], Tensor | None] = lambda module: None


def _heads(states: Tensor, num_heads: int) -> Tensor:
    """[1, T, H * D] -> [1, H, T, D]."""
    return states.view(*states.shape[:-1], num_heads, -1).transpose(1, 2)


def _refuse(arguments: dict[str, Any], *names: str) -> None:
    """Packed rows are text alone."""
    for name in names:
        if arguments.get(name) is not None:
            raise NotPlainError(f"its attention is given {name}")


def _bert(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    _refuse(arguments, "encoder_hidden_states")
    hidden, heads = arguments["hidden_states"], module.num_attention_heads
    query, key, value = (_heads(project(hidden), heads) for project in (module.query, module.key, module.value))
    positions = arguments.get("sinusoidal_pos")
    if positions is not None and module.rotary_value:
        query, key, value = module.apply_rotary_position_embeddings(positions, query, key, value)
    elif positions is not None:
        query, key = module.apply_rotary_position_embeddings(positions, query, key)
    return attend(query, key, value, 1.0 / math.sqrt(module.attention_head_size)), None


def _bart(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    _refuse(arguments, "key_value_states", "attn_prompt")
    hidden, heads = arguments["hidden_states"], module.num_heads
    query, key, value = (_heads(project(hidden), heads) for project in (module.q_proj, module.k_proj, module.v_proj))
    # The factor goes to the scores: in bf16 scaled queries would be rounded once more.
    return module.out_proj(attend(query, key, value, module.scaling)), None


def _gpt_neo(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    hidden, heads = arguments["hidden_states"], module.num_heads
    query, key, value = (_heads(project(hidden), heads) for project in (module.q_proj, module.k_proj, module.v_proj))
    length = module.bias.shape[-1]
    window = int(module.bias[0, 0, -1].sum())  # keys that the last position sees
    return module.out_proj(attend(query, key, value, 1.0, sliding_window=window if window < length else None)), None


def _openai(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    query, key, value = (_heads(part, module.n_head) for part in module.c_attn(arguments["x"]).chunk(3, dim=-1))
    scaling = 1.0 / math.sqrt(value.shape[-1]) if module.scale else 1.0
    return [module.c_proj(attend(query, key, value, scaling))]


def _gpt_neox_japanese(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    query, key, value = _heads(module.query_key_value(arguments["hidden_states"]), module.num_attention_heads).chunk(
        3, dim=-1
    )
    rotate, size = sys.modules[type(module).__module__].apply_rotary_pos_emb, module.rotary_ndims
    rotated = rotate(query[..., :size], key[..., :size], *arguments["position_embeddings"])
    query, key = (torch.cat((turned, own[..., size:]), -1) for turned, own in zip(rotated, (query, key), strict=True))
    return module.dense(attend(query, key, value, 1.0 / module.norm_factor)), None, module.dense_bias


def _bloom(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise NotPlainError("slow_but_exact=True of its configuration adds up its projections in slices")
    fused = arguments["hidden_states"]
    fused = module.query_key_value(fused).view(*fused.shape[:-1], module.num_heads, 3, module.head_dim)
    query, key, value = (part.transpose(1, 2) for part in fused.unbind(3))
    attended = attend(query, key, value, module.inv_norm_factor, alibi="exact")
    return module.dense(attended) + arguments["residual"], None


def _mpt(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    mixed = module.Wqkv(arguments["hidden_states"])
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (_heads(part, module.n_heads) for part in mixed.chunk(3, dim=2))
    alibi = None if arguments.get("position_bias") is None else "exact"
    return module.out_proj(attend(query, key, value, module.softmax_scale, alibi=alibi)), None


def _falcon(module: Any, attend: Attend, arguments: dict[str, Any]) -> Any:
    fused, heads = module.query_key_value(arguments["hidden_states"]), module.num_heads
    kv_heads = module.num_kv_heads if module.new_decoder_architecture or not module.multi_query else 1
    parts = fused.view(*fused.shape[:-1], kv_heads, heads // kv_heads + 2, module.head_dim)  # queries, key, value
    query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if arguments.get("alibi") is not None:
        return module.dense(attend(query, key, value, module.inv_norm_factor, alibi="rounded")), None
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *arguments["position_embeddings"])
    return module.dense(attend(query, key, value, module.inv_norm_factor)), None


def _built_slopes(module: Any) -> Tensor:
    """What the model's own function builds for the second position, less what it builds for the first."""
    build = sys.modules[type(module).__module__].build_alibi_tensor
    bias: Tensor = build(torch.ones(1, 2, dtype=torch.long), module.num_heads, torch.float32)  # [H, 1, 2]
    return bias[:, 0, 1] - bias[:, 0, 0]


def _mpt_slopes(module: Any) -> Tensor:
    bias: Tensor = sys.modules[type(module).__module__].build_mpt_alibi_tensor(module.n_heads, 2)  # [H, 1, 2]
    return bias[:, 0, 1] - bias[:, 0, 0]


_TABLE = {
    "big_bird.BigBirdSelfAttention": OwnAttention(_bert),
    "bloom.BloomAttention": OwnAttention(_bloom, slopes=_built_slopes),
    # The mask that it is given has become one with the bias: what the model hides is known of the class alone.
    "falcon.FalconAttention": OwnAttention(
        _falcon, is_causal=True, slopes=lambda module: _built_slopes(module) if module.config.alibi else None
    ),
    # Its mask function looks up which tokens are of an image, and knows of those that are there only; text is causal.
    "git.GitSelfAttention": OwnAttention(_bert, is_causal=True),
    "gpt_neo.GPTNeoSelfAttention": OwnAttention(_gpt_neo, is_causal=True),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": OwnAttention(_gpt_neox_japanese),
    "megatron_bert.MegatronBertSelfAttention": OwnAttention(_bert),
    "mpt.MptAttention": OwnAttention(_mpt, needs_mask=True, slopes=_mpt_slopes),
    "mvp.MvpAttention": OwnAttention(_bart),
    "openai.Attention": OwnAttention(_openai, is_causal=True),
    "rembert.RemBertSelfAttention": OwnAttention(_bert),
    "roformer.RoFormerSelfAttention": OwnAttention(_bert),
    "trocr.TrOCRAttention": OwnAttention(_bart),
    "xglm.XGLMAttention": OwnAttention(_bart),
}
"""By package and name of the class."""


def _known(module: nn.Module) -> OwnAttention | None:
    """Return the class's row, unless somebody has patched the module."""
    kind = type(module)
    package, _, file = kind.__module__.rpartition(".")
    library, _, folder = package.rpartition(".")
    if library != "transformers.models" or file != f"modeling_{folder}" or not is_untouched(module.forward):
        return None
    return _TABLE.get(f"{folder}.{kind.__qualname__}")


def needs_masks(model: nn.Module) -> bool:
    """True where the model around such a module cannot do without a mask, whatever is in it."""
    return any(known is not None and known.needs_mask for known in map(_known, model.modules()))


def take_over(model: nn.Module, answering: Callable[[], Handler | None]) -> int:
    """Replace the forwards of all such modules of a view; return how many there are.

    Args:
        model: its modules are changed.
        answering: returns what answers the pass that is under way, None where there is none: then the module's own
            forward runs.
    """
    count = 0
    for module in model.modules():
        known = _known(module)
        if known is not None:
            module.__dict__["forward"] = _replaced(module, known, count, answering)
            count += 1
    return count


def _replaced(
    module: Any, known: OwnAttention, number: int, answering: Callable[[], Handler | None]
) -> Callable[..., Any]:
    own, slopes = type(module).forward, known.slopes(module)
    names = tuple(inspect.signature(own).parameters)[1:]
    indices = (getattr(module, name, None) for name in ("layer_idx", "layer_id"))
    layer: int = next((index for index in indices if index is not None), number)
    placed: dict[torch.device, Tensor | None] = {}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, scaling: float, *, handler: Handler, mask: Any, **options: Any
    ) -> Tensor:
        key, value = handler.update(key, value, layer)
        alibi: Alibi | None = options.get("alibi")
        if alibi is not None:
            if query.device not in placed:
                placed[query.device] = None if slopes is None else slopes.to(query.device)
            options["slopes"] = placed[query.device]
        # What a pass did not make itself is there for the model's sake only.
        mask = mask if handler.made(mask) and not known.is_causal else None
        call = AttentionCall(module, query, key, value, mask, scaling, is_causal=known.is_causal, **options)
        return handler.attend(call).flatten(2)

    def forward(*args: Any, **kwargs: Any) -> Any:
        handler = answering()
        if handler is None:
            return own(module, *args, **kwargs)
        named = {**dict(zip(names, args)), **kwargs}
        answer = functools.partial(attend, handler=handler, mask=named.get("attention_mask"))
        return known.forward(module, answer, named)

    return forward
