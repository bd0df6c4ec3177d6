"""The second start of a GGUF model: the same engine, without the module."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import aiocb
from aiocb import kernels
from aiocb.model.load import hub as loader
from aiocb.model.load import snapshot
from aiocb.model.native.families import Experts, describe
from aiocb.model.open import Pretrained, open_pretrained
from aiocb.sampling_params import ModelDefaults

from .helpers import tiny
from .test_loader import write_gguf

CONFIG = aiocb.EngineConfig(num_blocks=64, num_threads=1)
QWEN2_MOE = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    built = kernels.load()
    assert not isinstance(built, kernels.KernelUnavailable), built
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / built.path.parent.name).symlink_to(built.path.parent)  # the kernels are not compiled again
    monkeypatch.setenv("AIOCB_CACHE", str(cache))
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def no_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to forbid starts by way of the module."""

    def forbid() -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("the module was loaded")

        monkeypatch.setattr(loader, "load", refuse)

    return forbid


def snapshots(gguf_file: Path) -> list[Path]:
    return sorted((gguf_file.parent / "cache" / "gguf").glob("*/native-*"))


def tokens_of(path: Path, **options: Any) -> list[tuple[int, ...]]:
    prompts = ["af", [5, 7, 9, 11, 13] * 7, [8]]

    async def main() -> list[tuple[int, ...]]:
        async with aiocb.Engine.from_pretrained(str(path), config=CONFIG, device="cpu", **options) as engine:
            assert engine.model is None
            done = await engine.generate_batch(prompts, temperature=0.0, max_new_tokens=12, ignore_eos=True)
            sampled = await engine.generate_batch(prompts, temperature=0.9, seed=4, max_new_tokens=12, ignore_eos=True)
            return [each.token_ids for each in (*done, *sampled)]

    return asyncio.run(main())


def opened(path: Path, config: aiocb.EngineConfig = CONFIG, **options: Any) -> Pretrained:
    result = open_pretrained(str(path), config, device="cpu", **options)
    result.runner.close()
    return result


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "int8"}], ids=str)
def test_a_second_start_is_the_first_one_again(gguf_file: Path, no_module: Any, options: dict[str, Any]) -> None:
    first = tokens_of(gguf_file, **options)
    assert [path.suffix for path in snapshots(gguf_file)] == [".json", ".safetensors"]
    no_module()
    assert tokens_of(gguf_file, **options) == first


def test_what_it_says_of_itself(gguf_file: Path, no_module: Any) -> None:
    first = opened(gguf_file)
    no_module()
    second = opened(gguf_file)
    assert second.defaults == first.defaults and second.model is None
    assert type(second.tokenizer) is type(first.tokenizer)
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert second.tokenizer.encode("afbg") == first.tokenizer.encode("afbg")
    before, after = ({choice.name: choice for choice in one.choices} for one in (first, second))
    assert list(before) == list(after)
    assert after["parity"].value == before["parity"].value + ", when this model was started first"
    del before["parity"], after["parity"]
    assert before == after


