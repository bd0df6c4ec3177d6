"""`GET /v1/models`, `/health` and `/stats`: what the server has, and how it is."""

from __future__ import annotations

from typing import Any

from aiocb.errors import explain
from aiocb.serve.body import Receive, Scope, Send
from aiocb.serve.errors import ApiError
from aiocb.serve.respond import Endpoint, send_bytes, send_json
from aiocb.serve.service import Service

__all__ = ["Health", "Models", "Scrape", "Stats"]


class Models(Endpoint):
    """All names of the model, or one."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A list, or the one of the path."""
        service = self._service
        asked = scope["path_params"].get("name")
        if asked is None:
            await send_json(send, {"object": "list", "data": [self._entry(name) for name in service.names]})
        else:
            await send_json(send, self._entry(service.name_of(asked)))

    def _entry(self, name: str) -> dict[str, Any]:
        service = self._service
        entry: dict[str, Any] = {"id": name, "object": "model", "created": service.created, "owned_by": "aiocb"}
        if name != service.names[0]:
            entry["root"] = service.names[0]
        if not service.is_loading and service.failure is None:
            tokenizer = service.engine.tokenizer
            entry["max_model_len"] = service.engine.max_request_tokens
            entry["capabilities"] = {"chat": getattr(tokenizer, "chat_template", None) is not None}
        return entry


class Health(Endpoint):
    """Alive, ready and moving, told apart. 200 while requests are taken and answered, else 503."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`status` in one word: `loading`, `ok`, `hung`, `draining`, `dead`."""
        service = self._service
        health = service.engine.health()
        error = service.failure or health.error
        status = "ok" if health.is_ok else "dead"
        if error is not None:
            status = "dead"
        elif service.is_loading:
            status = "loading"
        elif health.is_hung:
            status = "hung"
        elif service.is_draining:
            status = "draining"
        body: dict[str, Any] = {
            "status": status,
            "alive": status not in ("dead", "hung"),
            "ready": status == "ok",
            "step_age_seconds": health.step_age_s,
            "error": None if error is None else explain(error),
        }
        if service.is_loading:
            body["loading"] = {"stage": service.progress.stage, "fraction": service.progress.fraction}
        await send_json(send, body, 200 if status == "ok" else 503, {"cache-control": "no-store"})


class Scrape(Endpoint):
    """The counters for Prometheus."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In the format that `Accept` asks for."""
        accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
        body, content_type = self._service.metrics.render(accept)
        await send_bytes(send, 200, body, content_type.encode(), {"cache-control": "no-store"})


class Stats(Endpoint):
    """The engine's counters as JSON."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """503 before the engine has run."""
        if self._service.is_loading:
            raise ApiError(503, "the model is still being loaded", code="loading", headers={"retry-after": "5"})
        await send_json(send, self._service.stats(), headers={"cache-control": "no-store"})
