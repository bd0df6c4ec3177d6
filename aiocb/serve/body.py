"""A request's body: read within its limits, parsed, and checked against its model. Runs on the event loop.

What comes is anybody's. So its size and the time it takes are bounded while it is read, and its depth before anything
that recurses sees it: how deep Python's own parser goes differs from version to version, from an error to a crash.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ValidationError

from aiocb.checks import is_deep_json
from aiocb.serve.config import ServeConfig
from aiocb.serve.errors import ApiError

__all__ = ["ClientGone", "Receive", "Scope", "Send", "check", "parse", "read_body"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Model = TypeVar("Model", bound=BaseModel)

_SMALL = 32 << 10
"""Bodies up to this size are parsed on the loop: a thread would cost more."""
_BRANCHES = frozenset({"bool", "dict", "float", "int", "list", "none", "str"})
"""What pydantic calls the alternatives of a field."""


class ClientGone(Exception):
    """The client has left before its request was complete."""


async def read_body(scope: Scope, receive: Receive, config: ServeConfig) -> bytes:
    """Read the body.

    Raises:
        ApiError: too large, or too slow.
        ClientGone: it ends in the middle.
    """
    most = config.max_body_size
    too_large = ApiError(
        413, f"the body is larger than {most} bytes, which is the most that this server takes", code="body_too_large"
    )
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout or None):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408, f"the body has not arrived within {config.body_timeout:g} seconds", code="body_timeout"
        ) from None


async def parse(body: bytes, model: type[Model], config: ServeConfig) -> Model:
    """Parse and check a body; a large one in a thread.

    Raises:
        ApiError: 400, with the field's place as `param`.
    """
    if len(body) <= _SMALL:
        return _parse(body, model, config.max_body_depth)
    return await anyio.to_thread.run_sync(_parse, body, model, config.max_body_depth)


def _parse(body: bytes, model: type[Model], max_depth: int) -> Model:
    if is_deep_json(body, max_depth):
        raise ApiError(400, f"the body is nested deeper than {max_depth} levels; make it flatter", code="too_deep")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return check(value, model)


def check(value: dict[str, Any], model: type[Model]) -> Model:
    """Check what was parsed.

    Raises:
        ApiError: 400, with the field's place as `param`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _refusal(error: ValidationError) -> ApiError:
    """The first of what is wrong, with its place."""
    found = error.errors(include_url=False, include_input=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    field = first.get("ctx", {}).get("field")
    place = _pointer((*first["loc"], field) if field else first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"unknown field {place!r}: this server honours every field or refuses it by name; leave it out",
            param=place,
            code="unknown_parameter",
        )
    what = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    codes = {"missing": "missing_required_parameter", "refused": "unsupported_parameter"}
    code = codes.get(first["type"], "invalid_value")
    return ApiError(400, f"{place}: {what}" if place else what, param=place or None, code=code)


def _pointer(place: tuple[int | str, ...]) -> str:
    """`messages[0].content`; names of branches that pydantic has tried are left out."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES and not part[0].isupper():
            text += f".{part}" if text else part
    return text
