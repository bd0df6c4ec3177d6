"""Two replicas behind the ingress: streams, leaving, killing, routing, health, drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import openai
import pytest
from ray import serve

from .conftest import DRAIN_S, ask, body, deploy, eventually, pid_of

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = "The same long beginning of a prompt. " * 40


class Reading:
    """One streamed answer, read by a task of its own."""

    def __init__(self, client: httpx.AsyncClient, text: str, **fields: Any) -> None:
        self.text = ""
        self.events: list[Any] = []
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, body(text, stream=True, **fields)))

    async def _read(self, client: httpx.AsyncClient, request: dict[str, Any]) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = line.removeprefix("data: ")
                self.events.append(event if event == "[DONE]" else json.loads(event))
                if event != "[DONE]" and "choices" in self.events[-1]:
                    for choice in self.events[-1]["choices"]:
                        self.text += choice["delta"].get("content") or ""
                if " " in self.text:
                    self.has_begun.set()

    async def begin(self) -> int:
        """Wait until it says which process answers."""
        await asyncio.wait_for(self.has_begun.wait(), 30)
        return pid_of(self.text)

    @property
    def error(self) -> dict[str, Any] | None:
        """Of the last event."""
        last = self.events[-1]
        error: dict[str, Any] | None = last.get("error") if isinstance(last, dict) else None
        return error


async def num_open(client: httpx.AsyncClient) -> int:
    """Requests in the engines: `/stats` is answered by one of them, by chance."""
    open_ones = 0
    for _ in range(12):
        stats = (await client.get("/stats")).json()
        open_ones = max(open_ones, stats["num_requests_running"] + stats["num_requests_waiting"])
    return open_ones


async def pids(client: httpx.AsyncClient) -> set[int]:
    return {pid_of(await ask(client, "who?")) for _ in range(12)}


async def all_pids(client: httpx.AsyncClient) -> set[int]:
    """Both processes: when they have the same to do, either may be asked."""
    seen: set[int] = set()

    async def are_two() -> bool:
        seen.update(await pids(client))
        return len(seen) == 2

    await eventually(are_two, 30)
    return seen


async def test_the_openai_client(app: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{app}/v1", api_key="x") as client:
        said = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "ticks=3"}])
        assert said.choices[0].message.content is not None
        assert said.choices[0].message.content.endswith("tick tick tick ")
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "ticks=50"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text.count("tick ") == 50 and chunks[-1].usage is not None
        assert [model.id async for model in client.models.list()] == ["fake"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x"}], temperature=-1
            )


async def test_refusals_keep_their_status(client: httpx.AsyncClient) -> None:
    for content, status in ((b'{"model": "fake", "messa', 400), (b"", 400), (b"[]", 400), (b"x" * (2 << 20), 413)):
        response = await client.post("/v1/chat/completions", content=content, timeout=10)
        assert response.status_code == status and response.json()["error"]["message"]
    assert (await client.post("/v1/chat/completions", json=body("x", stream=True, max_tokens=-1))).status_code == 400
    assert (await client.get("/nothing")).status_code == 404
    assert (await client.get("/health")).json()["status"] == "ok"


async def test_a_stream_comes_as_it_is_made(client: httpx.AsyncClient) -> None:
    reading = Reading(client, "ticks=200")
    await reading.begin()
    assert not reading.task.done() and len(reading.text) < 800
    await reading.task
    assert reading.text.count("tick ") == 200 and reading.events[-1] == "[DONE]"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot(client: httpx.AsyncClient, is_stream: bool) -> None:
    if is_stream:
        readings = [Reading(client, f"ticks=20000 {number}") for number in range(4)]
        for reading in readings:
            await reading.begin()
        tasks: list[asyncio.Task[Any]] = [reading.task for reading in readings]
    else:
        tasks = [asyncio.create_task(ask(client, f"ticks=20000 {number}")) for number in range(4)]

    async def are_busy() -> bool:
        return await num_open(client) > 0

    await eventually(are_busy)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    async def are_free() -> bool:
        return await num_open(client) == 0

    await eventually(are_free, 5)


async def test_a_handle_streams_and_is_cancelled(client: httpx.AsyncClient) -> None:
    engines: Any = serve.get_deployment_handle("engines", "test")
    completion = await engines.generate.remote("ticks=2", max_new_tokens=100)
    assert completion.text.endswith("tick tick ")
    chunks = engines.options(stream=True).stream.remote("ticks=20000", max_new_tokens=50_000)
    text = ""
    async for chunk in chunks:
        text += chunk.text
        if len(text) > 100:
            break
    assert await num_open(client) == 1
    chunks.cancel()

    async def are_free() -> bool:
        return await num_open(client) == 0

    await eventually(are_free, 5)


async def test_a_conversation_stays_with_its_replica(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        session = LONG + os.urandom(8).hex() * 40
        seen = {pid_of(await ask(client, session + " and then" * turn)) for turn in range(8)}
        assert len(seen) == 1
    await all_pids(client)  # short prompts go anywhere


async def test_a_hot_prefix_does_not_overload_its_replica(client: httpx.AsyncClient) -> None:
    readings = [Reading(client, f"{LONG} ticks=100") for _ in range(16)]
    answered = [await reading.begin() for reading in readings]
    counts = sorted(answered.count(pid) for pid in set(answered))
    assert len(counts) == 2 and counts[1] - counts[0] <= 8, counts
    await asyncio.gather(*(reading.task for reading in readings))
    assert all(reading.events[-1] == "[DONE]" for reading in readings)


async def test_a_killed_replica_loses_only_its_own_streams(client: httpx.AsyncClient) -> None:
    readings = [Reading(client, f"ticks=400 {number}") for number in range(8)]
    answered = [await reading.begin() for reading in readings]
    assert len(set(answered)) == 2
    victim = answered[0]
    whole = asyncio.create_task(ask(client, "who? ticks=2"))
    await whole
    os.kill(victim, signal.SIGKILL)
    assert pid_of(await ask(client, "who is left?")) != victim
    await asyncio.wait_for(asyncio.gather(*(reading.task for reading in readings)), 60)
    for reading, pid in zip(readings, answered, strict=True):
        if pid == victim:
            assert reading.error is not None and reading.error["code"] == "replica_lost", reading.events[-1]
            assert "send the request again" in reading.error["message"]
        else:
            assert reading.events[-1] == "[DONE]" and reading.text.count("tick ") == 400

    async def are_two() -> bool:
        return len(await pids(client) - {victim}) == 2

    await eventually(are_two)


async def test_what_has_not_begun_is_a_503(client: httpx.AsyncClient) -> None:
    both = await all_pids(client)
    task = asyncio.create_task(client.post("/v1/chat/completions", json=body("ticks=20000")))
    other = asyncio.create_task(client.post("/v1/chat/completions", json=body("ticks=20000")))

    async def are_busy() -> bool:
        return await num_open(client) > 0

    await eventually(are_busy)
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    for response in await asyncio.gather(task, other):
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "replica_lost"


@pytest.mark.parametrize("what", ["die now", "hang now"])
async def test_an_engine_that_is_dead_or_hung_is_replaced(client: httpx.AsyncClient, what: str) -> None:
    before = await all_pids(client)
    task = asyncio.create_task(client.post("/v1/chat/completions", json=body(what)))

    async def is_replaced() -> bool:
        answers = [await client.post("/v1/chat/completions", json=body("who?"), timeout=5) for _ in range(6)]
        now = {pid_of(answer.text) for answer in answers if answer.status_code == 200}
        return bool(now - before) and all(answer.status_code == 200 for answer in answers)

    async def is_replaced_some_time() -> bool:
        try:
            return await is_replaced()
        except httpx.TimeoutException:  # it was sent to the engine that hangs
            return False

    await eventually(is_replaced_some_time)
    response = await task
    assert response.status_code >= 500 and response.json()["error"]["message"]


async def test_a_replica_that_is_stopped_drains(client: httpx.AsyncClient, changing: None) -> None:
    short = [Reading(client, f"ticks=150 {number}") for number in range(6)]  # three to four seconds
    assert len({await reading.begin() for reading in short}) == 2
    await asyncio.to_thread(deploy, num_replicas=1)
    await asyncio.gather(*(reading.task for reading in short))
    assert [reading.events[-1] for reading in short] == ["[DONE]"] * 6
    assert len(await pids(client)) == 1


async def test_what_does_not_end_in_time_is_told(client: httpx.AsyncClient, changing: None) -> None:
    endless = [Reading(client, f"ticks=20000 {number}") for number in range(6)]
    assert len({await reading.begin() for reading in endless}) == 2
    await asyncio.to_thread(deploy)
    assert await ask(client, "who?")
    await asyncio.wait_for(asyncio.gather(*(reading.task for reading in endless)), DRAIN_S + 15)
    for reading in endless:
        assert reading.error is not None and reading.error["code"] in ("draining", "replica_lost")


async def test_replicas_come_with_the_load_and_go_with_it(client: httpx.AsyncClient, changing: None) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 2.0,
        "look_back_period_s": 1.0,
        "metrics_interval_s": 0.5,
    }
    await asyncio.to_thread(deploy, num_replicas=None, autoscaling_config=scaling)

    def num_replicas() -> int:
        return len(serve.status().applications["test"].deployments["engines"].replica_states) and sum(
            serve.status().applications["test"].deployments["engines"].replica_states.values()
        )

    readings = [Reading(client, f"ticks=20000 {number}") for number in range(8)]
    await eventually(lambda: num_replicas() == 2)
    for reading in readings:
        reading.task.cancel()
    await asyncio.gather(*(reading.task for reading in readings), return_exceptions=True)
    await eventually(lambda: num_replicas() == 1)


@pytest.mark.model
async def test_a_real_model(cluster: str, changing: None) -> None:
    await asyncio.to_thread(
        deploy,
        "smollm2",
        ray_actor_options={"num_cpus": 0.5, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}},
    )
    async with openai.AsyncOpenAI(base_url=f"{cluster}/v1", api_key="x") as client:
        question: Any = [{"role": "user", "content": "What is the capital of France?"}]
        said = await client.chat.completions.create(model="fake", messages=question, temperature=0, max_tokens=20)
        assert "Paris" in (said.choices[0].message.content or "")
        stream = await client.chat.completions.create(
            model="fake", messages=question, temperature=0, max_tokens=20, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == said.choices[0].message.content
