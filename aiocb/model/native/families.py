"""Decoder families that the native step can run, and how to read one out of a transformers module.

A family is a row of a table: where its norms sit, how its MLP and its projections are stored. Everything that can be
read from the loaded module (weights, biases, rotary frequencies, activation, scaling) is read from there and not from
the config, so that a value which transformers adjusts at load is not missed. Whatever is not understood is a reason to
take the generic path, never a guess; so is whatever somebody has hung on a module or put in its place (hooks, patched
forwards, parametrizations, adapters), because the native step calls no module.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.kernels.interface import QK_NORMS
from aiocb.model.native.inspection import Unsupported, activation_of, require, require_untouched

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Experts", "Family", "LayerDescription", "ModelDescription", "Projection", "describe"]

MAX_HEAD_DIM = 256


class Family(NamedTuple):
    """One architecture of transformers: a row of families.json.

    Attributes:
        class_name: the causal LM class; a subclass may change the forward, so only this one is taken.
        norms: native norm -> attribute of the decoder layer. Absent: that norm does not exist.
        norm_offset: added to a norm's weight (Gemma stores w - 1).
        is_layer_norm: mean and variance instead of the root mean square.
        mlp: names of gate, up and down; of up and down; or of one for gate and up, and of down.
        qkv: names of the three; or of one with all q, all k, all v; `query_key_value` has them head by head.
        out: what the attention's result goes through.
        backbone, attention, mlp_name: attribute names of the decoder, and of a layer's attention and MLP.
        mixture: the class of an MLP that is a mixture of experts; layers may have either.
        has_window: `config.sliding_window` counts (for sliding layers only, where the config has `layer_types`).
    """

    class_name: str
    norms: Mapping[str, str]
    norm_offset: float = 0.0
    is_layer_norm: bool = False
    mlp: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    backbone: str = "model"
    attention: str = "self_attn"
    mlp_name: str = "mlp"
    mixture: str = ""
    has_window: bool = False

    @property
    def is_interleaved(self) -> bool:
        """One projection holds q, k and v of the first head, then of the second."""
        return "query_key_value" in self.qkv


@functools.cache
def _families() -> dict[str, Family]:
    text = importlib.resources.files(__package__).joinpath("families.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return {
        model_type: Family(**row | {"norms": table["norms"][row.get("norms", "pre")]})
        for model_type, row in table["families"].items()
    }


class Projection(NamedTuple):
    """A weight [N, K] (row per output) and its bias [N]."""

    weight: Tensor
    bias: Tensor | None


class Experts(NamedTuple):
    """A mixture of E experts, K of which a row passes.

    Attributes:
        router: [E, H]; the softmax of its product with a row says which, and how much each counts.
        gate_up, down: [E, 2 * I, H] (gate, then up) and [E, H, I].
        num_chosen: K.
        is_renormalised: the weights of the chosen add up to one.
        shared_gate: [1, H]; its sigmoid weighs the layer's MLP, which every row passes. None: the layer has none.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    num_chosen: int
    is_renormalised: bool
    shared_gate: Tensor | None


class LayerDescription(NamedTuple):
    """One decoder layer; `gate` is None when the MLP is plain, and all three are where there are experts only.

    The rows of `qkv` are those of its parts, one part after the other.
    """

    qkv: tuple[Projection, ...]
    out: Projection
    gate: Projection | None
    up: Projection | None
    down: Projection | None
    experts: Experts | None
    vectors: dict[str, Tensor]
    window: int | None
    rope: int
    scale: float


class ModelDescription(NamedTuple):
    """Everything the native step needs. Tensors are views of the module's parameters; `dtype` is the activations'."""

    family: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    activation: str
    is_layer_norm: bool
    is_parallel: bool
    qk_norm: int
    rotary_dim: int
    norm_eps: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    attention_softcap: float
    logit_softcap: float
    embedding: Tensor
    head: Projection
    final_vectors: dict[str, Tensor]
    ropes: list[tuple[Tensor, float]]
    layers: list[LayerDescription]
    max_position_embeddings: int
    dtype: torch.dtype


def describe(model: nn.Module, *, has_memory: bool = True) -> ModelDescription | str:
    """Read a loaded causal LM; return the reason when the native step cannot run it.

    What somebody does to the model later is seen when it is read again. `has_memory`: its matrices do not lie
    elsewhere, with tensors without memory in their place.
    """
    try:
        return _describe(model, ("cpu",) if has_memory else ("cpu", "meta"))
    except Unsupported as reason:
        return str(reason)
    except (AttributeError, TypeError, ValueError, LookupError) as error:  # not built as this table believes
        return f"unexpected module structure: {error}"


