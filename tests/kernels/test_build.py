"""The build: one library per key, two processes at once, damage, no compiler, compilers that fail, hang or vanish."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiocb import files
from aiocb.kernels import KernelUnavailable, Library, build, compilation, find_compiler, find_or_build, load
from aiocb.kernels.__main__ import main
from aiocb.kernels.threads import default_num_threads


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A one-line source instead of the kernels, so that a build takes a moment."""
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "toy.cpp").write_text('extern "C" int toy() { return 7; }\n')
    monkeypatch.setattr(build, "_SOURCE_DIR", source)
    monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "cache"))
    if isinstance(find_compiler(), KernelUnavailable):
        pytest.skip("no compiler")
    return source


def test_built_once_per_source(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = find_or_build()
    assert isinstance(first, Path)
    assert "building native kernels" in capfd.readouterr().err
    assert find_or_build() == first
    assert capfd.readouterr().err == ""
    (toy / "toy.cpp").write_text('extern "C" int toy() { return 8; }\n')
    second = find_or_build()
    assert second != first
    assert first.exists()
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".lock", ".lock", ".so", ".so", ".sum", ".sum"]


def test_two_processes_build_once(toy: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from aiocb.kernels import build\n"
        f"build._SOURCE_DIR = Path({str(toy)!r})\n"
        "print(build.find_or_build())\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert len({out for out, _ in outputs}) == 1
    assert sum("built in" in err for _, err in outputs) == 1


def test_failure_is_a_reason(toy: Path) -> None:
    (toy / "toy.cpp").write_text("this is not C++\n")
    failure = find_or_build()
    assert isinstance(failure, KernelUnavailable)
    assert "error" in failure.reason
    assert "\n" not in failure.reason


def knows_all(flags: tuple[str, ...]) -> bool:
    return True


def knows_no_bf16(flags: tuple[str, ...]) -> bool:
    return "-mavx512bf16" not in flags


def test_levels_that_the_compiler_does_not_know_are_left_out() -> None:
    kept = compilation.chosen_sets(knows_no_bf16, "x86_64", best_only=False)
    assert kept == ["avx512", "avx2", "portable"]
    units = compilation._units(build._SOURCE_DIR, "x86_64", kept)
    assert units["dispatch"] == ["dispatch.cpp", "-DAIOCB_NO_AVX512BF16"]
    assert [name for name, arguments in units.items() if "instruction_set.cpp" in arguments] == kept
    assert units.keys() - kept == {path.stem for path in build._SOURCE_DIR.glob("*.cpp")} - {"instruction_set"}


AVX2, AVX512, BF16 = ({*compilation._SETS[name]} for name in ("avx2", "avx512", "avx512bf16"))


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        (None, ["avx512bf16", "avx512", "avx2", "portable"]),  # nobody to ask: every instruction set is built
        ({"sse2"}, ["portable"]),
        (AVX2, ["avx2"]),
        (AVX512, ["avx512"]),
        (BF16, ["avx512bf16"]),
        (BF16 | {"AuthenticAMD"}, ["avx512bf16"]),
        (BF16 | {"GenuineIntel"}, ["avx512"]),
    ],
)
def test_a_first_use_builds_the_best_level_alone(
    features: set[str] | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "processor_features", lambda: features)
    assert compilation.chosen_sets(knows_all, "x86_64", best_only=True) == chosen
    assert compilation.chosen_sets(knows_all, "x86_64", best_only=False) == ["avx512bf16", "avx512", "avx2", "portable"]


def test_other_processors_have_the_portable_level() -> None:
    for best_only in (True, False):
        assert compilation.chosen_sets(knows_all, "aarch64", best_only=best_only) == ["portable"]
    assert compilation._units(build._SOURCE_DIR, "aarch64", ["portable"])["dispatch"] == ["dispatch.cpp"]


def test_a_level_that_the_compiler_does_not_know_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "processor_features", lambda: BF16)
    assert compilation.chosen_sets(knows_no_bf16, "x86_64", best_only=True) == ["avx512"]


def test_a_library_without_a_level_for_this_processor_is_not_used(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Library, "instruction_set", lambda self, name=None: None)
    result = load(every_instruction_set=True)
    assert isinstance(result, KernelUnavailable)
    assert "no instruction set" in result.reason


def test_the_build_and_the_library_agree_on_the_best_level(library: Library) -> None:
    assert library.instruction_set() in compilation.chosen_sets(knows_all, platform.machine(), best_only=True)


def test_a_complete_library_serves_everybody(toy: Path) -> None:
    complete = find_or_build(every_instruction_set=True)
    assert find_or_build() == complete


def test_a_library_of_something_else_is_a_reason(toy: Path) -> None:
    result = load()
    assert isinstance(result, KernelUnavailable)
    assert "cannot be loaded" in result.reason


