"""The description of the server, and bodies made of it at random: nothing is a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from aiocb.serve.openapi import openapi_document

from .helpers import serving

pytestmark = pytest.mark.asyncio
ODD: list[Any] = [None, True, -1, 0, 1, 2.5, 1e308, 10**30, "", "x", "\ud83d", [], [1], ["x"], {}, {"x": 1}, [[]], [{}]]


def made(schema: Any, definitions: dict[str, Any], chance: random.Random, depth: int = 0) -> Any:
    """A value of a schema, or sometimes an odd one."""
    if chance.random() < 0.12 or depth > 5 or not isinstance(schema, dict):
        return chance.choice(ODD)
    if "$ref" in schema:
        return made(definitions[schema["$ref"].rpartition("/")[2]], definitions, chance, depth + 1)
    if "anyOf" in schema:
        return made(chance.choice(schema["anyOf"]), definitions, chance, depth + 1)
    if "enum" in schema:
        return chance.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        return {
            name: made(each, definitions, chance, depth + 1)
            for name, each in properties.items()
            if name in required or chance.random() < 2 / max(len(properties), 2)
        }
    if kind == "array":
        return [made(schema.get("items"), definitions, chance, depth + 1) for _ in range(chance.randrange(3))]
    values: dict[str, list[Any]] = {
        "string": ["", "x", "user", "auto", "Hi there", "\u2028"],
        "integer": [0, 1, 2, 7, -1, 100],
        "number": [0, 1, 0.5, -2.0, 100.0],
        "boolean": [True, False],
    }
    return chance.choice(values.get(str(kind), ODD))


async def test_the_document_names_every_body() -> None:
    document = openapi_document()
    json.dumps(document, allow_nan=False)
    async with serving() as served:
        assert (await served.client.get("/openapi.json")).json() == document
        for path, item in document["paths"].items():
            for method in item:
                response = await served.client.request(method, path, json={} if method == "post" else None)
                assert response.status_code in (200, 400), (method, path)


@pytest.mark.slow
async def test_random_bodies_are_answered_or_refused() -> None:
    document = openapi_document()
    definitions = document["components"]["schemas"]
    chance = random.Random(11)
    statuses: dict[int, int] = {}
    async with serving(request_timeout=5.0) as served:
        for path, item in document["paths"].items():
            if "post" not in item:
                continue
            schema = item["post"]["requestBody"]["content"]["application/json"]["schema"]
            for _ in range(60):
                body = json.dumps(made(schema, definitions, chance))
                response = await served.client.post(path, content=body.encode())
                assert response.status_code in (200, 400, 404, 429, 504), (path, body, response.text)
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                if response.status_code != 200:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert statuses[200] > 10
    assert statuses[400] > 50
