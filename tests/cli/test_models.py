"""`aiocb pull | list | rm` against a hub of the test's own, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiocb.cli.models import size
from tests.hub_server import Hub, Repository, running_hub
from tests.model.gguf_files import write_gguf

from .conftest import CTRL_C, REAL, Spawn, environment, run_plain

pytestmark = pytest.mark.slow


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as server:
        yield server


@pytest.fixture
def places(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """Environment variables: the test's hub and caches."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "AIOCB_CACHE": str(tmp_path / "kept"),
    }


def test_pull_list_rm(hub: Hub, places: dict[str, str], tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    hub.repositories["some/gguf"] = Repository({"x-Q4_K_M.gguf": content})
    pulled = run_plain([*REAL, "pull", "some/gguf"], **places)
    assert (pulled.returncode, pulled.stderr.count("\n")) == (0, 1), pulled.stderr
    assert "no tag was given: Q4_K_M is the first choice" in pulled.stderr
    path = Path(pulled.stdout.rstrip("\n"))
    assert path.read_bytes() == content
    offline = {**places, "HF_HUB_OFFLINE": "1"}
    assert run_plain([*REAL, "pull", "hf.co/some/gguf:q4_k_m"], **offline).stdout == pulled.stdout
    lines = run_plain([*REAL, "list"], **offline).stdout.splitlines()
    assert lines[0] == "name\tformat\tsize\tmade here\tlast used"
    (line,) = (line for line in lines if line.startswith("some/gguf"))
    assert line.startswith(f"some/gguf:Q4_K_M\tGGUF\t{size(len(content))}\t\t20")
    refused = run_plain([*REAL, "rm", "some/gguf"], **offline)
    assert refused.returncode == 2 and "say --yes" in refused.stderr and path.exists()
    removed = run_plain([*REAL, "rm", "some/gguf", "--yes"], **offline)
    assert (removed.returncode, removed.stdout) == (0, f"removed {size(len(content))}\n")
    assert not path.exists()
    gone = run_plain([*REAL, "rm", "some/gguf", "--yes"], **offline)
    assert (gone.returncode, gone.stderr) == (
        1,
        "aiocb: some/gguf is not on this machine; `aiocb list` shows what is\n",
    )


def test_a_bar_and_a_question_on_a_terminal(hub: Hub, places: dict[str, str], spawn: Spawn) -> None:
    hub.repositories["some/gguf"] = Repository({"x-Q4_K_M.gguf": b"?" * 40_000_000})
    terminal = spawn([*REAL, "pull", "some/gguf"], **places)
    terminal.expect(r"Pulling some/gguf \(download\).* \d+%")
    terminal.expect("x-Q4_K_M.gguf")
    assert terminal.wait() == 0
    table = spawn([*REAL, "list"], **places)
    table.expect(r"some/gguf:Q4_K_M +GGUF +40.0 MB")
    assert table.wait() == 0
    for answer in ("n\n", CTRL_C):
        question = spawn([*REAL, "rm", "some/gguf"], **places)
        question.expect(r"Remove 40.0 MB\? \[y/N\]")
        question.send(answer)
        question.wait()
        assert "Traceback" not in question.output and "removed" not in question.output
    question = spawn([*REAL, "rm", "some/gguf"], **places)
    question.expect(r"Remove 40.0 MB\? \[y/N\]")
    question.send("y\n")
    question.expect("removed 40.0 MB")
    assert question.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_download_that_is_killed_is_nothing(hub: Hub, places: dict[str, str], number: signal.Signals) -> None:
    repository = Repository({"x-Q4_K_M.gguf": b"?" * 30_000_000}, stalled=("x-Q4_K_M.gguf",))
    hub.repositories["some/gguf"] = repository
    process = subprocess.Popen(
        [*REAL, "pull", "some/gguf"], env=environment(**places), stderr=subprocess.PIPE, text=True
    )
    assert hub.has_stalled.wait(60)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert said == ("aiocb: interrupted\n" if number == signal.SIGINT else "")
    assert "some/gguf" not in run_plain([*REAL, "list"], **places).stdout
    again = run_plain([*REAL, "pull", "some/gguf"], **{**places, "HF_HUB_OFFLINE": "1"})
    assert again.returncode == 1 and "it is not on this machine" in again.stderr
    repository.stalled = ()
    path = Path(run_plain([*REAL, "pull", "some/gguf"], **places).stdout.rstrip("\n"))
    assert path.stat().st_size == 30_000_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pull", "some/other"], "the hub has no model of that name"),
        (["pull", "some/gated"], "it is gated: accept its terms"),
        (["run", "some/gguf:Q8_0", "hello"], "no GGUF file of the tag 'Q8_0'; there are Q4_0"),
        (["pull", "a/b/c"], "a/b/c is no name of a model on the hub"),
        (["info", "https://hf.co/some"], "is no link to a model"),
    ],
)
def test_what_goes_wrong_is_one_line(hub: Hub, places: dict[str, str], arguments: list[str], says: str) -> None:
    hub.repositories["some/gated"] = Repository({"x-Q4_0.gguf": b"?"}, gated=True)
    hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": b"?"})
    result = run_plain([*REAL, *arguments], **places)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.stderr
    assert result.stderr.startswith("aiocb: ") and says in result.stderr


def test_names_complete(hub: Hub, places: dict[str, str]) -> None:
    hub.repositories["some/gguf"] = Repository({"x-Q4_0.gguf": b"?"})
    assert run_plain([*REAL, "pull", "some/gguf"], **places).returncode == 0
    shell = {"_AIOCB_COMPLETE": "complete_bash", "COMP_WORDS": "aiocb run so", "COMP_CWORD": "2"}
    assert run_plain([*REAL], **places, **shell).stdout.split() == ["some/gguf:Q4_0"]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_960, "100 kB"), (2.5e9, "2.5 GB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
