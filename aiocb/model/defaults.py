"""What a model says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocb.model.eager.positions import sequence_bound
from aiocb.model.eager.view import text_config
from aiocb.sampling_params import ModelDefaults, generation_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["length_reason", "model_defaults"]


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
        max_model_len=sequence_bound(config)[0],
        eos_token_ids=tuple(token for token in eos_ids if 0 <= token < vocab_size),
        generation=values,
    )


def length_reason(model: PreTrainedModel) -> str:
    """Where the model's longest sequence comes from."""
    return sequence_bound(text_config(model))[1]


def _vocab_size(model: PreTrainedModel, config: Any) -> int:
    """Rows of the logits: of the output embedding, else of the configuration."""
    module: Any = model
    head = module.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is not None:
        return int(weight.shape[0])
    return int(config.vocab_size)
