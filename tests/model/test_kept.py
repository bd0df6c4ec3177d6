"""What is on this machine: packages, downloads of the hub, what was made of them, and how they are removed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiocb import files
from aiocb.errors import ConfigError
from aiocb.model.load import kept as kept_module
from aiocb.model.load.download import locate
from aiocb.model.load.gguf import PACKAGES
from aiocb.model.load.hub import load
from aiocb.model.load.kept import read_shelf
from tests.hub_server import Hub, Repository, running_hub, using_hub

from .gguf_files import write_gguf
from .helpers import tiny


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(kept_module, "find_package", lambda _: ())
    with running_hub() as server, using_hub(server, tmp_path / "hub", monkeypatch):
        yield server


def pull(*names: str) -> None:
    for name in names:
        locate(name, {}, lambda stage, share: None)


def names() -> list[str]:
    return [kept.name for kept in read_shelf().models]


def test_nothing(hub: Hub) -> None:
    shelf = read_shelf()
    assert not shelf.models and not shelf.unfinished
    with pytest.raises(ConfigError, match="some/model is not on this machine; `aiocb list` shows what is"):
        shelf.find("some/model")


def test_names_forms_and_sizes(hub: Hub, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "llama")
    llama = {path.name: path.read_bytes() for path in (tmp_path / "llama").iterdir()}
    hub.repositories["some/llama"] = Repository(llama)
    hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": b"four", "x-Q8_0.gguf": b"eight..."}, ("main", "v1"))
    hub.repositories["some/parts"] = Repository({f"x-0000{number}-of-00002.gguf": b"1234" for number in (1, 2)})
    pull("some/llama", "some/gguf:Q4_0", "some/gguf:Q8_0", "some/parts")
    found = {kept.name: (kept.form, kept.num_bytes) for kept in read_shelf().models}
    assert found == {
        "some/gguf:Q4_0": ("GGUF", 4),
        "some/gguf:Q8_0": ("GGUF", 8),
        "some/llama": ("safetensors", sum(map(len, llama.values()))),
        "some/parts:x-00001-of-00002.gguf": ("GGUF", 8),
    }
    hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": b"newer"}, ("main",))
    pull("some/gguf:Q4_0")
    (old,) = {name for name in names() if name.startswith("some/gguf:Q8_0")}
    assert old.startswith("some/gguf:Q8_0@")  # what main was before is known by its commit
    assert all(time.time() - kept.last_used < 3600 for kept in read_shelf().models)


def test_what_was_made_of_a_model_goes_with_it(hub: Hub, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": content, "x-Q8_0.gguf": content + b"?"})
    pull("some/gguf:Q8_0")
    for dtype in ("float32", "bfloat16"):
        load("some/gguf:Q4_0", dtype=dtype, device="cpu")
    four, eight = read_shelf().models
    assert len(four.folders) == 2 and four.num_made_bytes > len(content) and not eight.folders
    snapshot = files.cache_dir() / "native" / f"{four.folders[0].name}-0123"
    snapshot.mkdir(parents=True)
    shelf = read_shelf()
    assert snapshot in shelf.models[0].folders
    shelf.remove(shelf.find("some/gguf:Q4_0"))
    assert names() == ["some/gguf:Q8_0"] and not snapshot.exists()
    assert not list((files.cache_dir() / "gguf").iterdir())
    path = Path(locate("some/gguf:Q8_0", {"local_files_only": True}, print).name)
    assert path.read_bytes() == content + b"?"
    shelf = read_shelf()
    shelf.remove(shelf.find("some/gguf"))
    assert not names() and not path.exists() and not (tmp_path / "hub" / "models--some--gguf").exists()


def test_of_a_package_only_what_was_made(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    name = next(iter(PACKAGES))
    monkeypatch.setattr(kept_module, "find_package", lambda asked: (path,) if asked == name else ())
    load(str(path), device="cpu")
    shelf = read_shelf()
    (package,) = shelf.models
    assert package[:3] == (name, "GGUF package", path.stat().st_size) and len(package.folders) == 1
    shelf.remove([package])
    assert path.exists() and not read_shelf().models[0].folders


def test_unfinished_downloads(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": b"four", "config.json": b"{}"})
    pull("some/gguf")
    blobs = tmp_path / "hub" / "models--some--gguf" / "blobs"
    old, new = blobs / "abc.1.incomplete", blobs / "abc.2.incomplete"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 600,) * 2)
    shelf = read_shelf()
    assert shelf.unfinished == (old,)  # the other one is being written
    shelf.remove_unfinished()
    assert not old.exists() and new.exists() and names() == ["some/gguf:Q4_0"]


def test_a_folder_without_weights_can_be_removed(hub: Hub) -> None:
    hub.repositories["some/llama"] = Repository(
        {"config.json": b"{}", "model.safetensors": b"1234"}, cut=("model.safetensors",)
    )
    with pytest.raises(ConfigError, match="the hub answers 503"):
        pull("some/llama")
    shelf = read_shelf()
    assert [(kept.name, kept.form) for kept in shelf.models] == [("some/llama", "no weights")]
    shelf.remove(shelf.find("some/llama"))
    assert not names()


def test_what_cannot_be_removed_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": b"four"})
    pull("some/gguf")
    shelf = read_shelf()

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kept_module, "_remove_downloads", fail)
    with pytest.raises(ConfigError, match="cannot remove the model: there is no permission"):
        shelf.remove(shelf.models)
