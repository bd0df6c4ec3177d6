"""From what a user passes to what is submitted. `StreamSpec` is made on the event loop, the rest in the encoder.

Everything that can be refused is refused here, before the worker hears of the request.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiocb.checks import check_integer
from aiocb.errors import InvalidRequest, explain, show_value
from aiocb.sampling_params import MAX_SAMPLES, ModelDefaults, SamplingParams
from aiocb.structure import structure_of
from aiocb.text.prompts import Messages, text_length
from aiocb.text.tools import check_tool_choice, take_tools

if TYPE_CHECKING:
    from aiocb.text.output import TextOutput
    from aiocb.text.processor import TextProcessor

__all__ = ["Limits", "Prepared", "Prompt", "StreamSpec", "prepare", "prepare_tokens"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Any
"""Text, token ids (list, 1-D tensor, a tokenizer's encoding), or chat messages."""

# What preparing a stop string costs, in other things.
_STRINGS_PER_WORD = 10
_IDS_PER_STRING = 10
_LENGTH_PER_STRING = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """What the running engine can take; fixed at start, read from any thread.

    Attributes:
        defaults: what the model says about itself.
        max_request_tokens: most tokens (prompt and output) whose cache fits when a request runs alone.
        return_logprobs: `EngineConfig.return_logprobs`.
        max_prompt_characters, max_request_strings: see `EngineConfig`; None is no bound.
        parsers: `EngineConfig.tool_parser` and `reasoning_parser`.
    """

    defaults: ModelDefaults
    max_request_tokens: int
    return_logprobs: bool = False
    max_prompt_characters: int | None = None
    max_request_strings: int | None = None
    parsers: tuple[str, str] = ("auto", "auto")

    @property
    def longest(self) -> int:
        """The most tokens of a request: what the model's positions and the cache allow."""
        return min(self.defaults.max_model_len, self.max_request_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StreamSpec:
    """One call of `Engine.stream`, as given; see there for the fields. Nobody changes it.

    Attributes:
        prompt: what `take_prompt` has made of the user's.
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
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    adapter: str | None = None

    @property
    def needs_compiler(self) -> bool:
        """True where what the answer has to look like is worked out from its tools."""
        tools = self.tools if isinstance(self.prompt, Messages) else None
        return bool(tools) and (self.tool_choice not in (None, "auto", "none") or any(map(_is_strict, tools or ())))

    def check(self) -> None:
        """Check what needs no model.

        Raises:
            InvalidRequest: naming the argument and what to do.
        """
        check_integer("n", self.sampling.n, 1, MAX_SAMPLES)  # how many outputs there will be is asked at once
        for name, value in (("timeout", self.timeout), ("queue_timeout", self.queue_timeout)):
            if value is not None and not _is_duration(value):
                raise InvalidRequest(f"{name} must be a number of seconds >= 0, or None, not {show_value(value)}")
        for name, count in (("stream_interval", self.stream_interval), ("max_unread_tokens", self.max_unread_tokens)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise InvalidRequest(f"{name} must be an integer >= 1, not {show_value(count)}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest(f"priority must be an integer (lower runs first), not {show_value(self.priority)}")
        if not isinstance(self.on_unread, str) or self.on_unread not in ("pause", "cancel"):
            raise InvalidRequest(f"on_unread must be 'pause' or 'cancel', not {show_value(self.on_unread)}")
        if not isinstance(self.on_full, str) or self.on_full not in ("wait", "refuse"):
            raise InvalidRequest(f"on_full must be 'wait' or 'refuse', not {show_value(self.on_full)}")
        for name, text in (("request_id", self.request_id), ("cache_salt", self.cache_salt), ("adapter", self.adapter)):
            if text is not None and not _is_text(text):
                raise InvalidRequest(
                    f"{name} must be a text (without halves of surrogate pairs), not {show_value(text)}"
                )
        if self.tools is not None and not isinstance(self.tools, (list, tuple)):
            raise InvalidRequest(f"tools must be a list of JSON schemas or functions, not {show_value(self.tools)}")
        if self.tools or self.tool_choice is not None or self.parallel_tool_calls is not True:
            check_tool_choice(self.tool_choice, self.parallel_tool_calls, bool(self.tools))
        arguments = self.chat_template_kwargs
        if arguments is not None and not (isinstance(arguments, Mapping) and all(map(_is_text, arguments))):
            raise InvalidRequest(f"chat_template_kwargs must map names to values, not {show_value(arguments)}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What will be submitted: resolved parameters, the checked prompt and the room it may take.

    Attributes:
        max_output_tokens: 0 means that there is nothing to run.
        drop_output: the prompt is computed for its log-probabilities only.
        texts: what makes text of each sample's tokens; empty when nobody wants text.
    """

    sampling: SamplingParams
    prompt_token_ids: list[int]
    max_output_tokens: int
    drop_output: bool = False
    texts: tuple[TextOutput, ...] = ()


def prepare(spec: StreamSpec, limits: Limits, text: TextProcessor) -> Prepared:
    """Do everything that comes before the queue: resolve, render, encode, check, and make ready what makes text.

    Raises:
        InvalidRequest: the request can never run as asked. Whatever a tokenizer, a template or an object of the
            user's raises (be it `SystemExit`) is its cause.
    """
    try:
        return _prepare(spec, limits, text)
    except InvalidRequest:
        raise
    except BaseException as error:
        raise InvalidRequest(f"this request cannot be prepared: {explain(error)}") from error


def _prepare(spec: StreamSpec, limits: Limits, text: TextProcessor) -> Prepared:
    prompt = spec.prompt
    structure = None
    given = spec.sampling
    if isinstance(prompt, Messages) and given.is_structured:  # it begins behind the reasoning, and beside calls
        structure = structure_of(given.structure_values)
        given = dataclasses.replace(given, json_schema=None, regex=None, choice=None, grammar=None)
    sampling = _resolve(given, limits, text)
    keep = sampling.truncate_prompt_tokens
    if isinstance(prompt, (str, Messages)):
        length = sum(map(text_length, (prompt, spec.tools, spec.chat_template_kwargs)))
        most = limits.max_prompt_characters
        if most is not None and length > most:
            raise InvalidRequest(
                f"the prompt has {length} characters, tools included; max_prompt_characters of the engine is {most}: "
                "shorten it, or raise EngineConfig(max_prompt_characters=...)"
            )
    elif isinstance(prompt, tuple):
        if keep is not None:
            prompt = prompt[-keep:]
        _check_room(len(prompt), sampling, limits)
    plan = None
    if isinstance(prompt, Messages):
        tools = take_tools(spec.tools, spec.tool_choice, spec.parallel_tool_calls)
        chat = text.take_chat(
            prompt,
            tools=tools,
            chat_template_kwargs=spec.chat_template_kwargs,
            parse_special_tokens=bool(sampling.parse_special_tokens),
            parsers=limits.parsers,
        )
        prompt, plan = tuple(chat.token_ids), chat.plan
        if tools.tools or structure is not None:
            sampling = text.with_answer(sampling, limits.defaults, plan, tools, structure)
    elif spec.tools or spec.chat_template_kwargs:
        raise InvalidRequest("tools and chat_template_kwargs need a prompt of chat messages")
    ids = text.normalize_prompt(
        prompt, vocab_size=limits.defaults.vocab_size, parse_special_tokens=sampling.parse_special_tokens
    )
    prepared = _fit(spec, sampling, ids if keep is None else ids[-keep:], limits)
    if not (sampling.detokenize and text.has_tokenizer):
        return prepared
    silent = prepared.drop_output or prepared.max_output_tokens == 0
    if silent:  # no text but that of the prompt, in which nothing is searched
        sampling, plan = dataclasses.replace(sampling, stop=()), None
    texts = text.make_outputs(sampling, prepared.prompt_token_ids, prepared.sampling.n, plan)
    if silent:
        for output in texts:
            output.flush()
    return dataclasses.replace(prepared, texts=texts)


def prepare_tokens(spec: StreamSpec, prompt_token_ids: list[int], limits: Limits, text: TextProcessor) -> Prepared:
    """Resolve parameters and check every length against the model and the cache; for who brings a checked prompt.

    Raises:
        InvalidRequest: the request can never run as asked.
    """
    return _fit(spec, _resolve(spec.sampling, limits, text), prompt_token_ids, limits)


def _resolve(sampling: SamplingParams, limits: Limits, text: TextProcessor) -> SamplingParams:
    """Resolved parameters, with `bad_words` among `bad_words_ids`."""
    if limits.max_request_strings is not None:
        _check_sizes(sampling, limits.max_request_strings)
    if sampling.logprobs is None and limits.return_logprobs:
        sampling = dataclasses.replace(sampling, logprobs=0)
    sampling = sampling.resolve(limits.defaults)
    if sampling.stop and not text.has_tokenizer:
        raise InvalidRequest("stop strings need a tokenizer: pass one to the engine, or use stop_token_ids")
    if sampling.echo and not text.has_tokenizer:
        raise InvalidRequest("echo needs a tokenizer: pass one to the engine")
    if sampling.bad_words:
        found = (*(sampling.bad_words_ids or ()), *text.bad_words_ids(sampling.bad_words))
        sampling = dataclasses.replace(sampling, bad_words=(), bad_words_ids=found).resolve(limits.defaults)
    return text.with_structure(sampling, limits.defaults) if sampling.is_structured else sampling


def _check_sizes(sampling: SamplingParams, most: int) -> None:
    """Refuse lists that would take long to prepare; what is no list is refused elsewhere."""
    for name, entries in (
        ("stop", most),
        ("bad_words", most // _STRINGS_PER_WORD),
        ("bad_words_ids", most),
        ("logit_bias", most),
        ("allowed_token_ids", most),
        ("stop_token_ids", most),
        ("eos_token_id", most),
    ):
        value = getattr(sampling, name)
        if not isinstance(value, (list, tuple, Mapping)):
            continue
        strings = [each for each in value if isinstance(each, (str, list, tuple)) and len(each) > 1]
        total = sum(map(len, strings))
        if max(len(strings), len(value) // _IDS_PER_STRING) > entries or total > entries * _LENGTH_PER_STRING:
            raise InvalidRequest(
                f"{name} has {len(value)} entries, {total} long in all: more than max_request_strings={most} of the "
                "engine allows; give fewer, or raise EngineConfig(max_request_strings=...)"
            )


def _fit(spec: StreamSpec, sampling: SamplingParams, prompt_token_ids: list[int], limits: Limits) -> Prepared:
    room, what = _check_room(len(prompt_token_ids), sampling, limits)
    wanted = sampling.max_new_tokens
    if wanted == 0:
        if sampling.prompt_logprobs is None:
            return Prepared(sampling, prompt_token_ids, 0)
        sampling = dataclasses.replace(sampling, max_new_tokens=1, n=1)
        return Prepared(sampling, prompt_token_ids, 1, drop_output=True)
    if spec.sampling.max_new_tokens is not None and wanted is not None and wanted > room:
        raise InvalidRequest(
            f"max_new_tokens={show_value(wanted)} after a prompt of {len(prompt_token_ids)} tokens is over {what}; "
            f"at most {room} fit"
        )
    return Prepared(sampling, prompt_token_ids, room if wanted is None else min(wanted, room))


def _check_room(num_prompt: int, sampling: SamplingParams, limits: Limits) -> tuple[int, str]:
    """How many output tokens fit behind a prompt, and what bounds them."""
    longest = limits.defaults.max_model_len
    room = limits.longest - num_prompt
    what = (
        f"the model's limit of {longest} tokens"
        if longest <= limits.max_request_tokens
        else f"the cache's {limits.max_request_tokens} tokens (raise num_blocks or max_memory_percent)"
    )
    if sampling.max_new_tokens == 0:
        if room < 0:
            raise InvalidRequest(f"the prompt has {num_prompt} tokens, which is over {what}")
        if sampling.prompt_logprobs is not None and room < 1:
            raise InvalidRequest(f"prompt log-probabilities of {num_prompt} tokens need one more than {what}")
    elif room < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens, which leaves no room under {what}; "
            "shorten it or pass truncate_prompt_tokens"
        )
    return room, what


def _is_strict(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and function.get("strict") is True


def _is_duration(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return float(value) >= 0
    except OverflowError:  # an integer beyond all clocks
        return False


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