def _describe(model: Any, devices: Sequence[str]) -> ModelDescription:
    import torch
    from torch import nn

    config = model.config
    family = _families().get(config.model_type)
    if family is None:
        raise Unsupported(f"architecture {config.model_type!r} has no native description")
    require(
        type(model).__name__ == family.class_name and type(model).__module__.startswith("transformers.models."),
        f"{type(model).__name__} is not transformers' {family.class_name}",
    )
    require_untouched(model)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    require(dtypes in ({torch.bfloat16}, {torch.float32}), f"weights are {sorted(map(str, dtypes))}")
    require(all(p.device.type in devices for p in model.parameters()), "weights are not on the CPU")
    require(all(type(p.data) is torch.Tensor for p in model.parameters()), "weights are no plain tensors")

    backbone = getattr(model, family.backbone)
    heads, kv_heads, head_dim = _heads(config, family)
    require(head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM, f"head dim {head_dim} is not a multiple of 16 up to 256")
    require(config.hidden_size % 2 == 0, "the hidden size is odd")
    require(getattr(config, "clip_qkv", None) is None, "queries, keys and values are clipped")

    ropes, rope_of_type = _ropes(backbone.rotary_emb)
    first = getattr(backbone.layers[0], family.attention)
    qk_norm = _qk_norm(first, head_dim)
    embedding = getattr(backbone, "embed_in", None) or backbone.embed_tokens
    final = getattr(backbone, "final_layer_norm", None) or backbone.norm
    head = model.get_output_embeddings()
    require(
        embedding.weight.shape[0] >= head.weight.shape[0] and embedding.weight.shape[1] == config.hidden_size,
        "the embedding has fewer rows than the output, or another width than the model",
    )
    require(embedding.max_norm is None, "the embedding renormalises its rows")
    scale: Any = getattr(embedding, "embed_scale", None)
    if scale is None:
        scale = getattr(config, "embedding_multiplier", 1.0)
    else:  # in bf16 transformers multiplies by the rounded one: it is part of the model as it was trained and tested
        scale = scale.to(embedding.weight.dtype)
    layers = [
        _layer(config, family, layer, index, rope_of_type, qk_norm) for index, layer in enumerate(backbone.layers)
    ]
    norms = [module for module in backbone.modules() if "norm" in type(module).__name__.lower()]
    require(len({_epsilon(norm) for norm in norms}) == 1, "norms with different epsilons")
    require(all(isinstance(norm, nn.LayerNorm) == family.is_layer_norm for norm in norms), "norms of another kind")
    shapes = {(x.gate_up.shape, x.num_chosen, x.is_renormalised) for x in (y.experts for y in layers) if x is not None}
    require(len(shapes) <= 1, "layers with different experts")
    widths = [layer.down.weight.shape[1] for layer in layers if layer.down is not None]
    return ModelDescription(
        family=config.model_type,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=max(widths, default=0),
        vocab_size=head.weight.shape[0],
        activation=_common_activation(family, backbone.layers),
        is_layer_norm=family.is_layer_norm,
        is_parallel=bool(getattr(config, "use_parallel_residual", False)),
        qk_norm=qk_norm,
        rotary_dim=2 * len(ropes[0][0]) if ropes else 0,
        norm_eps=_epsilon(final),
        embedding_scale=float(scale),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        attention_softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        embedding=embedding.weight,
        head=_projection(head),
        final_vectors=_norm(family, final, "final"),
        ropes=ropes,
        layers=layers,
        max_position_embeddings=int(getattr(config, "max_position_embeddings", 0) or 1 << 20),
        dtype=embedding.weight.dtype,
    )


