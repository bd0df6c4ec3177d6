"""`POST /v1/completions`: texts and token ids, continued."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from aiocb.outputs import Chunk, Completion
from aiocb.serve.errors import ApiError
from aiocb.serve.generation import Answer, Asked, Generation
from aiocb.serve.logprobs import legacy_logprobs
from aiocb.serve.sse import DONE, data, quote
from aiocb.serve.usage import UsageSum
from aiocb.serve.wire import CompletionRequest
from aiocb.text.processor import TextProcessor

__all__ = ["Completions"]


class Completions(Generation[CompletionRequest]):
    """Continues texts."""

    def ask(self, request: CompletionRequest, call_id: str, name: str) -> Asked:
        """One prompt, or several; choices are numbered through."""
        options = request.options()
        if request.logprobs is not None:
            most = self.service.config.max_logprobs
            if request.logprobs > most:
                raise ApiError(400, f"logprobs must be at most {most}", param="logprobs", code="invalid_value")
            options["logprobs"] = request.logprobs
        if request.echo:
            options["echo"] = True
            if request.logprobs is not None:
                if request.stream:
                    raise ApiError(
                        400,
                        "echo with logprobs cannot be streamed: the prompt's are known at the end; do not stream",
                        param="echo",
                        code="unsupported_parameter",
                    )
                options["prompt_logprobs"] = request.logprobs
        prompts = request.prompts()
        if not prompts:
            raise ApiError(400, "prompt: give at least one", param="prompt", code="invalid_value")
        answer = CompletionAnswer(
            f"cmpl-{call_id}",
            name,
            request.n,
            self.service.text,
            request.logprobs,
            bool(request.stream_options and request.stream_options.include_usage),
        )
        return Asked(prompts, options, answer)


class CompletionAnswer(Answer):
    """Chunks and whole completions; arguments as for `ChatAnswer`."""

    def __init__(
        self, call_id: str, name: str, n: int, text: TextProcessor, num_top: int | None, wants_usage: bool
    ) -> None:
        self.call_id = call_id
        self._text = text
        self._num_top = num_top
        self._wants_usage = wants_usage
        self._usage = UsageSum(n)
        self._base = {"id": call_id, "object": "text_completion", "created": int(time.time()), "model": name}
        self._head = json.dumps(self._base)[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if wants_usage else "]}"
        self._offsets: dict[int, int] = {}

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def chunk(self, choice: int, chunk: Chunk) -> bytes:
        """New text, and the reason why a choice has ended."""
        if chunk.usage is not None:
            self._usage.add(choice, chunk.usage)
        if not (chunk.text or chunk.logprobs or chunk.finish_reason):
            return b""
        logprobs = "null"
        if self._num_top is not None and chunk.logprobs:
            offset = self._offsets.get(choice, 0)
            found = legacy_logprobs(self._text, chunk.logprobs, chunk.token_ids, self._num_top, offset)
            self._offsets[choice] = offset + sum(map(len, found["tokens"]))
            logprobs = json.dumps(found)
        reason = "null" if chunk.finish_reason is None else quote(chunk.finish_reason)
        return data(
            f'{self._head}{{"index":{choice},"text":{quote(chunk.text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}{self._tail}'
        )

    def end(self) -> bytes:
        """Counts, where they were asked for, and the end."""
        if not self._wants_usage:
            return DONE
        return data(f'{self._head}],"usage":{json.dumps(self._usage.to_wire())}}}') + DONE

    def fail(self, error: ApiError) -> bytes:
        """The error; no `[DONE]`, which would say that the answer is whole."""
        return data(error.body.decode())

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """A `text_completion`."""
        choices = []
        for index, completion in enumerate(completions):
            self._usage.add(index, completion.usage)
            logprobs = None
            if self._num_top is not None:
                prompt = completion.prompt_logprobs
                token_ids = (
                    completion.token_ids if prompt is None else (*completion.prompt_token_ids, *completion.token_ids)
                )
                found = [*chain(prompt or (), completion.logprobs or ())]
                logprobs = legacy_logprobs(self._text, found, token_ids, self._num_top, 0)
            choices.append(
                {
                    "index": index,
                    "text": completion.text,
                    "logprobs": logprobs,
                    "finish_reason": completion.finish_reason,
                }
            )
        return {**self._base, "choices": choices, "usage": self._usage.to_wire()}
