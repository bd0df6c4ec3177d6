"""Refusals: whatever is wrong with a request is an `InvalidRequest` that names it, before anything has started."""

from __future__ import annotations

import array
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import aiocb
from aiocb.testing import assert_quiescent, byte_tokenizer, fake_engine

from .helpers import running

MESSAGES = [{"role": "user", "content": "x"}]
HUGE = 10**5000


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def cyclic() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def deep() -> Any:
    value: Any = {}
    for _ in range(5000):
        value = {"a": value}
    return value


# name of what is wrong, and the values that are
PARAMETERS: list[tuple[str, list[Any]]] = [
    ("n", [1.5, "2", 2**63, HUGE, -1, 0, True, [2], math.inf, math.nan, np.array([1, 2]), b"1", {}]),
    (
        "temperature",
        ["1", math.nan, math.inf, HUGE, [1.0], np.array([1.0, 2.0]), torch.ones(2), 1j, b"1", {}],
    ),
    ("top_p", [np.float32(1.5), "x", Unprintable()]),
    ("top_k", [1.5, "5", math.nan, np.array([1])]),
    ("max_new_tokens", [1.5, "3", math.inf, HUGE, np.array([3]), [3], b"3"]),
    ("min_new_tokens", [-1, HUGE, "3"]),
    ("seed", [HUGE, -HUGE, 1.5, "a", np.array([1])]),
    ("truncate_prompt_tokens", [1.5, "1", 0, -1, [1], math.nan]),
    (
        "stop",
        [
            5,
            b"x",
            {"x"},
            {"x": 1},
            (x for x in "ab"),
            [""],
            ["x", None],
            ["\ud83d"],
            "\udc00",
            [b"x"],
            np.array([1]),
            deep(),
        ],
    ),
    ("bad_words", [5, "text", b"x", {"x"}, (x for x in "ab"), ["\ud83d"], [None], [" "], {"x": 1}, cyclic()]),
    (
        "bad_words_ids",
        [5, [5], ["a"], [[]], [[None]], [{1}], {(1,)}, (x for x in [[1]]), b"x", [[HUGE]], cyclic(), deep()],
    ),
    ("allowed_token_ids", [[], {1}, {1: 2}, b"abc", "abc", (x for x in [1]), [1.0], [None], np.array([[1]]), [HUGE]]),
    ("stop_token_ids", [{1}, b"a", (x for x in [1]), [True], np.array([1.5]), np.array(1.5), [2**64], Unprintable()]),
    ("eos_token_id", [{1}, b"a", "a", [[1]], HUGE, -2]),
    (
        "logit_bias",
        [[1], 5, {"1": 1.0}, {1: "a"}, {1: None}, {1: math.nan}, {1: np.array([1.0, 2.0])}, {HUGE: 1.0}, {None: 1}],
    ),
    ("logits_processors", [5, [5], "a", {"a": 1}, [None]]),
    ("logprobs", [-1, 1.5, "2", HUGE, [1]]),
    ("logprobs_mode", ["x", None, 5, np.array(["raw", "x"]), ["raw"]]),
    ("prompt_logprobs", [-1, "2"]),
    ("ignore_eos", [1, "yes", None, np.array([True])]),
    ("skip_special_tokens", [1, "yes", np.array([True, False]), []]),
    ("parse_special_tokens", [1, "yes", []]),
    ("detokenize", [0, None]),
    ("echo", [1, None]),
    ("include_stop_str_in_output", [1, None]),
    ("timeout", [HUGE, 10**400, -1, math.nan, "1", [1], True, np.array([1.0, 2.0]), 1j]),
    ("queue_timeout", [10**400, -0.1, b"1"]),
    ("priority", [1.5, "1", None, True, [1]]),
    ("stream_interval", [0, 1.5, "1", True]),
    ("max_unread_tokens", [0, "1", 1.5]),
    ("on_unread", ["x", None, ["pause"], np.array(["pause"])]),
    ("on_full", ["x", 5, {}]),
    ("cache_salt", [5, b"x", "\ud83d", ["x"]]),
    ("request_id", [5, b"x", "\ud83d", ["x"]]),
    ("params", [{"temperature": 1}, 5, "x", [1], aiocb.SamplingParams, SimpleNamespace()]),
]


@pytest.mark.parametrize(("name", "values"), PARAMETERS, ids=[name for name, _ in PARAMETERS])
async def test_wrong_parameters_are_refused_by_name(name: str, values: list[Any]) -> None:
    async with running(tokenizer=byte_tokenizer()) as setup:
        for value in values:
            with pytest.raises(aiocb.InvalidRequest, match=name):
                await setup.engine.generate("hello", **{"max_new_tokens": 2, name: value})
        await assert_quiescent(setup.engine)
    assert setup.runner.num_steps == 0


