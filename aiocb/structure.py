"""What an output has to look like: `Structure`, as a request asks for it. Neither torch nor a grammar library here.

A JSON schema, a regular expression, a list of choices or a grammar is taken as text when the request is made, so that
what its owner changes afterwards does not matter, and so that equal ones are compiled once. What can be seen to be
wrong is refused here, by name and place; what is too expensive to compile, by whoever compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from aiocb.checks import is_deep_json, items_of
from aiocb.errors import InvalidRequest, explain, show_value

__all__ = ["CompiledStructure", "Structure", "StructureKind", "schema_text", "structure_of"]

StructureKind = Literal["json_schema", "regex", "choice", "grammar"]

_MAX_LENGTH = 1 << 18
_MAX_DEPTH = 64
_MAX_PARTS = 1 << 16
_MAX_CHOICES = 10_000
_OF_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)  # by names that are the user's


class Structure(NamedTuple):
    """One of the four ways to say what an output has to look like.

    Attributes:
        kind: which.
        text: a schema as JSON; a regular expression; choices as a JSON list; a grammar in Lark's syntax.
    """

    kind: StructureKind
    text: str


class CompiledStructure(Protocol):
    """What a compiler makes of a `Structure`; carried by the parameters of a request to whoever samples it."""

    @property
    def structure(self) -> Structure:
        """What it was made from."""


def schema_text(schema: Any) -> str:
    """A JSON schema as text.

    Args:
        schema: a mapping, JSON text, a pydantic model, or True for any object.

    Raises:
        InvalidRequest: it is none of these, is too large or nested too deeply, or asks for what is outside of it.
    """
    if schema is True:
        schema = {"type": "object"}
    make = getattr(schema, "model_json_schema", None)
    try:
        if callable(make):
            schema = make()
        if isinstance(schema, str):
            _check_length("json_schema", schema)
            if is_deep_json(schema, 2 * _MAX_DEPTH):
                raise InvalidRequest(f"json_schema is nested deeper than {_MAX_DEPTH} levels")
            schema = json.loads(schema)
            schema = {} if schema is True else schema
        if schema is False:
            raise InvalidRequest("json_schema is false: nothing fits it")
        if not isinstance(schema, Mapping):
            raise InvalidRequest(
                f"json_schema must be a mapping, JSON text, a pydantic model or True, not {show_value(schema)}"
            )
        _check_schema(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except InvalidRequest:
        raise
    except Exception as error:  # of a model of the user's, or a text that is no JSON
        raise InvalidRequest(f"json_schema is no JSON schema: {explain(error)}") from error
    _check_length("json_schema", text)
    return text


def structure_of(values: Mapping[str, Any]) -> Structure | None:
    """The structure that some parameters ask for; None where they ask for none.

    Args:
        values: of `json_schema`, `regex`, `choice` and `grammar`; None, or left out, is unset.

    Raises:
        InvalidRequest: more than one, or one that can be seen to be wrong.
    """
    given = [name for name in ("json_schema", "regex", "choice", "grammar") if values.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} were given together: an output can have one structure only")
    kind: Any = given[0]
    value = values[kind]
    if kind == "json_schema":
        return Structure(kind, schema_text(value))
    if kind == "choice":
        return Structure(kind, _choice_text(value))
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{kind} must be a text that is not empty, not {show_value(value)}")
    _check_length(kind, value)
    if kind == "grammar" and "x-guidance" in value:
        raise InvalidRequest("grammar has x-guidance: schemas must not change how they are compiled")
    return Structure(kind, value)


def _choice_text(value: Any) -> str:
    choices = items_of(value)
    if not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequest(f"choice must be a list of texts, none empty, not {show_value(value)}")
    if len(choices) > _MAX_CHOICES:
        raise InvalidRequest(f"choice has {len(choices)} texts; at most {_MAX_CHOICES} are taken")
    text = json.dumps(list(choices))
    _check_length("choice", text)
    return text


def _check_length(name: str, text: str) -> None:
    if len(text) > _MAX_LENGTH:
        raise InvalidRequest(f"{name} has {len(text)} characters; at most {_MAX_LENGTH} are taken")


def _check_schema(schema: Any) -> None:
    """Refuse what is too deep, or refers to something outside."""
    for pointer, depth, name, value in walk(schema):
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"json_schema is nested deeper than {_MAX_DEPTH} levels at {pointer[:200]}")
        if name in ("$ref", "$dynamicRef", "$recursiveRef") and not (isinstance(value, str) and value.startswith("#")):
            raise InvalidRequest(
                f"json_schema refers to {show_value(value)} at {pointer}: only references within the schema ('#...') "
                "are followed, nothing is fetched"
            )
        if name == "x-guidance":
            raise InvalidRequest(f"json_schema has {pointer}: schemas must not change how they are compiled")


def walk(schema: Any) -> Iterator[tuple[str, int, str, Any]]:
    """Every keyword of a schema and of those within it: pointer, depth, name and value. By a stack of its own.

    What is no schema (names of properties, values of `const`, `enum`, `default` and `examples`) is looked through for
    its depth only.

    Raises:
        InvalidRequest: there is too much of it; objects that share their parts can have any number of paths.
    """
    num_seen = 0
    stack: list[tuple[str, int, Any, str]] = [("#", 0, schema, "schema")]
    while stack:
        pointer, depth, value, kind = stack.pop()
        num_seen += 1
        if num_seen > _MAX_PARTS:
            raise InvalidRequest(f"json_schema has more than {_MAX_PARTS} lists and objects")
        if depth > _MAX_DEPTH + 1:
            yield pointer, depth, "", value
            continue
        if isinstance(value, Mapping):
            for name, each in value.items():
                place = f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}"
                if kind == "schema":
                    yield place, depth, str(name), each
                within = "schema"
                if kind == "data" or name in ("const", "enum", "default", "examples"):
                    within = "data"
                elif kind == "schema" and name in _OF_SCHEMAS:
                    within = "names"
                if isinstance(each, (Mapping, list, tuple)):
                    stack.append((place, depth + 1, each, within))
        elif isinstance(value, (list, tuple)):
            stack += [
                (f"{pointer}/{at}", depth + 1, each, kind)
                for at, each in enumerate(value)
                if isinstance(each, (Mapping, list, tuple))
            ]
