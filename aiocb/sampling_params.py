"""What one request asks for: sampling, stopping, log-probabilities and text options.

Torch-free. `SamplingParams` is what a user writes (unset fields are None); `SamplingParams.resolve` fills the unset
ones from the model's own generation config and checks every value, so that the step loop never meets a bad one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiocb.checks import (
    check_bias,
    check_boolean,
    check_callables,
    check_choice,
    check_eos,
    check_id_set,
    check_integer,
    check_logprobs,
    check_real,
    check_sequences,
    check_strings,
    items_of,
)
from aiocb.errors import InvalidRequest, show_value
from aiocb.structure import CompiledStructure, schema_text, structure_of

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["LogprobsMode", "ModelDefaults", "SamplingParams"]

LogprobsMode = Literal["raw", "processed"]

_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
MAX_SAMPLES = 4096
_INT64 = 2**63


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
        json_schema: the output is JSON that fits this schema: a mapping, JSON text, a pydantic model, or True for any
            object. Needs the extra `grammar`, as the next three do; at most one of the four can be given. The output
            ends when it is complete, whatever `min_new_tokens` says.
        regex: the output matches this regular expression from its beginning to its end.
        choice: the output is one of these texts.
        grammar: the output fits this grammar, in the syntax of Lark as llguidance has it (`%json {...}` and
            `%regex {...}` inside).
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
    json_schema: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | CompiledStructure | None = None

    @classmethod
    def build(cls, params: SamplingParams | GenerationConfig | None, keywords: Mapping[str, Any]) -> SamplingParams:
        """Combine a base and keywords (keywords win) into one object, still unresolved, that holds no list of its user.

        Args:
            params: a `SamplingParams`, a transformers `GenerationConfig`, or None.
            keywords: field names of this class, or the aliases `max_tokens` and `min_tokens`.

        Raises:
            InvalidRequest: an unknown name, or a name given twice through its alias.
        """
        base = params if params is None or isinstance(params, SamplingParams) else cls.from_generation_config(params)
        values: dict[str, Any] = {}
        for name, value in keywords.items():
            field = _ALIASES.get(name, name)
            if field in values:
                raise InvalidRequest(f"{field!r} was given twice (also through its alias); give it once")
            if field not in _FIELDS:
                raise InvalidRequest(f"unknown sampling parameter {name!r}; known are: {', '.join(sorted(_FIELDS))}")
            values[field] = schema_text(value) if field == "json_schema" and value is not None else _copied(value)
        if base is None:
            return cls(**values)
        held = {name: getattr(base, name) for name in _FIELDS}
        if base.json_schema is not None:
            values.setdefault("json_schema", schema_text(base.json_schema))
        values = {name: copy for name, value in held.items() if (copy := _copied(value)) is not value} | values
        return dataclasses.replace(base, **values) if values else base

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
        picked = {name: values[name] for name in _FROM_GENERATION if values.get(name) is not None}
        if values["do_sample"] is False:
            picked = {name: value for name, value in picked.items() if name not in _TRUNCATIONS} | {"temperature": 0.0}
        elif values["do_sample"]:
            picked.setdefault("temperature", 1.0)
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
        values: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        generation, vocab_size = defaults.generation, defaults.vocab_size
        if self.temperature is None and not generation.get("do_sample"):
            samples = any(each is not None and each is not False for each in map(values.get, _TRUNCATIONS))
            values["temperature"] = 1.0 if samples else 0.0
        if self.ignore_eos is True:
            values["eos_token_id"] = ()
        elif self.eos_token_id is None:
            # A model may name ids that it cannot produce; that is not the request's fault.
            values["eos_token_id"] = tuple(token for token in defaults.eos_token_ids if 0 <= token < vocab_size)
        if isinstance(self.stop, str):
            values["stop"] = (self.stop,)
        for name in _FROM_GENERATION:
            if values[name] is None:
                values[name] = generation.get(name)
        for name, (check, default) in _RULES.items():
            value = values[name]
            if value is None and _FIELDS[name] is None:
                values[name] = default
            else:
                values[name] = check(name, value, vocab_size) if check in _OF_VOCABULARY else check(name, value)
        values["top_k"] = min(max(values["top_k"], 0), vocab_size)
        if values["stop"] and not values["detokenize"]:
            raise InvalidRequest("stop strings need text: leave detokenize=True, or use stop_token_ids")
        least, most = values["min_new_tokens"], values["max_new_tokens"]
        if most is not None and least > most:
            if self.min_new_tokens is not None:
                raise InvalidRequest(f"min_new_tokens ({show_value(least)}) is greater than max_new_tokens ({most})")
            values["min_new_tokens"] = most
        structure = structure_of(values)
        if structure is not None and values["ignore_eos"]:
            raise InvalidRequest(f"{structure.kind} with ignore_eos: an output with a structure has to end; give one")
        if values["allowed_token_ids"] == ():
            raise InvalidRequest("allowed_token_ids is empty: nothing could be produced")
        return SamplingParams(**values)

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken (resolved parameters only)."""
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """True when sampling is the argmax of the raw logits and nothing else is asked (resolved parameters only)."""
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
            or self.is_structured
        )

    @property
    def is_structured(self) -> bool:
        """True when the output has to have a structure."""
        return (
            self.grammar is not None
            or self.json_schema is not None
            or self.regex is not None
            or self.choice is not None
        )

    @property
    def structure_values(self) -> dict[str, Any]:
        """The fields that say which."""
        return {
            "json_schema": self.json_schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar,
        }  # fmt: skip


