"""Bodies, heads, keys and origins: what anybody may send, and what comes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from aiocb.errors import ConfigError
from aiocb.serve import ServeConfig

from .helpers import CHAT, MESSAGES, serving

pytestmark = pytest.mark.asyncio
ROUTES = (CHAT, "/v1/completions", "/tokenize", "/detokenize")


async def test_bodies_that_are_no_requests() -> None:
    async with serving(max_body_depth=16) as served:
        deep = '{"messages": [{"role": "user", "content": "x", "extra": ' + "[" * 100_000 + "]" * 100_000 + "}]}"
        bodies: dict[str, str | None] = {
            "": None,
            "[]": None,
            "nul": None,
            "{": None,
            '{"messages": [NaN]}': None,
            '{"temperature": Infinity}': None,
            "\x00": None,
            '{"a": "\\ud83d"}': "unknown_parameter",
            deep: "too_deep",
            "[" * 1_000_000: "too_deep",
            '{"a": ' * 1_000_000: "too_deep",
        }
        for path in ROUTES:
            for body, code in bodies.items():
                response = await served.client.post(path, content=body.encode())
                assert response.status_code == 400, (path, body[:30], response.text[:200])
                assert response.json()["error"]["code"] == (code or "invalid_json")
        assert (await served.chat()).status_code == 200
        text = '{"messages": [{"role": "user", "content": "' + "[{" * 1000 + '\\"[" }]}'
        assert (await served.client.post(CHAT, content=text.encode())).status_code == 200


async def test_a_lone_surrogate_is_replaced_or_refused() -> None:
    async with serving() as served:
        for text in ("\\ud83d", "a\\ude00b"):
            body = '{"messages": [{"role": "user", "content": "' + text + '"}]}'
            assert (await served.client.post(CHAT, content=body.encode())).status_code in (200, 400)


async def test_large_and_slow_bodies() -> None:
    async with serving(max_body_size=1000, body_timeout=0.1) as served:
        response = await served.client.post(CHAT, content=b"x" * 1001)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

        async def parts() -> object:
            for _ in range(20):
                yield b"x" * 100

        response = await served.client.post(CHAT, content=parts())  # type: ignore[arg-type]
        assert response.status_code == 413
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


async def test_heads_are_bounded() -> None:
    async with serving() as served:
        many = [(f"x-{number}", "y") for number in range(1000)]
        for headers in (many, [("x-long", "y" * 200_000)]):
            response = await served.client.get("/v1/models", headers=headers)
            assert response.status_code == 400
        assert (await served.client.get("/v1/models", headers=many[:50])).status_code == 200
        response = await served.client.get("/v1/models?" + "q" * 60_000, headers=[("x-long", "y" * 10_000)])
        assert response.status_code == 400


async def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiocb.serve.run._HEADER_S", 0.05)
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET / HTTP/1.1\r\nhost")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_keys() -> None:
    async with serving(api_key=("alpha", "beta"), waits=False) as served:
        while (await served.client.get("/health")).status_code != 200:
            await asyncio.sleep(0.005)
        for path in (*ROUTES, "/v1/responses", "/nowhere"):
            response = await served.client.post(path, json={})
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["x-request-id"]
        for path in ("/v1/models", "/stats", "/metrics", "/openapi.json", "/v1/streams/x"):
            assert (await served.client.get(path)).status_code == 401, path
        for header in (b"Bearer x", b"Basic alpha", b"alpha", "Bearer schlüssel".encode(), b"Bearer alpha beta"):
            assert (await served.client.get("/v1/models", headers=[(b"authorization", header)])).status_code == 401
        for key in ("alpha", "beta"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await served.client.get("/v1/models", headers=headers)).status_code == 200


async def test_origins() -> None:
    asked = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with serving(api_key=("k",), cors_origin=("http://page",), waits=False) as served:
        preflight = await served.client.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page"
        refused = await served.client.post(CHAT, json={}, headers={"origin": "http://page"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page"
        other = await served.client.post(CHAT, json={}, headers={"origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers
    async with serving() as served:
        assert (await served.client.options(CHAT, headers=asked)).status_code == 405


async def test_paths_and_methods_that_are_not_here() -> None:
    async with serving() as served:
        for method, path, status in (("GET", CHAT, 405), ("POST", "/nowhere", 404), ("GET", "/v1", 404)):
            response = await served.client.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["message"]


async def test_only_so_many_requests_are_open() -> None:
    async with serving(max_connections=0, waits=False, checks=False) as served:
        response = await served.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "too_busy")


async def test_the_access_log_has_a_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiocb.serve.access")
    async with serving() as served:
        caplog.clear()
        await served.client.post(CHAT, json={"messages": MESSAGES}, headers={"x-request-id": "mine"})
        await served.client.get("/nowhere")
    lines = [json.loads(record.message) for record in caplog.records if record.name == "aiocb.serve.access"]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", CHAT, 200),
        ("GET", "/nowhere", 404),
    ]
    assert lines[0]["request_id"] == "mine"


async def test_settings_that_cannot_be() -> None:
    for name, value in (
        ("port", 70_000),
        ("port", -1),
        ("heartbeat", float("nan")),
        ("api_key", "k"),
        ("api_key", ("",)),
        ("access_log", 1),
        ("max_n", 1.5),
    ):
        with pytest.raises(ConfigError, match=name):
            ServeConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cors_origin"):
        ServeConfig(host="0.0.0.0", cors_origin=("*",))


async def test_every_setting_is_an_option() -> None:
    from aiocb.cli.serve import ServeOptions

    options = {field.name for field in dataclasses.fields(ServeOptions)}
    assert {field.name for field in dataclasses.fields(ServeConfig)} <= options


async def test_settings_of_the_engine_are_taken_out_of_the_options() -> None:
    import aiocb
    from aiocb.cli.serve import ServeOptions, _engine_settings

    values = dataclasses.asdict(
        ServeOptions(target_itl=0.0, target_ttft=2.0, speculation="prompt_lookup", metrics_buckets=[1.0, 2.0])
    )
    config = aiocb.EngineConfig(**_engine_settings(values))
    assert (config.target_itl, config.target_ttft, config.speculation) == (None, 2.0, "prompt_lookup")
    assert (config.num_speculative_tokens, config.latency_buckets, config.max_queue_size) == (7, (1.0, 2.0), 1024)
    assert not set(values) & {field.name for field in dataclasses.fields(aiocb.EngineConfig)} - {"max_queue_size"}
    assert aiocb.EngineConfig(**_engine_settings(dataclasses.asdict(ServeOptions()))).target_itl == "auto"
