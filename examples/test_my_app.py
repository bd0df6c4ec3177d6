"""Tests of a program that uses an engine, without weights: scripted answers, steps by hand, failures at will.

pip install aiocb pytest pytest-asyncio && pytest examples/test_my_app.py
"""

from __future__ import annotations

import asyncio

import pytest

import aiocb
from aiocb.testing import FakeRunner, Gate, assert_quiescent, byte_tokenizer, fake_engine


async def summarise(engine: aiocb.Engine, text: str) -> str:
    """The program."""
    try:
        completion = await engine.generate(f"In one word: {text}", max_new_tokens=8, timeout=5.0)
    except aiocb.RequestFailed:
        return "(no answer)"
    return completion.text.strip()


@pytest.mark.asyncio
async def test_the_answer_is_stripped() -> None:
    async with fake_engine(reply=" sea ") as engine:
        assert await summarise(engine, "waves, salt, ships") == "sea"


@pytest.mark.asyncio
async def test_a_failure_is_told() -> None:
    runner = FakeRunner(fail=lambda step, record: ValueError("out of luck") if step == 2 else None)
    async with fake_engine(runner=runner, tokenizer=byte_tokenizer()) as engine:
        assert await summarise(engine, "x") == "(no answer)"


@pytest.mark.asyncio
async def test_whoever_leaves_frees_the_slot() -> None:
    gate = Gate()
    async with fake_engine(reply="sea", gate=gate) as engine:
        task = asyncio.create_task(summarise(engine, "x"))
        await gate.held()
        task.cancel()
        gate.open()
        await assert_quiescent(engine)
