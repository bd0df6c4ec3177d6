"""Whether native kernels run a model, and how it is built: from a module, a snapshot, or the file as it is.

Worker thread only: who builds a runner executes its plans.
"""

from __future__ import annotations

import functools

import torch

from aiocb.config import Choice
from aiocb.kernels import KernelUnavailable, Library, load
from aiocb.kernels.interface import PAGE_SIZE
from aiocb.model.native.build import build
from aiocb.model.native.families import ModelDescription, describe
from aiocb.model.native.runner import NativeRunner
from aiocb.model.native.stored import build_stored
from aiocb.model.request import Candidate, Material, ModelRequest, Refusal

__all__ = ["plan"]


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
    if material.stored is not None:
        description = describe(material.stored.module, has_memory=False)
    else:
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
    if material.stored is not None:
        return build_stored(request, material, material.stored, description, library)
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