_FIELDS: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_TRUNCATIONS = ("top_p", "top_k", "min_p", "typical_p")
_FROM_GENERATION = (
    *("temperature", *_TRUNCATIONS, "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("no_repeat_ngram_size", "bad_words_ids", "max_new_tokens", "min_new_tokens", "eos_token_id"),
)
_share = functools.partial(check_real, low=0.0, high=1.0)
_count = functools.partial(check_integer, low=0)


def _as_given(name: str, value: Any) -> Any:
    """`structure_of` looks at the four together."""
    return value


_RULES: Mapping[str, tuple[Callable[..., Any], Any]] = {
    "temperature": (functools.partial(check_real, low=0.0), 1.0),
    "top_p": (_share, 1.0),
    "top_k": (functools.partial(check_integer, low=-1), 0),
    "min_p": (_share, 0.0),
    "typical_p": (functools.partial(_share, open_low=True), 1.0),
    "repetition_penalty": (functools.partial(check_real, low=0.0, open_low=True), 1.0),
    "presence_penalty": (check_real, 0.0),
    "frequency_penalty": (check_real, 0.0),
    "no_repeat_ngram_size": (_count, 0),
    "logit_bias": (check_bias, None),
    "bad_words": (check_strings, ()),
    "bad_words_ids": (check_sequences, ()),
    "allowed_token_ids": (check_id_set, None),
    "max_new_tokens": (_count, None),
    "min_new_tokens": (_count, 0),
    "ignore_eos": (check_boolean, None),
    "eos_token_id": (check_eos, None),
    "stop": (check_strings, ()),
    "stop_token_ids": (check_id_set, ()),
    "include_stop_str_in_output": (check_boolean, None),
    "seed": (functools.partial(check_integer, low=-(2**63), high=2**64 - 1), None),
    "n": (functools.partial(check_integer, low=1, high=MAX_SAMPLES), None),
    "logits_processors": (check_callables, ()),
    "logprobs": (check_logprobs, None),
    "logprobs_mode": (functools.partial(check_choice, choices=("raw", "processed")), None),
    "prompt_logprobs": (check_logprobs, None),
    "echo": (check_boolean, None),
    "truncate_prompt_tokens": (functools.partial(check_integer, low=1), None),
    "detokenize": (check_boolean, None),
    "skip_special_tokens": (check_boolean, True),
    "parse_special_tokens": (check_boolean, None),
    "json_schema": (_as_given, None),
    "regex": (_as_given, None),
    "choice": (_as_given, None),
    "grammar": (_as_given, None),
}
"""How a field is checked, and what it is when neither the request nor the model says anything."""
_OF_VOCABULARY = {check_bias, check_sequences, check_id_set, check_eos}


def generation_values(config: GenerationConfig) -> dict[str, Any]:
    """The values that a transformers `GenerationConfig` really sets (differences from its defaults)."""
    values: dict[str, Any] = config.to_diff_dict()
    # to_diff_dict leaves out what equals the default, yet an explicit do_sample=False means greedy.
    values.setdefault("do_sample", getattr(config, "do_sample", None))
    return values


def _copied(value: Any) -> Any:
    """A list (of lists) as tuples, a mapping as a new one: what its owner changes later does not matter."""
    if value is None or type(value) is tuple or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    values = items_of(value)
    return value if values is None else tuple([tuple(each) if isinstance(each, list) else each for each in values])
