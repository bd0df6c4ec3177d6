"""Server-sent events with Starlette alone: the stream ends when the client goes away.

    pip install aiocb starlette uvicorn
    uvicorn --app-dir examples server_sent_events:app
    curl -N "http://localhost:8000/?prompt=Once+upon+a+time"

`fastapi_chat.py` has the rest of a server: bodies, statuses, a bounded queue.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import aiocb

engine = aiocb.Engine.from_pretrained("smollm2")


@contextlib.asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


async def events(prompt: str) -> AsyncIterator[str]:
    async with engine.stream(prompt, temperature=0.8, max_new_tokens=64) as stream:
        async for chunk in stream:
            # JSON: a line end in the text would end the event's line.
            yield f"data: {json.dumps({'text': chunk.text})}\n\n"
    yield "data: [DONE]\n\n"


async def begun(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for each in rest:
        yield each


async def complete(request: Request) -> Response:
    answer = events(request.query_params.get("prompt", "Once upon a time"))
    try:
        first = await anext(answer)  # before the response begins, so that a refusal has a status of its own
    except aiocb.InvalidRequest as error:
        return JSONResponse({"error": str(error)}, 400)
    return StreamingResponse(begun(first, answer), media_type="text/event-stream")


app = Starlette(routes=[Route("/", complete)], lifespan=lifespan)
