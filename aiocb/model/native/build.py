"""Making a native runner: describe the module, pack its weights, compare it with the module, free what is not needed.

Worker thread only: who builds a runner executes its plans.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from aiocb.attention.base import KVFormat, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import KernelError, KernelUnavailable, Library, load
from aiocb.kernels.interface import PAGE_SIZE
from aiocb.kernels.threads import default_num_threads
from aiocb.model.kv import choose_cache_dtype, choose_layout, choose_page_size
from aiocb.model.native.families import ModelDescription, describe
from aiocb.model.native.runner import NativeRunner
from aiocb.model.native.sampling import NativeSampler
from aiocb.model.native.weights import build_native_model
from aiocb.model.request import Candidate, Material, ModelRequest, Refusal
from aiocb.model.swap import choose_swap

if TYPE_CHECKING:
    from aiocb.sampling.sampler import Sampler

__all__ = ["build", "plan"]


def plan(request: ModelRequest, material: Material) -> Candidate | Refusal:
    """See whether native kernels run this model as the settings ask."""
    config, module = request.config, material.module
    if config.native is False:
        return Refusal("native=False")
    if config.attention is not None:
        return Refusal(f"attention={config.attention!r} was asked for")
    if (config.page_size or PAGE_SIZE) % PAGE_SIZE:
        return Refusal(f"native kernels work on multiples of {PAGE_SIZE} tokens, not on pages of {config.page_size}")
    if module is not None and module.device.type != "cpu":
        return Refusal(f"the model is on {module.device.type} (device='cpu' puts it on the CPU)")
    description = material.description or describe(module)
    if isinstance(description, str):
        return Refusal(description)
    library = load()
    if isinstance(library, KernelUnavailable):
        return Refusal(library.reason)
    return Candidate(functools.partial(_build, request, material, description, library))


def _build(
    request: ModelRequest, material: Material, description: ModelDescription, library: Library
) -> NativeRunner | Refusal:
    """Build, leave a snapshot for the next start, and free the module where it is nobody else's."""
    module = material.module
    runner = build(
        description,
        library,
        request.config,
        max_model_len=material.max_model_len,
        sampler=request.sampler,
        module=module,
        is_owned=request.is_owned,
        quantization=request.quantization,
    )
    if isinstance(runner, Refusal):
        return runner
    if module is None:
        runner.choices += (Choice("parity", material.parity, "when this model was started first"),)
    elif request.is_owned:
        from aiocb.model.load import snapshot

        parity = next(choice.value for choice in runner.choices if choice.name == "parity")
        snapshot.save(material._replace(parity=parity), description, library, request.quantization)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
    return runner


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
        quantization: "int8" or None.
        instruction_set: instruction set; None for the best of this processor.
        checks_parity: compare with the module's own forward.

    Raises:
        ConfigError: not even one short request would fit into the cache that is configured.
    """
    page_size, page_choice = choose_page_size(config, PAGE_SIZE, "the native kernels read")
    dtype = description.embedding.dtype
    cache_dtype, cache_choice = choose_cache_dtype(config, dtype)
    kv_format = KVFormat.of(cache_dtype)
    layout, layout_choice = choose_layout(
        kv_format, _specs(description), page_size, config, max_model_len, torch.device("cpu")
    )
    layout, swap_choice = choose_swap(layout, config, is_on_host=True)
    threads = config.num_threads or default_num_threads()
    try:
        native = build_native_model(
            library,
            description,
            layout,
            kv_format,
            threads,
            instruction_set,
            copy_embedding=is_owned,
            quantization=quantization,
        )
    except KernelError as error:
        return Refusal(str(error))
    weights = quantization or KVFormat.of(dtype).name
    # Quantised weights are not read again: the cache would be overwritten by the run that looks at activations.
    kept = None if is_owned or quantization is not None else module
    runner = NativeRunner(native, description, layout, sampler or NativeSampler(description.vocab_size, native), kept)
    kernels = Choice("kernels", f"{native.instruction_set}, {weights}, {threads} threads", description.family)
    runner.choices = (page_choice, cache_choice, layout_choice, swap_choice, kernels)
    if module is not None and checks_parity:
        from aiocb.model.parity import check_parity

        try:
            runner.choices += (check_parity(module, runner, weights if cache_dtype == dtype else kv_format.name),)
        except ConfigError as error:
            runner.close()
            return Refusal(str(error))
    return runner


def _specs(d: ModelDescription) -> list[LayerSpec]:
    return [
        LayerSpec(index, d.num_heads, d.num_kv_heads, d.head_dim, d.head_dim, layer.scale, layer.window)
        for index, layer in enumerate(d.layers)
    ]
