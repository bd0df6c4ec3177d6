"""The second start of a GGUF file or a folder: the same engine, without the module."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import aiocb
from aiocb import kernels
from aiocb.model.load import hub as loader
from aiocb.model.load import snapshot
from aiocb.model.native.families import Experts, describe
from aiocb.model.open import open_model
from aiocb.model.request import Material, ModelRequest, Opened
from aiocb.sampling_params import ModelDefaults

from .gguf_files import HEADS, HIDDEN, write_gguf
from .helpers import tiny

pytestmark = pytest.mark.slow

CONFIG = aiocb.EngineConfig(num_blocks=64, num_threads=1)
QWEN2_MOE = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}


@pytest.fixture
def gguf_file(own_cache: Path) -> Path:
    return write_gguf(own_cache.parent / "tiny.gguf")


@pytest.fixture
def no_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to forbid starts by way of the module."""

    def forbid() -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("the module was loaded")

        monkeypatch.setattr(loader, "load", refuse)

    return forbid


@pytest.fixture(params=["file", "folder", "shards"])
def model(request: pytest.FixtureRequest, gguf_file: Path) -> Path:
    """The tiny GGUF file, and the same model as a folder, in one file and in several."""
    if request.param == "file":
        return gguf_file
    folder = gguf_file.parent / "model"
    loaded = loader.load(str(gguf_file), device="cpu")
    loaded.model.save_pretrained(folder, max_shard_size="1GB" if request.param == "folder" else "40KB")
    loaded.tokenizer.save_pretrained(folder)
    assert (len(list(folder.glob("*.safetensors"))) > 1) is (request.param == "shards")
    return folder


def snapshots(model: Path) -> list[Path]:
    return sorted(path for path in (model.parent / "cache" / "native").glob("*") if path.is_dir())


