"""Clients that leave, streams that are cut, servers that stop, engines that die."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

import aiocb
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import FakeRunner, Gate, assert_quiescent, byte_tokenizer, fake_engine

from .helpers import CHAT, ENDLESS, content_of, events_of, gated, serving

pytestmark = pytest.mark.asyncio


async def connect(
    port: int, body: dict[str, Any], path: str = CHAT
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def until(predicate: Any) -> None:
    async with asyncio.timeout(20):
        while not predicate():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_a_client_that_leaves_frees_its_slot_within_a_step(stream: bool, steps: int) -> None:
    """Before its prefill, after it, in decode; whether it streams or waits."""
    engine, runner, gate = gated()
    middle: dict[str, Any] = {"api_key": ("k",), "cors_origin": ("http://a",)}
    async with serving(engine, **middle) as served:
        headers_of_all_layers = b"authorization: Bearer k\r\norigin: http://a\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        data = json.dumps({**ENDLESS, "stream": stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n".encode()
        writer.write(head + headers_of_all_layers + b"\r\n" + data)
        await gate.held()
        await gate.step(steps)
        writer.close()
        await until(lambda: not served.service.num_calls)
        before = runner.num_steps
        gate.open()
        await assert_quiescent(engine)
        assert runner.num_steps <= before + 1
        del reader


async def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    engine, runner, gate = gated(num_blocks=8)
    async with serving(engine) as served:
        first = await connect(served.port, {**ENDLESS, "max_tokens": 80, "stream": True})
        await gate.held()
        second = await connect(served.port, {**ENDLESS, "max_tokens": 80, "stream": True})
        await until(lambda: served.service.num_calls == 2)
        second[1].close()
        await until(lambda: served.service.num_calls == 1)
        first[1].close()
        gate.open()
        await assert_quiescent(engine)
        assert runner.max_requests == 1


async def test_a_body_that_is_cut_is_nobody_s_request() -> None:
    engine, runner, _gate = gated(is_open=True)
    async with serving(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        assert (await served.client.get("/health")).status_code == 200
        assert runner.num_steps == 0
        del reader


async def test_what_fails_in_a_stream_is_told_in_it() -> None:
    def fail(step: int, record: Any) -> Exception | None:
        return ValueError('a "quoted"\nline') if step == 4 else None

    runner = FakeRunner(fail=fail)
    engine = fake_engine(runner=runner, tokenizer=byte_tokenizer())
    async with serving(engine) as served:
        response = await served.client.post(CHAT, json={**ENDLESS, "stream": True})
        assert response.status_code == 200
        *events, last = events_of(response.text)
        assert content_of(events)
        assert last["error"]["type"] == "server_error"
        assert last["error"]["message"]
        assert "[DONE]" not in response.text
        whole = await served.client.post(CHAT, json={**ENDLESS, "max_tokens": 1})
        assert whole.status_code == 200


async def test_an_engine_that_dies_ends_every_stream_with_an_error() -> None:
    engine, _runner, gate = gated(raise_at={5: RuntimeError("boom")})
    async with serving(engine) as served:
        streams = [await connect(served.port, {**ENDLESS, "stream": True}) for _ in range(3)]
        for reader, _writer in streams:
            assert b"200 OK" in await reader.readuntil(b"\r\n")
        whole = asyncio.create_task(served.client.post(CHAT, json=ENDLESS))
        await until(lambda: served.service.num_calls == 4)
        gate.open()
        for reader, writer in streams:
            assert b'"code": "engine_dead"' in await reader.readuntil(b"0\r\n\r\n")
            writer.close()
        assert (await whole).status_code == 503
        health = await served.client.get("/health")
        assert health.status_code == 503
        assert (health.json()["status"], health.json()["alive"]) == ("dead", False)
        assert (await served.client.post(CHAT, json=ENDLESS)).status_code == 503


async def test_an_engine_that_hangs_is_seen() -> None:
    runner = FakeRunner(hang_at={3})
    engine = fake_engine(
        runner=runner, tokenizer=byte_tokenizer(), config=aiocb.EngineConfig(hang_timeout=0.01, debug_checks=True)
    )
    async with serving(engine) as served:
        reader, writer = await connect(served.port, {**ENDLESS, "stream": True})
        await until(lambda: runner.is_hanging)
        await asyncio.sleep(0.02)  # what is tested is time
        body = (await served.client.get("/health")).json()
        assert (body["status"], body["ready"]) == ("hung", False)
        assert body["step_age_seconds"] > 0.01
        runner.resume()
        writer.close()
        await until(lambda: not served.service.num_calls)
        del reader


async def test_health_tells_loading_from_failure() -> None:
    async with serving(fake_engine(reply="x"), waits=False) as served:
        states = set()
        while (response := await served.client.get("/health")).status_code == 503:
            states.add(response.json()["status"])
        assert states <= {"loading"}
        assert response.json() == {**response.json(), "status": "ok", "alive": True, "ready": True}


async def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def no_runner(_: Any) -> Any:
        raise aiocb.ConfigError("no such model")

    async with serving(aiocb.Engine.from_runner(no_runner, ModelDefaults(8, 8)), waits=False) as served:
        await until(lambda: served.server.should_exit)
        assert "no such model" in str(served.service.failure)


async def test_a_full_queue_is_429() -> None:
    gate = Gate()
    runner = FakeRunner(gate=gate, num_blocks=8)
    config = aiocb.EngineConfig(max_queue_size=1, debug_checks=True)
    engine = fake_engine(runner=runner, tokenizer=byte_tokenizer(), config=config)
    async with serving(engine) as served:
        calls = [await connect(served.port, {**ENDLESS, "max_tokens": 60, "stream": True})]
        await gate.held()
        calls.append(await connect(served.port, {**ENDLESS, "max_tokens": 60, "stream": True}))
        await until(lambda: served.service.num_calls == 2)
        response = await served.client.post(CHAT, json={**ENDLESS, "max_tokens": 60, "stream": True})
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert response.json()["error"]["type"] == "rate_limit_error"
        for _, writer in calls:
            writer.close()
        gate.open()
        await until(lambda: not served.service.num_calls)


async def test_draining_lets_streams_end_and_takes_nothing_new() -> None:
    engine, _runner, gate = gated()
    async with serving(engine, checks=False) as served:
        reading = asyncio.create_task(served.client.post(CHAT, json={**ENDLESS, "max_tokens": 5, "stream": True}))
        await gate.held()
        served.server._stop()
        await until(lambda: served.service.is_draining)
        refused = await served.client.post(CHAT, json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await served.client.get("/health")).json()["status"] == "draining"
        gate.open()
        response = await reading
        assert response.text.endswith("[DONE]\n\n")
        await until(lambda: served.server.should_exit)


async def test_a_second_signal_ends_streams_with_an_error() -> None:
    engine, _runner, gate = gated(is_open=True)
    async with serving(engine, drain=1000.0, checks=False) as served:
        readings = [
            asyncio.create_task(served.client.post(CHAT, json={**ENDLESS, "stream": stream}))
            for stream in (True, False)
        ]
        await until(lambda: served.service.num_calls == 2 and engine.stats().num_steps > 3)
        served.server._stop()
        await until(lambda: served.service.is_draining)
        served.server._stop()
        streamed, whole = await asyncio.gather(*readings)
        *events, last = events_of(streamed.text)
        assert content_of(events)
        assert last["error"]["code"] == "draining"
        assert whole.status_code == 503
        gate.open()


async def test_silence_is_filled_with_comments() -> None:
    engine, _runner, gate = gated()
    async with serving(engine, heartbeat=0.02) as served:
        reader, writer = await connect(served.port, {**ENDLESS, "max_tokens": 2, "stream": True})
        async with asyncio.timeout(20):
            text = await reader.readuntil(b"wait\n\n")
        assert b"200 OK" in text
        gate.open()
        async with asyncio.timeout(20):
            await reader.readuntil(b"[DONE]\n\n")
        writer.close()


async def test_a_cut_stream_goes_on_where_it_was() -> None:
    engine, runner, gate = gated(is_open=True)
    async with serving(engine, resume_window=30.0) as served:
        fields = {**ENDLESS, "max_tokens": 40, "stream": True, "temperature": 0}
        expected = (await served.client.post(CHAT, json=fields)).text
        wanted = content_of([event for event in events_of(expected) if event != "[DONE]"])
        steps = runner.num_steps
        gate.close()
        frames, last_id, stream_id = [], "", ""
        async with served.client.stream("POST", CHAT, json={**fields, "resume": True}) as response:
            stream_id = response.headers["x-stream-id"]
            lines = response.aiter_lines()
            await gate.held()
            async for line in lines:
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    frames.append(json.loads(line.removeprefix("data: ")))
                    if len(frames) == 3:
                        break
                    await gate.step()
        gate.open()  # and goes on without a reader
        rest = await served.client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": last_id})
        assert rest.status_code == 200
        *events, done = events_of(rest.text)
        assert done == "[DONE]"
        assert content_of([*frames, *events]) == wanted
        assert runner.num_steps == 2 * steps  # nothing was computed twice
        again = await served.client.get(f"/v1/streams/{stream_id}")
        assert content_of([event for event in events_of(again.text) if event != "[DONE]"]) == wanted
        missing = await served.client.get("/v1/streams/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "stream_not_found")
        wrong = await served.client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": "x:1"})
        assert wrong.status_code == 400


async def test_a_stream_that_nobody_resumes_ends() -> None:
    engine, runner, gate = gated()
    async with serving(engine, resume_window=0.05) as served:
        async with served.client.stream("POST", CHAT, json={**ENDLESS, "stream": True, "resume": True}):
            await gate.held()
        gate.open()
        await until(lambda: not served.service.num_calls)
        await assert_quiescent(engine)
        assert runner.num_steps > 0


async def test_what_is_kept_of_a_stream_is_bounded() -> None:
    engine, _runner, _gate = gated(is_open=True)
    async with serving(engine, resume_window=30.0, resume_buffer=2000, max_resumable=1) as served:
        fields = {**ENDLESS, "max_tokens": 200, "stream": True, "resume": True}
        response = await served.client.post(CHAT, json=fields)
        stream_id = response.headers["x-stream-id"]
        gone = await served.client.get(f"/v1/streams/{stream_id}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "events_gone")
        more = await served.client.post(CHAT, json=fields)
        assert (more.status_code, more.json()["error"]["code"]) == (429, "too_many_resumable")


async def test_a_slow_client_holds_nobody_up() -> None:
    engine, _runner, _gate = gated(is_open=True)
    async with serving(engine) as served:
        slow = await connect(served.port, {**ENDLESS, "stream": True})
        async with asyncio.timeout(30):
            quick = await served.client.post(CHAT, json={**ENDLESS, "max_tokens": 50, "stream": True})
        assert quick.text.endswith("[DONE]\n\n")
        slow[1].close()
        await until(lambda: not served.service.num_calls)


async def test_a_client_by_another_loop_gets_its_own_answer() -> None:
    """Duplicate request ids, long ones and odd ones mix up nothing."""
    async with serving() as served:
        ids = ["same", "same", "x" * 1000, "a b"]
        responses = await asyncio.gather(
            *(
                served.client.post(
                    CHAT, json={"messages": [{"role": "user", "content": "a"}]}, headers=[("x-request-id", i)]
                )
                for i in ids
            )
        )
        assert [r.status_code for r in responses] == [200] * 4
        assert [r.headers["x-request-id"] for r in responses[:2]] == ["same", "same"]
        assert all(len(r.headers["x-request-id"]) == 32 for r in responses[2:])
        assert len({r.json()["id"] for r in responses}) == 4
        assert isinstance(responses[0], httpx.Response)
