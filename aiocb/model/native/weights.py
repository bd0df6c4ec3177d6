"""Thread: the worker's only. Turning a described model into packed native weights.

Weights are handed over as the address of the source row of every packed column, so that fusing q, k and v or pairing
gate and up columns needs no copy on the Python side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiocb.attention.base import KVFormat
from aiocb.kernels import KernelError, Library, NativeModel
from aiocb.kernels.formats import FORMATS, INT4, INT8, PANEL, WeightFormat, WeightSource
from aiocb.kernels.interface import ACTIVATIONS, PAGE_SIZE, ModelConfig
from aiocb.model.native.families import Experts, ModelDescription, Projection
from aiocb.model.native.int8 import FEEDING_NORM, InputTuning, record_inputs, tune, widths_of
from aiocb.model.native.rows import FindRows, tensor_rows
from aiocb.step import CacheLayout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["build_native_model", "pack_again", "stored_bytes"]


def build_native_model(
    library: Library,
    description: ModelDescription,
    layout: CacheLayout,
    num_threads: int,
    instruction_set: str | None,
    copy_embedding: bool,
    quantization: str | None = None,
    find_rows: FindRows = tensor_rows,
) -> NativeModel:
    """Pack all weights and reserve the cache.

    With `copy_embedding` nothing of the module is read afterwards; else its embedding is borrowed. `quantization` is
    None for the weights as they are stored, "int8" or "int4". `find_rows` says where the weights lie.

    Raises:
        KernelError: the kernels do not support a shape of the model.
        LookupError: `find_rows` does not find a weight.
    """
    config = _config(description, layout)
    native = NativeModel(library, config, num_threads=num_threads, instruction_set=instruction_set)
    for group, cache in enumerate(layout.groups):
        native.set_group(group, cache.num_blocks * layout.page_size // PAGE_SIZE, len(cache.layers))
    _pack_all(native, description, layout, copy_embedding, quantization, find_rows)
    return native


def stored_bytes(d: ModelDescription, find_rows: FindRows) -> int:
    """Bytes of the packed weights of a model without experts that are packed as they are stored.

    Raises:
        LookupError: `find_rows` does not find a weight.
    """
    parts = [part for layer in d.layers for part in (*layer.qkv, layer.out, layer.gate, layer.up, layer.down)]
    weights = [part.weight for part in (*parts, d.head) if part is not None]
    return sum(_target(d, find_rows(weight).source).packed_bytes(*weight.shape) for weight in weights)


def pack_again(native: NativeModel, description: ModelDescription, layout: CacheLayout) -> None:
    """Read all weights once more, into the memory where they are.

    Raises:
        KernelError: the model's shape has changed.
    """
    if bytes(_config(description, layout)) != bytes(native.config):
        raise KernelError("the model has another shape than the one that was loaded; only its weights may change")
    _pack_all(native, description, layout, copy_embedding=False)


def _config(d: ModelDescription, layout: CacheLayout) -> ModelConfig:
    experts = next((layer.experts for layer in d.layers if layer.experts is not None), None)
    is_gated = all(layer.gate is not None or layer.up is None for layer in d.layers)
    return ModelConfig(
        num_layers=len(d.layers), hidden_size=d.hidden_size, num_heads=d.num_heads, num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim, intermediate_size=d.intermediate_size, vocab_size=d.vocab_size, format=_format(d).code,
        num_experts=len(experts.router) if experts else 0, num_chosen=experts.num_chosen if experts else 0,
        expert_size=experts.down.shape[2] if experts else 0, is_renormalised=bool(experts and experts.is_renormalised),
        activation=ACTIVATIONS[d.activation], is_gated=is_gated, is_layer_norm=d.is_layer_norm,
        qk_norm=d.qk_norm, is_parallel=d.is_parallel, rotary_dim=d.rotary_dim,
        num_groups=len(layout.groups), num_ropes=len(d.ropes), norm_eps=d.norm_eps,
        embedding_scale=d.embedding_scale, residual_scale=d.residual_scale, logit_scale=d.logit_scale,
        attention_softcap=d.attention_softcap, logit_softcap=d.logit_softcap,
    )  # fmt: skip


def _target(d: ModelDescription, source: WeightSource, quantization: str | None = None) -> WeightFormat:
    """The format that a weight is packed in: what was asked for, else the nearest to what it is stored as."""
    if quantization is not None:
        return FORMATS[quantization]
    if source.weights == 1:
        return _format(d)
    return INT4 if source.name in _FOUR_BITS else INT8


def _format(d: ModelDescription) -> WeightFormat:
    return FORMATS[KVFormat.of(d.dtype).name]


def _pack_all(
    native: NativeModel,
    d: ModelDescription,
    layout: CacheLayout,
    copy_embedding: bool,
    quantization: str | None = None,
    find_rows: FindRows = tensor_rows,
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
    embedding = d.embedding.detach()
    if find_rows is tensor_rows:
        # A copy also lets go of the file mapping that all weights of a safetensors file share.
        embedding = embedding.clone() if copy_embedding else embedding.contiguous()
    rows = find_rows(embedding)
    native.set_embedding(int(rows.addresses[0]), rows.source, rows.owner)
    packer = _Packer(native, d, quantization, find_rows, {})
    packer.pack()
    if quantization is not None:
        _Packer(native, d, quantization, find_rows, _tunings(native, d, layout)).pack()


_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
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
    """Hands vectors and weights over, changed as whole numbers want them."""

    def __init__(
        self,
        native: NativeModel,
        d: ModelDescription,
        quantization: str | None,
        find_rows: FindRows,
        tunings: _Tunings,
    ) -> None:
        self._native = native
        self._description = d
        self._quantization = quantization
        self._find_rows = find_rows
        self._tunings = tunings

    def pack(self) -> None:
        """Pack the whole model."""
        d = self._description
        for index, layer in enumerate(d.layers):
            self._set_vectors(index, layer.vectors)
            self._set_qkv(index, layer.qkv)
            self._set(index, "out", layer.out)
            if layer.down is not None:
                self._set(index, "down", layer.down)
            if layer.up is not None:
                self._set(index, "gate_up", *(part for part in (layer.gate, layer.up) if part is not None))
            if layer.experts is not None:
                self._set_experts(index, layer.experts)
        self._set_vectors(-1, d.final_vectors)
        self._set(-1, "head", d.head)

    def _set_qkv(self, layer: int, parts: tuple[Projection, ...]) -> None:
        """Pack queries, keys and values; values by themselves where they are stored in another format than both."""
        if len(parts) == 3:
            *others, value = (self._target(self._find_rows(part.weight).source) for part in parts)
            if value not in others and sum(len(part.weight) for part in parts[:2]) % PANEL == 0:
                self._set(layer, "qkv", *parts[:2])
                self._set(layer, "value", parts[2])
                return
        self._set(layer, "qkv", *parts)

    def _target(self, source: WeightSource) -> WeightFormat:
        return _target(self._description, source, self._quantization)

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

        rows = [self._find_rows(projection.weight) for projection in projections]  # alive until they are packed
        biases = [
            np.zeros(len(each.addresses), np.float32) if projection.bias is None else _floats(projection.bias)
            for each, projection in zip(rows, projections, strict=True)
        ]
        join = _alternate if name.endswith("gate_up") and len(projections) == 2 else np.concatenate
        tuning = self._tuning(layer, name)
        target = max((self._target(each.source) for each in rows), key=lambda each: each.bits)
        if name == "head" and self._quantization == INT4.name:
            target = INT8  # as files of four bits have it: it is most sensitive, and read once a token
        self._native.set_linear(
            layer,
            name,
            join([each.addresses for each in rows]),
            projections[0].weight.shape[1],
            source=join([np.full(len(each.addresses), each.source.code, np.int32) for each in rows]),
            weight_format=_format(self._description) if name == "router" else target,
            expert=expert,
            bias=None if all(projection.bias is None for projection in projections) else join(biases),
            input_scales=tuning.scales,
            importance=tuning.importance,
        )


def _alternate(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Half a panel of each of two in turn: the product of a pair is formed where both were computed."""
    import numpy as np

    half = PANEL // 2
    padded = np.pad(np.stack(parts), ((0, 0), (0, -len(parts[0]) % half)))
    return padded.reshape(2, -1, half).transpose(1, 0, 2).reshape(-1)


def _floats(values: Tensor) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = values.detach().float().contiguous().numpy()
    return result