def _heads(config: Any, family: Family) -> tuple[int, int, int]:
    """H, K and D."""
    heads = config.num_attention_heads
    kv_heads = (getattr(config, "num_key_value_heads", None) if not family.is_interleaved else None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _layer(
    config: Any, family: Family, layer: Any, index: int, rope_of_type: dict[str, int], qk_norm: int
) -> LayerDescription:
    attention = getattr(layer, family.attention)
    mlp = getattr(layer, family.mlp_name)
    is_mixture = bool(family.mixture) and type(mlp).__name__ == family.mixture
    experts = _experts(config, mlp) if is_mixture else None
    gate, up, down = _mlp(family, getattr(mlp, "shared_expert", None) if is_mixture else mlp)
    vectors: dict[str, Tensor] = {}
    for name, attribute in family.norms.items():
        # A parallel StableLM has one norm for both branches.
        norm = getattr(layer, attribute, None) or layer.input_layernorm
        vectors.update(_norm(family, norm, name))
    if qk_norm:
        vectors["q"] = attention.q_norm.weight.float() + family.norm_offset
        vectors["k"] = attention.k_norm.weight.float() + family.norm_offset
    types = getattr(config, "layer_types", None)
    layer_type = types[index] if types else "full_attention"
    require(layer_type in ("full_attention", "sliding_attention"), f"layer type {layer_type!r}")
    window = getattr(config, "sliding_window", None) if family.has_window else None
    if types and layer_type == "full_attention":
        window = None
    require(not types or layer_type == "full_attention" or window is not None, "a sliding layer without a window")
    rotates = bool(getattr(attention, "use_rope", True)) and bool(rope_of_type)
    return LayerDescription(
        qkv=_qkv(family, attention, *_heads(config, family)),
        out=_projection(getattr(attention, family.out)),
        gate=gate,
        up=up,
        down=down,
        experts=experts,
        vectors=vectors,
        window=window,
        rope=rope_of_type.get(layer_type, rope_of_type.get("", -1)) if rotates else -1,
        scale=float(attention.scaling),
    )


def _projection(linear: Any) -> Projection:
    from torch import nn

    require(type(linear) is nn.Linear, f"a projection is {type(linear).__name__}, not a plain Linear")
    return Projection(linear.weight, linear.bias)


def _qkv(family: Family, attention: Any, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
    parts = tuple(_projection(getattr(attention, name)) for name in family.qkv)
    if family.is_interleaved:  # [heads][q, k, v][D] -> all q, all k, all v
        ((weight, bias),) = parts
        weight = weight.view(heads, 3, head_dim, -1).transpose(0, 1).reshape(3 * heads * head_dim, -1)
        return (
            Projection(weight, None if bias is None else bias.view(heads, 3, head_dim).transpose(0, 1).reshape(-1)),
        )
    expected = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    sizes = [part.weight.shape[0] for part in parts]
    require(sizes in (expected, [sum(expected)]), "projections do not match the heads of the config")
    return parts


def _mlp(family: Family, mlp: Any) -> tuple[Projection | None, Projection | None, Projection | None]:
    if mlp is None:
        return None, None, None
    *inner, down = (_projection(getattr(mlp, name)) for name in family.mlp)
    if family.mlp[0] == "gate_up_proj":
        require(inner[0].bias is None, "a fused MLP with a bias")
        inner = [Projection(half, None) for half in inner[0].weight.chunk(2)]
    return inner[0] if len(inner) == 2 else None, inner[-1], down


def _experts(config: Any, block: Any) -> Experts:
    router = getattr(block, "gate", None) or block.router
    experts = block.experts
    gate_up, down = experts.gate_up_proj, experts.down_proj
    count, hidden, size = down.shape
    require(
        router.weight.shape == (count, config.hidden_size)
        and hidden == config.hidden_size
        and gate_up.shape == (count, 2 * size, hidden)
        and 1 <= router.top_k <= count,
        "experts of unexpected shapes",
    )
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    odd = [name for name, value in plain.items() if getattr(experts, name, value) != value]
    odd += [name for name in ("has_post_expert_norm", "_is_expert_parallel") if getattr(experts, name, False)]
    names = {name for module in (router, experts) for name, _ in module.named_parameters()}
    odd += sorted(names - {"weight", "gate_up_proj", "down_proj"})
    require(not odd, f"experts with {', '.join(odd)}")
    shared_gate = None
    if hasattr(block, "shared_expert"):
        gate = _projection(block.shared_expert_gate)
        require(gate.weight.shape == (1, hidden) and gate.bias is None, "an unexpected gate of the shared expert")
        shared_gate = gate.weight
    # Mixtral and Granite know no other way than to let the chosen weights add up to one.
    is_renormalised = bool(getattr(router, "norm_topk_prob", True))
    return Experts(router.weight, gate_up, down, int(router.top_k), is_renormalised, shared_gate)


def _common_activation(family: Family, layers: Any) -> str:
    mlps = [getattr(layer, family.mlp_name) for layer in layers]
    parts = [getattr(mlp, name, None) for mlp in mlps for name in ("experts", "shared_expert")]
    functions = [getattr(part, name, None) for part in (*mlps, *parts) for name in ("act_fn", "activation_fn", "act")]
    names = {activation_of(function) for function in functions if function is not None}
    require(len(names) == 1, "MLPs with different activations")
    return names.pop()


def _norm(family: Family, norm: Any, name: str) -> dict[str, Tensor]:
    vectors = {name: norm.weight.float() + family.norm_offset}
    bias = getattr(norm, "bias", None)
    if bias is not None:
        vectors[f"{name}_bias"] = bias.float()
    return vectors


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _qk_norm(attention: Any, head_dim: int) -> int:
    if not hasattr(attention, "q_norm"):
        require(not getattr(attention, "qk_layernorm", False), "layer norm on queries and keys")
        return QK_NORMS["none"]
    return QK_NORMS["per_head" if attention.q_norm.weight.numel() == head_dim else "full_width"]


def _ropes(rotary: Any) -> tuple[list[tuple[Tensor, float]], dict[str, int]]:
    """The rotary tables, and which of them a layer type uses (`""`: every layer)."""
    kinds: dict[str, str] = (
        dict(rotary.rope_type) if isinstance(rotary.rope_type, dict) else {"": str(rotary.rope_type)}
    )
    ropes: list[tuple[Tensor, float]] = []
    for name, kind in kinds.items():
        require(kind in ("default", "linear", "llama3", "yarn"), f"rotary embedding of type {kind!r}")
        prefix = f"{name}_" if name else ""
        ropes.append(
            (getattr(rotary, f"{prefix}inv_freq").float(), float(getattr(rotary, f"{prefix}attention_scaling")))
        )
    require(len({len(frequencies) for frequencies, _ in ropes}) == 1, "rotary tables of different sizes")
    return ropes, {name: index for index, name in enumerate(kinds)}
