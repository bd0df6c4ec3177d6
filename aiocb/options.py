"""The keywords of `Engine.stream`, `generate` and their like, for editors and type checkers.

    async def ask(engine: aiocb.Engine, prompt: str, **options: Unpack[aiocb.RequestOptions]) -> str:
        return (await engine.generate(prompt, **options)).text

What they mean is said in `SamplingParams` and `Engine.stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

__all__ = ["RequestOptions", "SamplingOptions", "StreamOptions", "ToolChoice"]

ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]
"""Whether and what a model calls; the mapping is `{"type": "function", "function": {"name": ...}}`."""


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams` but `n`, and their aliases."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    allowed_token_ids: Sequence[int] | None
    max_new_tokens: int | None
    max_tokens: int | None
    min_new_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool
    eos_token_id: int | Sequence[int] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    seed: int | None
    logits_processors: Sequence[Callable[..., Any]] | Callable[..., Any] | None
    logprobs: int | bool | None
    logprobs_mode: Literal["raw", "processed"]
    prompt_logprobs: int | bool | None
    echo: bool
    truncate_prompt_tokens: int | None
    detokenize: bool
    skip_special_tokens: bool | None
    parse_special_tokens: bool | None
    json_schema: Any
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None


class StreamOptions(SamplingOptions, total=False):
    """The sampling keywords of `Engine.stream`."""

    n: int


class RequestOptions(SamplingOptions, total=False):
    """The keywords of `Engine.generate`, `generate_batch` and `as_completed`."""

    priority: int
    timeout: float | None
    queue_timeout: float | None
    cache_salt: str | None
    stream_interval: int
    max_unread_tokens: int | None
    on_unread: Literal["pause", "cancel"]
    on_full: Literal["wait", "refuse"]
    tools: Sequence[Any] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any] | None
    adapter: str | None
