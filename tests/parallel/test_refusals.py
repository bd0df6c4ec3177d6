"""What is refused before any process waits for another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import ContinuousBatchingConfig
from transformers.distributed.configuration_utils import DistributedConfig as Theirs

import aiocb
from aiocb.compat.transformers.hosting import engine_config
from aiocb.model.eager.sharding import asked_of_one, for_several

pytestmark = pytest.mark.asyncio


async def refused(folder: str, size: int = 2, **options: Any) -> str:
    engine = aiocb.Engine.from_pretrained(
        folder, distributed_config=options.pop("distributed_config", aiocb.DistributedConfig(tp_size=size)), **options
    )
    with pytest.raises(aiocb.ConfigError) as caught:
        async with engine:
            pass
    return str(caught.value)


async def test_heads_that_do_not_come_out_even(folder: str) -> None:
    assert "tp_size=3 does not divide the model's 4 heads of keys and values; use 2 or 4" in await refused(folder, 3)
    assert "tp_size=8" in await refused(folder, 8)


async def test_the_number_of_processes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "torchrun --nproc-per-node N" in await refused(folder)


@pytest.mark.parametrize(
    "setting",
    [
        {"native": True},
        {"attention": "cpu"},
        {"use_cuda_graph": True},
        {"default_compile_level": 1},
    ],
    ids=lambda setting: next(iter(setting)),
)
async def test_settings_of_one_process(folder: str, setting: dict[str, Any]) -> None:
    assert next(iter(setting)) in await refused(folder, config=aiocb.EngineConfig(**setting))


async def test_int8_and_a_device(folder: str) -> None:
    assert "quantization='int8'" in await refused(folder, quantization="int8")
    assert "device='cpu'" in await refused(folder, device="cpu")


async def test_other_kinds_of_parallelism(folder: str) -> None:
    assert "fsdp_size=2" in await refused(folder, distributed_config=Theirs(fsdp_size=2))
    assert "must be a DistributedConfig" in await refused(folder, distributed_config=3)
    assert "tp_size" in await refused(folder, distributed_config={"tp_size": 0})


async def test_one_process_is_no_special_case(folder: str) -> None:
    for config in (aiocb.DistributedConfig(tp_size=1), Theirs(tp_size=1)):
        async with aiocb.Engine.from_pretrained(folder, distributed_config=config) as engine:
            assert "processes" not in {choice.name for choice in engine.describe()}


async def test_heads_that_are_not_shared_out_need_not_come_out_even(folder: str, tmp_path: Path) -> None:
    """The model's own plan may leave keys and values whole: then only the number of processes is asked for."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_key_value_heads": 1}))
    plan = {f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "kv"}
    config = aiocb.DistributedConfig(tp_size=3, tp_plan=plan)
    assert "torchrun" in await refused(str(tmp_path), distributed_config=config)
    assert "one process" in await refused(str(tmp_path), 3)


async def test_values() -> None:
    with pytest.raises(aiocb.ConfigError, match="tp_size"):
        aiocb.DistributedConfig(tp_size=0)
    with pytest.raises(aiocb.ConfigError, match="tp_plan"):
        aiocb.DistributedConfig(tp_plan="all")  # type: ignore[arg-type]
    with pytest.raises(aiocb.ConfigError, match="cpu_group_timeout"):
        aiocb.EngineConfig(cpu_group_timeout=0.0)


async def test_programs_for_transformers_are_warned_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Spread:
        _device_mesh = object()

    settings = ContinuousBatchingConfig(cpu_group_timeout=7.0, disable_nccl_graph_mixing=False)
    config = engine_config(Spread(), None, settings)
    assert config.cpu_group_timeout == 7.0 and config.native is False and config.attention == "sdpa"
    assert [record.getMessage().partition("=")[0] for record in caplog.records] == ["disable_nccl_graph_mixing"]
    asked = aiocb.EngineConfig(use_cuda_graph=True, default_compile_level=2, attention="cpu")
    assert asked_of_one(asked) == ["attention", "use_cuda_graph", "default_compile_level"]
    assert asked_of_one(for_several(asked, drop=True)) == []
