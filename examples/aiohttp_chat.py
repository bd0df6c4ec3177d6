"""An aiohttp handler that streams text.

pip install aiocb aiohttp
python examples/aiohttp_chat.py
curl -N "localhost:8080/ask?question=Name+three+colours."
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

import aiocb

ENGINE = web.AppKey("engine", aiocb.Engine)


async def run_engine(app: web.Application) -> AsyncIterator[None]:
    async with app[ENGINE]:
        yield


async def ask(request: web.Request) -> web.StreamResponse:
    messages = [{"role": "user", "content": request.query.get("question", "")}]
    try:
        async with request.app[ENGINE].stream(messages, max_new_tokens=128) as stream:
            response = web.StreamResponse()
            await response.prepare(request)
            async for chunk in stream:
                await response.write(chunk.text.encode())  # raises when the client has left: the slot is free then
            await response.write_eof()
            return response
    except aiocb.InvalidRequest as error:
        raise web.HTTPBadRequest(text=str(error)) from None


def make_app(engine: aiocb.Engine) -> web.Application:
    app = web.Application()
    app[ENGINE] = engine
    app.cleanup_ctx.append(run_engine)
    app.router.add_get("/ask", ask)
    return app


if __name__ == "__main__":
    web.run_app(make_app(aiocb.Engine.from_pretrained("smollm2")), handler_cancellation=True)
