"""Models as people name them: names, the choice among a repository's files, and a small hub to take them from."""

from __future__ import annotations

import errno
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from aiocb import kernels
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.load.choose import choose, label_of, tags_of
from aiocb.model.load.download import locate
from aiocb.model.load.gguf_file import read_gguf
from aiocb.model.load.hub import load
from aiocb.model.load.names import HubName, is_local, parse_name
from aiocb.model.open import open_model
from aiocb.model.request import ModelRequest
from tests.hub_server import Hub, Repository, running_hub, using_hub

from .gguf_files import KEYS, add_key, write_gguf
from .helpers import prompt, tiny


class TestNames:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("owner/repo", HubName("owner/repo")),
            ("gpt2", HubName("gpt2")),
            ("owner/repo-2.5_x:Q4_K_M", HubName("owner/repo-2.5_x", "Q4_K_M")),
            ("owner/repo@v1", HubName("owner/repo", None, "v1")),
            ("owner/repo@refs/pr/1:Q8_0", HubName("owner/repo", "Q8_0", "refs/pr/1")),
            ("owner/repo:Q8_0@v1", HubName("owner/repo", "Q8_0", "v1")),
            ("hf.co/owner/repo", HubName("owner/repo")),
            ("hf.co/owner/repo:q4_0", HubName("owner/repo", "q4_0")),
            ("https://huggingface.co/owner/repo", HubName("owner/repo")),
            ("https://huggingface.co/owner/repo/", HubName("owner/repo")),
            ("HTTPS://HF.co/owner/repo/tree/main", HubName("owner/repo")),
            ("https://huggingface.co/owner/repo/tree/v1", HubName("owner/repo", None, "v1")),
            ("https://huggingface.co/owner/repo/tree/refs%2Fpr%2F1", HubName("owner/repo", None, "refs/pr/1")),
            (
                "https://huggingface.co/owner/repo/blob/main/a/b-Q4_0.gguf?download=true",
                HubName("owner/repo", None, None, "a/b-Q4_0.gguf"),
            ),
            ("http://www.huggingface.co/o/r/resolve/v2/x.gguf", HubName("o/r", None, "v2", "x.gguf")),
            ("a/b/c", None),
            ("", None),
            ("C:\\models\\x", None),
            ("https://example.com/owner/repo", None),
        ],
    )
    def test_what_a_name_says(self, name: str, expected: HubName | None) -> None:
        assert parse_name(name) == expected

    @pytest.mark.parametrize(
        "name", ["o/r:", "o/r@", "o/r:Q4_0@", "o/r@a:Q4_0@b", "https://hf.co/owner", "https://hf.co/o/r/discussions"]
    )
    def test_half_a_name(self, name: str) -> None:
        with pytest.raises(ConfigError, match="link to a model|should come|two revisions"):
            parse_name(name)

    def test_paths_come_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert all(map(is_local, ("./a", "../a", "/a/b", "~/a", "a/b.gguf", "a.gguf")))
        assert not is_local("owner/repo") and not is_local("owner/repo:file.gguf")
        (tmp_path / "owner" / "repo").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert is_local("owner/repo")


MANY = [
    "README.md",
    "mmproj-model-f16.gguf",
    "model-lora-Q4_K_M.gguf",
    "model-imatrix.gguf",
    "model-BF16.gguf",
    "model-IQ3_XXS.gguf",
    "model-Q2_K.gguf",
    "model-Q4_0.gguf",
    "model-Q6_K.gguf",
    "model-UD-Q4_K_XL.gguf",
    "model.q5_k_m.gguf",
    "big/model-Q8_0-00001-of-00002.gguf",
    "big/model-Q8_0-00002-of-00002.gguf",
]
TAGS = ["UD-Q4_K_XL", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "IQ3_XXS", "Q2_K"]


