"""`create_app`: the server as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from aiocb.serve.chat import Chat
from aiocb.serve.completions import Completions
from aiocb.serve.config import ServeConfig
from aiocb.serve.errors import ApiError
from aiocb.serve.generation import Resume
from aiocb.serve.looking import Health, Models, Scrape, Stats
from aiocb.serve.middleware import Guard, Observer
from aiocb.serve.openapi import OpenAPI
from aiocb.serve.responses import Responses, ResponsesRequest
from aiocb.serve.service import LoadProgress, Service
from aiocb.serve.sse import Heartbeats
from aiocb.serve.tokens import Detokenize, Tokenize
from aiocb.serve.websocket import ChatSocket
from aiocb.serve.wire import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from aiocb.engine.engine import Engine

__all__ = ["create_app"]

_OPEN_PATHS = ("/health", "/", "/v1/ws/chat")
"""What needs no key in a header; the socket asks for one itself."""


def create_app(engine: Engine, config: ServeConfig | None = None, progress: LoadProgress | None = None) -> Starlette:
    """Return the server as an ASGI application; its lifespan starts the engine, and leaves it at the end.

    The application is up while the model is loaded: `/health` says how far it is, requests are answered 503. Mount it
    under an application of your own if you run its lifespan there.

    Args:
        engine: of which there is one per server; it may be running already.
        config: settings.
        progress: what the engine tells how far its model is loaded; `/health` shows it.
    """
    service = Service(engine, config or ServeConfig(), progress or LoadProgress())
    config = service.config
    heartbeats = Heartbeats(config.heartbeat, service.num_waiting)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.spawn(service.run())
        service.spawn(heartbeats.run())
        service.spawn(service.lag.run())
        try:
            yield
        finally:
            await service.end()

    chat = Chat(service, heartbeats, ChatRequest)
    routes: list[Route | WebSocketRoute] = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        WebSocketRoute("/v1/ws/chat", ChatSocket(service, chat)),
        Route("/v1/completions", Completions(service, heartbeats, CompletionRequest), methods=["POST"]),
        Route("/v1/responses", Responses(service, heartbeats, ResponsesRequest), methods=["POST"]),
        Route("/v1/streams/{id}", Resume(service, heartbeats), methods=["GET"]),
        Route("/v1/models", Models(service), methods=["GET"]),
        Route("/v1/models/{name:path}", Models(service), methods=["GET"]),
        Route("/tokenize", Tokenize(service), methods=["POST"]),
        Route("/detokenize", Detokenize(service), methods=["POST"]),
        Route("/health", Health(service), methods=["GET"]),
        Route("/openapi.json", OpenAPI(), methods=["GET"]),
        Route("/metrics", Scrape(service), methods=["GET"]),
        Route("/stats", Stats(service), methods=["GET"]),
    ]
    paths = [route.path for route in routes]
    observer = Middleware(Observer, config=config, metrics=service.metrics, paths=paths)
    middleware = [observer, Middleware(Guard, config=config, open_paths=_OPEN_PATHS)]
    if config.cors_origin:
        # Outermost: refusals carry its headers too, and a preflight has no key.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: _not_here}
    )
    app.state.service = service
    return app


async def _not_here(request: Request, error: Any) -> Response:
    """Of the router: no such path, or not by this method."""
    what = f"{request.method} {request.url.path[:200]}"
    message = f"{what}: method not allowed" if error.status_code == 405 else f"{what}: there is nothing here"
    told = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None)
    return Response(told.body, told.status, {**(error.headers or {})}, "application/json")
