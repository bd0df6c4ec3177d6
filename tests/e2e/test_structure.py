"""Structured output through whole engines: the same tokens, log-probabilities and ends, however it was computed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

import aiocb
from aiocb.testing import assert_quiescent, byte_tokenizer
from tests.model.helpers import tiny

VOCAB = 300
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["person", "place", "pet"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
STRUCTURES: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": r"(very )?long-winded words [0-9]{2}!"},
    {"choice": ["an answer", "another answer", "none"]},
    {"grammar": 'start: "begin " item " end"\nitem: "(" item ")" | /[xyz]/'},
]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "seed": 8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.3, "seed": 9, "logprobs": 2, "logprobs_mode": "processed"},
    {"temperature": 1.0, "seed": 10, "min_new_tokens": 5},
    {"temperature": 1.0, "seed": 11, "max_new_tokens": 12},
    {"temperature": 1.0, "seed": 12, "logits_processors": [lambda _, logits: logits * 0.5]},
]
PROMPTS = ["Tell me.", "A prompt that is long enough to be cut into chunks, and shared by some. " * 2]


def fits(structure: dict[str, Any], text: str) -> bool:
    if "json_schema" in structure:
        import jsonschema

        jsonschema.validate(json.loads(text), structure["json_schema"])
        return True
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    if "choice" in structure:
        return text in structure["choice"]
    return re.fullmatch(r"begin \(*[xyz]\)* end", text) is not None


async def outputs(kind: str, **settings: Any) -> list[aiocb.Completion]:
    """Every structure by every way, all at once, some with neighbours of the same prompt, and two by `n`."""
    model = tiny(kind, vocab_size=VOCAB)
    config = aiocb.EngineConfig(page_size=16, debug_checks=True, **settings)
    async with aiocb.Engine(model, byte_tokenizer(), config=config) as engine:
        calls = [
            engine.generate(prompt, eos_token_id=[256], **{"max_new_tokens": 120, **structure, **way})
            for prompt in PROMPTS
            for structure in STRUCTURES
            for way in WAYS
        ]
        plain = [engine.generate(PROMPTS[0], max_new_tokens=20, temperature=0.0, ignore_eos=True) for _ in range(2)]
        done = await asyncio.gather(*calls, *plain)
        many = await engine.generate(PROMPTS[1], n=3, seed=5, temperature=1.0, max_new_tokens=120, **STRUCTURES[0])
        await assert_quiescent(engine)
        return [*done, *many]


def same(first: list[aiocb.Completion], second: list[aiocb.Completion]) -> None:
    for one, other in zip(first, second, strict=True):
        for field in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert getattr(one, field) == getattr(other, field)
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.rank == theirs.rank
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "native"), [("llama", True), ("llama", False), ("mistral", True), ("qwen3_next", None)]
)
async def test_outputs_fit_and_do_not_depend_on_jumps(kind: str, native: bool | None) -> None:
    with_jumps = await outputs(kind, native=native)
    count = len(PROMPTS) * len(STRUCTURES) * len(WAYS)
    wanted = [structure for _ in PROMPTS for structure in STRUCTURES for _ in WAYS]
    for structure, completion in zip(wanted, with_jumps[:count], strict=True):
        if completion.finish_reason == "stop":
            assert fits(structure, completion.text), (structure, completion.text)
    assert sum(completion.finish_reason == "stop" for completion in with_jumps[:count]) > 0.7 * count
    same(with_jumps, await outputs(kind, native=native, jump_ahead=False))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_outputs_survive_preemption_and_small_chunks() -> None:
    expected = await outputs("llama", native=True)
    same(expected, await outputs("llama", native=True, num_blocks=24, max_batch_tokens=16))
    same(expected, await outputs("llama", native=True, num_blocks=24, cpu_offload_space=0.01))


@pytest.mark.asyncio
async def test_jumps_save_steps() -> None:
    model = tiny("llama", vocab_size=VOCAB)
    steps = []
    for jumps in (True, False):
        config = aiocb.EngineConfig(jump_ahead=jumps, debug_checks=True)
        async with aiocb.Engine(model, byte_tokenizer(), config=config) as engine:
            done = await engine.generate("x", choice=["a long text that is forced", "b"], logit_bias={98: -100.0})
            assert done.text == "a long text that is forced"
            assert done.finish_reason == "stop"
            steps.append(engine.stats().num_steps)
    assert steps[0] <= 3
    assert steps[1] == len("a long text that is forced")


@pytest.mark.asyncio
async def test_an_empty_mask_ends_its_own_request() -> None:
    model = tiny("llama", vocab_size=VOCAB)
    async with aiocb.Engine(model, byte_tokenizer(), config=aiocb.EngineConfig(debug_checks=True)) as engine:
        neighbour = asyncio.ensure_future(engine.generate("x", max_new_tokens=30, ignore_eos=True))
        with pytest.raises(aiocb.RequestFailed, match="structure"):
            await engine.generate("x", regex="abc", allowed_token_ids=[97])
        assert len((await neighbour).token_ids) == 30
        await assert_quiescent(engine)


@pytest.mark.asyncio
async def test_a_slow_structure_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has to be compiled is prepared in a thread of its own."""
    import threading

    from aiocb.sampling.grammar import Compiler

    go = threading.Event()
    compile_ = Compiler.compile

    def slow(self: Compiler, structure: Any) -> Any:
        go.wait(20.0)
        return compile_(self, structure)

    monkeypatch.setattr(Compiler, "compile", slow)
    model = tiny("llama", vocab_size=VOCAB)
    async with aiocb.Engine(model, byte_tokenizer()) as engine:
        waiting = asyncio.ensure_future(engine.generate("x", regex="abc"))
        assert len((await engine.generate("x", max_new_tokens=3, ignore_eos=True)).token_ids) == 3
        assert not waiting.done()
        go.set()
        assert (await waiting).text == "abc"
        # It is known now, and needs no thread of its own.
        assert (await engine.generate("x", regex="abc")).text == "abc"


@pytest.mark.model
@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
async def test_real_models_fill_a_schema(name: str) -> None:
    async with aiocb.Engine.from_pretrained(name) as engine:
        prompt = "Bob is 30. As JSON: "
        odd = ["naïve – “quotes”", "日本語 😀", 'tab\tand \\ and "', "\u2028"]
        completion, *chosen = await asyncio.gather(
            engine.generate(prompt, json_schema=SCHEMA, max_new_tokens=100, temperature=0.0),
            *(engine.generate(prompt, choice=[text], max_new_tokens=60) for text in odd),
        )
        assert fits({"json_schema": SCHEMA}, completion.text)
        assert [each.text for each in chosen] == odd
        assert {each.finish_reason for each in (completion, *chosen)} == {"stop"}