def asked(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Options that ask for converted weights: a GGUF file is used as it is where no dtype is asked for."""
    return {"dtype": "bfloat16", **options} if path.suffix == ".gguf" else options


def tokens_of(path: Path, **options: Any) -> list[tuple[int, ...]]:
    prompts = ["af", [5, 7, 9, 11, 13] * 7, [8]]

    async def main() -> list[tuple[int, ...]]:
        options_here = asked(path, options)
        async with aiocb.Engine.from_pretrained(str(path), config=CONFIG, device="cpu", **options_here) as engine:
            assert engine.model is None
            done = await engine.generate_batch(prompts, temperature=0.0, max_new_tokens=12, ignore_eos=True)
            sampled = await engine.generate_batch(prompts, temperature=0.9, seed=4, max_new_tokens=12, ignore_eos=True)
            return [each.token_ids for each in (*done, *sampled)]

    return asyncio.run(main())


def opened(path: Path, config: aiocb.EngineConfig = CONFIG, **options: Any) -> Opened:
    result = open_model(ModelRequest(config, str(path), device="cpu", **asked(path, options)))
    result.runner.close()
    return result


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_a_second_start_is_the_first_one_again(model: Path, no_module: Any, options: dict[str, Any]) -> None:
    first = tokens_of(model, **options)
    assert len(snapshots(model)) == 1
    no_module()
    assert tokens_of(model, **options) == first


def test_a_file_in_another_dtype(gguf_file: Path, no_module: Any) -> None:
    first = tokens_of(gguf_file, dtype="float32")
    no_module()
    assert tokens_of(gguf_file, dtype="float32") == first


def test_a_folder_that_is_cast_has_no_snapshot(gguf_file: Path) -> None:
    folder = gguf_file.parent / "model"
    loader.load(str(gguf_file), device="cpu").model.save_pretrained(folder)
    first = opened(folder, dtype="float32")
    assert first.model is None and not snapshots(folder), "its weights lie in no file"


def test_what_it_says_of_itself(model: Path, no_module: Any) -> None:
    first = opened(model)
    no_module()
    second = opened(model)
    assert second.defaults == first.defaults and second.model is None
    assert type(second.tokenizer) is type(first.tokenizer)
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert second.tokenizer.encode("afbg") == first.tokenizer.encode("afbg")
    before, after = ({choice.name: choice for choice in one.choices} for one in (first, second))
    assert list(before) == list(after)
    assert after["parity"] == before["parity"]._replace(reason="when this model was started first")
    del before["parity"], after["parity"]
    assert before == after


@pytest.mark.parametrize("model", ["file", "folder"], indirect=True)
def test_no_modelling_code_is_imported(model: Path) -> None:
    opened(model)
    program = (
        "import sys, aiocb\nfrom aiocb.model.open import open_model\n"
        "from aiocb.model.request import ModelRequest\n"
        f"request = ModelRequest(aiocb.EngineConfig(num_blocks=64), {str(model)!r}, "
        f"device='cpu', **{asked(model, {})!r})\n"
        "open_model(request).runner.close()\n"
        "print(*[name for name in ('transformers.modeling_utils', 'torch._dynamo', 'aiocb.model.eager.adapter')"
        " if name in sys.modules], 'end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "end\n"


@pytest.mark.parametrize("what", ["material.pickle", "vectors.safetensors", "seal.json", "missing"])
def test_a_damaged_snapshot_is_made_anew(
    model: Path, no_module: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = tokens_of(model)
    (folder,) = snapshots(model)
    if what == "missing":
        (folder / "vectors.safetensors").unlink()
    else:
        content = bytearray((folder / what).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / what).write_bytes(content)
    assert tokens_of(model) == first
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "is made again" in caplog.text
    no_module()
    assert tokens_of(model) == first and len(caplog.records) == 1


@pytest.mark.parametrize("part", ["short", "flipped"])
def test_damaged_weights_of_a_file_are_made_anew(gguf_file: Path, no_module: Any, part: str) -> None:
    first = tokens_of(gguf_file)
    (weights,) = (gguf_file.parent / "cache" / "gguf").glob("*/weights.safetensors")
    content = bytearray(weights.read_bytes())
    for place in range(len(content) // 2, len(content), 64):
        content[place] ^= 0x40
    weights.write_bytes(content if part == "flipped" else content[:-100])
    assert tokens_of(gguf_file) == first
    no_module()
    assert tokens_of(gguf_file) == first


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_changed_folder_is_another_model(gguf_file: Path, name: str) -> None:
    folder = gguf_file.parent / "model"
    loaded = loader.load(str(gguf_file), device="cpu")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    before = loader.find(str(folder), "auto", "cpu")
    assert before == loader.find(str(folder), "auto", "cpu") is not None
    path = folder / name
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content[:-1] + b" ")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = loader.find(str(folder), "auto", "cpu")
    assert before is not None and after is not None and after.identity != before.identity


def test_frequencies_of_a_file_are_in_the_snapshot(gguf_file: Path, no_module: Any) -> None:
    factors = np.linspace(1, 8, HIDDEN // HEADS // 2).astype(np.float32)
    plain = tokens_of(gguf_file)
    write_gguf(gguf_file, tensors={"rope_freqs.weight": factors})
    first = tokens_of(gguf_file)
    assert first != plain
    no_module()
    assert tokens_of(gguf_file) == first


def test_other_settings_take_the_whole_way(gguf_file: Path) -> None:
    opened(gguf_file)
    for config in (
        aiocb.EngineConfig(native=False, num_blocks=64),
        aiocb.EngineConfig(attention="sdpa", num_blocks=64),
        aiocb.EngineConfig(page_size=24, num_blocks=64),
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
            library, found = kernels.load(), loader.find(str(gguf_file), "auto", "cpu")
            assert not isinstance(library, kernels.KernelUnavailable) and found is not None
            assert not snapshot.snapshot_folder(found, library, None).exists() and len(snapshots(gguf_file)) == 1


def test_a_folder_that_cannot_be_written(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "snapshot_folder", lambda *_: gguf_file / "native")
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
    weights = tmp_path / "weights"
    save_file(model.state_dict(), weights)
    stored = snapshot.stored_weights(model, [weights])
    assert stored.keys() == model.state_dict().keys()
    encoded = snapshot.encode(Material(ModelDefaults(128, 512), "", description=description), stored)
    assert encoded is not None
    snapshot._write(tmp_path / "native", encoded)
    loaded = snapshot.load(tmp_path / "native", loader.Found((weights,), tmp_path, ""))
    assert loaded is not None and loaded.description is not None
    for before, after in zip(description.layers, loaded.description.layers, strict=True):
        assert isinstance(before.experts, Experts) and isinstance(after.experts, Experts)
        for one, other in zip(before.experts, after.experts, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                assert torch.equal(one, other)
            else:
                assert one == other
        assert (before.down is None) is (after.down is None) is (name == "mixtral")


def test_only_what_lies_in_a_file_is_named(tmp_path: Path) -> None:
    model = tiny("llama")
    state = dict(model.state_dict())
    changed, cast = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    other = {**state, changed: state[changed] + 1, cast: state[cast].bfloat16(), "nothing": torch.ones(2)}
    save_file(other, tmp_path / "weights")
    assert snapshot.stored_weights(model, [tmp_path / "weights"]).keys() == state.keys() - {changed, cast}


def test_writers_at_once_leave_a_whole_snapshot(gguf_file: Path, no_module: Any) -> None:
    """Two engines of one process start the same file."""
    first = tokens_of(gguf_file)
    (folder,) = snapshots(gguf_file)
    found = loader.find(str(gguf_file), "auto", "cpu")
    assert found is not None
    stored = snapshot.load(folder, found)
    assert stored is not None and stored.description is not None
    assert snapshot.encode(stored.description, load_file(found.weights[0])) is None, "another mapping of the file"
    one = snapshot.Encoded(
        pickle.dumps("nothing"), {str(index): torch.full((4096,), float(index)) for index in range(8)}
    )
    other = folder.with_name("native-other")

    def write() -> None:
        for _ in range(20):
            snapshot._write(other, one)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pickle.loads((other / "material.pickle").read_bytes()) == "nothing"
    assert set(load_file(other / "vectors.safetensors")) == set(one.vectors)
    assert snapshots(gguf_file) == sorted([folder, other])
    no_module()
    assert tokens_of(gguf_file) == first


def test_few_snapshots_of_a_model_are_kept(tmp_path: Path) -> None:
    encoded = snapshot.Encoded(b"", {"0": torch.ones(2)})
    for index in range(snapshot._KEPT + 3):
        folder = tmp_path / f"model-{index:020x}"
        snapshot._write(folder, encoded)
        os.utime(folder, (index, index))
    (tmp_path / "other-0").mkdir()
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert kept == [f"model-{index:020x}" for index in range(3, snapshot._KEPT + 3)] + ["other-0"]


def test_a_snapshot_that_cannot_be_made_costs_nothing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "encode", refuse)
        first = tokens_of(gguf_file)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_write", refuse)
        assert tokens_of(gguf_file) == first
    assert not snapshots(gguf_file)
