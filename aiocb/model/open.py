"""Opening a model by name: from a snapshot where there is one, else by way of the module. Worker thread only.

name ─► weights here? ─► snapshot? ──► native runner             (the second start of a file or folder on a CPU)
└──────┴───────────────┴──► module ─► native or torch runner ─► snapshot for the next start
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.load import hub as loader
from aiocb.sampling_params import ModelDefaults

if TYPE_CHECKING:
    from aiocb.model.load.snapshot import Encoded
    from aiocb.model.native import NativeRunner
    from aiocb.step import Runner

logger = logging.getLogger("aiocb.model")

__all__ = ["Pretrained", "choose_length", "open_pretrained"]


class Pretrained(NamedTuple):
    """A model that is ready to step.

    Attributes:
        runner: built over the model.
        defaults: what the model says about itself.
        tokenizer: None when there is none.
        choices: what was decided on the way, with reasons.
        model: the transformers module, or None where the runner has its own weights.
    """

    runner: Runner
    defaults: ModelDefaults
    tokenizer: Any
    choices: list[Choice]
    model: Any


def open_pretrained(
    name: str,
    config: EngineConfig,
    *,
    dtype: Any = "auto",
    device: Any = None,
    quantization: str | None = None,
    progress: loader.Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> Pretrained:
    """Load a model and build its runner; arguments as those of `loader.load` and `build.build_runner`.

    Raises:
        ConfigError: the model cannot be loaded or run, or a setting cannot work with it.
    """
    report = progress if progress is not None else _ignore
    if not options:
        opened = _from_snapshot(name, config, dtype, device, quantization, report)
        if opened is not None:
            return opened
    from aiocb.model.build import build_runner, length_reason, model_defaults
    from aiocb.model.native import NativeRunner

    loaded = loader.load(name, dtype=dtype, device=device, progress=report, **(options or {}))
    defaults = model_defaults(loaded.model)
    reason = length_reason(loaded.model)
    encoded = _encoded(loaded) if _may_snapshot(config) else None
    runner, choices = build_runner(loaded.model, config, owns_model=True, quantization=quantization)
    # Where the runner took the weights over, what is left is no model that could be used or changed.
    took_over = isinstance(runner, NativeRunner) and not runner.has_module
    model = None if took_over else loaded.model
    if isinstance(runner, NativeRunner) and took_over and encoded is not None:
        _save(loaded, encoded, defaults, reason, runner, quantization)
    return Pretrained(runner, defaults, loaded.tokenizer, [*loaded.choices, *choices], model)


def choose_length(config: EngineConfig, max_model_len: int, reason: str) -> tuple[int, Choice]:
    """Return the most tokens of a request: the model's own number, or a smaller one that is configured.

    Raises:
        ConfigError: more is configured than the model's positions allow.
    """
    if config.max_model_len is None:
        return max_model_len, Choice("max_model_len", str(max_model_len), reason)
    if config.max_model_len > max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the model's positions allow ({max_model_len})"
        )
    return config.max_model_len, Choice("max_model_len", str(config.max_model_len), "configured")


def _ignore(stage: str, fraction: float) -> None:
    """Take progress for nobody."""


def _may_snapshot(config: EngineConfig) -> bool:
    return config.native is not False and config.attention is None


def _from_snapshot(
    name: str, config: EngineConfig, dtype: Any, device: Any, quantization: str | None, report: loader.Progress
) -> Pretrained | None:
    """Start without the module; None when this is no second start, or the settings ask for something else."""
    if not _may_snapshot(config):
        return None
    report("import", 0.0)
    with loader.quiet():
        from aiocb.kernels import KernelUnavailable
        from aiocb.kernels import load as load_kernels
        from aiocb.model.load import snapshot
        from aiocb.model.native import runner as native
        from aiocb.sampling.sampler import Sampler

        report("import", 1.0)
        found = loader.find(name, dtype, device)
        if found is None:
            return None
        library = load_kernels()
        if isinstance(library, KernelUnavailable):
            return None
        report("load", 0.0)
        stored = snapshot.load(snapshot.snapshot_folder(found, library, quantization), found)
        if stored is None:
            return None
        report("load", 1.0)
    max_model_len, length_choice = choose_length(config, stored.defaults.max_model_len, stored.length_reason)
    sampler = Sampler(stored.defaults.vocab_size, device="cpu")
    runner, reason = native.build_described(
        stored.description,
        config,
        sampler,
        library,
        max_model_len=max_model_len,
        quantization=quantization,
        parity=stored.parity,
    )
    if runner is None:
        return None
    choices = [*stored.choices, Choice("runner", "native", reason), length_choice, *runner.choices]
    return Pretrained(runner, stored.defaults, stored.tokenizer, choices, None)


def _encoded(loaded: loader.LoadedModel) -> Encoded | None:
    """What the native runner would read out of the module, written down before the module is freed."""
    if loaded.found is None:
        return None
    from aiocb.model.load import snapshot
    from aiocb.model.native.families import describe

    try:
        description = describe(loaded.model)
        if isinstance(description, str):
            return None
        return snapshot.encode(description, snapshot.stored_weights(loaded.model, loaded.found.weights))
    except Exception:
        logger.debug("no snapshot of %s can be made", loaded.name, exc_info=True)
        return None


def _save(
    loaded: loader.LoadedModel,
    encoded: Encoded,
    defaults: ModelDefaults,
    length_reason: str,
    runner: NativeRunner,
    quantization: str | None,
) -> None:
    from aiocb.kernels import KernelUnavailable
    from aiocb.kernels import load as load_kernels
    from aiocb.model.load import snapshot

    library = load_kernels()
    if not isinstance(library, KernelUnavailable) and loaded.found is not None:
        folder = snapshot.snapshot_folder(loaded.found, library, quantization)
        parity = runner.notes.get("parity", "")
        try:
            snapshot.save(folder, encoded, defaults, length_reason, loaded.tokenizer, loaded.choices, parity)
        except Exception:
            # A start that has succeeded does not fail for it: the next one only takes longer.
            logger.debug("no snapshot could be written to %s", folder, exc_info=True)
