"""From a `GenerationConfig` to an engine's parameters. The config is read, and never changed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiocb.errors import ConfigError, InvalidRequest
from aiocb.sampling_params import SamplingParams, generation_values

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from aiocb.engine.prepare import Limits, Prepared

__all__ = ["LogitProcessors", "Parameters", "Scope", "request_sampling"]

logger = logging.getLogger("aiocb")

_WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_THROUGH_TRANSFORMERS = (
    "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
)  # fmt: skip
# With the values that ask for nothing.
_UNSUPPORTED = {
    "guidance_scale": 1, "watermarking_config": None, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "stop_strings": None, "max_time": None,
    "penalty_alpha": None, "constraints": None, "force_words_ids": None, "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0, "dola_layers": None, "token_healing": False,
}  # fmt: skip
_IGNORED_KEYWORDS = ("filter_value", "min_tokens_to_keep")
_KEPT_WHEN_CLEARED = ("do_sample", "max_new_tokens", "eos_token_id", "num_return_sequences")


@dataclass(slots=True)
class LogitProcessors:
    """What is done to the logits of requests to come, apart from their own parameters.

    Attributes:
        logits_processor: further processors for all requests, shared by them: transformers' `LogitsProcessor` objects,
            or callables `(token_ids, logits) -> logits`.
        is_cleared: what the generation config says about logits does not count.
    """

    logits_processor: list[Any] = field(default_factory=list)
    is_cleared: bool = False

    def clear(self) -> None:
        """Leave the logits as they are, whatever the generation config says."""
        self.logits_processor.clear()
        self.is_cleared = True


@dataclass(frozen=True, slots=True)
class Scope:
    """What all configs of a manager have in common.

    Attributes:
        model: whose own config counts when none is given; None for a runner without a model.
        logprobs: log-probabilities for every request.
        drop_unsupported: warn about a setting that cannot be honoured instead of refusing it.
        processors: see there.
        said: what was warned of; once is enough.
    """

    model: Any
    logprobs: bool = False
    drop_unsupported: bool = True
    processors: LogitProcessors = field(default_factory=LogitProcessors)
    said: set[object] = field(default_factory=set)

    def warn(self, about: object, message: str) -> None:
        """Log a warning, unless there was one about the same."""
        if about not in self.said:
            self.said.add(about)
            logger.warning("%s", message)


class Parameters:
    """What requests of a manager start from: a reading of a generation config.

    A config that the caller passes stands for itself: what it leaves open has transformers' default and not the value
    of the model's own config, and without an end-of-sequence token nothing ends but by length. That is how the
    reference reads it.

    Args:
        scope: the manager's.
        given: the caller's own object, or None.
        before: an earlier reading of the same object.

    Attributes:
        config: the object that was read.
        num_return_sequences: samples per prompt.

    Raises:
        ConfigError: the config asks for beams, or for something unsupported.
    """

    def __init__(self, scope: Scope, given: GenerationConfig | None, before: Parameters | None = None) -> None:
        self._given = given
        self.config = given if given is not None else getattr(scope.model, "generation_config", None)
        if self.config is not None and not hasattr(self.config, "to_diff_dict"):
            raise ConfigError(f"generation_config must be a transformers GenerationConfig, not {type(given).__name__}")
        self._scope = scope
        settings, is_cleared, self._extra = self._look()
        self._seen = copy.deepcopy(settings), is_cleared, self._extra
        values: dict[str, Any] = {} if self.config is None else generation_values(self.config)
        self._eos = _ids(values.get("eos_token_id"))
        self.num_return_sequences: int = values.get("num_return_sequences") or 1
        # Switched off after the config was given, sampling leaves its distribution behind, as it does in the reference.
        self._has_sampled: bool = bool(values.get("do_sample") or (before is not None and before._has_sampled))
        self._is_switched_off = self._has_sampled and not values.get("do_sample")
        if (values.get("num_beams") or 1) > 1:
            raise ConfigError("num_beams > 1 is not supported; set num_return_sequences and sample instead")
        if not all(isinstance(token, int) for token in self._eos):
            raise ConfigError("eos_token_id of the generation config must be a token id or several")
        unsupported = [name for name, no_op in _UNSUPPORTED.items() if values.get(name, no_op) != no_op]
        if unsupported:
            message = f"{', '.join(unsupported)} of the generation config cannot be honoured in continuous batching"
            if not scope.drop_unsupported:
                raise ConfigError(message)
            scope.warn(message, f"{message}: ignored")
        if given is not None and values.get("eos_token_id") is None:
            scope.warn("eos", "the generation config has no eos_token_id: requests end by their length only")
        if given is not None and values.get("max_length") and values.get("max_new_tokens") is None:
            scope.warn("max_length", "max_length of the generation config does not count here: set max_new_tokens")
        if is_cleared:
            values = {name: value for name, value in values.items() if name in _KEPT_WHEN_CLEARED}
        self._values = values
        self._has_processors = any(values.get(name) is not None for name in _THROUGH_TRANSFORMERS)

    def current(self) -> Parameters:
        """This reading, or a new one if the config or the processors have changed since."""
        with contextlib.suppress(Exception):  # an array is neither equal nor not: read again
            if self._seen == self._look():
                return self
        return Parameters(self._scope, self._given, self)

    def _look(self) -> tuple[dict[str, Any], bool, tuple[Any, ...]]:
        processors = self._scope.processors
        settings = {} if self.config is None else vars(self.config)
        return settings, processors.is_cleared, tuple(processors.logits_processor)

    def limits(self, limits: Limits) -> Limits:
        """The running engine's limits with this config in the place of the model's."""
        defaults = limits.defaults
        eos = defaults.eos_token_ids
        if self._given is not None or self._eos:
            eos = tuple(token for token in self._eos if token < defaults.vocab_size)
        defaults = dataclasses.replace(defaults, eos_token_ids=eos, generation=self._values)
        return dataclasses.replace(limits, defaults=defaults, return_logprobs=False)

    def complete(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Add what depends on the prompt's length, and what the manager says of logits.

        Raises:
            InvalidRequest: transformers refuses a value.
        """
        changes: dict[str, Any] = {}
        if self._scope.logprobs and sampling.logprobs is None:
            changes.update(logprobs=0, logprobs_mode="processed")
        shortest = (self._values.get("min_length") or 0) - num_prompt_tokens
        if sampling.min_new_tokens is None and shortest > (self._values.get("min_new_tokens") or 0):
            changes["min_new_tokens"] = shortest
        before, after = [*self._extra], []
        if self._has_processors:
            values = {name: self._values.get(name) for name in _THROUGH_TRANSFORMERS}
            before[:0] = self._made(sampling, num_prompt_tokens, values)
        if self._is_switched_off:
            after = self._made(sampling, num_prompt_tokens, {**self._warpers(sampling), "do_sample": True})
            changes["temperature"] = 0.0
        if before or after:
            own = sampling.logits_processors or ()
            changes["logits_processors"] = (*before, *(own if isinstance(own, Iterable) else (own,)), *after)
        return dataclasses.replace(sampling, **changes) if changes else sampling

    def check_room(self, prepared: Prepared, limits: Limits) -> None:
        """Warn, once for each number, when the config wants more tokens than fit."""
        wanted, room = prepared.sampling.max_new_tokens, prepared.max_output_tokens
        if wanted is not None and room < wanted:
            is_the_models = limits.defaults.max_model_len <= limits.max_request_tokens
            where = "the model's limit" if is_the_models else "the cache (raise num_blocks or max_memory_percent)"
            self._scope.warn(
                ("max_new_tokens", wanted),
                f"max_new_tokens={wanted} of the generation config does not fit: a prompt of "
                f"{len(prepared.prompt_token_ids)} tokens leaves room for {room} in {where}; such requests end there",
            )

    def _warpers(self, sampling: SamplingParams) -> dict[str, Any]:
        """What shapes the distribution of a request; what is 0 or less is switched off."""
        given = {name: value for name in _WARPERS if (value := getattr(sampling, name)) is not None}
        values = {name: value for name, value in {**self._values, **given}.items() if name in _WARPERS}
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        return {name: value if name == "top_k" else float(value) for name, value in numbers.items() if value > 0}

    def _made(self, sampling: SamplingParams, num_prompt_tokens: int, values: Mapping[str, Any]) -> list[Any]:
        """New processor objects for one request, because some of them have state: those that some settings ask for."""
        import torch
        from transformers import GenerationConfig

        model = self._scope.model
        if model is None:
            return []
        eos = self._eos if sampling.eos_token_id is None else _ids(sampling.eos_token_id)
        try:
            config: Any = GenerationConfig(**values)  # type: ignore[no-untyped-call]
            config._eos_token_tensor = torch.tensor(eos, dtype=torch.long, device=model.device)
            return list(
                model._get_logits_processor(config, input_ids_seq_length=num_prompt_tokens, device=str(model.device))
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"transformers refuses a parameter: {error}") from error


def request_sampling(keywords: Mapping[str, Any], num_return_sequences: int) -> SamplingParams:
    """The parameters of one `add_request`, unresolved: token ids only, no text.

    Raises:
        InvalidRequest: an unknown keyword.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    if "prompt_logprobs" in values:
        raise InvalidRequest("prompt_logprobs: these outputs have no place for them; use aiocb.Engine")
    ignored = [name for name in _IGNORED_KEYWORDS if values.pop(name, None) is not None]
    if ignored:
        logger.warning("%s: ignored", ", ".join(ignored))
    if "eos_token_id" in values:
        values["eos_token_id"] = _ids(values["eos_token_id"])
    return SamplingParams.build(None, {"n": num_return_sequences, "detokenize": False, **values})


def _ids(value: Any) -> tuple[Any, ...]:
    """Token ids without -1, the reference's "no end of sequence"; other things are refused elsewhere."""
    value = value.tolist() if hasattr(value, "tolist") else () if value is None else value
    ids = value if isinstance(value, Iterable) else (value,)
    return tuple(token for token in ids if not (isinstance(token, int) and token < 0))
