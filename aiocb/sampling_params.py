"""What one request asks for: sampling, stopping, log-probabilities and text options.

Torch-free. `SamplingParams` is what a user writes (unset fields are None); `SamplingParams.resolve` fills the unset
ones from the model's own generation config and checks every value, so that the step loop never meets a bad one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiocb.checks import (
    check_bias,
    check_boolean,
    check_callables,
    check_count,
    check_eos,
    check_id_set,
    check_integer,
    check_real,
    check_sequences,
    check_strings,
    items_of,
)
from aiocb.errors import InvalidRequest, show_value

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["LogprobsMode", "ModelDefaults", "SamplingParams"]

LogprobsMode = Literal["raw", "processed"]

_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
MAX_SAMPLES = 4096
_INT64 = 2**63
_LISTS = (
    "bad_words",
    "bad_words_ids",
    "allowed_token_ids",
    "eos_token_id",
    "logits_processors",
    "stop",
    "stop_token_ids",
)
"""Fields of which a request takes a copy, so that a list that its owner changes later does not matter."""


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What a model says about itself; the base that unset parameters are taken from.

    Attributes:
        vocab_size: rows of the logits; every token id must lie below it.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: ids that end a sequence.
        generation: the non-default values of the model's generation config.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. `None` means: take the model's own value, else the default named here.

    Order of the stages: repetition, presence and frequency penalties; n-gram blocking; `logits_processors`; bias,
    allowed and banned tokens, `min_new_tokens`; temperature; top_k; min_p; top_p; typical_p.

    Attributes:
        temperature: 0 is greedy. Unset and the model does not sample by default: 0, or 1 when any of `top_p`,
            `top_k`, `min_p`, `typical_p` is given.
        top_p: nucleus sampling in (0, 1]; 1 is off. 0 keeps the most likely token only.
        top_k: keep the k most likely; 0, -1 or None is off.
        min_p: keep tokens with at least this fraction of the best token's probability, [0, 1]; 0 is off.
        typical_p: locally typical sampling (Meister et al., 2022), (0, 1]; 1 is off.
        repetition_penalty: > 0; 1 is off (Keskar et al., 2019, over prompt and output).
        presence_penalty, frequency_penalty: subtracted for tokens of the output, as OpenAI defines them; 0 is off.
        no_repeat_ngram_size: no n-gram of this size occurs twice; 0 is off.
        logit_bias: token id to additive bias.
        bad_words: strings whose token sequences must not be produced (needs a tokenizer). How many words, banned
            sequences and stop strings a request may have is set by `EngineConfig.max_request_strings`.
        bad_words_ids: the same as token id sequences.
        allowed_token_ids: only these ids may be produced.
        max_new_tokens: most output tokens; unset: the model's own value, else whatever fits. Alias `max_tokens`.
        min_new_tokens: no stop token before so many output tokens, and no stop string that is complete before.
            Alias `min_tokens`.
        ignore_eos: go on over end-of-sequence tokens.
        eos_token_id: replaces the model's own end-of-sequence ids for this request.
        stop: strings that end the output; cut from it unless `include_stop_str_in_output`. One counts with the token
            that completes it, wherever it began. One may name special tokens that `skip_special_tokens` leaves out of
            the text: it matches where the model produces them.
        stop_token_ids: further ids that end the output.
        seed: makes the request repeatable, whatever its batch; unset: a fresh stream of random numbers.
        n: parallel samples of one prompt (only with `generate`, which then returns n completions).
        logits_processors: callables `(token_ids, logits) -> logits` of this request only, or transformers'
            `LogitsProcessor` objects. One that raises ends its own request.
        logprobs: number of most likely tokens to return with each output token; 0 returns the chosen one only;
            True means 0.
        logprobs_mode: `"raw"` is the model's own distribution, `"processed"` the one that was sampled from.
        prompt_logprobs: the same for the prompt's tokens, always raw.
        echo: put the prompt in front of the output text, which is then the text of both together (without
            `detokenize` there is none at all; the prompt's ids are in `Completion.prompt_token_ids`).
        truncate_prompt_tokens: keep the last so many prompt tokens.
        detokenize: False yields token ids only; not together with `stop`.
        skip_special_tokens: leave special tokens out of the text (default True).
        parse_special_tokens: whether text that spells a special token (`"<|im_end|>"`) becomes that token. True: in any
            prompt. False: in none. None (default): in a prompt that is one text, since its author writes all of it,
            but not in what chat messages hold (contents, names, arguments of tool calls, tools, documents): there it
            stays ordinary text, or a user could end a message and speak as somebody else. The template's own special
            tokens are always tokens.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool = False
    eos_token_id: int | Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    seed: int | None = None
    n: int = 1
    logits_processors: Sequence[Callable[..., Any]] | None = None
    logprobs: int | bool | None = None
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | bool | None = None
    echo: bool = False
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    # Asked for every request in every step; resolve() answers once.
    _is_plain: bool | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def build(cls, params: SamplingParams | GenerationConfig | None, keywords: Mapping[str, Any]) -> SamplingParams:
        """Combine a base and keywords (keywords win) into one object, still unresolved, that holds no list of its user.

        Args:
            params: a `SamplingParams`, a transformers `GenerationConfig`, or None.
            keywords: field names of this class, or the aliases `max_tokens` and `min_tokens`.

        Raises:
            InvalidRequest: an unknown name, or a name given twice through its alias.
        """
        if params is None:
            base = None
        elif isinstance(params, SamplingParams):
            base = params
        else:
            base = cls.from_generation_config(params)
        values: dict[str, Any] = {}
        for name, value in keywords.items():
            field = _ALIASES.get(name, name)
            if field in values:
                raise InvalidRequest(f"{field!r} was given twice (also through its alias); give it once")
            if field not in _FIELDS:
                raise InvalidRequest(f"unknown sampling parameter {name!r}; known are: {', '.join(sorted(_FIELDS))}")
            values[field] = value
        built = cls(**values) if base is None else dataclasses.replace(base, **values) if values else base
        changes: dict[str, Any] = {}
        for name in _LISTS:
            value = getattr(built, name)
            if value is not None and (copied := _copied(value)) is not None:
                changes[name] = copied
        if built.logit_bias is not None and isinstance(built.logit_bias, Mapping):
            changes["logit_bias"] = dict(built.logit_bias)
        return dataclasses.replace(built, **changes) if changes else built

    @classmethod
    def from_generation_config(cls, config: GenerationConfig) -> SamplingParams:
        """Take every value that a transformers `GenerationConfig` sets; the object is not changed.

        Raises:
            InvalidRequest: it is no generation config, or asks for something that continuous batching does not do
                (beams).
        """
        if isinstance(config, type) or not callable(getattr(config, "to_diff_dict", None)):
            raise InvalidRequest(
                f"params must be a SamplingParams or a GenerationConfig, not {show_value(config)}; pass a mapping as "
                "keywords: **values"
            )
        values = generation_values(config)
        if check_integer("num_beams", values.get("num_beams") or 1, 0, None) > 1:
            raise InvalidRequest("num_beams > 1 is not supported; sample with n > 1 instead")
        do_sample = values.get("do_sample")
        picked = {name: values[name] for name in _FROM_GENERATION if values.get(name) is not None}
        if do_sample is False:
            picked["temperature"] = 0.0
            for name in ("top_p", "top_k", "min_p", "typical_p"):
                picked.pop(name, None)
        elif do_sample and "temperature" not in picked:
            picked["temperature"] = 1.0
        if values.get("stop_strings") is not None:
            picked["stop"] = values["stop_strings"]
        if values.get("num_return_sequences"):
            picked["n"] = values["num_return_sequences"]
        return cls(**picked)

    def resolve(self, defaults: ModelDefaults) -> SamplingParams:
        """Fill every unset field from `defaults` and check all values.

        Raises:
            InvalidRequest: a value is out of its range or of the wrong type; the message names it.
        """
        generation = defaults.generation
        vocab_size = defaults.vocab_size

        def pick(name: str, default: Any) -> Any:
            value = getattr(self, name)
            if value is None:
                value = generation.get(name)
            return default if value is None else value

        temperature = self.temperature
        samples = any(
            value is not None and value is not False for value in (self.top_p, self.top_k, self.min_p, self.typical_p)
        )
        if temperature is None:
            if generation.get("do_sample"):
                temperature = pick("temperature", 1.0)
            else:
                temperature = 1.0 if samples else 0.0
        top_k = pick("top_k", 0)
        eos: Any = self.eos_token_id
        if eos is None:
            # A model may name ids that it cannot produce; that is not the request's fault.
            eos = tuple(token for token in defaults.eos_token_ids if 0 <= token < vocab_size)
        stop = check_strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        detokenize = check_boolean("detokenize", self.detokenize)
        if stop and not detokenize:
            raise InvalidRequest("stop strings need text: leave detokenize=True, or use stop_token_ids")
        max_new_tokens = pick("max_new_tokens", None)
        min_new_tokens = check_integer("min_new_tokens", pick("min_new_tokens", 0), 0, None)
        if max_new_tokens is not None:
            max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 0, None)
            if self.min_new_tokens is None:
                min_new_tokens = min(min_new_tokens, max_new_tokens)
            if min_new_tokens > max_new_tokens:
                raise InvalidRequest(
                    f"min_new_tokens ({show_value(min_new_tokens)}) is greater than max_new_tokens ({max_new_tokens})"
                )
        mode = self.logprobs_mode
        if not isinstance(mode, str) or mode not in ("raw", "processed"):
            raise InvalidRequest(f"logprobs_mode must be 'raw' or 'processed', not {show_value(mode)}")
        allowed = self.allowed_token_ids
        if allowed is not None:
            allowed = check_id_set("allowed_token_ids", allowed, vocab_size)
            if not allowed:
                raise InvalidRequest("allowed_token_ids is empty: nothing could be produced")
        resolved = SamplingParams(
            temperature=check_real("temperature", temperature, 0.0, math.inf),
            top_p=check_real("top_p", pick("top_p", 1.0), 0.0, 1.0),
            top_k=min(max(check_integer("top_k", top_k, -1, None), 0), vocab_size),
            min_p=check_real("min_p", pick("min_p", 0.0), 0.0, 1.0),
            typical_p=check_real("typical_p", pick("typical_p", 1.0), 0.0, 1.0, open_low=True),
            repetition_penalty=check_real(
                "repetition_penalty", pick("repetition_penalty", 1.0), 0.0, math.inf, open_low=True
            ),
            presence_penalty=check_real("presence_penalty", pick("presence_penalty", 0.0), -math.inf, math.inf),
            frequency_penalty=check_real("frequency_penalty", pick("frequency_penalty", 0.0), -math.inf, math.inf),
            no_repeat_ngram_size=check_integer("no_repeat_ngram_size", pick("no_repeat_ngram_size", 0), 0, None),
            logit_bias=check_bias(self.logit_bias, vocab_size),
            bad_words=check_strings("bad_words", self.bad_words),
            bad_words_ids=check_sequences("bad_words_ids", pick("bad_words_ids", ()), vocab_size),
            allowed_token_ids=allowed,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            ignore_eos=check_boolean("ignore_eos", self.ignore_eos),
            eos_token_id=() if self.ignore_eos else check_eos(eos, vocab_size),
            stop=stop,
            stop_token_ids=(
                () if self.stop_token_ids is None else check_id_set("stop_token_ids", self.stop_token_ids, vocab_size)
            ),
            include_stop_str_in_output=check_boolean("include_stop_str_in_output", self.include_stop_str_in_output),
            seed=None if self.seed is None else check_integer("seed", self.seed, -_INT64, 2 * _INT64 - 1),
            n=check_integer("n", self.n, 1, MAX_SAMPLES),
            logits_processors=check_callables(self.logits_processors),
            logprobs=check_count("logprobs", self.logprobs),
            logprobs_mode=mode,
            prompt_logprobs=check_count("prompt_logprobs", self.prompt_logprobs),
            echo=check_boolean("echo", self.echo),
            truncate_prompt_tokens=(
                None
                if self.truncate_prompt_tokens is None
                else check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None)
            ),
            detokenize=detokenize,
            skip_special_tokens=(
                True
                if self.skip_special_tokens is None
                else check_boolean("skip_special_tokens", self.skip_special_tokens)
            ),
            parse_special_tokens=(
                None
                if self.parse_special_tokens is None
                else check_boolean("parse_special_tokens", self.parse_special_tokens)
            ),
        )
        object.__setattr__(resolved, "_is_plain", resolved.is_plain)
        return resolved

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken (resolved parameters only)."""
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """True when sampling is the argmax of the raw logits and nothing else is asked (resolved parameters only)."""
        if self._is_plain is not None:
            return self._is_plain
        return self.temperature == 0.0 and not self.needs_processing and self.logprobs is None

    @property
    def needs_processing(self) -> bool:
        """True when logits are changed before selection (temperature and truncation aside; resolved only)."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.no_repeat_ngram_size
            or self.logit_bias
            or self.bad_words_ids
            or self.allowed_token_ids is not None
            or (self.min_new_tokens and (self.eos_token_id or self.stop_token_ids))
            or self.logits_processors
        )


_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams) if field.init)
_FROM_GENERATION = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "max_new_tokens",
    "min_new_tokens",
    "eos_token_id",
)


def generation_values(config: GenerationConfig) -> dict[str, Any]:
    """The values that a transformers `GenerationConfig` really sets (differences from its defaults)."""
    values: dict[str, Any] = config.to_diff_dict()
    # to_diff_dict leaves out what equals the default, yet an explicit do_sample=False means greedy.
    values.setdefault("do_sample", getattr(config, "do_sample", None))
    return values


def _copied(value: Any) -> tuple[Any, ...] | None:
    """A list (of lists) as tuples; None for everything that need not be copied."""
    if type(value) is tuple or isinstance(value, (str, int)):
        return None
    values = items_of(value)
    return None if values is None else tuple([tuple(each) if isinstance(each, list) else each for each in values])