class TestChoice:
    @pytest.mark.parametrize(
        ("path", "label"),
        [
            ("SmolLM2-135M-Instruct-Q4_K_M.gguf", "Q4_K_M"),
            ("smollm2.q4_k_m.gguf", "Q4_K_M"),
            ("Q8_0/Qwen3-Q8_0-00001-of-00003.gguf", "Q8_0"),
            ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
            ("Qwen3-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
            ("llama-3-fp16.gguf", "FP16"),
            ("bitnet-TQ1_0.gguf", "TQ1_0"),
            ("q4-model.gguf", "Q4"),
            ("tiny.gguf", ""),
            ("seq2seq.gguf", ""),
        ],
    )
    def test_the_quantization_in_a_name(self, path: str, label: str) -> None:
        assert label_of(path) == label

    def test_tags_are_listed_nearest_first(self) -> None:
        assert tags_of(MANY) == TAGS

    @pytest.mark.parametrize(
        ("tag", "file"),
        [
            ("q4_0", "model-Q4_0.gguf"),
            ("Q5_K_M", "model.q5_k_m.gguf"),
            ("Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
            ("bf16", "model-BF16.gguf"),
            ("model-Q4_0.gguf", "model-Q4_0.gguf"),
            ("model-q4_0", "model-Q4_0.gguf"),
        ],
    )
    def test_a_tag(self, tag: str, file: str) -> None:
        assert choose(HubName("o/r", tag), MANY) == ((file,), True, f"the tag {tag} was given")

    def test_parts_belong_together(self) -> None:
        assert choose(HubName("o/r", "q8_0"), MANY).files == tuple(MANY[-2:])
        assert choose(HubName("o/r", None, None, MANY[-1]), MANY).files == tuple(MANY[-2:])
        with pytest.raises(ConfigError, match="one of 2 parts, and not all of them are there"):
            choose(HubName("o/r", "q8_0"), MANY[:-1])

    def test_without_a_tag(self) -> None:
        assert choose(HubName("o/r"), [*MANY, "x/model-Q4_K_M.gguf"]).files == ("x/model-Q4_K_M.gguf",)
        chosen = choose(HubName("o/r"), MANY)
        assert chosen.files == ("model-UD-Q4_K_XL.gguf",)
        assert chosen.reason == f"no tag was given: UD-Q4_K_XL is the nearest to Q4_K_M of {', '.join(TAGS)}"

    def test_a_tag_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match=f"no GGUF file of the tag 'Q9'; there are {', '.join(TAGS)}$"):
            choose(HubName("o/r", "Q9"), MANY)
        with pytest.raises(ConfigError, match="leave the tag out"):
            choose(HubName("o/r", "Q4_0"), ["config.json", "model.safetensors"])
        with pytest.raises(ConfigError, match=r"several of its files are Q4_0: name one of a-Q4_0.gguf, b-Q4_0.gguf"):
            choose(HubName("o/r", "Q4_0"), ["a-Q4_0.gguf", "b-Q4_0.gguf"])
        assert choose(HubName("o/r", "b-Q4_0.gguf"), ["a-Q4_0.gguf", "b-Q4_0.gguf"]).files == ("b-Q4_0.gguf",)

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="it has no file x.gguf; there are UD-Q4_K_XL, "):
            choose(HubName("o/r", None, None, "x.gguf"), MANY)
        with pytest.raises(ConfigError, match="model.safetensors is no GGUF file"):
            choose(HubName("o/r", None, None, "model.safetensors"), ["model.safetensors"])

    def test_safetensors_are_transformers_own(self) -> None:
        files = [
            *("config.json", "model.safetensors", "tokenizer.json", "README.md", "custom.py", "logo.png"),
            *(
                "onnx/model.onnx",
                "original/consolidated.safetensors",
                "consolidated.safetensors",
                "model.fp16.safetensors",
            ),
            *("pytorch_model.bin", "additional_chat_templates/tools.jinja", "x-Q4_K_M.gguf", "onnx/config.json"),
        ]
        chosen = choose(HubName("o/r"), files)
        assert not chosen.is_gguf and sorted(chosen.files) == [
            "additional_chat_templates/tools.jinja",
            *("config.json", "custom.py", "model.safetensors", "tokenizer.json"),
        ]
        assert choose(HubName("o/r", "q4_k_m"), files).files == ("x-Q4_K_M.gguf",)

    def test_parts_of_safetensors(self) -> None:
        parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        files = [*parts, "model.safetensors.index.json", "config.json", "consolidated-00001-of-00001.safetensors"]
        assert sorted(choose(HubName("o/r"), files).files) == sorted(files[:-1])

    def test_no_model_at_all(self) -> None:
        with pytest.raises(ConfigError, match="it is an adapter for another model"):
            choose(HubName("o/r"), ["adapter_config.json", "adapter_model.safetensors"])
        with pytest.raises(ConfigError, match="files neither of transformers .* nor of llama.cpp"):
            choose(HubName("o/r"), ["README.md"])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub() as server, using_hub(server, tmp_path / "hub", monkeypatch):
        yield server


