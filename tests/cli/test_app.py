from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from aiocb._version import __version__
from aiocb.cli import main, terminal
from aiocb.cli.app import app
from aiocb.errors import ConfigError

from .conftest import FAKE, REAL, Spawn, run_plain, without_build

pytestmark = pytest.mark.slow


def test_version_and_help() -> None:
    assert run_plain([*REAL, "--version"]).stdout == f"aiocb {__version__}\n"
    text = run_plain([*REAL, "--help"]).stdout
    for command in ("chat", "run", "info", "bench"):
        assert f" {command} " in text


def test_help_does_not_import_torch() -> None:
    code = "import sys; import aiocb.cli.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def one_line_of(stderr: str) -> str:
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("aiocb: ")
    return stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["info", "missing.gguf"], 1, "missing.gguf"),
        (["run", "nosuch/x/y", "a"], 1, "cannot load 'nosuch/x/y'"),
        (["bench", "offline", "nosuch/x/y"], 1, "cannot load 'nosuch/x/y'"),
        (["bench", "startup", "nosuch/x/y"], 1, "cannot load 'nosuch/x/y'"),
        (["info", "--threads", "0"], 1, "num_threads"),
        (["chat", "--nonsense"], 2, "--nonsense"),
        (["chat", "--temperature", "hot"], 2, "--temperature"),
        (["bench", "serve", "--rate", "0"], 2, "--rate"),
        (["bench", "nonsense"], 2, "nonsense"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], code: int, says: str) -> None:
    result = run_plain([*REAL, *arguments])
    assert result.returncode == code
    assert result.stdout == ""
    assert says in one_line_of(result.stderr)


def test_what_a_library_raises_while_a_model_is_loaded_is_one_line_too() -> None:
    result = run_plain([*FAKE, "info", "broken"])
    assert result.returncode == 1
    assert one_line_of(result.stderr) == (
        "aiocb: cannot load broken: AssertionError: it is broken, and that is what a library says\n"
    )
    assert "Traceback" in run_plain([*FAKE, "info", "broken", "--debug"]).stderr


@pytest.mark.parametrize("commands", [[], ["chat"], ["run"], ["info"], ["bench"], ["bench", "offline"]])
def test_help_is_short_or_long(commands: list[str]) -> None:
    runner = CliRunner()
    short, long = (runner.invoke(app, [*commands, option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output
    assert "Usage" in short.output


def test_without_a_command_there_is_the_help() -> None:
    result = run_plain(REAL)
    assert result.returncode == 2
    assert "Usage" in result.stdout
    assert result.stderr == ""


def run_main(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("aiocb.cli.app.app", fail)
    monkeypatch.setattr(terminal, "quieten", lambda: None)
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        run_main(monkeypatch, KeyError("a fault"))
    with pytest.raises(ExceptionGroup):
        run_main(monkeypatch, ExceptionGroup("of a task group", [KeyError("a fault")]))


def test_errors_of_a_task_group_are_those_inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [ConfigError("this\nand\x1b[2J that")])])
    assert run_main(monkeypatch, group) == 1
    assert capsys.readouterr().err == "aiocb: this and\ufffd[2J that\n"


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