class TestDamage:
    @pytest.mark.parametrize("part", ["half", "empty", "flipped", "no checksum", "wrong checksum"])
    def test_noticed_before_it_is_loaded_built_anew_and_said_once(
        self, toy: Path, capfd: pytest.CaptureFixture[str], part: str
    ) -> None:
        library = find_or_build()
        assert isinstance(library, Path)
        good, note = library.read_bytes(), library.with_name(f"{library.name}.sum")
        if part == "no checksum":
            note.unlink()
        elif part == "wrong checksum":
            note.write_text("12 0")
        else:
            content = bytearray(good)
            content[len(content) // 2] ^= 1
            library.write_bytes({"half": good[: len(good) // 2], "empty": b"", "flipped": bytes(content)}[part])
        capfd.readouterr()
        assert find_or_build() == library and library.read_bytes() == good
        assert (
            capfd.readouterr().err.count(f"{library} {'has no checksum' if part == 'no checksum' else 'is damaged'}")
            == 1
        )
        assert find_or_build() == library
        assert capfd.readouterr().err == ""

    def test_a_damaged_complete_library_is_not_taken(self, toy: Path) -> None:
        complete = find_or_build(every_instruction_set=True)
        assert isinstance(complete, Path)
        complete.write_bytes(b"")
        other = find_or_build()
        assert isinstance(other, Path) and other != complete and not complete.exists()

    def test_scratch_of_a_killed_build_is_removed(self, toy: Path) -> None:
        folder = build.cache_dir()
        for name in (f"{files.SCRATCH}aiocb-0-1.so", f"{files.SCRATCH}aiocb-2-3.so"):
            (folder / name).mkdir(parents=True)
        with files.locked(folder / "aiocb-2-3.so"):
            assert isinstance(find_or_build(), Path)
            assert [path.name for path in folder.glob(f"{files.SCRATCH}*")] == [f"{files.SCRATCH}aiocb-2-3.so"]

    def test_one_that_is_being_built_is_left_alone(self, toy: Path) -> None:
        library = find_or_build()
        assert isinstance(library, Path)
        library.with_name(f"{library.name}.sum").unlink()  # as between the two renames
        with files.locked(library):
            assert not build._is_whole(library) and library.exists()


class TestSlowMachines:
    @pytest.fixture
    def slow(self, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A compiler that waits for the file that is returned."""
        found = find_compiler()
        assert not isinstance(found, KernelUnavailable)
        gate, compiler = tmp_path / "gate", tmp_path / "slow-c++"
        wait = f'case "$*" in *--version*) ;; *) while [ ! -e {gate} ]; do sleep 0.05; done;; esac'
        compiler.write_text(f'#!/bin/sh\n{wait}\nexec {shutil.which(found[0][0])} "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        return gate

    def test_a_build_that_outlives_its_limit_goes_on_by_itself(
        self, slow: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        result = find_or_build(patience_s=0.3)
        assert isinstance(result, KernelUnavailable) and "goes on by itself, for the next start" in result.reason
        assert "goes on by itself" in capfd.readouterr().err
        # The next start does not begin another one: it waits, and says why when that is too long.
        result = find_or_build(patience_s=0.3)
        assert isinstance(result, KernelUnavailable) and "another process has been building" in result.reason
        assert "building native kernels with" not in capfd.readouterr().err
        slow.touch()
        library = find_or_build()
        assert isinstance(library, Path) and "building" not in capfd.readouterr().err

    def test_it_goes_on_when_its_starter_is_gone(self, slow: Path, toy: Path, tmp_path: Path) -> None:
        code = (
            "from pathlib import Path; from aiocb.kernels import build\n"
            f"build._SOURCE_DIR = Path({str(toy)!r})\n"
            "build.find_or_build()\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as starter:
            assert starter.stderr is not None and "building native kernels" in starter.stderr.readline()
            while not list(build.cache_dir().glob(f"{files.SCRATCH}*")):  # the builder has begun
                time.sleep(0.01)
            starter.kill()
        slow.touch()
        library = find_or_build()
        assert isinstance(library, Path) and build._flaw(library) is None


class TestCompilers:
    def test_a_library_outlives_its_compiler(
        self, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        library = find_or_build()
        assert isinstance(library, Path)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_or_build() == library
        library.write_bytes(b"")
        result = find_or_build()
        assert isinstance(result, KernelUnavailable) and "no C++ compiler" in result.reason
        assert "is damaged and was removed" in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("exit 3", "failed: ?"),
            ("echo 'fatal error: writing: No space left on device' >&2; exit 1", "No space left on device"),
            ("kill -9 $PPID", "ended without a word"),
            ("rm -f $0; exit 1", "failed"),
        ],
    )
    def test_every_failure_is_a_reason(
        self, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
    ) -> None:
        compiler = tmp_path / "odd-c++"
        compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo odd 1.0; exit 0;; esac\n{body}\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        result = find_or_build()
        assert isinstance(result, KernelUnavailable) and said in result.reason and "\n" not in result.reason

    def test_one_that_does_not_answer(self, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = tmp_path / "c++"
        compiler.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(build, "_ANSWER_S", 0.2)
        result = find_or_build()
        assert isinstance(result, KernelUnavailable) and "timed out after 0.2 seconds" in result.reason

    def test_a_cache_that_can_only_be_read(self, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = find_or_build()
        assert isinstance(library, Path)

        def refuse(path: object, *_: object) -> int:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(os, "open", refuse)
        assert find_or_build() == library
        library.write_bytes(b"")
        result = find_or_build()
        assert isinstance(result, KernelUnavailable)
        assert "cannot be used (AIOCB_CACHE names another): [Errno 13]" in result.reason


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AIOCB_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = load()
    assert isinstance(result, KernelUnavailable)
    assert "no C++ compiler" in result.reason
    assert main(["info"]) == 1
    assert main(["build"]) == 1
    assert "no C++ compiler" in capsys.readouterr().out


def test_unusable_cache(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "file"))
    result = find_or_build()
    assert isinstance(result, KernelUnavailable)
    assert "cache" in result.reason


def test_info(library: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert "portable" in capsys.readouterr().out
    assert default_num_threads() >= 1
