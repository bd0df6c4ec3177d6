"""Adapters per request: tokens equal those of a model whose weights were merged, whoever else is in the batch."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import aiocb
from aiocb.errors import AdapterInUse, ConfigError, EngineClosed, InvalidRequest
from aiocb.testing import assert_quiescent
from tests.e2e.test_equality import cleared, truth
from tests.model.helpers import prompt

MODULES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "qkv_proj")
ADAPTED = aiocb.EngineConfig(attention="cpu")
GREEDY: Any = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def write_adapter(model: Any, folder: Path, seed: int, *, rank: int = 4, **settings: Any) -> Path:
    """Save a random adapter of a model's linears as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(MODULES):
            columns, depth = module.weight.shape
            down, up = torch.randn(rank, depth, generator=generator), torch.randn(columns, rank, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down * depth**-0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = up * 0.3
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: Any, folder: Path) -> Any:
    """W + scaling * B A, written out."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text())
    root = settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"]
    tensors, result = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(model)
    for name, module in result.named_modules():
        down = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if down is not None:
            module.weight += settings["lora_alpha"] / root * tensors[f"base_model.model.{name}.lora_B.weight"] @ down
    return result


@pytest.mark.parametrize("config", [ADAPTED, aiocb.EngineConfig(native=False)], ids=["native linears", "torch"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
@pytest.mark.asyncio
async def test_a_mixed_batch_equals_merged_models(kind: str, config: aiocb.EngineConfig, tmp_path: Path) -> None:
    model = cleared(kind)
    folders = {
        "a": write_adapter(model, tmp_path / "a", 1),
        "b": write_adapter(model, tmp_path / "b", 2, use_rslora=True),
    }
    prompts = [prompt(length) for length in (5, 17, 40)]
    expected = {name: truth(merged(model, folder), prompts, 8) for name, folder in folders.items()}
    expected["none"] = truth(model, prompts, 8)
    assert len({str(outputs) for outputs in expected.values()}) == 3
    async with aiocb.Engine(model, config=config) as engine:
        for name, folder in folders.items():
            await engine.load_adapter(name, folder)
        assert engine.adapters == {name: str(folder) for name, folder in folders.items()}
        order = ["a", "b", "a", "none"]  # rows of one adapter are not adjacent
        calls = [
            engine.generate(each, adapter=None if name == "none" else name, **GREEDY)
            for each in prompts
            for name in order
        ]
        done = [completion.token_ids for completion in await asyncio.gather(*calls)]
        wanted = [expected[name][index] for index in range(len(prompts)) for name in order]
        assert done == wanted
        async with engine.pause():
            pass
        again = await engine.generate(prompts[0], adapter="b", **GREEDY)
        assert again.token_ids == expected["b"][0]
        await assert_quiescent(engine)


@pytest.mark.asyncio
async def test_prefixes_belong_to_the_content(tmp_path: Path) -> None:
    model = cleared("llama")
    first, second = write_adapter(model, tmp_path / "1", 1), write_adapter(model, tmp_path / "2", 2)
    ids = prompt(64)

    async with aiocb.Engine(model, config=ADAPTED) as engine:

        async def cached(name: str | None) -> int:
            completion = await engine.generate(ids, adapter=name, **GREEDY)
            if name is not None:
                weights = merged(model, Path(engine.adapters[name]))
                assert completion.token_ids == truth(weights, [ids], 8)[0]
            num_cached: int = completion.usage.num_cached_tokens
            return num_cached

        await engine.load_adapter("x", first)
        assert await cached(None) == 0
        assert await cached("x") == 0
        assert await cached("x") > 0
        await engine.load_adapter("x", second)
        assert await cached("x") == 0
        await engine.load_adapter("y", first)
        assert await cached("y") > 0
        await engine.unload_adapter("x")
        await engine.load_adapter("x", second)
        assert await cached("x") > 0
        await assert_quiescent(engine)


@pytest.mark.asyncio
async def test_an_adapter_in_use_stays(tmp_path: Path) -> None:
    model = cleared("llama")
    first, second = write_adapter(model, tmp_path / "1", 1), write_adapter(model, tmp_path / "2", 2)
    async with aiocb.Engine(model, config=ADAPTED) as engine:
        await engine.load_adapter("x", first)
        async with engine.stream(
            prompt(5), adapter="x", temperature=0.0, max_new_tokens=100, ignore_eos=True
        ) as stream:
            await anext(stream)
            with pytest.raises(AdapterInUse, match="'x' is used by 1 request"):
                await engine.unload_adapter("x")
            with pytest.raises(AdapterInUse):
                await engine.load_adapter("x", second)
            await engine.load_adapter("x", first)
            assert [chunk async for chunk in stream]
        late = engine.stream(prompt(5), adapter="x", **GREEDY)
        await engine.unload_adapter("x")
        with pytest.raises(InvalidRequest, match="no adapter 'x' is loaded"):
            await late
        await assert_quiescent(engine)


@pytest.mark.asyncio
async def test_unknown_names_are_refused_at_once(tmp_path: Path) -> None:
    engine = aiocb.Engine(cleared("llama"), config=ADAPTED)
    with pytest.raises(EngineClosed):
        await engine.load_adapter("x", tmp_path)
    async with engine:
        with pytest.raises(InvalidRequest, match="no adapter 'x' is loaded"):
            engine.stream([5], adapter="x")
        with pytest.raises(InvalidRequest, match="no adapter 'x' is loaded"):
            await engine.unload_adapter("x")
        with pytest.raises(InvalidRequest, match="adapter must be a text"):
            engine.stream([5], adapter=3)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="must be a text"):
            await engine.load_adapter("", tmp_path)


@pytest.mark.asyncio
async def test_the_whole_step_says_what_to_do(tmp_path: Path) -> None:
    model = cleared("llama")
    folder = write_adapter(model, tmp_path / "a", 1)
    async with aiocb.Engine(model) as engine:
        with pytest.raises(ConfigError, match="attention='cpu'"):
            await engine.load_adapter("a", folder)
        assert engine.adapters == {}
        assert (await engine.generate([5, 6], **GREEDY)).token_ids


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"something_new": 2}, "something_new"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' .it changes the model's own weights"),
        ({"r": 0}, "r must be a number above 0"),
        ({"lora_alpha": "8"}, "lora_alpha must be"),
        ({"r": 8}, "not of rank 8"),
    ],
)
def test_what_would_not_be_applied_is_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    from aiocb.model.load.peft import read_adapter

    folder = write_adapter(cleared("llama"), tmp_path / "a", 1)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(ConfigError, match=named):
        read_adapter(str(folder))


@pytest.mark.asyncio
async def test_modules_that_cannot_be_adapted_are_named(tmp_path: Path) -> None:
    model = cleared("llama")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    def save(name: str, columns: int, depth: int) -> None:
        tensors = {"lora_A": torch.ones(2, depth), "lora_B": torch.ones(columns, 2)}
        save_file(
            {f"base_model.model.{name}.{kind}.weight": values for kind, values in tensors.items()},
            tmp_path / "adapter_model.safetensors",
        )

    head, hidden = model.lm_head.weight.shape
    async with aiocb.Engine(model, config=ADAPTED) as engine:
        for name, columns, depth, why in (
            ("lm_head", head, hidden, "not called with all tokens"),
            ("model.layers.0.self_attn.q_proj", 7, hidden, "the model's is"),
            ("model.layers.9.self_attn.q_proj", 7, hidden, "no such module"),
            ("model.norm", 7, hidden, "not a plain linear"),
        ):
            save(name, columns, depth)
            with pytest.raises(ConfigError, match=f"{name} .*{why}"):
                await engine.load_adapter("x", tmp_path)
        assert engine.adapters == {}
