"""What a user gets back: `Chunk` (a delta of a stream) and `Completion` (the whole).

Torch-free, immutable, picklable.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, Self

from aiocb.errors import RequestError

__all__ = [
    "Chunk",
    "Completion",
    "FinishReason",
    "RequestMetrics",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "joined_calls",
]

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class _TokenLogprobs(NamedTuple):
    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenLogprobs(_TokenLogprobs):
    """Log-probabilities at one position; a named tuple.

    `top` is kept as bytes and unpacked by whoever reads it. As pairs it would be nearly all that the garbage collector
    walks, and makes it walk the whole program: tenths of a second in which the event loop stands still.

    Attributes:
        token_id, logprob: of the token that was chosen (or, for a prompt, that stands there).
        rank: 1-based rank of that token in the same distribution.
        top: the most likely (token id, log-probability) pairs, best first; always includes the chosen token.
    """

    __slots__ = ()

    def __new__(cls, token_id: int, logprob: float, rank: int, top: Iterable[tuple[int, float]] = ()) -> Self:
        """Pack `top`."""
        pairs = tuple(top)
        packed = struct.pack("qd" * len(pairs), *chain.from_iterable(pairs))
        return tuple.__new__(cls, (token_id, logprob, rank, packed))

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The most likely tokens, unpacked at each call."""
        packed: Any = super().__getitem__(3)
        return tuple(struct.iter_unpack("qd", packed))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        return cls(*iterable)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.token_id, self.logprob, self.rank, self.top))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, TokenLogprobs) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(_TokenLogprobs(*self)).removeprefix("_")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        # What is written in another language than Python sees the tuple without its methods.
        plain = handler.generate_schema(tuple[int, float, int, tuple[tuple[int, float], ...]])
        return {
            "type": "function-wrap",
            "function": {"type": "no-info", "function": lambda value, check: cls(*check(tuple(value)))},
            "schema": plain,
            "serialization": {"type": "function-plain", "function": tuple, "return_schema": plain},
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        num_prompt_tokens, num_output_tokens: of this request.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_reasoning_tokens: output tokens within reasoning, its marks included.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds; None where that point was never reached.

    Attributes:
        queue_s: from submission to the first step that ran it.
        time_to_first_token_s: from submission to the first token.
        total_s: from submission to the end.
        num_preemptions: how often it gave its cache back, to be recomputed or copied in again.
    """

    queue_s: float | None
    time_to_first_token_s: float | None
    total_s: float
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What has arrived of one tool call.

    Attributes:
        index: which call of the answer, from 0.
        id, name: of the call and of its function; in the first delta of a call, and in no other.
        arguments: further JSON text; "" in the first delta. Joined, it is what the model has written: an object, unless
            the answer was cut, or the model has spoiled it.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole tool call.

    Attributes:
        id: nine letters and digits, made up here.
        name: of the function, one of those that were offered.
        arguments: JSON text as the model has written it: see `ToolCallDelta`.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, init=False)
class Chunk:
    """A delta of one stream: what has arrived since the chunk before it.

    Attributes:
        request_id: the label that was given, or a generated one.
        index: which of the n parallel samples.
        text: new text (may be empty while a code point or a stop string is undecided); without reasoning and calls.
        token_ids: new token ids.
        logprobs: one element per token id, when asked for.
        finish_reason: None until the last chunk.
        stop_reason: the stop string or token id that matched.
        usage: counts, on the last chunk only.
        reasoning_content: new text of reasoning, where the model's chat template has marks for it.
        tool_calls: what is new of tool calls. A call's first delta has its id and name, others go on with arguments.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage | None
    reasoning_content: str
    tool_calls: tuple[ToolCallDelta, ...]

    def __init__(
        self,
        request_id: str,
        index: int = 0,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        usage: Usage | None = None,
        reasoning_content: str = "",
        tool_calls: tuple[ToolCallDelta, ...] = (),
    ) -> None:
        # Slot descriptors instead of the generated object.__setattr__ calls: one Chunk is built per token and stream.
        _set_request_id(self, request_id)
        _set_index(self, index)
        _set_text(self, text)
        _set_token_ids(self, token_ids)
        _set_logprobs(self, logprobs)
        _set_finish_reason(self, finish_reason)
        _set_stop_reason(self, stop_reason)
        _set_usage(self, usage)
        _set_reasoning_content(self, reasoning_content)
        _set_tool_calls(self, tool_calls)

    def to_dict(self) -> dict[str, Any]:
        """Plain, picklable and JSON-ready."""
        return dataclasses.asdict(self)


def _setter(name: str) -> Any:
    return Chunk.__dict__[name].__set__


_set_request_id = _setter("request_id")
_set_index = _setter("index")
_set_text = _setter("text")
_set_token_ids = _setter("token_ids")
_set_logprobs = _setter("logprobs")
_set_finish_reason = _setter("finish_reason")
_set_stop_reason = _setter("stop_reason")
_set_usage = _setter("usage")
_set_reasoning_content = _setter("reasoning_content")
_set_tool_calls = _setter("tool_calls")


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Put the deltas of one answer together."""
    heads: dict[int, ToolCallDelta] = {}
    pieces: dict[int, list[str]] = {}
    for delta in deltas:
        heads.setdefault(delta.index, delta)
        pieces.setdefault(delta.index, []).append(delta.arguments)
    return tuple([ToolCall(head.id or "", head.name or "", "".join(pieces[index])) for index, head in heads.items()])


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one request.

    Attributes:
        request_id, index, text, token_ids, logprobs, finish_reason, stop_reason, usage: as in `Chunk`, complete.
        prompt_token_ids: the prompt as the model saw it.
        prompt_logprobs: one element per prompt token (the first is None), when asked for.
        metrics: times of the request.
        error: what ended the request when `finish_reason` is `"error"` (only from `generate_batch` and
            `as_completed` with `return_exceptions=True`; elsewhere it is raised).
        reasoning_content: the text of all reasoning.
        tool_calls: every call in the order of the answer.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    prompt_token_ids: tuple[int, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: RequestError | None = None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as OpenAI's API writes it: append it to the messages for the next turn.

        `content` is None where there is nothing but tool calls; `tool_calls` and `reasoning_content` are there only
        where the answer has some.
        """
        is_silent = bool(self.tool_calls) and not self.text.strip()
        message: dict[str, Any] = {"role": "assistant", "content": None if is_silent else self.text}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message

    def to_dict(self) -> dict[str, Any]:
        """Plain, picklable and JSON-ready (the error becomes its message)."""
        error = None if self.error is None else str(self.error)
        return {**dataclasses.asdict(dataclasses.replace(self, error=None)), "error": error}
