"""Opening a model: native kernels where they can run it, else module by module. Worker thread only.

by name ─► located ─► files here? ─► snapshot? ──► native runner           (the second start of a model on a CPU)
                      └──────────────┴──► module ─► native runner, which leaves a snapshot for the next start
a module ─────────────────────────────────┴───────► or eager runner
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.model.load import hub
from aiocb.model.request import Material, ModelRequest, Opened, Refusal

if TYPE_CHECKING:
    from aiocb.model.request import Candidate
    from aiocb.step import Runner

__all__ = ["open_model"]

logger = logging.getLogger("aiocb")


def open_model(request: ModelRequest) -> Opened:
    """Load a model where it is not there yet, and build its runner.

    Raises:
        ConfigError: the model cannot be loaded or run, or a setting cannot work with it.
    """
    if request.distributed is not None or getattr(request.model, "_device_mesh", None) is not None:
        from aiocb.model.eager.parallel import open_parallel

        return open_parallel(request, _open_here)
    return _open_here(request)


def _open_here(request: ModelRequest) -> Opened:
    if request.quantization not in (None, "int8", "int4"):
        raise ConfigError(
            f"quantization={request.quantization!r} is unknown: 'int8', 'int4', or None for the weights as they are"
        )
    origin: tuple[Choice, ...] = ()
    if request.model is None:
        request.report("import", 0.0)
        located = hub.locate(request.name, request.dtype, request.device, request.options, request.report)
        request = replace(request, name=located.name, options=located.options)
        origin = located.choices
    opened = _open_located(request)
    return opened._replace(choices=(*origin, *opened.choices))


def _open_located(request: ModelRequest) -> Opened:
    from aiocb.model.native import plan as native

    # A file as it is comes first: what was made of it in another dtype is not what is asked for.
    stored = _stored(request)
    why_converted: tuple[Choice, ...] = ()
    if isinstance(stored, Material):
        _refuse_accelerated(request, "cpu")
        runner = _built(native.plan(request, stored))
        if not isinstance(runner, Refusal):
            return _opened(request, stored, runner)
        stored = runner
    if stored is not None:
        logger.info("the file is converted: %s", stored.reason)
        why_converted = (Choice("gguf", "converted", stored.reason),)
    kept = _kept(request)
    if kept is not None:
        _refuse_accelerated(request, "cpu")
        kept = kept._replace(choices=(*kept.choices, *why_converted))
        runner = _built(native.plan(request, kept))
        if not isinstance(runner, Refusal):
            return _opened(request, kept, runner)
    from aiocb.model.eager import build as eager

    material = _loaded(request)
    material = material._replace(choices=(*material.choices, *why_converted))
    _refuse_accelerated(request, material.module.device.type)
    refused = _built(native.plan(request, material))
    if not isinstance(refused, Refusal):
        return _opened(request, material, refused)
    runner = _built(eager.plan(request, material))
    if isinstance(runner, Refusal):
        raise ConfigError(f"{runner.reason}, and the native runner cannot be used: {refused.reason}")
    return _opened(request, material, runner, refused.reason)


def _refuse_accelerated(request: ModelRequest, device_type: str) -> None:
    names = request.config.accelerator_settings()
    if names and device_type != "cuda":
        raise ConfigError(f"{', '.join(names)} needs a CUDA device, the model is on {device_type}; leave it out")


def _built(plan: Candidate | Refusal) -> Runner | Refusal:
    return plan if isinstance(plan, Refusal) else plan.build()


def _opened(request: ModelRequest, material: Material, runner: Runner, why_not_native: str = "") -> Opened:
    kind = Choice("runner", "torch", why_not_native) if why_not_native else Choice("runner", "native", "the whole step")
    choices = (*material.choices, kind, *_library_choice(request, material), *runner.choices)
    model = material.module if why_not_native or not request.is_owned else None
    return Opened(runner, material.defaults, material.tokenizer, choices, model)


def _library_choice(request: ModelRequest, material: Material) -> tuple[Choice, ...]:
    """Where the native kernels came from; says once more, and louder, when there are none and torch has to do."""
    is_on_cpu = material.module is None or material.module.device.type == "cpu"
    if request.config.native is False or not is_on_cpu:
        return ()
    from aiocb.kernels import KernelUnavailable, load

    library = load()
    if not isinstance(library, KernelUnavailable):
        return (Choice("library", library.origin, str(library.path)),)
    logger.warning("plain torch runs the model, which is several times slower: %s", library.reason)
    return (Choice("library", "none", library.reason),)


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


def _stored(request: ModelRequest) -> Material | Refusal | None:
    """A GGUF file as it is; None where it is none or more was asked for, or why it has to be converted."""
    config = request.config
    if request.model is not None or hub.unused_by_files(request.options) or request.quantization is not None:
        return None
    if config.native is False or config.attention is not None:
        return None
    found = hub.find_file(request.name, request.dtype, request.device)
    if found is None:
        return None
    from aiocb.kernels import KernelUnavailable, load
    from aiocb.model.defaults import length_reason, model_defaults
    from aiocb.model.load import gguf_stored

    library = load()
    if isinstance(library, KernelUnavailable):
        return Refusal(library.reason)
    loaded = hub.load_stored(found, request.progress)
    if isinstance(loaded, gguf_stored.Unstorable):
        return Refusal(str(loaded))
    module = loaded.stored.module
    material = Material(
        model_defaults(module),
        length_reason(module),
        stored=loaded.stored,
        tokenizer=loaded.tokenizer,
        choices=loaded.choices,
    )
    return _with_length(request, material)


def _loaded(request: ModelRequest) -> Material:
    """The module, loaded by name if need be."""
    from aiocb.model.defaults import length_reason, model_defaults

    loaded, module = None, request.model
    if module is None:
        loaded = hub.load(
            request.name, dtype=request.dtype, device=request.device, progress=request.progress, **request.options
        )
        module = loaded.model
    material = Material(model_defaults(module), length_reason(module), module)
    if loaded is not None:
        material = material._replace(tokenizer=loaded.tokenizer, choices=loaded.choices, found=loaded.found)
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
