"""Choosing the runner of a model: native where it can be had, else plain torch. Every choice has its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.adapter import text_config
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.native.runner import NativeRunner, try_build
from aiocb.model.open import choose_length
from aiocb.sampling.sampler import Sampler
from aiocb.sampling_params import ModelDefaults, generation_values
from aiocb.step import Runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["QUANTIZATIONS", "BuiltRunner", "build_runner", "length_reason", "model_defaults"]

QUANTIZATIONS = (None, "int8")

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")
_UNBOUNDED = 1 << 20


class BuiltRunner(NamedTuple):
    """A runner and how it came about."""

    runner: Runner
    choices: tuple[Choice, ...]


def build_runner(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    sampler: Sampler | None = None,
    owns_model: bool = False,
    quantization: str | None = None,
) -> BuiltRunner:
    """Choose and build the runner of a model.

    Args:
        model: in eval mode. Left as it was found when it is not owned.
        config: the engine's settings.
        sampler: None makes one.
        owns_model: the engine loaded the model itself, so its weights may be repacked in place.
        quantization: "int8" for 8-bit weights, which only the native runner has.

    Raises:
        ConfigError: the model cannot be run, or a setting cannot work with it.
    """
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={quantization!r} is unknown: 'int8', or None for the weights as they are")
    defaults = model_defaults(model)
    max_model_len, length_choice = choose_length(config, defaults.max_model_len, length_reason(model))
    if sampler is None:
        sampler = Sampler(defaults.vocab_size, device=str(model.device))
    native, reason = _try_native(model, config, sampler, max_model_len, owns_model, quantization)
    if native is not None:
        choices = (Choice("runner", "native", reason), length_choice, *native.choices)
        return BuiltRunner(native, choices)
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} needs the native CPU kernels, which cannot be used: {reason}. "
            "Leave quantization out to run the weights as they are"
        )
    runner = TorchRunner(model, config, sampler, max_model_len=max_model_len)
    return BuiltRunner(runner, (Choice("runner", "torch", reason), length_choice, *runner.choices))


def model_defaults(model: PreTrainedModel) -> ModelDefaults:
    """What the model says about itself; nothing of it is changed."""
    config = text_config(model)
    generation: Any = getattr(model, "generation_config", None)
    values: dict[str, Any] = {} if generation is None else generation_values(generation)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = ()
    eos_ids = (int(eos),) if isinstance(eos, int) else tuple(int(token) for token in eos)
    vocab_size = _vocab_size(model, config)
    return ModelDefaults(
        vocab_size=vocab_size,
        max_model_len=_model_length(config)[0],
        eos_token_ids=tuple(token for token in eos_ids if 0 <= token < vocab_size),
        generation=values,
    )


def length_reason(model: PreTrainedModel) -> str:
    """Where the model's longest sequence comes from."""
    return _model_length(text_config(model))[1]


def _model_length(config: Any) -> tuple[int, str]:
    """The most tokens of a sequence, and why."""
    length, reason = _UNBOUNDED, "the configuration names no bound"
    for name in _LENGTH_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            length, reason = value, f"{name} of the model"
            break
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(rope, dict):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind == "longrope" and isinstance(original, int) and original < length:
            length, reason = original, "beyond it, rope type longrope would change the rotation of the whole batch"
        elif kind == "dynamic":
            bound = original if isinstance(original, int) else length
            length = min(bound, length)
            reason = "beyond it, rope type dynamic would change the rotation of the whole batch"
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None) or ()
    if isinstance(chunk, int) and "chunked_attention" in types and chunk < length:
        length, reason = chunk, "attention_chunk_size of the model: beyond it, chunked attention is not implemented"
    return length, reason


def _vocab_size(model: PreTrainedModel, config: Any) -> int:
    """Rows of the logits: of the output embedding, else of the configuration."""
    module: Any = model
    head = module.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is not None:
        return int(weight.shape[0])
    return int(config.vocab_size)


def _try_native(
    model: PreTrainedModel,
    config: EngineConfig,
    sampler: Sampler,
    max_model_len: int,
    owns_model: bool,
    quantization: str | None,
) -> tuple[NativeRunner | None, str]:
    """Ask the native runner whether it takes this model; the reason goes with the answer."""
    if config.native is False:
        return None, "native=False"
    if config.attention is not None:
        return None, f"attention={config.attention!r} was asked for"
    if model.device.type != "cpu":
        return None, f"the model is on {model.device.type} (device='cpu' puts it on the CPU)"
    runner, reason = try_build(
        model, config, sampler, max_model_len=max_model_len, owns_model=owns_model, quantization=quantization
    )
    if runner is None and config.native:
        raise ConfigError(f"native=True, but the native runner cannot be used: {reason}")
    return runner, reason
