"""From a `GenerationConfig` to an engine's parameters. The config is read once and never changed."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.errors import ConfigError
from aiocb.sampling_params import SamplingParams, generation_values

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from aiocb.engine.admission import Limits

__all__ = ["Parameters", "request_sampling"]

logger = logging.getLogger("aiocb")

# What `SamplingParams` does itself, or what does not concern continuous batching, needs no further processors.
_OWN = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "renormalize_logits",
    "remove_invalid_values",
    "do_sample",
)
_THROUGH_TRANSFORMERS = (
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
)
_UNSUPPORTED = (
    "guidance_scale",
    "watermarking_config",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "stop_strings",
    "max_time",
    "penalty_alpha",
    "constraints",
    "force_words_ids",
)
_NO_OPS = {"guidance_scale": 1, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
_IGNORED_KEYWORDS = ("filter_value", "min_tokens_to_keep")


class Parameters:
    """What all requests of a manager start from.

    A config that the caller passes stands for itself: what it leaves open has transformers' default and not the value
    of the model's own config, and without an end-of-sequence token nothing ends but by length. That is how the
    reference reads it.

    Args:
        model: whose own config counts when none is given; None for a runner without a model.
        config: the caller's, or None.
        logprobs: log-probabilities for every request.
        drop_unsupported: warn about a setting that cannot be honoured instead of refusing it.

    Raises:
        ConfigError: the config asks for beams, or for something unsupported.
    """

    def __init__(
        self, model: Any, config: GenerationConfig | None, *, logprobs: bool = False, drop_unsupported: bool = True
    ) -> None:
        own = getattr(model, "generation_config", None)
        self.config: GenerationConfig | None = copy.deepcopy(config if config is not None else own)
        self._model = model
        self._is_given = config is not None
        self._logprobs = logprobs
        self._values: dict[str, Any] = {} if self.config is None else generation_values(self.config)
        self._eos = _ids(self._values.get("eos_token_id"))
        self.num_return_sequences: int = self._values.get("num_return_sequences") or 1
        if (self._values.get("num_beams") or 1) > 1:
            raise ConfigError("num_beams > 1 is not supported; set num_return_sequences and sample instead")
        unsupported = [name for name in _UNSUPPORTED if self._values.get(name, _NO_OPS.get(name)) != _NO_OPS.get(name)]
        if unsupported:
            message = f"{', '.join(unsupported)} of the generation config cannot be honoured in continuous batching"
            if not drop_unsupported:
                raise ConfigError(message)
            logger.warning("%s: ignored", message)
        if self._is_given and self._values.get("eos_token_id") is None:
            logger.warning("the generation config has no eos_token_id: requests end by their length only")
        self._has_processors = any(self._values.get(name) is not None for name in _THROUGH_TRANSFORMERS)

    @property
    def max_new_tokens(self) -> int | None:
        """The config's own bound."""
        value: int | None = self._values.get("max_new_tokens")
        return value

    def limits(self, limits: Limits) -> Limits:
        """The running engine's limits with this config in the place of the model's."""
        defaults = limits.defaults
        eos = defaults.eos_token_ids
        if self._is_given or self._eos:
            eos = tuple(token for token in self._eos if token < defaults.vocab_size)
        defaults = dataclasses.replace(defaults, eos_token_ids=eos, generation=self._values)
        return dataclasses.replace(limits, defaults=defaults, return_logprobs=False)

    def complete(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Add what depends on the prompt's length, and the log-probabilities of the manager."""
        changes: dict[str, Any] = {}
        if self._logprobs and sampling.logprobs is None:
            changes.update(logprobs=0, logprobs_mode="processed")
        shortest = (self._values.get("min_length") or 0) - num_prompt_tokens
        if sampling.min_new_tokens is None and shortest > (self._values.get("min_new_tokens") or 0):
            changes["min_new_tokens"] = shortest
        if self._has_processors:
            mine = self._processors(num_prompt_tokens, sampling)
            changes["logits_processors"] = (*mine, *(sampling.logits_processors or ()))
        return dataclasses.replace(sampling, **changes) if changes else sampling

    def _processors(self, num_prompt_tokens: int, sampling: SamplingParams) -> Sequence[Any]:
        """New processor objects for one request: some of them have state."""
        import torch

        config: Any = copy.copy(self.config)
        for name in _OWN + _UNSUPPORTED:
            setattr(config, name, None)
        eos = self._eos if sampling.eos_token_id is None else _ids(sampling.eos_token_id)
        device = self._model.device
        config._eos_token_tensor = torch.tensor(eos, dtype=torch.long, device=device)
        processors: Sequence[Any] = self._model._get_logits_processor(
            config, input_ids_seq_length=num_prompt_tokens, device=str(device)
        )
        return list(processors)


def request_sampling(
    keywords: Mapping[str, Any], *, max_new_tokens: int | None, eos_token_id: Any, num_return_sequences: int
) -> SamplingParams:
    """The parameters of one `add_request`, unresolved: token ids only, no text.

    Raises:
        InvalidRequest: an unknown keyword.
    """
    ignored = [name for name in _IGNORED_KEYWORDS if name in keywords]
    if ignored:
        logger.warning("%s: ignored", ", ".join(ignored))
    values = {name: value for name, value in keywords.items() if name not in ignored}
    values.setdefault("n", num_return_sequences)
    if max_new_tokens is not None:
        values["max_new_tokens"] = max_new_tokens
    if eos_token_id is not None:
        # -1 is the reference's "no end of sequence".
        values["eos_token_id"] = _ids(eos_token_id)
    values.setdefault("detokenize", False)
    return SamplingParams.build(None, values)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if hasattr(value, "tolist"):
        value = value.tolist()
    ids = (value,) if isinstance(value, int) else tuple(value)
    return tuple(token for token in ids if token >= 0)
