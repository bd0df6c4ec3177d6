"""Loading by name, folder and GGUF file; the conversion cache; the real packaged models."""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.utils.logging as transformers_logging
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import aiocb.model.load.gguf as gguf_module
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.defaults import model_defaults
from aiocb.model.load import gguf_convert
from aiocb.model.load.hub import LoadedModel, find, load

from .gguf_files import write_gguf
from .helpers import ManualScheduler, argmax_sampler, generate, open_module, prompt, tiny

ABSENT: list[Any] = ["meta", "mps", "hip", "privateuseone", "cuda:99", "gpu", "", "cuda:-1", 99, -1, 1.5, b"cuda"]
if not torch.accelerator.is_available():
    ABSENT += ["cuda", "cuda:0", "xpu", "xla", 0, torch.device("cuda")]


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
        assert len(folders(gguf_file)) == 2 and not any(folder.name.startswith(".") for folder in folders(gguf_file))

    @pytest.mark.parametrize("place", [-8, -100_000])  # the middle of the file counts too
    def test_a_changed_file_is_converted_again(self, gguf_file: Path, place: int) -> None:
        first = load(str(gguf_file), device="cpu")
        content = bytearray(gguf_file.read_bytes())
        content[place : place + 8] = bytes(8)
        gguf_file.write_bytes(content)
        second = load(str(gguf_file), device="cpu")
        assert len(folders(gguf_file)) == 2
        pairs = zip(first.model.state_dict().values(), second.model.state_dict().values())
        assert not all(torch.equal(one, two) for one, two in pairs)

    def test_the_content_decides_what_it_is(self, gguf_file: Path, no_conversion: Any) -> None:
        load(str(gguf_file), device="cpu")
        renamed = gguf_file.rename(gguf_file.with_suffix(".bin"))
        (gguf_file.parent / "link").symlink_to(renamed)
        no_conversion()  # the same content under another name is the same model
        for path in (renamed, gguf_file.parent / "link"):
            assert load(str(path), device="cpu").model.dtype == torch.bfloat16

    @pytest.mark.parametrize("name", ["tiny.gguf", "model.safetensors"])
    def test_another_kind_of_file(self, gguf_file: Path, name: str) -> None:
        path = gguf_file.with_name(name)
        path.write_bytes(b"not a model")
        with pytest.raises(ConfigError, match=f"{name} is a file but not a GGUF file"):
            load(str(path), device="cpu")
        assert not (gguf_file.parent / "cache").exists()

    def test_a_file_cut_short(self, gguf_file: Path) -> None:
        gguf_file.write_bytes(gguf_file.read_bytes()[:-5000])
        with pytest.raises(ConfigError, match=r"tiny\.gguf is cut short: \d+ bytes of \d+; download it again"):
            load(str(gguf_file), device="cpu")
        assert not folders(gguf_file)

    def test_two_at_once_convert_once(self, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, convert = [], gguf_module._convert

        def counted(*args: Any) -> None:
            calls.append(1)
            convert(*args)

        monkeypatch.setattr(gguf_module, "_convert", counted)
        threads = [threading.Thread(target=load, args=(str(gguf_file),), kwargs={"device": "cpu"}) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(calls) == 1 and len(folders(gguf_file)) == 1

    def test_modules_made_meanwhile_are_initialised(self, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        load(str(gguf_file), device="cpu")
        cls: Any = LlamaForCausalLM
        made, others = cls._from_config, []

        def beside(*args: Any, **kwargs: Any) -> Any:
            thread = threading.Thread(target=lambda: others.append(torch.nn.LayerNorm(64)))
            thread.start()
            thread.join()
            return made(*args, **kwargs)

        monkeypatch.setattr(LlamaForCausalLM, "_from_config", beside)
        load(str(gguf_file), device="cpu")
        assert torch.equal(others[0].weight, torch.ones(64))


class TestKeptWeights:
    @pytest.mark.parametrize(
        "what", ["short", "empty", "flipped", "weights", "config.json", "tokenizer.json", "seal.json"]
    )
    def test_damage_is_noticed_made_again_and_said_once(
        self, gguf_file: Path, no_conversion: Any, caplog: pytest.LogCaptureFixture, what: str
    ) -> None:
        ids = torch.tensor([prompt(9, vocab=90)])
        expected = load(str(gguf_file), device="cpu").model(ids).logits
        (folder,) = folders(gguf_file)
        weights = folder / gguf_module.WEIGHTS
        content = bytearray(weights.read_bytes())
        if what == "short":
            weights.write_bytes(content[: len(content) // 2])
        elif what == "empty":
            weights.write_bytes(b"")
        elif what == "flipped":
            content[-3000] ^= 0x40
            weights.write_bytes(content)
        else:
            (folder / what.replace("weights", gguf_module.WEIGHTS)).unlink()
        assert torch.equal(load(str(gguf_file), device="cpu").model(ids).logits, expected)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "the converted weights of" in caplog.text and "are made again" in caplog.text
        no_conversion()
        load(str(gguf_file), device="cpu")
        assert len(caplog.records) == 1

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (MemoryError("nothing left"), "not enough memory"),
            (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
            (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
            (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ],
    )
    def test_what_the_machine_lacks_is_no_damage(
        self, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, no_conversion: Any, error: Exception, said: str
    ) -> None:
        load(str(gguf_file), device="cpu")
        (folder,) = folders(gguf_file)
        before = folder.stat().st_ino
        no_conversion()

        def fail(*_: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(gguf_module, "_load_folder", fail)
            with pytest.raises(ConfigError, match=said):
                load(str(gguf_file), device="cpu")
        assert folder.stat().st_ino == before
        load(str(gguf_file), device="cpu")

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.ENOSPC, "No space left")])
    def test_a_conversion_that_fails_leaves_nothing(
        self, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        def fail(*_: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(gguf_convert, "_write", fail)
            expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError
            with pytest.raises(expected):
                load(str(gguf_file), device="cpu")
        assert not folders(gguf_file)
        load(str(gguf_file), device="cpu")

    def test_no_room_is_known_before(self, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        full = shutil.disk_usage(gguf_file.parent)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
        monkeypatch.setattr(gguf_convert, "_dequantised", None)
        with pytest.raises(ConfigError, match=r"takes 0\.0 GiB as torch.bfloat16, .* AIOCB_CACHE"):
            load(str(gguf_file), device="cpu")

    def test_a_cache_that_cannot_be_written(self, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOCB_CACHE", str(gguf_file))
        with pytest.raises(ConfigError, match=r"cannot keep .*AIOCB_CACHE names another"):
            load(str(gguf_file), device="cpu")

    def test_another_version_makes_its_own(
        self, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(gguf_module, "_maker", lambda: "format 2")
        load(str(gguf_file), device="cpu")
        monkeypatch.undo()
        monkeypatch.setenv("AIOCB_CACHE", str(gguf_file.parent / "cache"))
        load(str(gguf_file), device="cpu")
        assert len(folders(gguf_file)) == 1 and "made by format 2" in caplog.text

    def test_folders_of_earlier_formats_are_removed(self, gguf_file: Path) -> None:
        parent = gguf_file.parent / "cache" / "gguf"
        old, other = parent / "tiny-bfloat16-0123", parent / "mine"
        for folder in (old, other):
            folder.mkdir(parents=True)
        for name in (gguf_module.WEIGHTS, "config.json"):
            (old / name).write_text("{}")
        load(str(gguf_file), device="cpu")
        assert not old.exists() and other.exists()


def folders(gguf_file: Path) -> list[Path]:
    return [path for path in (gguf_file.parent / "cache").glob("gguf/*") if path.is_dir()]


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

    def test_without_tokenizer(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tiny("llama").save_pretrained(tmp_path)
        loaded = load(str(tmp_path), device="cpu", dtype="bf16")
        assert loaded.tokenizer is None and not caplog.records
        assert loaded.choices[-1] == Choice("tokenizer", "none", "the folder has none: prompts are token ids")

    def test_a_tokenizer_that_cannot_be_loaded_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tiny("llama").save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{ broken")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        loaded = load(str(tmp_path), device="cpu")
        assert loaded.tokenizer is None and "prompts must be token ids" in caplog.text
        assert loaded.choices[-1].value == "none" and "cannot be loaded" in loaded.choices[-1].reason

    @pytest.mark.parametrize("name", ["/no/such/folder", "/no/such/file.gguf", "no-such/model"])
    def test_missing(self, name: str) -> None:
        with pytest.raises(ConfigError, match="no.such") as caught:
            load(name)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["./nope", "../nope", "/nope/nope", "~/nope"])
    def test_a_folder_that_is_not_there(self, name: str) -> None:
        with pytest.raises(ConfigError, match="there is no such folder"):
            load(name, device="cpu")

    def test_missing_weights(self, tmp_path: Path) -> None:
        tiny("llama").config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="cannot load") as caught:
            load(str(tmp_path))
        assert "\n" not in str(caught.value)

    def test_damaged_weights(self, tmp_path: Path) -> None:
        tiny("llama").save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"broken")
        with pytest.raises(ConfigError, match="cannot load"):
            load(str(tmp_path))

    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot load"):
            load(str(tmp_path))
        write_gguf(tmp_path / "a.gguf")
        with pytest.raises(ConfigError, match="has no config.json; name one of its GGUF files: a.gguf"):
            load(str(tmp_path))

    def test_a_gguf_file_by_transformers_option(self, gguf_file: Path) -> None:
        expected = load(str(gguf_file), device="cpu").choices
        assert load(str(gguf_file.parent), device="cpu", gguf_file=gguf_file.name).choices == expected

    @pytest.mark.parametrize("dtype", ["int8", "nonsense", 3])
    def test_bad_dtype(self, dtype: Any) -> None:
        with pytest.raises(ConfigError, match="dtype"):
            load("smollm2", dtype=dtype)

    @pytest.mark.parametrize("place", ABSENT, ids=str)
    def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
        self, gguf_file: Path, no_conversion: Any, monkeypatch: pytest.MonkeyPatch, place: Any
    ) -> None:
        no_conversion()
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        for name in (str(gguf_file), "some/model"):
            for options in ({"device": place}, {"device_map": place}, {"device_map": {"lm_head": "cpu", "": place}}):
                with pytest.raises(ConfigError, match=r"device .* cannot be used with this torch .* pass 'cpu'"):
                    load(name, **options)
            with pytest.raises(ConfigError, match="cannot be used"):
                find(name, "auto", place)

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

    def test_one_model_is_made_at_a_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Transformers replaces functions of its own meanwhile; threads that overlap put back each other's."""
        tiny("llama").save_pretrained(tmp_path)
        tie_weights, made, both = (
            PreTrainedModel.tie_weights,
            AutoModelForCausalLM.from_pretrained,
            threading.Barrier(2),
        )

        def meeting(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)
            return made(*args, **kwargs)

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", meeting)
        threads = [threading.Thread(target=load, args=(str(tmp_path),), kwargs={"device": "cpu"}) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert both.broken and PreTrainedModel.tie_weights is tie_weights


def _bars() -> bool:
    logging: Any = transformers_logging
    return bool(logging.is_progress_bar_enabled())


def _loaded(name: str) -> LoadedModel:
    if not gguf_module.find_package(name):
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
    runner = open_module(loaded.model, EngineConfig(native=False, num_blocks=64), argmax_sampler).runner
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
