"""`WS /v1/ws/chat`: several chats over one socket. Event loop only.

Every frame is a JSON object with a `type`; those of a chat carry its `id`, which the client chooses.

```
client                                             server
{"type": "auth", "api_key": ...}                   first, where keys are asked for and no header has brought one
{"type": "start", "id": "a", "messages": [...]}    {"type": "started", "id": "a", "model": ...}
     fields of /v1/chat/completions                {"type": "delta", "id": "a", "index": 0, "content": ...}
{"type": "stop", "id": "a"}   ends and keeps       {"type": "done", "id": "a", "finish_reasons": [...], "usage": {...}}
{"type": "cancel", "id": "a"} ends and drops       {"type": "error", "id": "a", "error": {...}}
```

A delta has `content`, `reasoning_content` and `tool_calls` where there is something of them. What is malformed is
answered with an error; the socket stays open. When it closes, all of its chats end at once. A client that reads slowly
gets larger deltas.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiocb.checks import is_deep_json
from aiocb.errors import AiocbError
from aiocb.outputs import Chunk
from aiocb.serve.body import Receive, Scope, Send, check
from aiocb.serve.chat import Chat, call_delta
from aiocb.serve.errors import ApiError, error_of
from aiocb.serve.service import Call, Service
from aiocb.serve.usage import UsageSum
from aiocb.serve.wire import ChatRequest

__all__ = ["ChatSocket"]

_MAX_CHATS = 64
_AUTH_S = 10.0
_MAX_ID = 128
_POLICY = 1008
_GOING_AWAY = 1001


class _Closed(Exception):
    """The client has left, or was sent away."""


class ChatSocket:
    """The endpoint.

    Args:
        service: the server's state.
        chat: makes of a request what is to be streamed.
    """

    def __init__(self, service: Service, chat: Chat) -> None:
        self._service = service
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket."""
        await receive()  # websocket.connect
        headers = dict(scope["headers"])
        if not self._is_origin_good(headers):
            await send({"type": "websocket.close", "code": _POLICY, "reason": "this origin is not allowed"})
            return
        await send({"type": "websocket.accept"})
        socket = _Socket(self._service, self._chat, receive, send)
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    await socket.serve(group, is_known=self._has_key(headers))
                except _Closed:
                    pass
                finally:
                    socket.leave()
        except* (OSError, _Closed):
            pass  # it closed while something was written

    def _is_origin_good(self, headers: Mapping[bytes, bytes]) -> bool:
        """Pages of others must not use a server that their reader can reach; programs send no origin."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        allowed = self._service.config.cors_origin
        if not origin or origin in allowed or "*" in allowed:
            return True
        return urlsplit(origin).netloc == headers.get(b"host", b"").decode("latin-1")

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        if not self._service.config.api_key:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and is_key(self._service, given.strip())


def is_key(service: Service, given: bytes) -> bool:
    """Whether this is one of the server's keys."""
    matches = [hmac.compare_digest(given, key.encode()) for key in service.config.api_key]
    return any(matches)  # all were compared: how long it takes says nothing of them


