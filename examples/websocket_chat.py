"""A websocket chat server: one task per client, aborted when the client leaves.

    pip install aiocb starlette "uvicorn[standard]"
    uvicorn --app-dir examples websocket_chat:app

Send JSON text messages `{"content": "..."}`; the answer comes back in pieces, then `{"done": true}`, or
`{"error": "..."}`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

import aiocb

engine = aiocb.Engine.from_pretrained("smollm2", drain=5.0)


@contextlib.asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


async def chat(websocket: WebSocket) -> None:
    await websocket.accept()
    history: list[dict[str, str]] = []
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            try:
                content = (await websocket.receive_json()).get("content")
            except (ValueError, AttributeError):  # no JSON, or no object
                await websocket.send_json({"error": 'send {"content": "a text"}'})
                continue
            history.append({"role": "user", "content": content})
            answer = []
            try:
                # Leaving this block for any reason, a disconnect included, frees the place.
                async with engine.stream(history, temperature=0.7, max_new_tokens=128) as stream:
                    async for chunk in stream:
                        answer.append(chunk.text)
                        await websocket.send_json({"text": chunk.text})
            except aiocb.AiocbError as error:  # the conversation has become too long, say
                history.pop()
                await websocket.send_json({"error": str(error)})
                continue
            history.append({"role": "assistant", "content": "".join(answer)})
            await websocket.send_json({"done": True})


app = Starlette(routes=[WebSocketRoute("/chat", chat)], lifespan=lifespan)
