from __future__ import annotations

import subprocess
import sys

import pytest

from aiocb._version import __version__
from aiocb.cli import terminal

from .conftest import FAKE, REAL, Spawn, run_plain, without_build


def test_version_and_help() -> None:
    assert run_plain([*REAL, "--version"]).stdout == f"aiocb {__version__}\n"
    text = run_plain([*REAL, "--help"]).stdout
    for command in ("chat", "run", "info", "bench"):
        assert f" {command} " in text
    assert "--temperature" in run_plain([*REAL, "run", "--help"]).stdout


def test_help_does_not_import_torch() -> None:
    code = "import sys; import aiocb.cli.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_model_that_is_not_there() -> None:
    result = run_plain([*REAL, "info", "missing.gguf"])
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("aiocb: ")
    assert "missing.gguf" in result.stderr
    assert result.stderr.count("\n") == 1


def test_debug_shows_where_an_error_comes_from() -> None:
    assert "Traceback" in run_plain([*FAKE, "chat", "base", "--debug"]).stderr


def test_info_of_the_fake(spawn: Spawn) -> None:
    lines = run_plain([*FAKE, "info", "fake"]).stdout.splitlines()
    assert any(line.startswith("max_batch_tokens\t128\t") for line in lines)
    assert all(line.count("\t") == 2 for line in lines)
    screen = spawn([*FAKE, "info", "fake"])
    screen.expect("setting +value +reason")
    screen.expect("max_batch_tokens +128")
    assert screen.wait() == 0


@pytest.mark.model
@pytest.mark.timeout(400)  # the first start of all compiles the kernels
def test_info_of_a_real_model() -> None:
    result = run_plain([*REAL, "info"])
    assert result.returncode == 0
    assert without_build(result.stderr) == ""
    for name in ("weights", "dtype", "device", "runner", "page_size", "num_blocks"):
        assert f"\n{name}\t" in f"\n{result.stdout}"


def test_what_a_model_says_cannot_command_the_terminal() -> None:
    assert terminal.printable("a\x1b[2Jb\r\x9b\tc\nd") == "a\ufffd[2Jb\ufffd\ufffd\tc\nd"


def test_uvloop_is_used_where_it_is_installed() -> None:
    uvloop = pytest.importorskip("uvloop")
    factory = terminal._loop_factory()
    assert factory is not None
    loop = factory()
    assert isinstance(loop, uvloop.Loop)
    loop.close()
