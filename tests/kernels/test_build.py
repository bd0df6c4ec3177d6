"""The build: one library per key, two processes at once, no compiler, a compiler that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aiocb.kernels import KernelUnavailable, Library, build, find_compiler, find_or_build, load
from aiocb.kernels.__main__ import main
from aiocb.kernels.threads import default_num_threads


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A one-line source instead of the kernels, so that a build takes a moment."""
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "toy.cpp").write_text('extern "C" int toy() { return 7; }\n')
    monkeypatch.setattr(build, "_SOURCE_DIR", source)
    monkeypatch.setattr(build, "_units", lambda: (build._Unit("toy", "toy.cpp", ("-O1",)),))
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
    assert not list(first.parent.glob("build-*"))


def test_two_processes_build_once(toy: Path, tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from aiocb.kernels import build\n"
        f"build._SOURCE_DIR = Path({str(toy)!r})\n"
        "build._units = lambda: (build._Unit('toy', 'toy.cpp', ('-O1',)),)\n"
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


def test_levels_that_the_compiler_does_not_know_are_left_out() -> None:
    kept = build._supported(build._units(), lambda flags: "-mavx512bf16" not in flags)
    assert "avx512bf16" not in {unit.name for unit in kept}
    assert "portable" in {unit.name for unit in kept}
    dispatch = next(unit for unit in kept if unit.name == "dispatch")
    assert ("-DAIOCB_NO_AVX512BF16" in dispatch.flags) == ("avx512bf16" in {unit.name for unit in build._units()})


X86_UNITS = tuple(
    build._Unit(name, "level.cpp", (f"-m{name}",)) for name in ("avx512bf16", "avx512", "avx2", "portable")
)


@pytest.mark.parametrize(
    ("features", "unneeded"),
    [
        (None, set()),  # nobody to ask: every level is built
        ({"sse2"}, {"avx512bf16", "avx512", "avx2"}),
        ({"avx2", "fma", "bmi2"}, {"avx512bf16", "avx512", "portable"}),
        (build._NEEDS["avx512"] | build._NEEDS["avx2"], {"avx512bf16", "avx2", "portable"}),
        (build._NEEDS["avx512bf16"] | build._NEEDS["avx2"], {"avx512", "avx2", "portable"}),
        (build._NEEDS["avx512bf16"] | build._NEEDS["avx2"] | {"AuthenticAMD"}, {"avx512", "avx2", "portable"}),
        (build._NEEDS["avx512bf16"] | build._NEEDS["avx2"] | {"GenuineIntel"}, {"avx512bf16", "avx2", "portable"}),
    ],
)
def test_a_first_use_builds_the_best_level_alone(
    features: set[str] | None, unneeded: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_processor_features", lambda: features)
    assert build._unneeded(X86_UNITS, lambda flags: True) == unneeded


def test_a_level_that_the_compiler_does_not_know_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_processor_features", lambda: build._NEEDS["avx512bf16"] | build._NEEDS["avx2"])
    assert build._unneeded(X86_UNITS, lambda flags: flags != ("-mavx512bf16",)) == {"avx512bf16", "avx2", "portable"}


def test_a_library_without_a_level_for_this_processor_is_not_used(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Library, "level", lambda self, name=None: None)
    result = load(every_level=True)
    assert isinstance(result, KernelUnavailable)
    assert "no instruction-set level" in result.reason


def test_the_build_and_the_library_agree_on_the_best_level(library: Library) -> None:
    unneeded = build._unneeded(X86_UNITS, lambda flags: True)
    assert library.level() not in unneeded


def test_a_complete_library_serves_everybody(toy: Path) -> None:
    complete = find_or_build(every_level=True)
    assert find_or_build() == complete


def test_a_library_of_something_else_is_a_reason(toy: Path) -> None:
    result = load()
    assert isinstance(result, KernelUnavailable)
    assert "cannot be loaded" in result.reason


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