async def test_numbers_of_other_libraries_are_numbers() -> None:
    async with running() as setup:
        numbers: Any = {"n": np.int64(2), "max_new_tokens": 2.0, "temperature": np.float32(0.5), "top_k": np.int8(3)}
        samples: Any = await setup.engine.generate([1], **numbers)
        assert [len(sample.token_ids) for sample in samples] == [2, 2]
        kinds: list[Any] = [np.array([97, 98]), torch.tensor([97, 98]), array.array("i", [97, 98]), range(97, 99)]
        for ids in kinds:
            completion = await setup.engine.generate([1], allowed_token_ids=ids, max_new_tokens=2)
            assert len(completion.token_ids) == 2


PROMPTS: list[tuple[str, Any]] = [
    ("none", None),
    ("an integer", 5),
    ("bytes", b"x"),
    ("a set", {1, 2}),
    ("a generator", (x for x in [1])),
    ("an empty list", []),
    ("an empty text", ""),
    ("a float", [1.0]),
    ("an array of floats", array.array("d", [1.0])),
    ("an array of characters", np.array(["a"])),
    ("a matrix", np.array([[1], [2]])),
    ("a huge id", [HUGE]),
    ("an id of another model", [10**6]),
    ("a surrogate", "half a pair: \ud83d"),
    ("a surrogate in a message", [{"role": "user", "content": "\ud83d"}]),
    ("a cycle", [{"role": "user", "content": cyclic()}]),
    ("something deep", [{"role": "user", "content": deep()}]),
    ("no role", [{"content": "x"}]),
    ("no content", [{"role": "user"}]),
    ("an image", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages among ids", [1, MESSAGES[0]]),
    ("ids among messages", [MESSAGES[0], 1]),
    ("a broken object", Unprintable()),
]


@pytest.mark.parametrize("prompt", [prompt for _, prompt in PROMPTS], ids=[name for name, _ in PROMPTS])
async def test_wrong_prompts_are_refused_to_whoever_waits(prompt: Any) -> None:
    async with running(tokenizer=byte_tokenizer()) as setup:
        stream = setup.engine.stream(prompt, max_new_tokens=2)
        with pytest.raises(aiocb.InvalidRequest) as caught:
            await stream
        assert str(caught.value)
    assert setup.runner.num_steps == 0


async def test_one_wrong_prompt_does_not_cost_the_batch() -> None:
    async with running(tokenizer=byte_tokenizer()) as setup:
        done = await setup.engine.generate_batch(["a", None, [], "b"], max_new_tokens=2, return_exceptions=True)
        assert [completion.finish_reason for completion in done] == ["length", "error", "error", "length"]
        for prompts in ("text", 5, None, b"x", {"a": 1}):
            with pytest.raises(aiocb.InvalidRequest, match="list of prompts"):
                await setup.engine.generate_batch(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"chat_template_kwargs": {"chat_template": 5}}, "template"),
        ({"chat_template_kwargs": {"chat_template": "{{ x.y.z }}"}}, "template"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages | nosuch }}"}}, "template"),
        ({"chat_template_kwargs": {"x": cyclic()}}, "chat_template_kwargs"),
        ({"tools": 5}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [5]}, "tool 0 must be"),
        ({"tools": [cyclic()]}, "tools"),
    ],
)
async def test_wrong_arguments_of_templates(options: dict[str, Any], says: str) -> None:
    async with running(tokenizer=byte_tokenizer()) as setup:
        with pytest.raises(aiocb.InvalidRequest, match=says):
            await setup.engine.generate(MESSAGES, max_new_tokens=2, **options)


async def test_a_closed_stream_of_samples_has_as_many() -> None:
    async with running() as setup:
        count: Any = 3.0
        stream = setup.engine.stream([1], n=count)
        stream.close()
        assert [each.finish_reason for each in await stream.completions()] == ["cancelled"] * 3


# ── what a request may hold ──────────────────────────────────────────────────────────────────────────────────────────


