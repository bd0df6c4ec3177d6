"""A Ray cluster on this machine, with two replicas of half a core."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

os.environ["RAY_AUTH_MODE"] = "disabled"  # nothing is written into the home of who runs the tests
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve

from aiocb.contrib.ray import build_app
from aiocb.serve import ServeConfig
from tests.integration.ray.fakes import make_engine

DRAIN_S = 6.0
REPLICAS: dict[str, Any] = {
    "num_replicas": 2,
    "ray_actor_options": {"num_cpus": 0.5},
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 5.0,
}
CONFIG = ServeConfig(served_model_name=("fake",), drain=DRAIN_S, max_body_size=1 << 20, heartbeat=0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Its address for HTTP."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def deploy(model: Any = make_engine, max_imbalance: int = 4, **replicas: Any) -> Any:
    """Run the application, or replace the one that runs, whose replicas drain; returns when all new ones are ready."""
    application = build_app(
        model,
        config=CONFIG,
        replicas={**REPLICAS, **replicas},
        ingress={"ray_actor_options": {"num_cpus": 0.1}},
        max_imbalance=max_imbalance,
    )
    return serve.run(application, name="test", route_prefix="/")


@pytest.fixture(scope="session")
def app(cluster: str) -> str:
    """The address of the application with fake engines."""
    deploy()
    return cluster


@pytest.fixture
def changing(app: str) -> Iterator[None]:
    """For tests that deploy something else: the application is as before when they have ended."""
    yield
    deploy()


@pytest_asyncio.fixture
async def client(app: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=app, timeout=60) as http:
        yield http


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def pid_of(text: str) -> int:
    match = re.search(r"pid=(\d+) ", text)
    assert match is not None, text
    return int(match[1])


async def ask(client: httpx.AsyncClient, text: str, **fields: Any) -> str:
    response = await client.post("/v1/chat/completions", json=body(text, **fields))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def eventually(is_so: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition, which may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            outcome = is_so()
            if asyncio.iscoroutine(outcome):
                outcome = await outcome
            if outcome:
                return
            await asyncio.sleep(0.2)
