"""Thread: the worker's only. Turning a described model into packed native weights.

Weights are handed over as the address of the source row of every packed column, so that fusing q, k and v or pairing
gate and up columns needs no copy on the Python side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocb.attention.base import KVFormat
from aiocb.kernels import KernelError, Library, NativeModel
from aiocb.kernels.formats import FORMATS, PANEL, WeightFormat
from aiocb.kernels.interface import ACTIVATIONS, PAGE_SIZE, ModelConfig
from aiocb.model.native.families import Experts, ModelDescription, Projection
from aiocb.model.native.int8 import FEEDING_NORM, InputTuning, record_inputs, tune, widths_of
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
    config = _config(description, layout)
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
    _pack_model(native, d, weight_format, {})
    if quantization is not None:
        _pack_model(native, d, weight_format, _tunings(native, d, layout))


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


def _pack_model(native: NativeModel, d: ModelDescription, weight_format: WeightFormat, tunings: _Tunings) -> None:
    packer = _Packer(native, _format(d), weight_format, tunings)
    for index, layer in enumerate(d.layers):
        packer.vectors(index, layer.vectors)
        packer.pack(index, "qkv", *layer.qkv)
        packer.pack(index, "out", layer.out)
        if layer.down is not None:
            packer.pack(index, "down", layer.down)
        if layer.gate is not None and layer.up is not None:
            packer.pack_gated(index, layer.gate, layer.up)
        elif layer.up is not None:
            packer.pack(index, "gate_up", layer.up)
        if layer.experts is not None:
            packer.pack_experts(index, layer.experts)
    packer.vectors(-1, d.final_vectors)
    packer.pack(-1, "head", d.head)


class _Packer:
    """Hands vectors and weights over, changed as int8 wants them."""

    def __init__(
        self, native: NativeModel, source_format: WeightFormat, weight_format: WeightFormat, tunings: _Tunings
    ) -> None:
        self.native = native
        self.source_format = source_format
        self.weight_format = weight_format
        self.tunings = tunings

    def vectors(self, layer: int, vectors: dict[str, Tensor]) -> None:
        """Set norms (and sinks); what a weight is multiplied by along its depth, the norm before it is divided by."""
        divisors = {}
        for linear, norm in FEEDING_NORM.items():
            tuning = self.tunings.get((layer, linear))
            if tuning is not None and tuning.scales is not None:
                divisors[norm] = divisors[f"{norm}_bias"] = tuning.scales
        for name, values in vectors.items():
            floats = _floats(values)
            self.native.set_vector(layer, name, floats / divisors[name] if name in divisors else floats)

    def pack_experts(self, layer: int, experts: Experts) -> None:
        """Pack a router, with the gate of a shared expert as its last row, and all experts."""
        import torch

        router = experts.router if experts.shared_gate is None else torch.cat([experts.router, experts.shared_gate])
        scales = self.tunings.get((layer, "gate_up"), InputTuning(None, None)).scales
        if scales is not None:  # powers of two: exact
            router = router * torch.from_numpy(scales).to(router.dtype)
        rows = _Rows(Projection(router, None))
        self._set(layer, "router", rows.addresses, rows.depth, None)
        half = experts.gate_up.shape[1] // 2
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            gate, up = Projection(gate_up[:half], None), Projection(gate_up[half:], None)
            self.pack_gated(layer, gate, up, name="expert_gate_up", expert=expert)
            rows = _Rows(Projection(down, None))
            self._set(layer, "expert_down", rows.addresses, rows.depth, None, expert)

    def pack(self, layer: int, name: str, *projections: Projection) -> None:
        """Pack the rows of all projections as one matrix."""
        import numpy as np

        parts = [_Rows(projection) for projection in projections]
        bias = None
        if any(part.bias is not None for part in parts):
            zeros = (np.zeros(len(part.addresses), np.float32) for part in parts)
            bias = np.concatenate(
                [zero if part.bias is None else part.bias for part, zero in zip(parts, zeros, strict=True)]
            )
        self._set(layer, name, np.concatenate([part.addresses for part in parts]), parts[0].depth, bias)

    def pack_gated(
        self,
        layer: int,
        gate_projection: Projection,
        up_projection: Projection,
        *,
        name: str = "gate_up",
        expert: int = 0,
    ) -> None:
        """A panel is 32 gate and 32 up columns: the product of a pair is formed where both were computed."""
        import numpy as np

        half = PANEL // 2
        panels = -(-up_projection.weight.shape[0] // half)
        gate, up = _Rows(gate_projection), _Rows(up_projection)
        rows = np.zeros((panels, 2, half), np.uint64)
        biases = np.zeros((panels, 2, half), np.float32)
        for side, source in enumerate((gate, up)):
            rows[:, side] = _padded(source.addresses, panels * half).reshape(panels, half)
            if source.bias is not None:
                biases[:, side] = _padded(source.bias, panels * half).reshape(panels, half)
        has_bias = gate.bias is not None or up.bias is not None
        self._set(layer, name, rows.reshape(-1), gate.depth, biases.reshape(-1) if has_bias else None, expert)

    def _set(
        self,
        layer: int,
        name: str,
        addresses: npt.NDArray[np.uint64],
        depth: int,
        bias: npt.NDArray[np.float32] | None,
        expert: int = 0,
    ) -> None:
        source = "gate_up" if name == "expert_gate_up" else name
        tuning = self.tunings.get((layer, source), InputTuning(None, None))
        self.native.set_linear(
            layer,
            name,
            addresses,
            depth,
            source_format=self.source_format,
            weight_format=self.source_format if name == "router" else self.weight_format,
            expert=expert,
            bias=bias,
            input_scales=tuning.scales,
            importance=tuning.importance,
        )


class _Rows:
    """The address of every row of a weight; keeps the memory alive while it is packed."""

    def __init__(self, projection: Projection) -> None:
        import numpy as np

        weight = projection.weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self.weight = weight
        self.depth = weight.shape[1]
        stride = weight.stride(0) * weight.element_size()
        self.addresses = np.uint64(weight.data_ptr()) + np.arange(weight.shape[0], dtype=np.uint64) * np.uint64(stride)
        self.bias = None if projection.bias is None else _floats(projection.bias)


def _padded(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    import numpy as np

    result = np.zeros(size, values.dtype)
    result[: len(values)] = values
    return result


def _floats(values: Tensor) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = values.detach().float().contiguous().numpy()
    return result
