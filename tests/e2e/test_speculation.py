"""Speculation changes no output: tokens, log-probabilities and ends are those without it, bit for bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiocb
from aiocb.engine.stats import Stats
from aiocb.testing import assert_quiescent, byte_tokenizer
from tests.model.helpers import tiny

VOCAB = 300
FEW = [70, 71, 72]
"""Of so few tokens that what has stood there before often comes again, and often does not."""
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.05, "allowed_token_ids": FEW},
    {"temperature": 1.0, "seed": 7, "allowed_token_ids": FEW},
    {"temperature": 0.3, "seed": 8, "allowed_token_ids": FEW, "logprobs": 2},
    {
        "temperature": 0.5,
        "seed": 9,
        "allowed_token_ids": FEW,
        "logprobs": 1,
        "logprobs_mode": "processed",
        "top_p": 0.9,
    },
    {"temperature": 0.5, "seed": 10, "allowed_token_ids": FEW, "presence_penalty": 0.1, "frequency_penalty": 0.01},
    {"temperature": 0.2, "seed": 11, "allowed_token_ids": FEW, "stop_token_ids": [71], "min_new_tokens": 9},
    {"temperature": 0.2, "seed": 12, "allowed_token_ids": FEW, "stop": ["GHG"], "min_new_tokens": 12},
    {"temperature": 0.0, "no_repeat_ngram_size": 4, "allowed_token_ids": [*FEW, 80, 81]},
    {"temperature": 1.0, "seed": 13, "allowed_token_ids": FEW, "logits_processors": [lambda _, logits: logits * 0.5]},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "regex": "(ab)+c"},
]
PROMPTS = [[5, 6, 7, 8, 9] * 6, [70, 71, 72, 70, 71, 72, 70, 71]]


async def outputs(kind: str, sequential: bool, **settings: Any) -> tuple[list[aiocb.Completion], Stats]:
    model = tiny(kind, vocab_size=VOCAB)
    config = aiocb.EngineConfig(page_size=16, debug_checks=True, native=True, **settings)
    async with aiocb.Engine(model, byte_tokenizer(), config=config) as engine:
        calls: list[tuple[list[int], dict[str, Any]]] = [
            (prompt, {"max_new_tokens": 48, "eos_token_id": [256], **way}) for prompt in PROMPTS for way in WAYS
        ]
        if sequential:
            done = [await engine.generate(prompt, **options) for prompt, options in calls]
        else:
            done = await asyncio.gather(*(engine.generate(prompt, **options) for prompt, options in calls))
        many = await engine.generate(PROMPTS[0], n=3, seed=5, temperature=0.4, allowed_token_ids=FEW, max_new_tokens=40)
        await assert_quiescent(engine)
        return [*done, *many], engine.stats()


def same(first: list[aiocb.Completion], second: list[aiocb.Completion]) -> None:
    for one, other in zip(first, second, strict=True):
        for field in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs"):
            assert getattr(one, field) == getattr(other, field)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
async def test_outputs_are_those_without(kind: str) -> None:
    expected, plain = await outputs(kind, True)
    assert plain.spec_decode_num_draft_tokens == 0
    alone, stats = await outputs(kind, True, speculation="prompt_lookup")
    same(alone, expected)
    assert stats.spec_decode_num_draft_tokens > stats.spec_decode_num_accepted_tokens > 100
    assert stats.num_steps < plain.num_steps - stats.spec_decode_num_accepted_tokens * 0.8
    together, _ = await outputs(kind, False, speculation="prompt_lookup")
    same(together, expected)
    cramped, stats = await outputs(
        kind, False, speculation="prompt_lookup", num_speculative_tokens=3, num_blocks=24, max_batch_tokens=32
    )
    same(cramped, expected)


@pytest.mark.asyncio
async def test_only_kernels_that_verify_are_given_drafts() -> None:
    config = aiocb.EngineConfig(speculation="prompt_lookup", native=False)
    engine = aiocb.Engine(tiny("llama", vocab_size=VOCAB), byte_tokenizer(), config=config)
    with pytest.raises(aiocb.ConfigError, match=r"'prompt_lookup' needs the native CPU kernels.*native=False"):
        async with engine:
            pass
    with pytest.raises(aiocb.ConfigError, match="'prompt_lookup', or None"):
        aiocb.EngineConfig(speculation="ngram")  # type: ignore[arg-type]
