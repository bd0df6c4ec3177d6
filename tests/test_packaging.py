"""What is published: wheels that carry kernels, extras that are used and asked for by name, files for servers."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import json
import logging
import platform
import re
import shlex
import shutil
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from typer.core import TyperGroup
from typer.testing import CliRunner

import aiocb
from aiocb import EngineConfig, files
from aiocb.attention.flash import FlashKernels
from aiocb.cli.app import app
from aiocb.engine.tracing import Tracer
from aiocb.errors import ConfigError, InvalidRequest
from aiocb.kernels import KernelUnavailable, Library, build, compilation, find_or_build, library, load
from aiocb.sampling import grammar
from tests.model.helpers import open_module, tiny

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


class TestWheels:
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        """The project with a one-line source for its kernels."""
        tree = tmp_path / "tree"
        for name in (
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "hatch_build.py",
            "aiocb/_version.py",
            "aiocb/__init__.py",
        ):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        sources = tree / "aiocb" / "kernels" / "csrc"
        sources.mkdir(parents=True)
        shutil.copy(ROOT / "aiocb" / "kernels" / "compilation.py", sources.parent)
        (sources / "toy.cpp").write_text('extern "C" __attribute__((visibility("default"))) int toy() { return 7; }\n')
        return tree

    def test_pure_unless_asked(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AIOCB_BUILD_KERNELS", raising=False)
        (wheel,) = WheelBuilder(str(tree)).build(directory=str(tree), versions=["standard"])
        assert Path(wheel).name == f"aiocb-{aiocb.__version__}-py3-none-any.whl"
        assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]

    def test_with_a_library_named_for_sources_and_machine(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if isinstance(build.find_compiler(), KernelUnavailable):
            pytest.skip("no compiler")
        monkeypatch.setenv("AIOCB_BUILD_KERNELS", "1")
        (path,) = WheelBuilder(str(tree)).build(directory=str(tree), versions=["standard"])
        assert re.fullmatch(rf"aiocb-[\d.]+-py3-none-(linux|macosx)_.*{platform.machine()}\.whl", Path(path).name)
        name = compilation.library_name(tree / "aiocb" / "kernels" / "csrc", platform.machine(), None)
        with zipfile.ZipFile(path) as wheel:
            held = [name for name in wheel.namelist() if name.startswith("aiocb/kernels/lib/")]
            assert held == [f"aiocb/kernels/lib/{name}.so", f"aiocb/kernels/lib/{name}.so.sum"]
            metadata = wheel.read(f"aiocb-{aiocb.__version__}.dist-info/WHEEL").decode()
            wheel.extractall(tree / "installed")
        assert "Root-Is-Purelib: false" in metadata
        monkeypatch.setattr(build, "_SOURCE_DIR", tree / "aiocb" / "kernels" / "csrc")
        found = build.find_packaged(tree / "installed" / "aiocb" / "kernels" / "lib")
        assert isinstance(found, Path) and found.stem == name
        assert b"GLIBCXX" not in found.read_bytes()  # its own C++ runtime

    def test_a_compiler_that_fails_fails_the_build(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOCB_BUILD_KERNELS", "1")
        compiler = tree / "odd-c++"
        compiler.write_text(
            '#!/bin/sh\n[ "$1" = -dumpmachine ] && echo pdp11-unix && exit\necho "error: odd" >&2; exit 1\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        with pytest.raises(RuntimeError, match="odd-c\\+\\+: error: odd"):
            list(WheelBuilder(str(tree)).build(directory=str(tree), versions=["standard"]))
        assert not list(tree.glob("*.whl"))

    def test_the_source_distribution_can_be_built_from(self, tmp_path: Path) -> None:
        (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
        with tarfile.open(path) as archive:
            names = {name.split("/", 1)[1] for name in archive.getnames()}
        needed = {"hatch_build.py", "pyproject.toml", "LICENSE", "aiocb/py.typed", "aiocb/kernels/csrc/dispatch.cpp"}
        assert needed | {"deploy/Dockerfile", "scripts/wheels", "tests/test_packaging.py"} <= names
        assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".venv", "dist"))]


class TestPackagedLibrary:
    @pytest.fixture
    def packaged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The kernels as a wheel has them, and a cache that cannot be filled."""
        compiled = find_or_build(every_instruction_set=True)
        if isinstance(compiled, KernelUnavailable):
            pytest.skip(compiled.reason)
        folder = tmp_path / "lib"
        folder.mkdir()
        target = folder / f"{build._name(True)}.so"
        shutil.copy(compiled, target)
        shutil.copy(f"{compiled}.sum", f"{target}.sum")
        monkeypatch.setattr(library, "PACKAGED_DIR", folder)
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "cache"))
        return target

    def test_comes_first_and_needs_no_compiler(self, packaged: Path, capfd: pytest.CaptureFixture[str]) -> None:
        loaded = load()
        assert isinstance(loaded, Library) and (loaded.path, loaded.origin) == (packaged, "packaged")
        assert load(every_instruction_set=True) is loaded and "portable" in loaded.instruction_sets()
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ("damaged", "is damaged"),
            ("without a checksum", "has no checksum"),
            ("of other sources", "is of another version or for other machines"),
            ("of another interface", "cannot be loaded"),
        ],
    )
    def test_one_that_does_not_fit_is_not_used_and_that_is_said_once(
        self, packaged: Path, capfd: pytest.CaptureFixture[str], change: str, said: str
    ) -> None:
        note = packaged.with_name(f"{packaged.name}.sum")
        if change == "damaged":
            packaged.write_bytes(packaged.read_bytes()[:-1] + b"?")
        elif change == "without a checksum":
            note.unlink()
        elif change == "of other sources":
            packaged.rename(packaged.with_name("aiocb-0123456789abcdef.so"))
        else:
            packaged.write_bytes(b"no library")
            note.write_text(compilation.stamp(packaged))
        for _ in range(3):
            found = load()
            assert isinstance(found, KernelUnavailable) and "no C++ compiler" in found.reason
        errors = capfd.readouterr().err
        assert errors.count("aiocb: the native kernels of the package are not used: ") == 1 and errors.count(said) == 1
        assert packaged.parent.exists()  # a package's files are not ours to remove

    def test_without_one_nothing_is_said(self, tmp_path: Path) -> None:
        assert build.find_packaged(tmp_path / "lib") is None

    def test_the_engine_says_what_runs(
        self, packaged: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened = open_module(tiny("llama"), EngineConfig(num_blocks=8))
        opened.runner.close()
        chosen = {choice.name: choice for choice in opened.choices}
        assert (chosen["runner"].value, chosen["library"].value) == ("native", "packaged")
        assert chosen["library"].reason == str(packaged) and not caplog.records
        monkeypatch.setattr(library, "PACKAGED_DIR", packaged.parent / "absent")
        opened = open_module(tiny("llama"), EngineConfig(num_blocks=8))
        opened.runner.close()
        chosen = {choice.name: choice for choice in opened.choices}
        assert (chosen["runner"].value, chosen["library"].value) == ("torch", "none")
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert "plain torch runs the model" in record.message and "no C++ compiler" in record.message
        caplog.clear()
        opened = open_module(tiny("llama"), EngineConfig(num_blocks=8, native=False))
        opened.runner.close()
        assert "library" not in {choice.name for choice in opened.choices} and not caplog.records  # as was asked


class TestExtras:
    def test_each_package_is_used(self) -> None:
        """What an extra installs is imported somewhere, or asked for by name."""
        server, used = (ROOT / "aiocb" / "serve" / "run.py").read_text(encoding="utf-8"), set[str]()
        if "HttpToolsProtocol" in server and 'ws="websockets' in server:  # uvicorn imports them
            used |= {"httptools", "websockets"}
        for path in (ROOT / "aiocb").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    used |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    used.add(node.module.split(".")[0])
                elif isinstance(node, ast.Constant) and node.value in ("flash_attn", "kernels"):
                    used.add(node.value)
        extras = PROJECT["project"]["optional-dependencies"]
        imported = {"opentelemetry-api": "opentelemetry"}
        for extra, requirements in extras.items():
            for requirement in requirements:
                name = re.split(r"[\[><=;]", requirement)[0]
                assert name == "aiocb" or imported.get(name, name.replace("-", "_")) in used, (
                    f"{extra}: nothing uses {name}"
                )

    @pytest.mark.parametrize(
        ("extra", "absent", "use", "kind"),
        [
            ("serve", "uvicorn", lambda: CliRunner().invoke(app, ["serve"], catch_exceptions=False), ConfigError),
            ("serve", "starlette.routing", lambda: importlib.import_module("aiocb.serve"), ImportError),
            ("ray", "ray", lambda: importlib.import_module("aiocb.contrib.ray"), ImportError),
            ("grammar", "llguidance", grammar._library, InvalidRequest),
            ("otel", "opentelemetry", lambda: Tracer.detect(EngineConfig(tracing=True), "m"), ConfigError),
            ("flash", "kernels", lambda: FlashKernels.load("flash_attn", "some"), ImportError),
            ("kernels", "kernels", lambda: FlashKernels.load("flash_attn", "some"), ImportError),
        ],
    )
    def test_what_needs_an_extra_names_it(
        self, extra: str, absent: str, use: Callable[[], object], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [*sys.modules]:
            if name.startswith(("aiocb.serve", "aiocb.contrib.ray")):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, absent, None)
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        with pytest.raises(kind, match=rf"pip install '?.*aiocb\[{extra}\]"):
            use()

    def test_a_plot_names_its_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        done = CliRunner().invoke(app, ["bench", "serve", "--plot", str(tmp_path / "load.png")], env={"COLUMNS": "200"})
        assert done.exit_code == 2 and "aiocb[bench]" in done.output

    def test_every_extra_is_tried(self) -> None:
        tried = {"bench", *(row[0] for row in self.test_what_needs_an_extra_names_it.pytestmark[0].args[1])}  # type: ignore[attr-defined]
        assert tried == set(PROJECT["project"]["optional-dependencies"])


class TestDeployment:
    """What can be seen without docker and systemd: every name in those files exists."""

    @pytest.fixture
    def options(self) -> set[str]:
        """The options of `aiocb serve`."""
        command = typer.main.get_command(app)
        assert isinstance(command, TyperGroup)
        return {name for option in command.commands["serve"].params for name in option.opts}

    def test_the_unit(self, options: set[str]) -> None:
        unit = configparser.RawConfigParser(strict=True)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(ROOT / "deploy" / "aiocb.service", encoding="utf-8")
        service = unit["Service"]
        program, command, *arguments = shlex.split(service["ExecStart"])
        assert (Path(program).name, command) == ("aiocb", "serve")
        assert {argument for argument in arguments if argument.startswith("--")} <= options
        assert int(service["TimeoutStopSec"]) > int(arguments[arguments.index("--drain") + 1])
        variables = dict(pair.split("=", 1) for pair in service["Environment"].split())
        assert arguments[-1] == "${AIOCB_MODEL}" and variables["AIOCB_MODEL"]
        assert variables["AIOCB_CACHE"] == f"%C/{service['CacheDirectory']}"  # all that it can write
        assert "AIOCB_CACHE" in inspect.getsource(files.cache_dir)

    def test_the_image(self, options: set[str]) -> None:
        text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
        stages = [number for number, (word, _) in enumerate(lines) if word == "FROM"]
        assert len(stages) == 2 and lines[stages[0]][1].endswith(" AS build")
        final = lines[stages[1] :]
        words = dict(final)
        assert words["USER"] == "aiocb" and [*words].index("USER") < [*words].index("ENTRYPOINT")
        program, command, *arguments = json.loads(words["ENTRYPOINT"])
        assert (program, command) == ("aiocb", "serve")
        assert {argument for argument in arguments if argument.startswith("--")} <= options
        port = arguments[arguments.index("--port") + 1]
        assert words["EXPOSE"] == port and f"127.0.0.1:{port}/health'" in words["HEALTHCHECK"]
        python, flag, code = json.loads(words["HEALTHCHECK"].split("CMD ")[1])
        assert (python, flag) == ("python", "-c") and compile(code, "healthcheck", "exec")
        assert [line for line in lines if line[0] == "COPY"][0][1] == "dist/ /dist/"
        # What make wheels leaves there gets into the context, and nothing else.
        ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
        assert ignored == ["*", "!dist/*.whl"]
