"""Structures: what is refused and where, what masks allow, and that a matcher is a function of the output."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from aiocb.errors import InvalidRequest, RequestFailed
from aiocb.sampling.grammar import Compiler, Grammar, Matcher, apply_masks
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.structure import Structure, schema_text, structure_of
from aiocb.testing.fake import EOS_TOKEN_ID, byte_tokenizer

VOCAB = 300  # the head is padded beyond the tokenizer's 260
END = 258  # a second token that ends


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_tokenizer(), VOCAB, (EOS_TOKEN_ID, END))


def start(compiler: Compiler, end_ids: tuple[int, ...] = (EOS_TOKEN_ID, END), **structure: Any) -> Matcher:
    made = structure_of(structure)
    assert made is not None
    return compiler.compile(made).matcher(end_ids)


def allowed(matcher: Matcher) -> set[int]:
    bits = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
    matcher.fill(bits)
    return set(np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0].tolist())


def accepts(compiler: Compiler, text: str, **structure: Any) -> bool:
    """Whether the masks let this text through, byte by byte, to its end."""
    matcher = start(compiler, **structure)
    for byte in text.encode():
        if matcher.is_complete or byte not in allowed(matcher):
            return False
        matcher.extend([byte])
    return matcher.is_complete or EOS_TOKEN_ID in allowed(matcher)


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"json_schema": True}, ["{}", '{"a": [1, null, "x"]}'], ["[]", "1", "{ }", "{\n}", '{"a":1}']),
    ({"json_schema": "true"}, ["{}", "[1, null]", '"x"'], ["{ }", "x"]),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 120}}, ["3", "120"], ["2", "121", "3.0", "-5", "03"]),
    ({"json_schema": {"type": "number", "multipleOf": 7}}, ["14"], ["15"]),
    ({"json_schema": {"type": "string", "minLength": 2, "maxLength": 3}}, ["\"ab\"", "\"äöü\""], ["\"a\"", "\"abcd\""]),
    ({"json_schema": {"type": "string", "pattern": "^a+$", "maxLength": 3}}, ['"aaa"'], ['"aaaa"', '"b"']),
    ({"json_schema": {"type": "string", "format": "date"}}, ['"2024-02-29"'], ['"2024-2-9"', '"x"']),
    ({"json_schema": {"enum": ["a", 1, None]}}, ['"a"', "1", "null"], ['"b"', "2"]),
    ({"json_schema": {"const": {"a": [1]}}}, ['{"a": [1]}'], ['{"a": [2]}']),
    ({"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
     ["[true]", "[true, false]"], ["[]", "[true, true, true]", "[1]"]),
    ({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"],
                      "additionalProperties": False}},
     ['{"a": 1}', '{"a": 1, "b": "x"}'], ['{"b": 1}', '{"a": 1, "c": 2}', '{"a": "1"}']),
    ({"json_schema": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": ["x"]}}}}, ['"x"'], ['"y"']),
    ({"json_schema": {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False}},
     ["{}", '{"c": {"c": {}}}'], ['{"c": 1}']),
    ({"json_schema": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, ['"x"', "null"], ["1"]),
    ({"json_schema": {"type": "object", "properties": {"x-guidance": {"const": 1}}, "required": ["x-guidance"]}},
     ['{"x-guidance": 1}'], ["{}"]),
    ({"regex": r"[0-9]{3}-(cat|dog)"}, ["123-cat"], ["12-cat", "123-cow", "123-cats", " 123-cat"]),
    ({"choice": ["yes", "no", "yes and \"no\"\n", "ä"]}, ["yes", "no", 'yes and "no"\n', "ä"], ["ye", "", "yes and"]),
    ({"grammar": 'start: "a" b* "c"\nb: /[xy]/'}, ["ac", "axyxc"], ["a", "azc"]),
    ({"grammar": 'start: "<call>" %json {"type": "integer"} "</call>"'}, ["<call>12</call>"], ["<call>x</call>"]),
]  # fmt: skip


def test_masks_let_through_what_fits_and_nothing_else(compiler: Compiler) -> None:
    for structure, right, wrong in CASES:
        for text in right:
            assert accepts(compiler, text, **structure), (structure, text)
        for text in wrong:
            assert not accepts(compiler, text, **structure), (structure, text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "object", "properties": {"x": {"not": {}}}}}, "#/properties/x/not"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "#/uniqueItems"),
    ({"json_schema": {"properties": {"x": {"type": "strin"}}}}, "#/properties/x/type"),
    ({"json_schema": {"type": "string", "format": "foo"}}, "#/format"),
    ({"json_schema": {"if": {"type": "string"}, "then": {"minLength": 2}}}, "#/if"),
    ({"json_schema": {"$ref": "http://example.org/schema"}}, "nothing is fetched"),
    ({"json_schema": {"$ref": "#/$defs/none"}}, "none"),
    ({"json_schema": {"$ref": "#"}}, "cannot be fulfilled"),
    ({"json_schema": {"minLength": 5, "maxLength": 2, "type": "string"}}, "minLength"),
    ({"json_schema": {"type": "object", "x-guidance": {"lenient": True}}}, "#/x-guidance"),
    ({"grammar": 'start: %json {"not": {}, "x-guidance": {"lenient": true}}'}, "x-guidance"),
    ({"json_schema": False}, "nothing fits"),
    ({"json_schema": 3}, "json_schema must be"),
    ({"json_schema": "{"}, "no JSON"),
    ({"json_schema": '{"items":' * 20_000}, "deeper than 64"),
    ({"json_schema": {"enum": ["x" * 400_000]}}, "characters"),
    ({"json_schema": {"type": "string", "default": float("nan")}}, "no JSON schema"),
    ({"regex": "["}, "unclosed"),
    ({"regex": "(?<=a)b"}, "look-around"),
    ({"regex": ""}, "not empty"),
    ({"choice": []}, "list of texts"),
    ({"choice": "yes"}, "list of texts"),
    ({"choice": [1]}, "list of texts"),
    ({"choice": ["x"] * 20_000}, "at most"),
    ({"grammar": "start: foo"}, "foo"),
    ({"grammar": 'start: "a'}, "lexer error"),
    ({"regex": "a", "choice": ["a"]}, "given together"),
]


def test_what_cannot_be_is_refused_by_name_and_place(compiler: Compiler) -> None:
    for structure, words in REFUSED:
        with pytest.raises(InvalidRequest) as caught:
            start(compiler, **structure)
        assert words in str(caught.value), (structure, str(caught.value))
        assert len(str(caught.value)) < 1000


def test_bombs_are_refused_or_harmless(compiler: Compiler) -> None:
    deep: Any = {"type": "string"}
    for _ in range(10_000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequest, match="deeper"):
        start(compiler, json_schema=deep)
    pair = [{"type": "object", "properties": {name: {"$ref": "#/$defs/%d"}}} for name in "ab"]
    defs = {str(at): json.loads(json.dumps({"anyOf": pair}).replace("%d", str(at + 1))) for at in range(20)}
    assert allowed(start(compiler, json_schema={"$ref": "#/$defs/0", "$defs": {**defs, "20": {"type": "string"}}}))
    for regex in ("(a{1,999}){1,999}", "((a{1,99}){1,99}){1,99}", "(a+)+"):
        assert allowed(start(compiler, regex=regex)) == {ord("a")}
    assert len(allowed(start(compiler, json_schema={"enum": [f"{at}" for at in range(10_000)]}))) == 1


def chain(count: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    links = {str(at): link({"$ref": f"#/$defs/{at + 1}"}) for at in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(count): {"type": "string"}}}


def test_what_would_crash_or_hang_is_refused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its trial elsewhere, each of these takes the whole process along, or minutes."""
    monkeypatch.setattr("aiocb.sampling.grammar_trial._CPU_S", 1)
    rules = "\n".join(f'r{at}: "a" r{at + 1}' for at in range(5000))
    patterns = [{"type": "string", "pattern": f".*(a|b){{{at}}}.*c.{{{7 * at}}}d"} for at in range(1, 40)]
    bombs: list[dict[str, Any]] = [
        {"json_schema": chain(5000, lambda ref: ref)},
        {"json_schema": chain(3000, lambda ref: {"type": "array", "items": ref})},
        {"json_schema": {"allOf": patterns}},
        {"grammar": f'start: r0\n{rules}\nr5000: "b"'},
    ]
    for structure in bombs:
        with pytest.raises(InvalidRequest, match="too complex"):
            start(compiler, **structure)