def test_no_modelling_code_is_imported(gguf_file: Path) -> None:
    opened(gguf_file)
    program = (
        "import sys, aiocb\nfrom aiocb.model.open import open_pretrained\n"
        f"open_pretrained({str(gguf_file)!r}, aiocb.EngineConfig(num_blocks=64), device='cpu').runner.close()\n"
        "print(*[name for name in ('transformers.modeling_utils', 'torch._dynamo', 'aiocb.model.eager.adapter')"
        " if name in sys.modules], 'end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "end\n"


@pytest.mark.parametrize("what", ["json", "vectors", "weights", "missing"])
def test_a_damaged_snapshot_is_made_anew(gguf_file: Path, no_module: Any, what: str) -> None:
    first = tokens_of(gguf_file)
    values, vectors = snapshots(gguf_file)
    if what == "json":
        values.write_text(values.read_text()[:-40])
    elif what == "vectors":
        vectors.write_bytes(b"broken")
    elif what == "weights":
        (values.parent / "weights.safetensors").write_bytes(b"broken")
    else:
        vectors.unlink()
    assert tokens_of(gguf_file) == first
    no_module()
    assert tokens_of(gguf_file) == first


def test_other_settings_take_the_whole_way(gguf_file: Path) -> None:
    opened(gguf_file)
    for config in (
        aiocb.EngineConfig(native=False, num_blocks=64),
        aiocb.EngineConfig(attention="sdpa", num_blocks=64),
        aiocb.EngineConfig(page_size=32, num_blocks=64),
    ):
        result = opened(gguf_file, config)
        assert result.model is not None and "kernels" not in {choice.name for choice in result.runner.choices}
    with pytest.raises(aiocb.ConfigError, match="max_model_len"):
        opened(gguf_file, aiocb.EngineConfig(max_model_len=1 << 20))


def test_other_code_finds_no_snapshot(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(gguf_file)
    for name, other in (("_own_sources", lambda: "changed"), ("torch", type("", (), {"__version__": "0.0"}))):
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, name, other)
            before = len(snapshots(gguf_file))
            library = kernels.load()
            assert not isinstance(library, kernels.KernelUnavailable)
            path = snapshot.snapshot_path(snapshots(gguf_file)[0].parent, library, None)
            assert not path.with_suffix(".json").exists() and before == 2


def test_a_folder_that_cannot_be_written(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "snapshot_path", lambda *_: gguf_file.parent / "nowhere" / "native")
    first = tokens_of(gguf_file)
    assert not snapshots(gguf_file)
    assert tokens_of(gguf_file) == first


def test_a_matrix_of_no_file_is_not_written_down() -> None:
    description = describe(tiny("gpt_neox", dtype=torch.float32))  # its q, k and v are sorted into a new matrix
    assert not isinstance(description, str)
    assert snapshot.encode(description, {}) is None


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_are_written_down(tmp_path: Path, name: str) -> None:
    model = tiny(name, **({} if name == "mixtral" else QWEN2_MOE))
    description = describe(model)
    assert not isinstance(description, str), description
    save_file(model.state_dict(), tmp_path / "weights")
    encoded = snapshot.encode(description, model.state_dict())
    assert encoded is not None
    snapshot.save(tmp_path / "native", encoded, ModelDefaults(128, 512), "", None, "")
    stored = snapshot.load(tmp_path / "native", tmp_path / "weights")
    assert stored is not None
    for before, after in zip(description.layers, stored.description.layers, strict=True):
        assert isinstance(before.experts, Experts) and isinstance(after.experts, Experts)
        for one, other in zip(before.experts, after.experts, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                assert torch.equal(one, other)
            else:
                assert one == other
        assert (before.down is None) is (after.down is None) is (name == "mixtral")


def test_writers_at_once_leave_a_whole_snapshot(gguf_file: Path, no_module: Any) -> None:
    """Two engines of one process start the same file."""
    first = tokens_of(gguf_file)
    (path,) = (each.with_suffix("") for each in snapshots(gguf_file) if each.suffix == ".json")
    stored = snapshot.load(path, path.parent / "weights.safetensors")
    assert stored is not None
    encoded = snapshot.encode(stored.description, load_file(path.parent / "weights.safetensors"))
    assert encoded is None, "these are other mappings of the file"
    vectors = {str(index): torch.full((4096,), float(index)) for index in range(8)}
    one = snapshot.Encoded({"nothing": 1}, vectors)

    def write() -> None:
        for _ in range(20):
            snapshot.save(path.with_name("native-other"), one, stored.defaults, "", None, "")

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = path.with_name("native-other")
    assert json.loads(other.with_suffix(".json").read_text())["description"] == {"nothing": 1}
    assert set(load_file(other.with_suffix(".safetensors"))) == set(vectors)
    assert not list(path.parent.glob(".native-*"))
    no_module()
    assert tokens_of(gguf_file) == first


def test_a_snapshot_that_cannot_be_made_costs_nothing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "encode", refuse)
        first = tokens_of(gguf_file)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "save", refuse)
        assert tokens_of(gguf_file) == first
    assert not snapshots(gguf_file)
