"""`POST /v1/responses`, without a memory: every request brings its history."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, StrictBool, StrictInt, StrictStr

from aiocb.outputs import Chunk, Completion
from aiocb.serve.errors import ApiError
from aiocb.serve.generation import Answer, Asked, Generation
from aiocb.serve.logprobs import chat_logprobs
from aiocb.serve.response_input import functions_of, history_of
from aiocb.serve.structure import schema_of_format, template_arguments, tool_choice_of, tools_of
from aiocb.serve.usage import UsageSum
from aiocb.serve.wire import GenerationRequest, Wire
from aiocb.text.processor import TextProcessor

__all__ = ["Responses", "ResponsesRequest"]

_INCLUDES = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})


class Reasoning(Wire):
    """`reasoning`."""

    effort: StrictStr | None = None
    summary: StrictStr | None = None  # a hint: reasoning is sent as it is
    generate_summary: StrictStr | None = None


class TextConfig(Wire):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: StrictStr | None = None  # a hint


class ResponsesRequest(GenerationRequest):
    """The body."""

    REFUSED: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **GenerationRequest.REFUSED,
        "conversation": ((), "nothing is kept; send the items of the conversation as input"),
        "prompt": ((), "there are no stored prompts"),
        "truncation": (("disabled",), "nothing is dropped in silence; shorten the input"),
        "context_management": (([],), "nothing is compacted here"),
    }

    input: StrictStr | list[Any]
    instructions: StrictStr | None = None
    max_output_tokens: StrictInt | None = Field(default=None, ge=1)
    max_tool_calls: StrictInt | None = None  # of tools that a service runs itself: there are none
    previous_response_id: StrictStr | None = None
    include: list[StrictStr] | None = None
    tools: list[Any] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0)

    def limit(self) -> int | None:
        """`max_output_tokens`."""
        return self.max_output_tokens


class Responses(Generation[ResponsesRequest]):
    """Answers by items."""

    def ask(self, request: ResponsesRequest, call_id: str, name: str) -> Asked:
        """Items to one prompt."""
        if request.previous_response_id is not None:
            raise ApiError(
                400,
                f"no response {request.previous_response_id[:100]!r}: nothing is kept here; send its items as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if request.n != 1:
            raise ApiError(400, "n must be 1: a response has one output", param="n", code="unsupported_parameter")
        unknown = next((each for each in request.include or () if each not in _INCLUDES), None)
        if unknown is not None:
            raise ApiError(400, f"include: {unknown[:100]!r} is not to be had here", param="include")
        options = request.options()
        wants_logprobs = "message.output_text.logprobs" in (request.include or ())
        num_top = request.top_logprobs or 0
        if num_top > self.service.config.max_logprobs:
            raise ApiError(
                400, f"top_logprobs must be at most {self.service.config.max_logprobs}", param="top_logprobs"
            )
        if wants_logprobs or num_top:
            options["logprobs"] = num_top
        schema = schema_of_format(request.text.format if request.text else None, "text.format")
        if schema is not None:
            options["json_schema"] = schema
        functions, custom, left_out = functions_of(request.tools)
        tools = tools_of(functions)
        choice = request.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "custom":
            choice = {**choice, "type": "function"}
        chosen = tool_choice_of(choice, tools)
        if tools is not None:
            options["tools"] = tools
            options["parallel_tool_calls"] = request.parallel_tool_calls is not False
        if chosen is not None:
            options["tool_choice"] = chosen
        template = getattr(self.service.text.tokenizer, "chat_template", None)
        effort = request.reasoning.effort if request.reasoning else None
        arguments = template_arguments(None, effort, template, "reasoning.effort")
        if arguments:
            options["chat_template_kwargs"] = arguments
        answer = ResponsesAnswer(
            f"resp_{call_id}", name, request, self.service.text, num_top if "logprobs" in options else None, custom
        )
        return Asked([history_of(request.input, request.instructions)], options, answer, left_out)


class ResponsesAnswer(Answer):
    """The events of a response, numbered from 0, and the response itself, made of the same items.

    Args:
        call_id, name: of the response, and of its model.
        request: what it echoes.
        text: for log-probabilities.
        num_top: how many likely tokens to name at each place; None writes no log-probabilities.
        custom: names of tools that take free text.
    """

    def __init__(
        self,
        call_id: str,
        name: str,
        request: ResponsesRequest,
        text: TextProcessor,
        num_top: int | None,
        custom: frozenset[str],
    ) -> None:
        self.call_id = call_id
        self._text = text
        self._num_top = num_top
        self._custom = custom
        self._usage = UsageSum(1)
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call_index = -1
        self._number = 0
        self._reason = "stop"
        asked = request.model_dump(exclude_none=True)
        self._echo: dict[str, Any] = {
            "id": call_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": asked.get("metadata", {}),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **asked.get("reasoning", {})},
            "service_tier": "default",
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}, **asked.get("text", {})},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "user": request.user,
            "background": False,
        }

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> bytes:
        """That it has begun."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        """What has come of reasoning, of the message and of calls, in this order."""
        frames = b""
        if chunk.reasoning_content:
            frames += self._add_reasoning(chunk.reasoning_content)
        if chunk.text or (chunk.logprobs and not chunk.reasoning_content and not chunk.tool_calls):
            frames += self._add_text(chunk)
        for call in chunk.tool_calls:
            if call.id is not None:
                frames += self._begin_call(call.id, call.name or "")
            if call.arguments:
                frames += self._add_arguments(call.arguments)
        if chunk.finish_reason is not None:
            self._reason = chunk.finish_reason
            if chunk.usage is not None:
                self._usage.add(0, chunk.usage)
        return frames

    def end(self) -> bytes:
        """The last item, and the whole response."""
        frames = self._close(is_cut=self._reason == "length")
        if not self._items:
            frames += self._begin("message") + self._close(is_cut=self._reason == "length")
        status = "incomplete" if self._reason == "length" else "completed"
        return frames + self._event(f"response.{status}", response=self._response(status))

    def fail(self, error: ApiError) -> bytes:
        """That it has failed; what there was stays in its output."""
        frames = self._close(is_cut=True)
        self._echo["error"] = {"code": "server_error", "message": error.message}
        return frames + self._event("response.failed", response=self._response("failed"))

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The response alone, made by the same events."""
        completion = completions[0]
        self.begin()
        self.chunk(
            0,
            Chunk(
                completion.request_id,
                0,
                completion.text,
                completion.token_ids,
                completion.logprobs,
                completion.finish_reason,
                completion.stop_reason,
                completion.usage,
                completion.reasoning_content,
            ),
        )
        for call in completion.tool_calls:
            self._begin_call(call.id, call.name)
            self._add_arguments(call.arguments)
        self.end()
        return self._response("incomplete" if self._reason == "length" else "completed")

    # ── items ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, kind: str, **fields: Any) -> bytes:
        """Close the item before, and open one."""
        frames = self._close()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._open = item
        self._items.append(item)
        frames += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind in ("message", "reasoning"):
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            if kind == "reasoning":
                part = {"type": "reasoning_text", "text": ""}
            frames += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
            item["content"] = [part]
        return frames

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items) - 1}

    def _add_reasoning(self, text: str) -> bytes:
        frames = b"" if self._is_open("reasoning") else self._begin("reasoning")
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return frames + self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _add_text(self, chunk: Chunk) -> bytes:
        frames = b"" if self._is_open("message") else self._begin("message")
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += chunk.text
        logprobs: list[Any] = []
        if self._num_top is not None and chunk.logprobs:
            logprobs = chat_logprobs(self._text, chunk.logprobs, self._num_top)["content"]
            part["logprobs"] += logprobs
        return frames + self._event(
            "response.output_text.delta", **self._place(), content_index=0, delta=chunk.text, logprobs=logprobs
        )

    def _begin_call(self, call_id: str, name: str) -> bytes:
        if name in self._custom:
            return self._begin("custom_tool_call", call_id=call_id, name=name, input="")
        return self._begin("function_call", call_id=call_id, name=name, arguments="")

    def _add_arguments(self, text: str) -> bytes:
        assert self._open is not None
        if self._open["type"] == "custom_tool_call":
            self._open["input"] += text  # JSON, of which only the whole can be read
            return b""
        self._open["arguments"] += text
        return self._event("response.function_call_arguments.delta", **self._place(), delta=text)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _close(self, *, is_cut: bool = False) -> bytes:
        """Say that the open item is whole."""
        item = self._open
        if item is None:
            return b""
        kind, place = item["type"], self._place()
        frames = b""
        if kind == "message":
            part = item["content"][0]
            frames += self._event(
                "response.output_text.done", **place, content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
            frames += self._event("response.content_part.done", **place, content_index=0, part=part)
        elif kind == "reasoning":
            part = item["content"][0]
            frames += self._event("response.reasoning_text.done", **place, content_index=0, text=part["text"])
            frames += self._event("response.content_part.done", **place, content_index=0, part=part)
        elif kind == "function_call":
            arguments = item["arguments"]
            frames += self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=arguments
            )
        else:
            item["input"] = _input_of(item["input"])
            frames += self._event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            frames += self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        item["status"] = "incomplete" if is_cut else "completed"
        frames += self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None
        return frames

    def _response(self, status: str) -> dict[str, Any]:
        response = {**self._echo, "status": status, "output": self._items, "usage": None}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status in ("completed", "incomplete"):
            response["usage"] = self._usage.to_response()
            response["completed_at"] = int(time.time()) if status == "completed" else None
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._number, **fields}, separators=(",", ":"))
        self._number += 1
        return f"event: {kind}\ndata: {body}\n\n".encode("ascii")


def _input_of(arguments: str) -> str:
    """What a tool of free text was called with; what is no such JSON, as it is."""
    try:
        value = json.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else arguments