class _Socket:
    """One socket and its chats."""

    def __init__(self, service: Service, chat: Chat, receive: Receive, send: Send) -> None:
        self._service = service
        self._chat = chat
        self._receive = receive
        self._send_raw = send
        self._calls: dict[str, Call] = {}
        self._is_open = True

    def leave(self) -> None:
        """End every chat."""
        self._is_open = False
        for call in self._calls.values():
            call.leave()

    async def serve(self, group: asyncio.TaskGroup, *, is_known: bool) -> None:
        """Read frames until the client leaves.

        Raises:
            _Closed: it has.
        """
        if not is_known:
            try:
                async with asyncio.timeout(_AUTH_S):
                    is_known = await self._authenticate()
            except TimeoutError:
                pass
            if not is_known:
                await self._send_raw({"type": "websocket.close", "code": _POLICY, "reason": "a wrong key, or none"})
                raise _Closed
        while True:
            text = await self._next()
            chat_id: str | None = None
            try:
                frame = self._parsed(text)
                chat_id = _id_of(frame)
                await self._obey(frame, chat_id, group)
            except (ApiError, AiocbError) as error:
                await self._fail(chat_id, error)

    async def _authenticate(self) -> bool:
        try:
            frame = self._parsed(await self._next())
        except ApiError:
            return False
        key = frame.get("api_key")
        return frame.get("type") == "auth" and isinstance(key, str) and is_key(self._service, key.encode())

    async def _next(self) -> str | bytes:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise _Closed
        text = message.get("text")
        return text if text is not None else (message.get("bytes") or b"")

    def _parsed(self, text: str | bytes) -> dict[str, Any]:
        if is_deep_json(text, self._service.config.max_body_depth):
            raise ApiError(400, "the frame is nested too deeply", code="too_deep")
        try:
            frame = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the frame is no JSON: {error}", code="invalid_json") from None
        if not isinstance(frame, dict):
            raise ApiError(400, "a frame must be a JSON object", code="invalid_json")
        return frame

    async def _obey(self, frame: dict[str, Any], chat_id: str, group: asyncio.TaskGroup) -> None:
        kind = frame.pop("type", None)
        if kind == "start":
            if chat_id in self._calls:
                raise ApiError(409, f"the chat {chat_id!r} has not ended; choose another id", param="id")
            if len(self._calls) >= _MAX_CHATS:
                raise ApiError(429, f"{_MAX_CHATS} chats run on this socket, the most", code="too_many_chats")
            del frame["id"]
            call, answer = self._start(frame)
            self._calls[chat_id] = call
            group.create_task(self._run(chat_id, call, answer))
        elif kind in ("stop", "cancel"):
            call_or_none = self._calls.get(chat_id)
            if call_or_none is None:
                return  # it has ended meanwhile
            if kind == "stop":
                call_or_none.finish()
            else:
                call_or_none.abort(ApiError(499, "cancelled by its client", code="cancelled"))
        else:
            raise ApiError(400, "type must be start, stop or cancel", param="type", code="invalid_value")

    def _start(self, fields: dict[str, Any]) -> tuple[Call, _Answer]:
        service = self._service
        service.check_open()
        if fields.get("stream") is not None or fields.get("resume") is not None:
            raise ApiError(400, "stream and resume mean nothing on a socket; leave them out", param="stream")
        request = check(fields, ChatRequest)
        name = service.name_of(request.model)
        asked = self._chat.ask(request, uuid.uuid4().hex, name)
        options = {**self._chat.bounded(request, asked), "adapter": service.adapter_of(name)}
        stream = service.engine.stream(asked.prompts[0], on_full="refuse", **options)
        return Call([stream]), _Answer(name, request.n)

    async def _run(self, chat_id: str, call: Call, answer: _Answer) -> None:
        self._service.add(call)
        try:
            async with call.streams[0] as stream:
                await self._send({"type": "started", "id": chat_id, "model": answer.model})
                async for chunk in stream:
                    for frame in answer.frames(chunk):
                        await self._send({"type": "delta", "id": chat_id, **frame})
            if call.error is not None:
                raise call.error
            if not call.is_gone:
                self._calls.pop(chat_id, None)  # before it is told: the id is free then
                await self._send({"type": "done", "id": chat_id, **answer.end()})
        except (ApiError, AiocbError) as error:
            self._calls.pop(chat_id, None)
            if not call.is_gone:
                await self._fail(chat_id, call.error or error)
        finally:
            self._calls.pop(chat_id, None)
            self._service.remove(call)
        if self._service.is_draining and not self._calls and self._is_open:
            await self._send_raw({"type": "websocket.close", "code": _GOING_AWAY, "reason": "the server is stopping"})

    async def _fail(self, chat_id: str | None, error: Exception) -> None:
        body = json.loads(error_of(error).body)
        await self._send({"type": "error", "id": chat_id, **body})

    async def _send(self, frame: dict[str, Any]) -> None:
        if self._is_open:
            await self._send_raw({"type": "websocket.send", "text": json.dumps(frame)})


class _Answer:
    """What is told of one chat."""

    def __init__(self, model: str, n: int) -> None:
        self.model = model
        self._usage = UsageSum(n)
        self._reasons: list[str | None] = [None] * n
        self._calling: set[int] = set()

    def frames(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The delta of a chunk, if there is something in it."""
        delta: dict[str, Any] = {}
        if chunk.reasoning_content:
            delta["reasoning_content"] = chunk.reasoning_content
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.tool_calls:
            self._calling.add(chunk.index)
            delta["tool_calls"] = [call_delta(call) for call in chunk.tool_calls]
        if chunk.finish_reason is not None:
            is_calling = chunk.index in self._calling and chunk.finish_reason == "stop"
            self._reasons[chunk.index] = "tool_calls" if is_calling else chunk.finish_reason
            if chunk.usage is not None:
                self._usage.add(chunk.index, chunk.usage)
        return [{"index": chunk.index, **delta}] if delta else []

    def end(self) -> dict[str, Any]:
        """Why each choice has ended, and the counts."""
        return {"finish_reasons": self._reasons, "usage": self._usage.to_wire()}


def _id_of(frame: Mapping[str, Any]) -> str:
    chat_id = frame.get("id")
    if not isinstance(chat_id, str) or not 0 < len(chat_id) <= _MAX_ID:
        raise ApiError(400, f"id must be a text of 1 to {_MAX_ID} characters", param="id", code="invalid_value")
    return chat_id