def test_shared_parts_are_bounded() -> None:
    shared: dict[str, Any] = {"type": "string"}
    for _ in range(25):
        shared = {"anyOf": [shared, shared]}
    with pytest.raises(InvalidRequest, match="lists and objects"):
        schema_text(shared)


def test_what_is_kept_is_found_while_something_else_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(byte_tokenizer(), VOCAB, (EOS_TOKEN_ID,))
    kept = Structure("choice", '["a"]')
    grammar = compiler.compile(kept)
    begun, go = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        begun.set()
        go.wait(20.0)

    monkeypatch.setattr("aiocb.sampling.grammar.try_out", slow)
    other = threading.Thread(target=compiler.compile, args=(Structure("regex", "b"),))
    other.start()
    try:
        assert begun.wait(20.0)
        assert compiler.compile(kept) is grammar
    finally:
        go.set()
        other.join()


def test_only_ends_of_the_request_end_it_and_only_when_it_is_complete(compiler: Compiler) -> None:
    matcher = start(compiler, regex="ab*")
    assert allowed(matcher) == {ord("a")}
    matcher.extend(b"a")
    assert allowed(matcher) == {ord("b"), EOS_TOKEN_ID, END}
    other = start(compiler, end_ids=(7,), regex="ab*")
    other.extend(b"a")
    assert allowed(other) == {ord("b"), 7}
    other.extend([7])
    assert other.is_complete
    with pytest.raises(RequestFailed, match="complete"):
        other.extend(b"b")


