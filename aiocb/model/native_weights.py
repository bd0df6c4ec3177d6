"""Thread: the worker's only. Turning a described model into packed native weights.

Weights are handed over as the address of the source row of every packed column, so that fusing q, k and v or pairing
gate and up columns needs no copy on the Python side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiocb.kernels import KernelError, Library, NativeModel
from aiocb.kernels.library import ACTIVATIONS, FORMATS, ModelConfig
from aiocb.model.families import LayerDescription, ModelDescription, Projection
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
    cores: Sequence[int] | None,
    level: str | None,
    copy_embedding: bool,
) -> NativeModel:
    """Pack all weights and reserve the cache.

    With `copy_embedding` nothing of the module is read afterwards; else its embedding is borrowed.

    Raises:
        KernelError: the kernels do not support a shape of the model.
    """
    config = _config(description, layout)
    native = NativeModel(library, config, num_threads=num_threads, cores=cores, level=level)
    for group, cache in enumerate(layout.groups):
        native.set_group(group, cache.num_blocks, len(cache.layers))
    _pack_all(native, description, layout, copy_embedding)
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
    weight_format = _format(d)
    return ModelConfig(
        num_layers=len(d.layers), hidden_size=d.hidden_size, num_heads=d.num_heads, num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim, intermediate_size=d.intermediate_size, vocab_size=d.vocab_size, format=weight_format,
        activation=ACTIVATIONS[d.activation], is_gated=d.layers[0].gate is not None, is_layer_norm=d.is_layer_norm,
        qk_norm=d.qk_norm, is_parallel=d.is_parallel, rotary_dim=d.rotary_dim, is_interleaved=0,
        num_groups=len(layout.groups), num_ropes=len(d.ropes), embedding_format=weight_format, norm_eps=d.norm_eps,
        embedding_scale=d.embedding_scale, residual_scale=d.residual_scale, logit_scale=d.logit_scale,
        attention_softcap=d.attention_softcap, logit_softcap=d.logit_softcap,
    )  # fmt: skip


def _format(d: ModelDescription) -> int:
    return FORMATS[str(d.embedding.dtype).removeprefix("torch.")]


def _pack_all(native: NativeModel, d: ModelDescription, layout: CacheLayout, copy_embedding: bool) -> None:
    weight_format = _format(d)
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
    for index, layer in enumerate(d.layers):
        _pack_layer(native, index, layer, weight_format)
    for name, values in d.final_vectors.items():
        native.set_vector(-1, name, _floats(values))
    _pack(native, -1, "head", d.head, weight_format)
    # A copy also lets go of the file mapping that all weights of a safetensors file share.
    embedding = d.embedding.detach().clone() if copy_embedding else d.embedding.detach().contiguous()
    native.set_embedding(embedding.data_ptr(), embedding)


def _pack_layer(native: NativeModel, index: int, layer: LayerDescription, weight_format: int) -> None:
    import numpy as np

    for name, values in layer.vectors.items():
        native.set_vector(index, name, _floats(values))
    _pack(native, index, "qkv", layer.qkv, weight_format)
    _pack(native, index, "out", layer.out, weight_format)
    _pack(native, index, "down", layer.down, weight_format)
    if layer.gate is None:
        _pack(native, index, "gate_up", layer.up, weight_format)
        return
    # A panel is 32 gate and 32 up columns: the product of a pair is formed where both were computed.
    columns = layer.up.weight.shape[0]
    panels = -(-columns // 32)
    gate, up = _Rows(layer.gate), _Rows(layer.up)
    rows = np.zeros((panels, 2, 32), np.uint64)
    biases = np.zeros((panels, 2, 32), np.float32)
    for side, source in enumerate((gate, up)):
        padded = np.zeros(panels * 32, np.uint64)
        padded[:columns] = source.addresses
        rows[:, side] = padded.reshape(panels, 32)
        if source.bias is not None:
            bias = np.zeros(panels * 32, np.float32)
            bias[:columns] = source.bias
            biases[:, side] = bias.reshape(panels, 32)
    has_bias = gate.bias is not None or up.bias is not None
    native.set_linear(
        index,
        "gate_up",
        rows.reshape(-1),
        gate.depth,
        source_format=weight_format,
        weight_format=weight_format,
        bias=biases.reshape(-1) if has_bias else None,
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


def _pack(native: NativeModel, layer: int, name: str, projection: Projection, weight_format: int) -> None:
    rows = _Rows(projection)
    native.set_linear(
        layer,
        name,
        rows.addresses,
        rows.depth,
        source_format=weight_format,
        weight_format=weight_format,
        bias=rows.bias,
    )


def _floats(values: Tensor) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = values.detach().float().contiguous().numpy()
    return result