@pytest.fixture
def kept_kernels(tmp_path: Path) -> None:
    """They are not compiled again in the test's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AIOCB_CACHE")
        built = kernels.load()
    assert not isinstance(built, kernels.KernelUnavailable), built
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / built.path.parent.name).symlink_to(built.path.parent)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def llama_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("llama")
    tiny("llama").save_pretrained(folder)
    return files_of(folder)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def quiet_locate(name: str, **options: Any) -> str:
    return locate(name, options, lambda stage, share: None).name


class TestHub:
    def test_safetensors(self, hub: Hub, llama_files: dict[str, bytes]) -> None:
        hub.repositories["some/llama"] = Repository({**llama_files, "x-Q4_K_M.gguf": b"?", "README.md": b"?"})
        stages: list[tuple[str, float]] = []
        loaded = load("some/llama", device="cpu", progress=lambda stage, share: stages.append((stage, share)))
        ids = torch.tensor([prompt(9)])
        assert torch.equal(loaded.model(ids).logits, tiny("llama")(ids).logits)
        commit = hub.repositories["some/llama"].commit
        assert loaded.choices[0] == Choice(
            "model", f"some/llama@{commit[:8]}", "it has weights that transformers loads"
        )
        assert sorted(hub.downloads()) == sorted(llama_files)
        shares = [share for stage, share in stages if stage == "download"]
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1 and len(set(shares)) > 2
        stages.clear()
        load("some/llama", device="cpu", progress=lambda stage, share: stages.append((stage, share)))
        assert sorted(hub.downloads()) == sorted(llama_files) and "download" not in dict(stages)

    @pytest.mark.slow
    def test_the_second_start_needs_no_module(
        self, hub: Hub, llama_files: dict[str, bytes], kept_kernels: None
    ) -> None:
        hub.repositories["some/llama"] = Repository(llama_files)
        request = ModelRequest(EngineConfig(num_blocks=8), "some/llama", device="cpu")
        for _ in range(2):
            opened = open_model(request)
            opened.runner.close()
            assert opened.choices[0].name == "model" and opened.choices[0].value.startswith("some/llama@")
        assert hub.downloads() and opened.model is None

    def test_gguf(self, hub: Hub, gguf_bytes: bytes) -> None:
        hub.repositories["some/gguf"] = Repository({"x-Q8_0.gguf": b"?", "x-Q5_K_M.gguf": gguf_bytes})
        loaded = load("hf.co/some/gguf", device="cpu")
        assert hub.downloads() == ["x-Q5_K_M.gguf"]
        name, value, why = loaded.choices[0]
        assert (name, value.partition("@")[0], value.rpartition(" ")[2]) == ("model", "some/gguf", "x-Q5_K_M.gguf")
        assert why == "no tag was given: Q5_K_M is the nearest to Q4_K_M of Q5_K_M, Q8_0"
        assert loaded.tokenizer("af").input_ids and loaded.found is not None
        with pytest.raises(
            ConfigError, match="cannot load 'some/gguf:Q4_0': it has no GGUF file of the tag 'Q4_0'; there are"
        ):
            load("some/gguf:Q4_0", device="cpu")
        load("https://huggingface.co/some/gguf/blob/main/x-Q5_K_M.gguf", device="cpu")
        load("some/gguf", device="cpu", gguf_file="x-Q5_K_M.gguf")
        assert hub.downloads() == ["x-Q5_K_M.gguf"]

    def test_revisions(self, hub: Hub, gguf_bytes: bytes) -> None:
        hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": gguf_bytes}, ("main", "v1", "refs/pr/1"))
        for name in ("some/gguf@v1", "some/gguf:Q4_0@refs/pr/1", "some/gguf"):
            assert quiet_locate(name).endswith("x-Q4_0.gguf")
        assert quiet_locate("some/gguf", revision="v1") == quiet_locate(
            f"some/gguf@{hub.repositories['some/gguf'].commit}"
        )
        with pytest.raises(ConfigError, match="it has no such revision"):
            quiet_locate("some/gguf@v2")
        with pytest.raises(ConfigError, match="two revisions are asked for, v1 and main"):
            quiet_locate("some/gguf@v1", revision="main")

    def test_without_a_network(
        self, hub: Hub, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        hub.repositories["some/gguf"] = Repository({"x-Q4_K_M.gguf": b"?", "x-Q8_0.gguf": gguf_bytes})
        path = quiet_locate("some/gguf:Q8_0")
        asked = len(hub.paths)
        assert quiet_locate("some/gguf", local_files_only=True) == path and len(hub.paths) == asked
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert quiet_locate("some/gguf") == path  # of those that are here
        assert not caplog.records
        with pytest.raises(ConfigError, match=r"not on this machine \(x-Q4_K_M.gguf\): go online and run `aiocb pull"):
            quiet_locate("some/gguf:Q4_K_M")
        with pytest.raises(ConfigError, match="it is not on this machine, and HF_HUB_OFFLINE forbids"):
            quiet_locate("some/other")
        with pytest.raises(ConfigError, match="local_files_only forbids"):
            quiet_locate("some/other", local_files_only=True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        assert quiet_locate("some/gguf") == path
        assert "is taken from this machine as it is: " in caplog.text
        with pytest.raises(ConfigError, match="the hub cannot be reached: go online") as caught:
            quiet_locate("some/other")
        assert "\n" not in str(caught.value)

    def test_a_download_that_was_cut_is_not_taken_for_whole(
        self, hub: Hub, llama_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repository = Repository(llama_files, cut=("model.safetensors",))
        hub.repositories["some/llama"] = repository
        with pytest.raises(
            ConfigError, match="cannot load 'some/llama': the hub answers 503: try again later"
        ) as caught:
            quiet_locate("some/llama")
        assert "\n" not in str(caught.value)
        with monkeypatch.context() as patch:
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
            with pytest.raises(ConfigError, match=r"1 of its files are not on this machine \(model.safetensors\)"):
                quiet_locate("some/llama")
        repository.cut = ()
        assert Path(quiet_locate("some/llama"), "model.safetensors").read_bytes() == llama_files["model.safetensors"]

    @pytest.mark.parametrize(
        ("repository", "said"),
        [
            (Repository({"x-Q4_0.gguf": b"?"}, gated=True), "it is gated: accept its terms"),
            (Repository({}, says=403), "the hub gives no access"),
            (Repository({}, says=500), "the hub answers 500: try again later"),
            (None, "the hub has no model of that name, or it is private"),
        ],
    )
    def test_what_the_hub_refuses_is_one_line(self, hub: Hub, repository: Repository | None, said: str) -> None:
        if repository is not None:
            hub.repositories["some/model"] = repository
        with pytest.raises(ConfigError, match=f"cannot load 'some/model': {said}") as caught:
            load("some/model")
        assert "\n" not in str(caught.value)

    def test_a_token_opens_what_is_gated(self, hub: Hub, gguf_bytes: bytes) -> None:
        hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": gguf_bytes}, gated=True)
        assert quiet_locate("some/gguf", token="hf_mine").endswith("x-Q4_0.gguf")

    def test_no_room_is_known_before(
        self, hub: Hub, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": gguf_bytes})
        full = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(ConfigError, match=r"its files take 0\.0 GiB, .* make room \(aiocb list, aiocb rm\)"):
            quiet_locate("some/gguf")
        assert not hub.downloads()

    def test_the_disk_gets_full_meanwhile(self, hub: Hub, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": gguf_bytes})

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
        with pytest.raises(ConfigError, match="the disk is full: make room"):
            quiet_locate("some/gguf")

    def test_what_is_left_to_transformers(self, hub: Hub) -> None:
        options = {"subfolder": "x", "revision": "v1"}
        assert locate("some/model", options, print) == ("some/model", options, ())
        assert locate("hf.co/some/model@v1", {"subfolder": "x"}, print) == ("some/model", options, ())
        assert locate("a/b/c", options, print) == ("a/b/c", options, ())
        with pytest.raises(ConfigError, match="subfolder and variant do nothing for a GGUF file"):
            quiet_locate("some/model:Q4_0", variant="fp16")
        with pytest.raises(ConfigError, match="both name a file"):
            quiet_locate("some/model:Q4_0", gguf_file="x.gguf")
        assert not hub.paths

    def test_a_choice_is_logged(self, hub: Hub, gguf_bytes: bytes, caplog: pytest.LogCaptureFixture) -> None:
        hub.repositories["some/gguf"] = Repository({"x-Q4_K_M.gguf": gguf_bytes})
        with caplog.at_level(logging.INFO, "aiocb"):
            quiet_locate("some/gguf")
        assert "no tag was given: Q4_K_M is the first choice" in caplog.text


def split(whole: Path, folder: Path, count: int) -> list[Path]:
    """Cut a GGUF file as llama-gguf-split does: keys and few tensors first, a share of the tensors in each part."""
    file = read_gguf(whole)
    names = list(file.tensors)
    parts = []
    for number in range(count):
        part = folder / f"tiny-Q8_0-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(str(part), "llama")
        if number == 0:
            for key, value in KEYS.items():
                add_key(writer, key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for name in names[number::count]:
            tensor = file.tensors[name]
            data = np.fromfile(whole, np.float32, math.prod(tensor.shape), offset=tensor.offset)
            writer.add_tensor(name, data.reshape(tensor.shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


class TestParts:
    def test_a_model_in_parts_is_the_whole_one(self, hub: Hub, tmp_path: Path) -> None:
        whole = write_gguf(tmp_path / "whole.gguf")
        parts = split(whole, tmp_path, 3)
        expected = load(str(whole), device="cpu").model.state_dict()
        for name in map(str, parts):  # any of them stands for all
            found = load(name, device="cpu").model.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], value) for key, value in expected.items())
        hub.repositories["some/parts"] = Repository({f"a/{part.name}": part.read_bytes() for part in parts})
        assert load("some/parts:Q8_0", device="cpu").tokenizer("af").input_ids
        assert len(hub.downloads()) == 3
        parts[1].unlink()
        with pytest.raises(ConfigError, match=r"one of 3 parts, and tiny-Q8_0-00002-of-00003.gguf is missing"):
            load(str(parts[0]), device="cpu")

    def test_parts_of_two_models(self, hub: Hub, tmp_path: Path) -> None:
        parts = split(write_gguf(tmp_path / "whole.gguf"), tmp_path, 2)
        parts[1].write_bytes(parts[0].read_bytes())
        with pytest.raises(ConfigError, match="are not of one model: a tensor is in two of them"):
            load(str(parts[0]), device="cpu")
