"""Making a native runner of a described model: pack its weights, compare it with the module.

Worker thread only: who builds a runner executes its plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from aiocb.attention.base import KVFormat, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import KernelError, Library
from aiocb.kernels.interface import PAGE_SIZE
from aiocb.kernels.threads import default_num_threads
from aiocb.model.kv import choose_layout, choose_page_size
from aiocb.model.native.families import ModelDescription
from aiocb.model.native.rows import FindRows, tensor_rows
from aiocb.model.native.runner import NativeRunner
from aiocb.model.native.sampling import NativeSampler
from aiocb.model.native.weights import build_native_model
from aiocb.model.request import Refusal
from aiocb.model.swap import choose_swap

if TYPE_CHECKING:
    from aiocb.sampling.sampler import Sampler

__all__ = ["build"]


def build(
    description: ModelDescription,
    library: Library,
    config: EngineConfig,
    *,
    max_model_len: int,
    sampler: Sampler | None = None,
    module: Any = None,
    is_owned: bool = False,
    quantization: str | None = None,
    find_rows: FindRows = tensor_rows,
    weights_label: str = "",
    reserved: Mapping[str, int] | None = None,
    instruction_set: str | None = None,
    checks_parity: bool = True,
) -> NativeRunner | Refusal:
    """Build the native runner of a described model.

    Args:
        description: of the module, or kept from an earlier start.
        library: the kernels.
        config: page size, blocks, memory and threads are taken from it.
        max_model_len: most tokens of a request.
        sampler: for whatever is not plain greedy; None selects in native code.
        module: compared with, where there is one, and read again when weights change.
        is_owned: nothing of the module is read after packing.
        quantization: "int8", "int4", or None for the weights as they are stored.
        find_rows: says where the weights of the description lie.
        weights_label: what they are, where that is neither their dtype nor their quantization.
        reserved: bytes that will be taken of the memory that is free, by what that is, and are not there for the cache.
        instruction_set: instruction set; None for the best of this processor.
        checks_parity: compare with the module's own forward.

    Raises:
        ConfigError: not even one short request would fit into the cache that is configured.
    """
    page_size, page_choice = choose_page_size(config, PAGE_SIZE, "the native kernels read")
    dtype = description.dtype
    layout, layout_choice = choose_layout(
        KVFormat.of(dtype), _specs(description), page_size, config, max_model_len, torch.device("cpu"), reserved
    )
    layout, swap_choice = choose_swap(layout, config, is_on_host=True)
    threads = config.num_threads or default_num_threads()
    try:
        native = build_native_model(
            library,
            description,
            layout,
            threads,
            instruction_set,
            copy_embedding=is_owned,
            quantization=quantization,
            find_rows=find_rows,
        )
    except (KernelError, LookupError) as error:
        return Refusal(str(error))
    weights = quantization or weights_label or KVFormat.of(dtype).name
    # Quantised weights are not read again: the cache would be overwritten by the run that looks at activations.
    kept = None if is_owned or quantization is not None else module
    runner = NativeRunner(native, description, layout, sampler or NativeSampler(description.vocab_size, native), kept)
    kernels = Choice("kernels", f"{native.instruction_set}, {weights}, {threads} threads", description.family)
    runner.choices = (page_choice, layout_choice, swap_choice, kernels)
    if module is not None and checks_parity:
        from aiocb.model.parity import check_parity

        try:
            runner.choices += (check_parity(module, runner, weights),)
        except ConfigError as error:
            runner.close()
            return Refusal(str(error))
    return runner


def _specs(d: ModelDescription) -> list[LayerSpec]:
    return [
        LayerSpec(index, d.num_heads, d.num_kv_heads, d.head_dim, d.head_dim, layer.scale, layer.window)
        for index, layer in enumerate(d.layers)
    ]
