"""Parameters: every wrong value is refused by name, unset ones come from the model, nothing is changed."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
from transformers import GenerationConfig

from aiocb.errors import InvalidRequest
from aiocb.sampling_params import ModelDefaults, SamplingParams

V = 100
DEFAULTS = ModelDefaults(V, 64, (2, 5))


# Untyped in transformers.
make_config: Any = GenerationConfig


def resolve(**values: Any) -> SamplingParams:
    return SamplingParams(**values).resolve(DEFAULTS)


REFUSED: list[tuple[str, list[Any]]] = [
    ("temperature", [-1, -1e-9, math.nan, math.inf, "1", True, 10**400, [1.0]]),
    ("top_p", [-0.1, 1.1, math.nan, "x", True]),
    ("top_k", [-2, 1.5, "5", True, math.nan, math.inf]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("typical_p", [0, -0.1, 1.1, math.nan]),
    ("repetition_penalty", [0, -1, math.nan, math.inf]),
    ("presence_penalty", [math.nan, math.inf, "1"]),
    ("frequency_penalty", [math.nan, -math.inf, None.__class__]),
    ("no_repeat_ngram_size", [-1, 1.5, "2"]),
    ("logit_bias", [{-1: 1.0}, {V: 1.0}, {2**63: 1.0}, {"1": 1.0}, {1: math.nan}, {1: math.inf}, {1: 10**400}, [1], 5]),
    ("bad_words", ["text", [""], [1], 5]),
    ("bad_words_ids", [[[]], [[-1]], [[V]], [[2**63]], ["a"], "a", 5, [[None]]]),
    ("allowed_token_ids", [[], [-1], [V], [V + 1], [2**63], ["a"], "a", [True]]),
    ("max_new_tokens", [-1, 1.5, "3", True]),
    ("min_new_tokens", [-1, "3"]),
    ("ignore_eos", [1, None, "yes"]),
    ("eos_token_id", [V, [-1], -2, 2**63, "a", True]),
    ("stop", [[""], [1], 5, [None]]),
    ("stop_token_ids", [[-1], [V], [2**63], "a", 1.5]),
    ("seed", [2**64, -(2**63) - 1, 1.5, "a"]),
    ("n", [0, 5000, "2", True]),
    ("logits_processors", [5, [None], ["a"]]),
    ("logprobs", [-1, 5000, 1.5, "2"]),
    ("logprobs_mode", ["other", None]),
    ("prompt_logprobs", [-1, 5000]),
    ("truncate_prompt_tokens", [0, -1]),
    ("detokenize", [None, 1]),
    ("echo", [None, 1]),
]


@pytest.mark.parametrize(("name", "values"), REFUSED, ids=[name for name, _ in REFUSED])
def test_wrong_values_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=name):
            resolve(**{name: value})


def test_every_field_refuses_every_wrong_type_with_the_same_error() -> None:
    wrong: list[Any] = [
        0,
        -1,
        1.5,
        "",
        "x",
        b"x",
        [],
        [1],
        [[1]],
        [[]],
        {},
        {1: "a"},
        object(),
        10**400,
        [None],
        len,
        {5},
    ]
    for field in dataclasses.fields(SamplingParams):
        if field.init:
            for value in wrong:
                try:
                    resolve(**{field.name: value})
                except InvalidRequest as error:
                    assert str(error)


@pytest.mark.parametrize(
    ("values", "name", "want"),
    [
        ({"temperature": 1}, "temperature", 1.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": V + 1}, "top_k", V),
        ({"top_p": 0}, "top_p", 0.0),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": False}, "logprobs", None),
        ({"stop": "end"}, "stop", ("end",)),
        ({"eos_token_id": 7}, "eos_token_id", (7,)),
        ({"eos_token_id": -1}, "eos_token_id", ()),
        ({"ignore_eos": True}, "eos_token_id", ()),
        ({}, "eos_token_id", (2, 5)),
        ({}, "temperature", 0.0),
        ({"top_p": 0.9}, "temperature", 1.0),
        ({"logit_bias": {1: -math.inf, 2: 3}}, "logit_bias", {1: -math.inf, 2: 3.0}),
        ({"logits_processors": len}, "logits_processors", (len,)),
        ({"seed": -1}, "seed", -1),
        ({"bad_words_ids": [[1, 2], [3]]}, "bad_words_ids", ((1, 2), (3,))),
    ],
)
def test_resolved_values(values: dict[str, Any], name: str, want: object) -> None:
    assert getattr(resolve(**values), name) == want


def test_the_models_own_values_fill_the_unset_ones() -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "min_new_tokens": 4}
    defaults = ModelDefaults(V, 64, (2, V + 7), generation)
    resolved = SamplingParams().resolve(defaults)
    assert (resolved.temperature, resolved.top_k, resolved.max_new_tokens, resolved.min_new_tokens) == (0.6, 20, 9, 4)
    assert resolved.eos_token_id == (2,)  # an id that the model cannot produce is no reason to refuse a request
    assert SamplingParams(temperature=0).resolve(defaults).is_greedy
    assert SamplingParams(max_new_tokens=2).resolve(defaults).min_new_tokens == 2
    with pytest.raises(InvalidRequest, match="min_new_tokens"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4).resolve(defaults)
    with pytest.raises(InvalidRequest, match="stop"):
        resolve(stop="x", detokenize=False)


def test_plain_survives_copies() -> None:
    plain = resolve()
    assert plain.is_plain and plain.is_greedy
    changed = dataclasses.replace(plain, repetition_penalty=1.3)
    assert not changed.is_plain and changed.needs_processing
    assert dataclasses.replace(plain, logprobs=0).is_plain is False
    copy = pickle.loads(pickle.dumps(plain))
    assert copy == plain and copy.is_plain
    for values in ({"temperature": 1.0}, {"min_new_tokens": 2}, {"logit_bias": {1: 0.0}}, {"allowed_token_ids": [1]}):
        assert not resolve(**values).is_plain


def test_build_combines_bases_keywords_and_aliases() -> None:
    base = SamplingParams(temperature=0.3, top_k=4)
    built = SamplingParams.build(base, {"max_tokens": 3, "top_k": 9})
    assert (built.temperature, built.top_k, built.max_new_tokens) == (0.3, 9, 3)
    assert SamplingParams.build(base, {}) is base
    with pytest.raises(InvalidRequest, match="twice"):
        SamplingParams.build(None, {"max_tokens": 3, "max_new_tokens": 3})
    with pytest.raises(InvalidRequest, match="unknown sampling parameter 'topp'"):
        SamplingParams.build(None, {"topp": 3})


def test_generation_configs_are_read_and_left_alone() -> None:
    config = make_config(do_sample=True, top_p=0.8, eos_token_id=[3, 4], repetition_penalty=1.2, max_new_tokens=7)
    before = config.to_dict()
    resolved = SamplingParams.build(config, {}).resolve(DEFAULTS)
    assert (resolved.temperature, resolved.top_p, resolved.eos_token_id) == (1.0, 0.8, (3, 4))
    assert (resolved.repetition_penalty, resolved.max_new_tokens) == (1.2, 7)
    assert config.to_dict() == before
    assert SamplingParams.from_generation_config(make_config(do_sample=False)).resolve(DEFAULTS).is_greedy
    with pytest.raises(InvalidRequest, match="num_beams"):
        SamplingParams.from_generation_config(make_config(num_beams=4))
