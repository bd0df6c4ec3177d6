"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from aiocb.outputs import Chunk, Completion, ToolCallDelta
from aiocb.serve.errors import ApiError
from aiocb.serve.generation import Answer, Asked, Generation
from aiocb.serve.logprobs import chat_logprobs
from aiocb.serve.messages import messages_of
from aiocb.serve.sse import DONE, data, quote
from aiocb.serve.structure import schema_of_format, template_arguments, tool_choice_of, tools_of
from aiocb.serve.usage import UsageSum
from aiocb.serve.wire import ChatRequest
from aiocb.text.processor import TextProcessor

__all__ = ["Chat", "call_delta"]


class Chat(Generation[ChatRequest]):
    """Answers chats."""

    def ask(self, request: ChatRequest, call_id: str, name: str) -> Asked:
        """Messages to one prompt."""
        options = request.options()
        num_top = request.top_logprobs or 0
        if num_top and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
        if num_top > self.service.config.max_logprobs:
            most = self.service.config.max_logprobs
            raise ApiError(400, f"top_logprobs must be at most {most}", param="top_logprobs", code="invalid_value")
        if request.logprobs:
            options["logprobs"] = num_top
        schema = schema_of_format(request.response_format, "response_format")
        if schema is not None:
            options["json_schema"] = schema
        tools = tools_of(request.tools)
        choice = tool_choice_of(request.tool_choice, tools)
        if tools is not None:
            options["tools"] = tools
            options["parallel_tool_calls"] = request.parallel_tool_calls is not False
        if choice is not None:
            options["tool_choice"] = choice
        template = getattr(self.service.text.tokenizer, "chat_template", None)
        arguments = template_arguments(request.chat_template_kwargs, request.reasoning_effort, template)
        if request.continue_final_message:
            arguments["continue_final_message"] = True
        elif not request.add_generation_prompt:
            arguments["add_generation_prompt"] = False
        if arguments:
            options["chat_template_kwargs"] = arguments
        answer = ChatAnswer(
            f"chatcmpl-{call_id}",
            name,
            request.n,
            self.service.text,
            num_top if request.logprobs else None,
            bool(request.stream_options and request.stream_options.include_usage),
        )
        return Asked([messages_of(request.messages)], options, answer)


def call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """What has arrived of a tool call, as chats write it: its id and name once, then pieces of its arguments."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class ChatAnswer(Answer):
    """Chunks and completions of a chat.

    Args:
        call_id, name: of the answer, and of its model.
        n: choices.
        text: for log-probabilities.
        num_top: how many likely tokens to name at each place; None writes no log-probabilities.
        wants_usage: counts in a chunk of their own at the end of a stream.
    """

    def __init__(
        self, call_id: str, name: str, n: int, text: TextProcessor, num_top: int | None, wants_usage: bool
    ) -> None:
        self._n = n
        self._text = text
        self._num_top = num_top
        self._wants_usage = wants_usage
        self.call_id = call_id
        self._created = int(time.time())
        self._model = name
        self._usage = UsageSum(n)
        self._calling: set[int] = set()
        head = json.dumps({"id": call_id, "object": "chat.completion.chunk", "created": self._created, "model": name})
        self._head = head[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if wants_usage else "]}"

    def begin(self) -> bytes:
        """The role of every choice."""
        return b"".join([self._frame(index, '{"role":"assistant","content":""}', "null") for index in range(self._n)])

    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        """New text; in a frame of its own, the reason why a choice has ended."""
        frames = b""
        if chunk.text or chunk.logprobs or chunk.reasoning_content or chunk.tool_calls:
            logprobs = "null"
            if self._num_top is not None and chunk.logprobs is not None:
                logprobs = json.dumps(chat_logprobs(self._text, chunk.logprobs, self._num_top))
            frames = self._frame(choice, self._delta(choice, chunk), "null", logprobs)
        if chunk.finish_reason is not None:
            if chunk.usage is not None:
                self._usage.add(choice, chunk.usage)
            frames += self._frame(choice, "{}", quote(self._reason(choice, chunk.finish_reason)))
        return frames

    def _delta(self, choice: int, chunk: Chunk) -> str:
        if not chunk.reasoning_content and not chunk.tool_calls:
            return f'{{"content":{quote(chunk.text)}}}'
        delta: dict[str, Any] = {}
        if chunk.reasoning_content:
            delta["reasoning_content"] = chunk.reasoning_content
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.tool_calls:
            self._calling.add(choice)
            delta["tool_calls"] = [call_delta(call) for call in chunk.tool_calls]
        return json.dumps(delta)

    def _reason(self, choice: int, reason: str) -> str:
        """`tool_calls` for whole calls; what has cut an answer wins."""
        return "tool_calls" if reason == "stop" and choice in self._calling else reason

    def end(self) -> bytes:
        """Counts, where they were asked for, and the end."""
        if not self._wants_usage:
            return DONE
        return data(f'{self._head}],"usage":{json.dumps(self._usage.to_wire())}}}') + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error; no `[DONE]`, which would say that the answer is whole."""
        return data(error.body.decode())

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """A `chat.completion`."""
        choices = []
        for index, completion in enumerate(completions):
            self._usage.add(index, completion.usage)
            logprobs = None
            if self._num_top is not None:
                logprobs = chat_logprobs(self._text, completion.logprobs or (), self._num_top)
            if completion.tool_calls:
                self._calling.add(index)
            choices.append(
                {
                    "index": index,
                    "message": {**completion.message, "refusal": None},
                    "logprobs": logprobs,
                    "finish_reason": self._reason(index, completion.finish_reason),
                }
            )
        return {
            "id": self.call_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": self._usage.to_wire(),
        }

    def _frame(self, choice: int, delta: str, finish_reason: str, logprobs: str = "null") -> bytes:
        return data(
            f'{self._head}{{"index":{choice},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}}}{self._tail}'
        )