async def test_long_prompts_are_refused_unread() -> None:
    config = aiocb.EngineConfig(max_prompt_characters=100)
    async with running(tokenizer=byte_tokenizer(), config=config) as setup:
        await setup.engine.generate("x" * 100, max_new_tokens=1)
        long: list[Any] = ["x" * 101, [{"role": "user", "content": "x" * 100}]]
        for prompt in long:
            with pytest.raises(
                aiocb.InvalidRequest, match=r"1\d\d characters.*max_prompt_characters of the engine is 100"
            ):
                await setup.engine.generate(prompt, max_new_tokens=1)
        tool = {"type": "function", "function": {"name": "f", "description": "x" * 100}}
        with pytest.raises(aiocb.InvalidRequest, match="tools included"):
            await setup.engine.generate(MESSAGES, tools=[tool], max_new_tokens=1)
        assert {choice.name: choice.value for choice in setup.engine.describe()}["max_prompt_characters"] == "100"


async def test_by_default_a_prompt_has_room_for_what_fits() -> None:
    async with fake_engine() as engine:
        chosen = {choice.name: int(float(choice.value)) for choice in engine.describe() if "characters" in choice.name}
        assert chosen["max_prompt_characters"] >= 1_000_000
        with pytest.raises(aiocb.InvalidRequest, match="characters"):
            await engine.generate("x" * 10_000_000)


def strings(count: int, length: int = 6) -> list[str]:
    return [f"{number:0{length}d}" for number in range(count)]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("stop", lambda size: strings(size)),
        ("stop", lambda size: ["x" * (100 * size)]),
        ("bad_words", lambda size: strings(size // 10)),
        ("bad_words_ids", lambda size: [[number % 256, 1] for number in range(size)]),
        ("bad_words_ids", lambda size: [[1] * (100 * size)]),
        ("stop_token_ids", lambda size: [1] * 10 * size),
        ("allowed_token_ids", lambda size: [97] * 10 * size),
        ("bad_words_ids", lambda size: [[1]] * 10 * size),
    ],
)
async def test_lists_that_would_take_long_are_refused(name: str, make: Callable[[int], list[Any]]) -> None:
    config = aiocb.EngineConfig(max_request_strings=100)
    async with running(tokenizer=byte_tokenizer(), config=config) as setup:
        few: dict[str, Any] = {name: make(100)}
        many: dict[str, Any] = {name: make(110)}
        await setup.engine.generate("x", max_new_tokens=1, **few)
        with pytest.raises(aiocb.InvalidRequest, match=rf"{name} .*max_request_strings=100"):
            await setup.engine.generate("x", max_new_tokens=1, **many)


async def test_twenty_thousand_stop_strings_are_taken() -> None:
    async with running(tokenizer=byte_tokenizer(), reply=list(b"one 000123 two"), eos_token_id=256) as setup:
        completion = await setup.engine.generate("x", stop=strings(20_000))
        assert (completion.text, completion.stop_reason) == ("one ", "000123")


async def test_an_identical_entry_counts_once_in_the_end() -> None:
    sampling = aiocb.SamplingParams(stop_token_ids=[5] * 1000, bad_words_ids=[[1], [1]], stop=["a", "a"])
    resolved = sampling.resolve(aiocb.sampling_params.ModelDefaults(10, 10))
    assert (resolved.stop_token_ids, resolved.bad_words_ids, resolved.stop) == ((5,), ((1,),), ("a",))


# ── taken when the stream is made ────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_changed_before_the_stream_starts_does_not_matter() -> None:
    async with running(tokenizer=byte_tokenizer()) as setup:
        engine = setup.engine
        messages = [{"role": "user", "content": "Hi"}]
        ids = [1, 2, 3]
        stop, bias, template = ["zz"], {97: 5.0}, {"add_generation_prompt": False}
        wanted = [
            (await engine.generate(messages, max_new_tokens=3, chat_template_kwargs=dict(template))).prompt_token_ids,
            (1, 2, 3),
        ]
        streams = [
            engine.stream(messages, max_new_tokens=3, stop=stop, logit_bias=bias, chat_template_kwargs=template),
            engine.stream(ids, max_new_tokens=3, stop=stop, logit_bias=bias),
        ]
        messages.append({"role": "user", "content": "more"})
        messages[0]["content"] = "other"
        template["add_generation_prompt"] = True
        ids.append(4)
        stop.append("")  # it could not be resolved
        bias[10**9] = 1.0
        assert [(await stream).prompt_token_ids for stream in streams] == wanted


async def test_a_spec_is_frozen_and_left_alone() -> None:
    async with running() as setup:
        stream = setup.engine.stream([1, 2], max_new_tokens=3)
        before = repr(stream._spec)
        with pytest.raises(AttributeError):
            stream._spec.on_full = "refuse"  # type: ignore[misc]
        spec = stream._spec
        await stream
        assert repr(spec) == before
        [completion async for completion in setup.engine.as_completed([[1]], max_new_tokens=1, on_full="wait")]
