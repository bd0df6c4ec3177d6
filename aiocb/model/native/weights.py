"""Thread: the worker's only. Turning a described model into packed native weights.

Weights are handed over as the address of the source row of every packed column, so that fusing q, k and v or pairing
gate and up columns needs no copy on the Python side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiocb.attention.base import KVFormat
from aiocb.kernels import KernelError, Library, NativeModel
from aiocb.kernels.formats import FORMATS, PANEL, WeightFormat
from aiocb.kernels.interface import ACTIVATIONS, PAGE_SIZE, ModelConfig
from aiocb.model.native.families import Experts, ModelDescription, Projection
from aiocb.model.native.int8 import FEEDING_NORM, InputTuning, record_inputs, tune, widths_of
from aiocb.model.native.keys import even_norms, even_projections
from aiocb.step import CacheLayout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["build_native_model", "pack_again"]


def build_native_model(
    library: Library,
    description: ModelDescription,
    layout: CacheLayout,
    kv_format: KVFormat,
    num_threads: int,
    instruction_set: str | None,
    copy_embedding: bool,
    quantization: str | None = None,
) -> NativeModel:
    """Pack all weights and reserve the cache.

    With `copy_embedding` nothing of the module is read afterwards; else its embedding is borrowed. `quantization` is
    None or "int8".

    Raises:
        KernelError: the kernels do not support a shape of the model.
    """
    config = _config(description, layout, FORMATS[kv_format.name].code)
    native = NativeModel(library, config, num_threads=num_threads, instruction_set=instruction_set)
    for group, cache in enumerate(layout.groups):
        native.set_group(group, cache.num_blocks * layout.page_size // PAGE_SIZE, len(cache.layers))
    _pack_all(native, description, layout, copy_embedding, quantization)
    return native


def pack_again(native: NativeModel, description: ModelDescription, layout: CacheLayout) -> None:
    """Read all weights once more, into the memory where they are.

    Raises:
        KernelError: the model's shape has changed.
    """
    if bytes(_config(description, layout, native.config.cache_format)) != bytes(native.config):
        raise KernelError("the model has another shape than the one that was loaded; only its weights may change")
    _pack_all(native, description, layout, copy_embedding=False)


def _config(d: ModelDescription, layout: CacheLayout, cache_format: int) -> ModelConfig:
    experts = next((layer.experts for layer in d.layers if layer.experts is not None), None)
    is_gated = all(layer.gate is not None or layer.up is None for layer in d.layers)
    return ModelConfig(
        num_layers=len(d.layers), hidden_size=d.hidden_size, num_heads=d.num_heads, num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim, intermediate_size=d.intermediate_size, vocab_size=d.vocab_size, format=_format(d).code,
        cache_format=cache_format,
        num_experts=len(experts.router) if experts else 0, num_chosen=experts.num_chosen if experts else 0,
        expert_size=experts.down.shape[2] if experts else 0, is_renormalised=bool(experts and experts.is_renormalised),
        activation=ACTIVATIONS[d.activation], is_gated=is_gated, is_layer_norm=d.is_layer_norm,
        qk_norm=d.qk_norm, is_parallel=d.is_parallel, rotary_dim=d.rotary_dim,
        num_groups=len(layout.groups), num_ropes=len(d.ropes), norm_eps=d.norm_eps,
        embedding_scale=d.embedding_scale, residual_scale=d.residual_scale, logit_scale=d.logit_scale,
        attention_softcap=d.attention_softcap, logit_softcap=d.logit_softcap,
    )  # fmt: skip


def _format(d: ModelDescription) -> WeightFormat:
    return FORMATS[KVFormat.of(d.embedding.dtype).name]


def _pack_all(
    native: NativeModel, d: ModelDescription, layout: CacheLayout, copy_embedding: bool, quantization: str | None = None
) -> None:
    for group, cache in enumerate(layout.groups):
        for position, index in enumerate(cache.layers):
            layer = d.layers[index]
            native.set_layer(
                index,
                window=layer.window or 0,
                rope=layer.rope,
                group=group,
                group_layer=position,
                scale=layer.scale,
            )
    for index, (frequencies, scaling) in enumerate(d.ropes):
        native.set_rope(index, _floats(frequencies), scaling)
    # A copy also lets go of the file mapping that all weights of a safetensors file share.
    embedding = d.embedding.detach().clone() if copy_embedding else d.embedding.detach().contiguous()
    native.set_embedding(embedding.data_ptr(), embedding)
    weight_format = _format(d) if quantization is None else FORMATS[quantization]
    _Packer(native, d, weight_format, {}).pack()
    if quantization is not None:
        _Packer(native, d, weight_format, _tunings(native, d, layout)).pack()


_Tunings = dict[tuple[int, str], InputTuning]


def _tunings(native: NativeModel, d: ModelDescription, layout: CacheLayout) -> _Tunings:
    """Let the model run as it is packed, and look at what its linears are given."""
    linears: dict[tuple[int, str], tuple[Tensor, ...]] = {(-1, "head"): (d.head.weight,)}
    for index, layer in enumerate(d.layers):
        linears[index, "qkv"] = tuple(part.weight for part in layer.qkv)
        linears[index, "out"] = (layer.out.weight,)
        linears[index, "gate_up"] = tuple(part.weight for part in (layer.gate, layer.up) if part is not None)
        if layer.down is not None:
            linears[index, "down"] = (layer.down.weight,)
        if layer.experts is not None:
            # All experts read what one norm made. Too few rows reach each of them to judge the channels before `down`.
            linears[index, "gate_up"] += tuple(layer.experts.gate_up)
    depths = {key: weights[0].shape[1] for key, weights in linears.items()}
    squares = record_inputs(native, depths, layout, d.vocab_size, d.max_position_embeddings)
    tunings = {}
    for (index, name), weights in linears.items():
        vectors = d.final_vectors if index < 0 else d.layers[index].vectors
        is_scaled = FEEDING_NORM.get(name) in vectors
        tunings[index, name] = tune(squares[index, name], widths_of(*weights), is_scaled=is_scaled)
    return tunings


class _Packer:
    """Hands vectors and weights over, changed as int8 wants them."""

    def __init__(
        self, native: NativeModel, d: ModelDescription, weight_format: WeightFormat, tunings: _Tunings
    ) -> None:
        self._native = native
        self._description = d
        self._weight_format = weight_format
        self._tunings = tunings

    def pack(self) -> None:
        """Pack the whole model."""
        d = self._description
        for index, layer in enumerate(d.layers):
            vectors, qkv = layer.vectors, layer.qkv
            if self._native.config.cache_format == FORMATS["int8"].code:
                if "k" in vectors:
                    query, key = even_norms(d, vectors["q"], vectors["k"])
                    vectors = {**vectors, "q": query, "k": key}
                else:
                    qkv = (even_projections(d, qkv, vectors),)
            self._set_vectors(index, vectors)
            self._set(index, "qkv", *qkv)
            self._set(index, "out", layer.out)
            if layer.down is not None:
                self._set(index, "down", layer.down)
            if layer.up is not None:
                self._set(index, "gate_up", *(part for part in (layer.gate, layer.up) if part is not None))
            if layer.experts is not None:
                self._set_experts(index, layer.experts)
        self._set_vectors(-1, d.final_vectors)
        self._set(-1, "head", d.head)

    def _set_vectors(self, layer: int, vectors: dict[str, Tensor]) -> None:
        """Set norms (and sinks); what a weight is multiplied by along its depth, the norm before it is divided by."""
        divisors = {}
        for linear, norm in FEEDING_NORM.items():
            divisors[norm] = divisors[f"{norm}_bias"] = self._tuning(layer, linear).scales
        for name, values in vectors.items():
            floats, divisor = _floats(values), divisors.get(name)
            self._native.set_vector(layer, name, floats if divisor is None else floats / divisor)

    def _set_experts(self, layer: int, experts: Experts) -> None:
        """Pack a router, with the gate of a shared expert as its last row, and all experts."""
        import torch

        router = experts.router if experts.shared_gate is None else torch.cat([experts.router, experts.shared_gate])
        scales = self._tuning(layer, "gate_up").scales
        if scales is not None:  # powers of two: exact
            router = router * torch.from_numpy(scales).to(router.dtype)
        self._set(layer, "router", Projection(router, None))
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            gate, up = gate_up.chunk(2)
            self._set(layer, "expert_gate_up", Projection(gate, None), Projection(up, None), expert=expert)
            self._set(layer, "expert_down", Projection(down, None), expert=expert)

    def _tuning(self, layer: int, name: str) -> InputTuning:
        source = "gate_up" if name == "expert_gate_up" else name
        return self._tunings.get((layer, source), InputTuning(None, None))

    def _set(self, layer: int, name: str, *projections: Projection, expert: int = 0) -> None:
        """Pack the rows of all projections as one matrix: one after the other, or gate and up in turn."""
        import numpy as np

        weights = [_contiguous_rows(projection.weight) for projection in projections]  # alive until they are packed
        addresses = [_addresses(weight) for weight in weights]
        biases = [
            np.zeros(len(weight), np.float32) if projection.bias is None else _floats(projection.bias)
            for weight, projection in zip(weights, projections, strict=True)
        ]
        join = _alternate if name.endswith("gate_up") and len(projections) == 2 else np.concatenate
        source_format, tuning = _format(self._description), self._tuning(layer, name)
        self._native.set_linear(
            layer,
            name,
            join(addresses),
            weights[0].shape[1],
            source_format=source_format,
            weight_format=source_format if name == "router" else self._weight_format,
            expert=expert,
            bias=None if all(projection.bias is None for projection in projections) else join(biases),
            input_scales=tuning.scales,
            importance=tuning.importance,
        )


def _contiguous_rows(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _addresses(weight: Tensor) -> npt.NDArray[np.uint64]:
    """The address of every row."""
    import numpy as np

    stride = weight.stride(0) * weight.element_size()
    return np.uint64(weight.data_ptr()) + np.arange(len(weight), dtype=np.uint64) * np.uint64(stride)


def _alternate(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Half a panel of each of two in turn: the product of a pair is formed where both were computed."""
    import numpy as np

    half = PANEL // 2
    padded = np.pad(np.stack(parts), ((0, 0), (0, -len(parts[0]) % half)))
    return padded.reshape(2, -1, half).transpose(1, 0, 2).reshape(-1)


def _floats(values: Tensor) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = values.detach().float().contiguous().numpy()
    return result
