"""Adapters by the name of a model: listed, chosen, and refused before anything is served."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import aiocb
from aiocb.errors import ConfigError
from aiocb.serve import ServeConfig
from aiocb.testing import byte_tokenizer
from tests.e2e.test_adapters import merged, write_adapter
from tests.model.helpers import tiny

from .helpers import serving

pytestmark = pytest.mark.asyncio
CONFIG = aiocb.EngineConfig(attention="cpu")


async def test_a_name_of_an_adapter_is_a_model(tmp_path: Path) -> None:
    model = tiny("llama", vocab_size=300)
    folder = write_adapter(model, tmp_path / "a", 1)
    asked: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def answers(model: Any, names: list[str], **settings: Any) -> list[str]:
        async with serving(aiocb.Engine(copy.deepcopy(model), byte_tokenizer(), config=CONFIG), **settings) as served:
            listed = (await served.client.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["fake", *names[1:]]
            texts = []
            for name in names:
                reply = (await served.client.post("/v1/completions", json={"model": name, **asked})).json()
                assert reply["model"] == name
                texts.append(reply["choices"][0]["text"])
            unknown = await served.client.post("/v1/completions", json={"model": "other", **asked})
            assert unknown.status_code == 404
            return texts

    plain, adapted = await answers(model, ["fake", "tuned"], adapter=(f"tuned={folder}",))
    assert [adapted] == await answers(merged(model, folder), ["fake"])
    assert plain != adapted


@pytest.mark.parametrize("adapter", [("name",), ("=path",), ("name=",), ("a=1", "a=2"), ("fake=1",)])
async def test_adapters_that_cannot_be_told_apart_are_refused(adapter: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="name=folder|must differ"):
        ServeConfig(served_model_name=("fake",), adapter=adapter)
