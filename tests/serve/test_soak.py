"""Five hundred clients of a real model, a third of which leave in the middle: nothing is lost, nothing is left."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

import aiocb
from aiocb.testing import assert_quiescent

from .helpers import CHAT, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.model, pytest.mark.timeout(300)]
CLIENTS = 500
TOKENS = 12


async def test_clients_that_come_and_go() -> None:
    chance = random.Random(3)
    engine = aiocb.Engine.from_pretrained("smollm2", config=aiocb.EngineConfig(max_queue_size=2 * CLIENTS))
    async with serving(engine) as served:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=240.0, limits=limits, base_url=served.client.base_url) as client:

            async def visit(number: int) -> str:
                leaves_after = chance.randrange(1, 6) if number % 3 == 0 else None
                await asyncio.sleep(chance.random() * 2)  # they do not come all at once
                body = {
                    "messages": [{"role": "user", "content": f"Say {number}"}],
                    "max_tokens": TOKENS,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                num_events, usage = 0, 0
                async with client.stream("POST", CHAT, json=body) as response:
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        if line == "data: [DONE]":
                            return "whole" if usage == TOKENS else "short"
                        if line.startswith("data: "):
                            event = json.loads(line.removeprefix("data: "))
                            usage = (event["usage"] or {}).get("completion_tokens", 0)
                            num_events += 1
                            if num_events == leaves_after:
                                return "left"
                return "cut"

            ends = await asyncio.gather(*map(visit, range(CLIENTS)))
        assert ends.count("left") == len(range(0, CLIENTS, 3))
        assert ends.count("whole") == CLIENTS - ends.count("left")
        async with asyncio.timeout(60):
            while served.service.num_calls:
                await asyncio.sleep(0.01)
        await assert_quiescent(engine)
        stats = engine.stats()
        assert stats.request_success["length"] >= ends.count("whole")
        assert sum(stats.request_success.values()) == CLIENTS
        assert stats.kv_cache_usage_perc == 0
