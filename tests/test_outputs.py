"""What users do with results: pickle, copy, `asdict`, JSON, a response model."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter

import aiocb
from aiocb.errors import explain, show_value

TOP = ((7, -0.25), (3, -1.5))
ONE = aiocb.TokenLogprobs(7, -0.25, 1, TOP)


def completion(error: Any = None) -> aiocb.Completion:
    return aiocb.Completion(
        "label",
        0,
        "text",
        (7,),
        (ONE,),
        "error" if error else "stop",
        "stop string",
        aiocb.Usage(2, 1),
        (1, 2),
        aiocb.RequestMetrics(0.1, None, 0.2),
        (None, ONE),
        error,
    )


def timeout() -> aiocb.RequestTimeout:
    error = aiocb.RequestTimeout("too late", "queue")
    error.partial = (completion(),)
    error.add_note("3 tokens had been produced")
    return error


COPIES: list[Callable[[Any], Any]] = [
    lambda value: pickle.loads(pickle.dumps(value)),
    copy.copy,
    copy.deepcopy,
]
CHUNK = aiocb.Chunk("label", 1, "text", (7,), (ONE,), "stop", 5, aiocb.Usage(1, 1))


@pytest.mark.parametrize("make", COPIES)
def test_copies_are_equal(make: Callable[[Any], Any]) -> None:
    for value in (CHUNK, completion(), ONE, aiocb.Usage(1, 2, 1), aiocb.RequestMetrics(None, None, 1.0)):
        assert make(value) == value and type(make(value)) is type(value)


@pytest.mark.parametrize("make", COPIES)
def test_errors_keep_what_they_carry(make: Callable[[Any], Any]) -> None:
    error = make(timeout())
    assert type(error) is aiocb.RequestTimeout and isinstance(error, TimeoutError)
    assert (str(error), error.stage, error.partial) == ("too late", "queue", (completion(),))
    assert error.__notes__ == ["3 tokens had been produced"]
    for kind in (aiocb.InvalidRequest, aiocb.QueueFull, aiocb.RequestFailed, aiocb.EngineClosed, aiocb.EngineDead):
        copied = make(kind("why"))
        assert type(copied) is kind and str(copied) == "why"
    failed = make(completion(timeout()))
    assert failed.error is not None and failed.error.partial == (completion(),)


def test_everything_is_ready_for_json() -> None:
    for value in (CHUNK, completion()):
        plain = json.loads(json.dumps(dataclasses.asdict(value)))
        assert plain["logprobs"] == [[7, -0.25, 1, [[7, -0.25], [3, -1.5]]]]
        assert json.loads(json.dumps(value.to_dict())) == plain
    failed = completion(timeout())
    assert json.loads(json.dumps(failed.to_dict()))["error"] == "too late"
    assert dataclasses.asdict(failed)["error"].partial == (completion(),)


def test_a_response_model_is_made_of_them() -> None:
    values: list[tuple[Any, Any]] = [(aiocb.Chunk, CHUNK), (aiocb.Completion, completion()), (aiocb.TokenLogprobs, ONE)]
    for kind, value in values:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        assert adapter.json_schema(mode="serialization") and adapter.json_schema()
        written = json.loads(adapter.dump_json(value))
        assert written == json.loads(json.dumps(value if kind is aiocb.TokenLogprobs else value.to_dict()))
        assert adapter.validate_python(value) == value
        assert adapter.validate_json(adapter.dump_json(value)) == value
        if kind is not aiocb.TokenLogprobs:  # what FastAPI does
            assert adapter.validate_python(dataclasses.asdict(value)) == value
    adapter = TypeAdapter(list[aiocb.Completion])
    failed = completion(timeout())
    assert json.loads(adapter.dump_json([failed]))[0]["error"] == "too late"
    assert adapter.dump_python([failed])[0]["error"] is failed.error


def test_log_probabilities_are_a_named_tuple() -> None:
    token_id, logprob, rank, top = ONE
    assert (token_id, logprob, rank, top) == (7, -0.25, 1, TOP) == tuple(ONE) == ONE
    assert ONE[3] == ONE.top == TOP and ONE[::2] == (7, 1) and len(ONE) == 4
    assert ONE._asdict() == {"token_id": 7, "logprob": -0.25, "rank": 1, "top": TOP}
    assert ONE._replace(rank=2) == aiocb.TokenLogprobs(7, -0.25, 2, TOP) != ONE
    assert hash(ONE) == hash(ONE._replace()) and aiocb.TokenLogprobs(1, -1.0, 1).top == ()
    assert repr(ONE) == f"TokenLogprobs(token_id=7, logprob=-0.25, rank=1, top={TOP})"
    assert json.dumps([ONE]) == "[[7, -0.25, 1, [[7, -0.25], [3, -1.5]]]]"


def test_log_probabilities_are_one_object_each_to_the_garbage_collector() -> None:
    """Twenty pairs for each token of each stream make it walk the whole program every few seconds."""
    top = [(token, -float(token)) for token in range(20)]
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        kept = [aiocb.TokenLogprobs(token, -1.0, 1, top) for token in range(1000)]
        assert len(gc.get_objects()) - before < 1100
    finally:
        gc.enable()
    assert kept[5].top == tuple(top)


def test_values_and_errors_of_users_are_shown_whatever_they_are() -> None:
    class Broken(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

        __str__ = __repr__

    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    assert show_value("x" * 1000).endswith("...") and len(show_value("x" * 1000)) < 120
    assert show_value([1] * 1000) == "a list of 1000 elements"
    assert show_value(10**5000) == "a value of type int"
    assert show_value(nested) == "a value of type list"
    assert show_value(Broken()) == "a value of type Broken"
    assert explain(Broken()).startswith("Broken: ") and explain(ValueError("why")) == "ValueError: why"
