"""A chat server with FastAPI: whole answers, server-sent events, a WebSocket. Explained in docs/serving.md.

    pip install aiocb fastapi "uvicorn[standard]"
    uvicorn --app-dir examples fastapi_chat:app
    curl -N localhost:8000/stream -H "content-type: application/json" \
        -d '{"messages": [{"role": "user", "content": "Name three colours."}]}'
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
from fastapi import Depends, FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

import aiocb

engine = aiocb.Engine.from_pretrained("smollm2", config=aiocb.EngineConfig(max_queue_size=64), drain=10.0)


@contextlib.asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with engine:  # loads the model, here and not at import
        yield


app = FastAPI(lifespan=lifespan)
HEARTBEAT_S = 15.0


def status_of(error: aiocb.AiocbError) -> int:
    match error:
        case aiocb.InvalidRequest():
            return 400  # can never run as asked; a body of the wrong shape is FastAPI's 422
        case aiocb.QueueFull():
            return 429  # this server is well and busy
        case aiocb.RequestTimeout():
            return 503 if error.stage == "queue" else 504
        case aiocb.EngineError():
            return 503  # starting, closing or dead
        case _:
            return 500


@app.exception_handler(aiocb.AiocbError)
async def refuse(_request: Request, error: aiocb.AiocbError) -> JSONResponse:
    status = status_of(error)
    headers = {"Retry-After": "5"} if status in (429, 503) else None
    return JSONResponse({"error": str(error)}, status, headers)


class Message(BaseModel):
    role: str
    content: str


class Question(BaseModel):
    messages: list[Message]
    temperature: float = 0.7
    max_new_tokens: int = 256


async def submit(question: Question, request: Request) -> AsyncIterator[aiocb.Stream]:
    messages = [message.model_dump() for message in question.messages]
    async with engine.stream(
        messages,
        temperature=question.temperature,
        max_new_tokens=question.max_new_tokens,
        timeout=120.0,
        queue_timeout=20.0,
        on_full="refuse",
    ) as stream:
        watcher = asyncio.create_task(close_when_gone(request, stream))
        try:
            yield stream
        finally:
            watcher.cancel()


async def close_when_gone(request: Request, stream: aiocb.Stream) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.close()


Submitted = Annotated[aiocb.Stream, Depends(submit)]


@app.post("/answer")
async def answer(stream: Submitted) -> dict[str, Any]:
    completion = await stream
    return {"text": completion.text, "finish_reason": completion.finish_reason}


def event(data: dict[str, Any], name: str = "message") -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def piece(chunk: aiocb.Chunk) -> dict[str, Any]:
    return {"text": chunk.text, "finish_reason": chunk.finish_reason}


async def events(stream: aiocb.Stream, first: aiocb.Chunk) -> AsyncIterator[str]:
    yield event(piece(first))
    try:
        while True:
            with anyio.move_on_after(HEARTBEAT_S) as patience:
                chunk = await anext(stream, None)
            if patience.cancelled_caught:
                yield ": still here\n\n"  # a comment: proxies cut connections in which nothing moves
            elif chunk is None:
                return
            else:
                yield event(piece(chunk))
    except aiocb.AiocbError as error:  # the status has been sent: what fails now is told in the stream
        yield event({"error": str(error)}, "error")


@app.post("/stream")
async def stream_answer(stream: Submitted) -> Response:
    first = await anext(stream, None)  # until here a failure still has a status of its own
    if first is None:
        return Response(status_code=499)  # the client has gone
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(stream, first), media_type="text/event-stream", headers=headers)


@app.websocket("/chat")
async def chat(websocket: WebSocket) -> None:
    """Takes {"content": ...} and {"stop": true}; sends {"text": ...}, and at the end of an answer its finish_reason."""
    await websocket.accept()
    messages: list[dict[str, str]] = []
    current: aiocb.Stream | None = None

    async def speak(stream: aiocb.Stream) -> None:
        nonlocal current
        said = ""
        try:
            async with stream:
                async for chunk in stream:
                    said += chunk.text
                    await websocket.send_json(piece(chunk))
            messages.append({"role": "assistant", "content": said})
        except aiocb.AiocbError as error:
            messages.pop()  # a question without an answer
            await websocket.send_json({"error": str(error)})
        finally:
            current = None

    try:
        async with asyncio.TaskGroup() as group:  # leaving it ends the answer that is being given
            while True:
                try:
                    received = await websocket.receive_json()
                    is_stop, content = received.get("stop"), received.get("content")
                except (ValueError, AttributeError):  # no JSON, or no object
                    await websocket.send_json({"error": 'send {"content": "a text"} or {"stop": true}'})
                    continue
                if is_stop:
                    if current is not None:
                        current.finish()
                elif current is not None:
                    await websocket.send_json({"error": "one question at a time"})
                else:
                    messages.append({"role": "user", "content": content})
                    current = engine.stream(messages, temperature=0.7, max_new_tokens=256, on_full="refuse")
                    group.create_task(speak(current))
    except* WebSocketDisconnect:
        pass


@app.get("/health")
async def health() -> JSONResponse:
    health = engine.health()
    return JSONResponse({"state": health.state, "is_hung": health.is_hung}, 200 if health.is_ok else 503)
