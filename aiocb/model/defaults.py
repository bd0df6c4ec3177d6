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
    config: Any = text_config(model)
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    eos_ids = (eos,) if isinstance(eos, int) else eos or ()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = getattr(head, "weight", None)
    vocab_size = int(config.vocab_size if weight is None else len(weight))  # rows of the logits
    return ModelDefaults(
        vocab_size=vocab_size,
        max_model_len=sequence_bound(config)[0],
        eos_token_ids=tuple(int(token) for token in eos_ids if 0 <= token < vocab_size),
        generation={} if generation is None else generation_values(generation),
    )


def length_reason(model: PreTrainedModel) -> str:
    """Where the model's longest sequence comes from."""
    return sequence_bound(text_config(model))[1]
