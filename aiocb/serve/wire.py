"""What clients send. Every field is honoured, taken as a hint that changes nothing, or refused by name.

An explicit null is the same as no field. Fields that no interface of OpenAI's has are the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "Message",
    "StreamOptions",
    "TokenizeRequest",
    "Wire",
]

Number = StrictInt | StrictFloat


class Wire(BaseModel):
    """A body: nulls are dropped, unknown fields refused, and fields that cannot be honoured refused by their name."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    REFUSED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    """By field: values that are allowed all the same, and why others are not."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {name: value for name, value in values.items() if value is not None}
        for name, (allowed, reason) in cls.REFUSED.items():
            if name in kept and not any(type(each) is type(kept[name]) and each == kept[name] for each in allowed):
                raise PydanticCustomError(
                    "refused", "is not supported here: {reason}", {"field": name, "reason": reason}
                )
            kept.pop(name, None)
        return kept


class StreamOptions(Wire):
    """`stream_options`."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # a hint: nothing is padded
    continuous_usage_stats: StrictBool = False


class Message(BaseModel):
    """A message of a chat; fields that a template may want are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | list[Any] | None = None


class GenerationRequest(Wire):
    """What every way to ask for text has in common."""

    REFUSED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "background": ((False,), "nothing is kept; wait for the answer, or stream it"),
        "moderation": ((), "nothing here judges texts"),
    }

    model: StrictStr | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: StrictInt = Field(default=1, ge=1)
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None

    # hints: nothing here depends on them
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # the engine's own
    top_k: StrictInt | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    no_repeat_ngram_size: StrictInt | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: list[StrictInt] | None = None
    bad_words: list[StrictStr] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    truncate_prompt_tokens: StrictInt | None = None
    priority: StrictInt = 0
    timeout: Number | None = None
    queue_timeout: Number | None = None
    cache_salt: StrictStr | None = None
    json_schema: dict[str, Any] | None = None
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None
    resume: StrictBool = False

    def limit(self) -> int | None:
        """The most tokens of the answer, as asked for."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Keywords of `Engine.stream`, without what the engine's own defaults say better."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "no_repeat_ngram_size", "seed", "stop", "stop_token_ids", "bad_words",
            "allowed_token_ids", "truncate_prompt_tokens", "min_tokens", "timeout", "queue_timeout", "cache_salt",
            "json_schema", "regex", "choice", "grammar",
        )  # fmt: skip
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name in ("n", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "priority"):
            options[name] = getattr(self, name)
        if self.limit() is not None:
            options["max_new_tokens"] = self.limit()
        if self.logit_bias:
            options["logit_bias"] = {int(key): float(value) for key, value in self.logit_bias.items()}
        return options

    @model_validator(mode="after")
    def _check_bias(self) -> Any:
        for key in self.logit_bias or ():
            if not key.isascii() or not key.isdigit() or len(key) > 9:
                raise PydanticCustomError(
                    "bias",
                    "keys are token ids as texts of digits, not {key}",
                    {"field": "logit_bias", "key": repr(key[:20])},
                )
        return self


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    REFUSED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **GenerationRequest.REFUSED,
        "audio": ((), "answers are text"),
        "modalities": ((["text"],), "answers are text"),
        "prediction": ((), "there is no speculation on predicted output"),
        "web_search_options": ((), "there is no search"),
        "functions": (([],), "give tools instead"),
        "function_call": ((), "give tool_choice instead"),
        "chat_template": ((), "a template of the request's own could run for minutes; the model's is used"),
        "verbosity": (("medium",), "say it in the prompt"),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(default=None, ge=0)
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False

    def limit(self) -> int | None:
        """`max_completion_tokens`, the newer name, wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    REFUSED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **GenerationRequest.REFUSED,
        "suffix": (("",), "texts are continued, not filled in"),
        "best_of": ((1,), "ask for n choices and take the best"),
    }

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    max_tokens: StrictInt | None = 16
    logprobs: StrictInt | None = Field(default=None, ge=0)
    echo: StrictBool = False

    def limit(self) -> int | None:
        """`max_tokens`; this interface's default is 16."""
        return self.max_tokens

    def prompts(self) -> list[Any]:
        """The prompts, one by one."""
        prompt: Any = self.prompt
        return list(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]


class TokenizeRequest(Wire):
    """`POST /tokenize`: a prompt or messages to token ids."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    return_token_strs: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one", "give either prompt or messages", {"field": "prompt"})
        return self


class DetokenizeRequest(Wire):
    """`POST /detokenize`: token ids to a text."""

    model: StrictStr | None = None
    tokens: list[StrictInt]