def test_special_tokens_and_padding_are_never_allowed_in_text(compiler: Compiler) -> None:
    matcher = start(compiler, json_schema={"type": "string"})
    matcher.extend(b'"')
    assert max(allowed(matcher)) < EOS_TOKEN_ID


def test_a_token_that_is_not_allowed_fails(compiler: Compiler) -> None:
    matcher = start(compiler, regex="ab")
    with pytest.raises(RequestFailed, match="followed"):
        matcher.extend(b"x")


def test_forced_tokens_are_those_that_masks_leave(compiler: Compiler) -> None:
    chance = random.Random(5)
    schema = {"type": "object", "properties": {"name": {"enum": ["anna", "anton"]}, "no": {"type": "null"}},
              "required": ["name", "no"], "additionalProperties": False}  # fmt: skip
    num_forced = 0
    for _ in range(20):
        matcher = start(compiler, json_schema=schema)
        while not matcher.is_complete:
            forced = matcher.forced()
            num_forced += len(forced)
            for token in forced:
                assert allowed(matcher) == {token}
                matcher.extend([token])
                assert not matcher.is_complete  # what completes it is sampled
            if allowed(matcher) <= {EOS_TOKEN_ID, END}:
                break
            matcher.extend([chance.choice(sorted(allowed(matcher) - {EOS_TOKEN_ID, END}))])
    assert num_forced > 100


def test_masks_of_a_batch_touch_their_own_rows(compiler: Compiler) -> None:
    logits = torch.zeros(3, VOCAB)
    failing = start(compiler, regex="ab")
    with pytest.raises(RequestFailed):
        failing.extend(b"x")
    matchers = [start(compiler, regex="a|b"), failing]
    failures = apply_masks(logits, [0, 2], matchers)
    assert list(failures) == [2]
    assert (logits[0] == 0).nonzero().flatten().tolist() == [ord("a"), ord("b")]
    assert (logits[1:] == 0).all()


def test_equal_structures_are_compiled_once_and_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(byte_tokenizer(), VOCAB, (EOS_TOKEN_ID,))
    made: list[Grammar] = []
    for _ in range(2):
        structure = structure_of({"json_schema": {"type": "integer"}})
        assert structure is not None
        made.append(compiler.compile(structure))
        assert compiler.find(structure) is made[0]
    assert made[0] is made[1]
    monkeypatch.setattr("aiocb.sampling.grammar._MAX_KEPT_BYTES", 1_000_000)
    for number in range(50):
        structure = structure_of({"choice": [f"a{number}"]})
        assert structure is not None
        compiler.compile(structure)
    assert len(compiler._kept) < 10
    assert compiler._num_bytes <= 1_000_000


def test_a_tokenizer_in_python_is_refused() -> None:
    structure = structure_of({"regex": "a"})
    assert structure is not None
    with pytest.raises(InvalidRequest, match="fast tokenizer"):
        Compiler(object(), VOCAB, ()).compile(structure)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    structure = structure_of({"regex": "a"})
    assert structure is not None
    with pytest.raises(InvalidRequest, match=r"aiocb\[grammar\]"):
        Compiler(byte_tokenizer(), VOCAB, ()).compile(structure)


class Person(BaseModel):
    name: str
    age: int


def test_schemas_are_taken_when_the_request_is_made() -> None:
    schema: dict[str, Any] = {"properties": {"a": {"type": "string"}}}
    params = SamplingParams.build(None, {"json_schema": schema})
    schema["properties"]["a"]["type"] = "integer"
    assert json.loads(params.json_schema) == {"properties": {"a": {"type": "string"}}}
    assert json.loads(SamplingParams.build(None, {"json_schema": Person}).json_schema)["required"] == ["name", "age"]
    assert json.loads(schema_text(True)) == {"type": "object"}
    base = SamplingParams(json_schema=Person)
    assert isinstance(SamplingParams.build(base, {}).json_schema, str)


def test_structures_are_resolved_with_the_rest() -> None:
    defaults = ModelDefaults(VOCAB, 100, (EOS_TOKEN_ID,))
    assert SamplingParams(regex="a").resolve(defaults).needs_processing
    assert not SamplingParams(regex="a", temperature=0.0).resolve(defaults).is_plain
    for wrong in ({"regex": "a", "ignore_eos": True}, {"regex": "a", "choice": ["b"]}, {"choice": 3}):
        with pytest.raises(InvalidRequest):
            SamplingParams(**wrong).resolve(defaults)
