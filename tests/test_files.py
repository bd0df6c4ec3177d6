"""Folders in the cache: whole or not there, damage noticed, nothing else a reason to replace them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aiocb import files

MAKER = "test 1"


def make(folder: Path, content: bytes = b"x" * 100, maker: str = MAKER) -> Path:
    with files.locked(folder), files.make_folder(folder, maker) as scratch:
        (scratch / "data").write_bytes(content)
        (scratch / "sub").mkdir()
        (scratch / "sub" / "more").write_bytes(b"more")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


class TestSeal:
    def test_a_made_folder_is_whole(self, tmp_path: Path) -> None:
        folder = make(tmp_path / "kept" / "it")
        assert files.flaw(folder, MAKER) is None
        assert names(folder.parent) == ["it"] and names(folder) == ["data", "seal.json", "sub"]

    def test_every_damage_is_named(self, tmp_path: Path) -> None:
        def damage(name: str, content: bytes | None) -> str | None:
            folder = make(tmp_path / "it")
            if content is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(content)
            return files.flaw(folder, MAKER)

        assert damage("data", b"x" * 99) == damage("data", b"") == "data is damaged"
        assert damage("data", b"x" * 50 + b"y" + b"x" * 49) == damage("data", b"x" * 101) == "data is damaged"
        assert damage("data", None) == "data is missing" and damage("sub/more", b"MORE") == "sub/more is damaged"
        assert damage("seal.json", b"{") == damage("seal.json", b"[]") == "seal.json is damaged"
        assert damage("seal.json", None) == "seal.json is missing"

    def test_another_maker(self, tmp_path: Path) -> None:
        assert files.flaw(make(tmp_path / "it", maker="test 0"), MAKER) == "made by test 0"

    def test_nothing_there_is_no_damage(self, tmp_path: Path) -> None:
        assert files.flaw(tmp_path / "nothing", MAKER) == ""

    def test_a_file_that_cannot_be_read_is_no_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = make(tmp_path / "it")

        def refuse(path: Path) -> str:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(files, "checksum", refuse)
        with pytest.raises(OSError, match="Too many"):
            files.flaw(folder, MAKER)

    @pytest.mark.parametrize("size", [0, 1, 100, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 9 << 20])
    def test_one_flipped_bit_anywhere(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / "data"
        content = bytearray(size)
        path.write_bytes(content)
        good = files.checksum(path)
        assert files.checksum(path) == good
        for place in {0, size // 2, size - 1} if size else ():
            content[place] ^= 4
            path.write_bytes(content)
            assert files.checksum(path) != good
            content[place] ^= 4
        path.write_bytes(bytes(size + 1))
        assert files.checksum(path) != good

    def test_pieces_that_changed_places(self, tmp_path: Path) -> None:
        path, piece = tmp_path / "data", 4 << 20
        path.write_bytes(b"a" * piece + b"b" * piece)
        good = files.checksum(path)
        path.write_bytes(b"b" * piece + b"a" * piece)
        assert files.checksum(path) != good


class TestMaking:
    def test_a_failure_leaves_what_was_there(self, tmp_path: Path) -> None:
        folder = make(tmp_path / "it")
        for error in (RuntimeError, KeyboardInterrupt, MemoryError):
            with pytest.raises(error), files.locked(folder), files.make_folder(folder, MAKER) as scratch:
                (scratch / "data").write_bytes(b"other")
                raise error
            assert files.flaw(folder, MAKER) is None and names(tmp_path) == ["it"]

    def test_it_replaces_what_was_there(self, tmp_path: Path) -> None:
        folder = make(tmp_path / "it")
        (folder / "data").write_bytes(b"")
        assert (make(folder, b"new") / "data").read_bytes() == b"new" and names(tmp_path) == ["it"]

    def test_scratch_of_the_dead_is_swept_and_that_of_the_living_stays(self, tmp_path: Path) -> None:
        program = (
            "import sys, os\nfrom pathlib import Path\nfrom aiocb import files\n"
            "folder = Path(sys.argv[1])\n"
            "with files.locked(folder), files.make_folder(folder, 'x') as scratch:\n"
            "    (scratch / 'data').write_bytes(b'half')\n"
            "    print('made', flush=True)\n    sys.stdin.readline()\n    os._exit(9)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "other")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
            assert maker.stdout is not None and maker.stdout.readline() == "made\n"
            make(tmp_path / "it")
            assert names(tmp_path) == [".making-other", "it"]
            maker.communicate("die\n", timeout=60)
        assert names(tmp_path) == [".making-other", "it"]  # killed: it could not tidy up
        make(tmp_path / "it")
        assert names(tmp_path) == ["it"]

    def test_one_maker_at_a_time(self, tmp_path: Path) -> None:
        folder = tmp_path / "it"
        inside, order = threading.Event(), []

        def second() -> None:
            with files.locked(folder):
                order.append("second")

        with files.locked(folder):
            thread = threading.Thread(target=second)
            thread.start()
            assert not inside.wait(0.1)
            order.append("first")
        thread.join(10)
        assert order == ["first", "second"]


class TestDigest:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_of_the_whole_content(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        seen = set()
        for place in (0, 300_000, 599_999):  # the middle counts too
            content = bytearray(600_000)
            content[place] = 1
            path.write_bytes(content)
            seen.add(files.digest(path))
        assert len(seen) == 3

    def test_remembered_while_nothing_changes(self, tmp_path: Path, cache: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"content")
        first = files.digest(path)
        index = cache / "digests.json"
        values = json.loads(index.read_text())
        (key,) = values
        values[key][-1] = "remembered"
        index.write_text(json.dumps(values))
        assert files.digest(path) == "remembered"
        # Another content with the old size and modification time: the time of change still tells.
        status = path.stat()
        path.write_bytes(b"CONTENT")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert files.digest(path) not in ("remembered", first)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}'])
    def test_a_damaged_index_is_written_anew(self, tmp_path: Path, cache: Path, content: str) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"content")
        expected = files.digest(path)
        (cache / "digests.json").write_text(content)
        assert files.digest(path) == expected
        assert str(path) in json.loads((cache / "digests.json").read_text())

    def test_without_a_place_for_the_index(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_bytes(b"content")
        expected = files.digest(tmp_path / "file")
        monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "file"))
        assert files.digest(tmp_path / "file") == expected


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIOCB_CACHE", "~/somewhere")
    assert files.cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("AIOCB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert files.cache_dir() == tmp_path / "aiocb"
