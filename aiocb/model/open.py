"""Opening a model: native kernels where they can run it, else module by module. Worker thread only.

by name ─► files here? ─► snapshot? ──► native runner            (the second start of a file or folder on a CPU)
           └──────────────┴──► module ─► native runner, which leaves a snapshot for the next start
a module ──────────────────────┴───────► or eager runner
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.model.load import hub
from aiocb.model.request import Material, ModelRequest, Opened, Refusal

if TYPE_CHECKING:
    from aiocb.model.request import Candidate
    from aiocb.step import Runner

__all__ = ["QUANTIZATIONS", "open_model"]

QUANTIZATIONS = (None, "int8")


def open_model(request: ModelRequest) -> Opened:
    """Load a model where it is not there yet, and build its runner.

    Raises:
        ConfigError: the model cannot be loaded or run, or a setting cannot work with it.
    """
    from aiocb.model.native import build as native

    if request.quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={request.quantization!r} is unknown: 'int8', or None for the weights as they are"
        )
    kept = _kept(request)
    if kept is not None:
        runner = _built(native.plan(request, kept))
        if not isinstance(runner, Refusal):
            return _opened(kept, runner, "native")
    from aiocb.model.eager import build as eager

    material = _loaded(request)
    runner = refused = _built(native.plan(request, material))
    if not isinstance(refused, Refusal):
        return _opened(material, refused, "native", is_taken_over=request.is_owned)
    runner = _built(eager.plan(request, material))
    if isinstance(runner, Refusal):
        raise ConfigError(f"{runner.reason}, and the native runner cannot be used: {refused.reason}")
    return _opened(material, runner, "torch", refused.reason)


def _built(plan: Candidate | Refusal) -> Runner | Refusal:
    return plan if isinstance(plan, Refusal) else plan.build()


def _opened(
    material: Material, runner: Runner, kind: str, reason: str = "the whole step", *, is_taken_over: bool = False
) -> Opened:
    choices = (*material.choices, Choice("runner", kind, reason), *runner.choices)
    model = None if is_taken_over else material.module
    return Opened(runner, material.defaults, material.tokenizer, choices, model)


def _kept(request: ModelRequest) -> Material | None:
    """What an earlier start has left; None when there was none, or the settings ask for something else."""
    config = request.config
    if request.model is not None or request.options or config.native is False or config.attention is not None:
        return None
    request.report("import", 0.0)
    with hub.quiet():
        from aiocb.kernels import KernelUnavailable, load
        from aiocb.model.load import snapshot

        request.report("import", 1.0)
        found = hub.find(request.name, request.dtype, request.device)
        if found is None:
            return None
        library = load()
        if isinstance(library, KernelUnavailable):
            return None
        request.report("load", 0.0)
        material = snapshot.load(snapshot.snapshot_folder(found, library, request.quantization), found)
        if material is None:
            return None
        request.report("load", 1.0)
    return _with_length(request, material)


def _loaded(request: ModelRequest) -> Material:
    """The module, loaded by name if need be."""
    from aiocb.model.defaults import length_reason, model_defaults

    module = request.model
    if module is not None:
        return _with_length(request, Material(model_defaults(module), length_reason(module), module))
    loaded = hub.load(
        request.name, dtype=request.dtype, device=request.device, progress=request.progress, **request.options
    )
    module = loaded.model
    material = Material(
        model_defaults(module),
        length_reason(module),
        module,
        tokenizer=loaded.tokenizer,
        choices=loaded.choices,
        found=loaded.found,
    )
    return _with_length(request, material)


def _with_length(request: ModelRequest, material: Material) -> Material:
    """Settle the most tokens of a request: the model's own number, or a smaller one that is configured."""
    longest, configured = material.defaults.max_model_len, request.config.max_model_len
    if configured is not None and configured > longest:
        raise ConfigError(f"max_model_len={configured} is more than the model's positions allow ({longest})")
    choice = Choice(
        "max_model_len",
        str(longest if configured is None else configured),
        material.length_reason if configured is None else "configured",
    )
    return material._replace(max_model_len=configured or longest, choices=(*material.choices, choice))
