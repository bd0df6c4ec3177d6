"""Server-sent events with Starlette: the stream ends when the client goes away.

pip install "aiocb[serve]"
uvicorn --app-dir examples server_sent_events:app
curl -N "http://localhost:8000/?prompt=Once+upon+a+time"
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
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
            yield f"data: {json.dumps({'text': chunk.text})}\n\n"
    yield "data: [DONE]\n\n"


async def complete(request: Request) -> StreamingResponse:
    prompt = request.query_params.get("prompt", "Once upon a time")
    return StreamingResponse(events(prompt), media_type="text/event-stream")


app = Starlette(routes=[Route("/", complete)], lifespan=lifespan)
