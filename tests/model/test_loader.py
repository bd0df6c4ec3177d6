"""Loading by name, folder and GGUF file; the conversion cache; the real packaged models."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers.utils.logging as transformers_logging
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import aiocb.model.load.gguf as gguf_module
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.build import build_runner, model_defaults
from aiocb.model.load.hub import LoadedModel, load

from .helpers import ManualScheduler, argmax_sampler, generate, prompt, tiny

HIDDEN, HEADS, KV_HEADS, LAYERS, MLP = 64, 4, 2, 2, 96
TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *[chr(33 + index) for index in range(90)],
    *[f"{a}{b}" for a in "abcde" for b in "fghij"],
]


def write_gguf(path: Path) -> None:
    """A tiny llama with random weights and a toy BPE vocabulary."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges([f"{a} {b}" for a in "abcde" for b in "fghij"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.3).astype(np.float32))

    add("token_embd.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", MLP, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", MLP, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call it to forbid further conversions."""

    def forbid() -> None:
        def refuse(*_: Any) -> None:
            raise AssertionError("converted again")

        monkeypatch.setattr(gguf_module, "_convert", refuse)

    yield forbid


class TestGguf:
    def test_second_load_reads_the_cache(self, gguf_file: Path, no_conversion: Any) -> None:
        stages: list[tuple[str, float]] = []
        first = load(str(gguf_file), device="cpu", progress=lambda stage, fraction: stages.append((stage, fraction)))
        assert first.model.dtype == torch.bfloat16
        assert stages[0] == ("import", 0.0) and ("convert", 1.0) in stages and stages[-1] == ("load", 1.0)
        no_conversion()
        second = load(str(gguf_file), device="cpu")
        for one, two in zip(first.model.state_dict().items(), second.model.state_dict().items()):
            assert one[0] == two[0] and torch.equal(one[1], two[1])
        ids = torch.tensor([prompt(9, vocab=90)])
        assert torch.equal(first.model(ids).logits, second.model(ids).logits)
        assert second.tokenizer.decode(second.tokenizer("af").input_ids) == "af"
        assert not second.model.training and not any(p.requires_grad for p in second.model.parameters())

    def test_a_conversion_draws_nothing(self, gguf_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
        load(str(gguf_file), device="cpu")
        assert capfd.readouterr() == ("", "")

    def test_options_that_a_file_cannot_have_are_refused(self, gguf_file: Path) -> None:
        with pytest.raises(ConfigError, match=r"tiny\.gguf is a GGUF file .* attn_implementation, use_cache"):
            load(str(gguf_file), device="cpu", use_cache=True, attn_implementation="sdpa", local_files_only=True)
        load(str(gguf_file), device="cpu", local_files_only=True, revision="main", device_map=None)

    def test_each_dtype_is_kept_apart(self, gguf_file: Path) -> None:
        assert load(str(gguf_file), dtype="float32", device="cpu").model.dtype == torch.float32
        assert load(str(gguf_file), dtype=torch.bfloat16, device="cpu").model.dtype == torch.bfloat16
        folders = list((gguf_file.parent / "cache" / "gguf").iterdir())
        assert len(folders) == 2 and not any(folder.name.startswith(".") for folder in folders)

    def test_a_damaged_cache_is_made_anew(self, gguf_file: Path) -> None:
        load(str(gguf_file), device="cpu")
        (folder,) = (gguf_file.parent / "cache" / "gguf").iterdir()
        (folder / gguf_module.WEIGHTS).write_bytes(b"broken")
        assert load(str(gguf_file), device="cpu").model.dtype == torch.bfloat16

    def test_a_changed_file_is_converted_again(self, gguf_file: Path) -> None:
        load(str(gguf_file), device="cpu")
        content = bytearray(gguf_file.read_bytes())
        content[-4:] = b"\0\0\0\0"
        gguf_file.write_bytes(content)
        load(str(gguf_file), device="cpu")
        assert len(list((gguf_file.parent / "cache" / "gguf").iterdir())) == 2

    def test_broken_file(self, gguf_file: Path) -> None:
        gguf_file.write_bytes(b"not a model")
        with pytest.raises(ConfigError, match="cannot convert"):
            load(str(gguf_file), device="cpu")
        assert not list((gguf_file.parent / "cache" / "gguf").iterdir())


class TestNames:
    def test_folder(self, tmp_path: Path) -> None:
        model = tiny("llama")
        model.save_pretrained(tmp_path)
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        wrapper: Any = PreTrainedTokenizerFast
        wrapper(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
        loaded = load(str(tmp_path), device="cpu")
        assert loaded.model.dtype == torch.float32 and loaded.tokenizer("a b").input_ids == [0, 1]
        ids = torch.tensor([prompt(9)])
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)

    def test_without_tokenizer(self, tmp_path: Path) -> None:
        tiny("llama").save_pretrained(tmp_path)
        assert load(str(tmp_path), device="cpu", dtype="bf16").tokenizer is None

    @pytest.mark.parametrize("name", ["/no/such/folder", "/no/such/file.gguf"])
    def test_missing(self, name: str) -> None:
        with pytest.raises(ConfigError, match="/no/such"):
            load(name)

    def test_missing_weights(self, tmp_path: Path) -> None:
        tiny("llama").config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="cannot load"):
            load(str(tmp_path))

    @pytest.mark.parametrize("dtype", ["int8", "nonsense", 3])
    def test_bad_dtype(self, dtype: Any) -> None:
        with pytest.raises(ConfigError, match="dtype"):
            load("smollm2", dtype=dtype)

    def test_nothing_global_is_left_changed(self, tmp_path: Path) -> None:
        tiny("llama").save_pretrained(tmp_path)
        dtype, threads, bars = torch.get_default_dtype(), torch.get_num_threads(), _bars()
        alive = set(threading.enumerate())
        load(str(tmp_path), device="cpu", dtype="bfloat16")
        assert (torch.get_default_dtype(), torch.get_num_threads(), _bars()) == (dtype, threads, bars)
        assert gc.isenabled() and torch.is_grad_enabled()
        for thread in set(threading.enumerate()) - alive:
            thread.join(5)  # transformers does not wait for its loading threads
            assert not thread.is_alive(), thread


def _bars() -> bool:
    logging: Any = transformers_logging
    return bool(logging.is_progress_bar_enabled())


def _loaded(name: str) -> LoadedModel:
    if gguf_module.find_package(name) is None:
        pytest.skip(f"needs the package of {name}")
    loaded = load(name, dtype="bfloat16", device="cpu")
    loaded.model.to(torch.float32)  # type: ignore[arg-type]
    return loaded


PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a land far away, there lived"]


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_real_models_equal_generate(name: str) -> None:
    loaded = _loaded(name)
    prompts = [loaded.tokenizer(text).input_ids for text in PROMPTS]
    num_new = 12
    if name == "gemma3-270m":
        prompts = [(prompts[2] * 60)[:530], prompts[0]]  # longer than the window
        num_new = 6
    expected = [generate(loaded.model, tokens, num_new) for tokens in prompts]
    runner = build_runner(loaded.model, EngineConfig(native=False, num_blocks=64), sampler=argmax_sampler).runner
    scheduler = ManualScheduler(runner, chunk=200)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, num_new, start_step=index)
    assert scheduler.run() == expected
    runner.close()


@pytest.mark.model
def test_smollm2_defaults() -> None:
    loaded = _loaded("smollm2")
    defaults = model_defaults(loaded.model)
    assert (defaults.vocab_size, defaults.max_model_len, defaults.eos_token_ids) == (49152, 8192, (2,))
    assert loaded.tokenizer.chat_template is not None
