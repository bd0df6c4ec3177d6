"""`POST /tokenize` and `POST /detokenize`, in the shapes that vLLM gave them."""

from __future__ import annotations

from typing import Any

import anyio.to_thread

from aiocb.serve.body import Receive, Scope, Send, parse, read_body
from aiocb.serve.errors import ApiError
from aiocb.serve.messages import messages_of
from aiocb.serve.respond import Endpoint, send_json
from aiocb.serve.service import Service
from aiocb.serve.wire import DetokenizeRequest, TokenizeRequest

__all__ = ["Detokenize", "Tokenize"]


class Tokenize(Endpoint):
    """A text or messages to token ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with `tokens`, their `count`, and `max_model_len`."""
        service = self._service
        service.check_open()
        request = await parse(await read_body(scope, receive, service.config), TokenizeRequest, service.config)
        service.name_of(request.model)
        ids = await anyio.to_thread.run_sync(self._encode, request)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.engine.max_request_tokens,
            "tokens": ids,
        }
        if request.return_token_strs:
            pieces = [service.text.token_text.piece(token_id) for token_id in ids]
            answer["token_strs"] = [piece.decode("utf-8", "replace") for piece in pieces]
        await send_json(send, answer)

    def _encode(self, request: TokenizeRequest) -> list[int]:
        text = self._service.text
        if request.prompt is not None:
            return text.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        arguments = {**(request.chat_template_kwargs or {}), "add_generation_prompt": request.add_generation_prompt}
        return text.encode_chat(
            messages_of(request.messages or ()), tools=request.tools, chat_template_kwargs=arguments
        )


class Detokenize(Endpoint):
    """Token ids to a text."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the `prompt` that they spell."""
        service = self._service
        service.check_open()
        request = await parse(await read_body(scope, receive, service.config), DetokenizeRequest, service.config)
        service.name_of(request.model)
        tokenizer = service.text.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this model has no tokenizer", code="unsupported")
        size = len(tokenizer)
        wrong = next((token_id for token_id in request.tokens if not 0 <= token_id < size), None)
        if wrong is not None:
            raise ApiError(400, f"tokens: {wrong} is no token id; they are below {size}", param="tokens")
        shown = await anyio.to_thread.run_sync(tokenizer.decode, request.tokens)
        await send_json(send, {"prompt": shown})
