"""From what a user passes to a checked submission. Runs on the event loop; long prompts are encoded in a thread.

Everything that can be refused is refused here, before the worker hears of the request.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from aiocb.errors import InvalidRequest
from aiocb.sampling_params import ModelDefaults, SamplingParams

if TYPE_CHECKING:
    from aiocb.text.processor import TextProcessor

__all__ = ["Limits", "Plan", "Prompt", "StreamSpec", "encode_prompt", "plan_request"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Any
"""Text, token ids (list, 1-D tensor, a tokenizer's encoding), or chat messages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the running engine can take; fixed at start, read from any thread.

    Attributes:
        defaults: what the model says about itself.
        max_request_tokens: most tokens (prompt and output) whose cache fits when a request runs alone.
        return_logprobs: `EngineConfig.return_logprobs`.
    """

    defaults: ModelDefaults
    max_request_tokens: int
    return_logprobs: bool = False


@dataclass(slots=True, eq=False)
class StreamSpec:
    """One call of `Engine.stream`, as given; see there for the fields.

    Attributes:
        prompt_token_ids: the prompt, once it has been encoded.
        withdraw: takes it out of the line for room in the queue, while it stands there (any thread).
    """

    prompt: Prompt
    sampling: SamplingParams
    request_id: str
    priority: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None
    stream_interval: int | None = 1
    max_unread_tokens: int | None = None
    on_unread: Literal["pause", "cancel"] = "pause"
    on_full: Literal["wait", "refuse"] = "wait"
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    withdraw: Callable[[], None] | None = None

    def check(self) -> None:
        """Check what needs no model.

        Raises:
            InvalidRequest: naming the argument and what to do.
        """
        for name in ("timeout", "queue_timeout"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value) or value < 0
            ):
                raise InvalidRequest(f"{name} must be a number of seconds >= 0, or None, not {value!r}")
        for name in ("stream_interval", "max_unread_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidRequest(f"{name} must be an integer >= 1, not {value!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest(f"priority must be an integer (lower runs first), not {self.priority!r}")
        if self.on_unread not in ("pause", "cancel"):
            raise InvalidRequest(f"on_unread must be 'pause' or 'cancel', not {self.on_unread!r}")
        if self.on_full not in ("wait", "refuse"):
            raise InvalidRequest(f"on_full must be 'wait' or 'refuse', not {self.on_full!r}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise InvalidRequest(f"cache_salt must be a string, not {self.cache_salt!r}")


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be submitted: resolved parameters, the checked prompt and the room it may take.

    Attributes:
        max_output_tokens: 0 means that there is nothing to run.
        drop_output: the prompt is computed for its log-probabilities only.
    """

    sampling: SamplingParams
    prompt_token_ids: list[int]
    max_output_tokens: int
    drop_output: bool = False


def encode_prompt(text: TextProcessor, spec: StreamSpec, vocab_size: int) -> list[int]:
    """Token ids of a prompt of any kind; runs inline or in a thread.

    Raises:
        InvalidRequest: wrong type, ids outside of the vocabulary, no tokenizer, no chat template.
    """
    ids = text.normalize_prompt(
        spec.prompt, vocab_size=vocab_size, tools=spec.tools, chat_template_kwargs=spec.chat_template_kwargs
    )
    keep = spec.sampling.truncate_prompt_tokens
    return ids if keep is None else ids[-keep:]


def plan_request(spec: StreamSpec, prompt_token_ids: list[int], limits: Limits, text: TextProcessor) -> Plan:
    """Resolve parameters and check every length against the model and the cache.

    Raises:
        InvalidRequest: the request can never run as asked.
    """
    sampling = spec.sampling
    if sampling.logprobs is None and limits.return_logprobs:
        sampling = _replace(sampling, logprobs=0)
    if sampling.bad_words:
        extra = text.bad_words_ids(sampling.bad_words)
        sampling = _replace(sampling, bad_words_ids=(*(sampling.bad_words_ids or ()), *extra))
    sampling = sampling.resolve(limits.defaults)
    if sampling.stop and not text.has_tokenizer:
        raise InvalidRequest("stop strings need a tokenizer: pass one to the engine, or use stop_token_ids")
    if sampling.stop and sampling.skip_special_tokens:
        # A stop string that is a special token never shows up in text that leaves special tokens out.
        special = [token_id for stop in sampling.stop if (token_id := text.special_id(stop)) is not None]
        if special:
            sampling = _replace(sampling, stop_token_ids=(*(sampling.stop_token_ids or ()), *special))
    if sampling.echo and not text.has_tokenizer:
        raise InvalidRequest("echo needs a tokenizer: pass one to the engine")
    num_prompt = len(prompt_token_ids)
    longest = limits.defaults.max_model_len
    room = min(longest, limits.max_request_tokens) - num_prompt
    what = (
        f"the model's limit of {longest} tokens"
        if longest <= limits.max_request_tokens
        else f"the cache's {limits.max_request_tokens} tokens (raise num_blocks or max_memory_percent)"
    )
    wanted = sampling.max_new_tokens
    if wanted == 0:
        if room < 0:
            raise InvalidRequest(f"the prompt has {num_prompt} tokens, which is over {what}")
        if sampling.prompt_logprobs is None:
            return Plan(sampling, prompt_token_ids, 0)
        if room < 1:
            raise InvalidRequest(f"prompt log-probabilities of {num_prompt} tokens need one more than {what}")
        return Plan(_replace(sampling, max_new_tokens=1, n=1), prompt_token_ids, 1, drop_output=True)
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens, which leaves no room under {what}; "
            "shorten it or pass truncate_prompt_tokens"
        )
    if spec.sampling.max_new_tokens is not None and wanted is not None and wanted > room:
        raise InvalidRequest(
            f"max_new_tokens={wanted} after a prompt of {num_prompt} tokens is over {what}; at most {room} fit"
        )
    return Plan(sampling, prompt_token_ids, room if wanted is None else min(wanted, room))


def _replace(sampling: SamplingParams, **values: Any) -> SamplingParams:
    return dataclasses.replace(sampling, **values)
