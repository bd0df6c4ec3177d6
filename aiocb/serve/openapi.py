"""`GET /openapi.json`: what the server takes, made of the models that check it."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from aiocb._version import __version__
from aiocb.serve.body import Receive, Scope, Send
from aiocb.serve.respond import Endpoint, send_json
from aiocb.serve.responses import ResponsesRequest
from aiocb.serve.wire import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

__all__ = ["OpenAPI", "openapi_document"]

_POSTS: dict[str, tuple[Any, str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a chat, whole or as server-sent events."),
    "/v1/completions": (CompletionRequest, "Continue texts, whole or as server-sent events."),
    "/v1/responses": (ResponsesRequest, "Answer by items, whole or as server-sent events."),
    "/tokenize": (TokenizeRequest, "A text or messages to token ids."),
    "/detokenize": (DetokenizeRequest, "Token ids to a text."),
}
_GETS = {
    "/v1/models": "The names of the model.",
    "/health": "Alive, ready and moving, told apart.",
    "/stats": "The engine's counters.",
    "/metrics": "The same for Prometheus.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document() -> dict[str, Any]:
    """The document, of OpenAPI 3.1."""
    models = [(model, "validation") for model, _ in _POSTS.values()]
    references, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    error = {
        "description": "Refused, or failed.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    refused = {str(status): error for status in (400, 401, 404, 408, 413, 429, 500, 503, 504)}
    paths: dict[str, Any] = {}
    for path, (model, summary) in _POSTS.items():
        streams: dict[str, Any] = {} if path in ("/tokenize", "/detokenize") else {"text/event-stream": {}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": references[model, "validation"]}},
                },
                "responses": {
                    "200": {"description": "Done.", "content": {"application/json": {}, **streams}},
                    **refused,
                },
            }
        }
    for path, summary in _GETS.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        answers = {"200": {"description": "As asked.", "content": {kind: {}}}}
        if path == "/health":
            answers["503"] = {"description": "Not ready.", "content": {"application/json": {}}}
        paths[path] = {"get": {"summary": summary, "responses": {**refused, **answers}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "aiocb", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


class OpenAPI(Endpoint):
    """The document."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Always the same."""
        await send_json(send, openapi_document())
