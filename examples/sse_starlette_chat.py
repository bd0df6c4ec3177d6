"""FastAPI and sse-starlette: an answer as server-sent events, ended by whoever leaves.

pip install aiocb fastapi sse-starlette "uvicorn[standard]"
uvicorn --app-dir examples sse_starlette_chat:app
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException
from sse_starlette.sse import EventSourceResponse

import aiocb

engine = aiocb.Engine.from_pretrained("smollm2")


@contextlib.asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/ask")
async def ask(question: str) -> EventSourceResponse:
    stream = engine.stream([{"role": "user", "content": question}], max_new_tokens=256, on_full="refuse")
    try:
        await stream.__aenter__()  # refusals have a status: the response has not begun
    except aiocb.InvalidRequest as error:
        raise HTTPException(400, str(error)) from None
    except aiocb.QueueFull as error:
        raise HTTPException(429, str(error)) from None

    async def events() -> AsyncIterator[dict[str, Any]]:
        async with stream:  # left when the client leaves
            async for chunk in stream:
                yield {"data": json.dumps({"text": chunk.text, "end": chunk.finish_reason})}

    return EventSourceResponse(events())
