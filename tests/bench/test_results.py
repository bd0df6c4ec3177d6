"""The program that makes docs/results.md, and the page that it has made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "results"

PAGE = """\
# Measured

## A machine

<!-- table: machine -->
old
<!-- end of table -->

Notes.
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def record(peer: str, work: str, rate: float, **values: Any) -> dict[str, Any]:
    """As the driver of the comparison writes them."""
    options = values.pop("opts", {})
    return {"label": peer, "peer": peer, "opts": options, "work": work, "rep": 0, "mode": "stream", "complete": True,
            "startup": 2.5, "out_tok_s": rate, "ttft_p50": 1500.0, "ttft_p99": 4000.0, "itl_p50": 70.2,
            "itl_p99": 133.3, "uss_MiB": 1080, **values}  # fmt: skip


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(path)


def test_every_engine_is_shown_in_its_best(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(PAGE)
    rounds = write(
        tmp_path / "rounds",
        [
            *(record("aiocb", "W1", rate) for rate in (300, 330, 310)),
            record("aiocb", "W1", 600, opts={"quantization": "int8", "dtype": "bfloat16"}),
            *(record("vllm_inproc", "W1", rate, opts={"dtype": "bfloat16"}) for rate in (90, 91)),
            *(record("vllm_inproc", "W1", rate, opts={"dtype": "float32", "bind": "nobind"}) for rate in (230, 240)),
            record("vllm_async", "W1", 100, opts={"dtype": "float32"}),
            record("llama_server", "W4", 60, opts={"gguf": "/secret/models/smol-bf16.gguf"}),
            record("llama_server", "W4", 81, opts={"gguf": "/secret/models/smol-Q4_1.gguf"}, itl_p50=None),
        ],
    )
    done = run("--page", str(page), "--add", "machine", rounds)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["64 requests at once, prompts 16 to 512, 16 to 128 new", "aiocb", "int8", "600", "1.50, 4.00", "70, 133"]
        + ["2.5", "1,080", "1"],
        ["aiocb", "bfloat16", "310 (300-330)", "1.50, 4.00", "70, 133", "2.5", "1,080", "3"],
        ["vLLM", "float32", "235 (230-240)", "1.50, 4.00", "70, 133", "2.5", "1,080", "2"],
        ["one request, 32 prompt, 128 new", "llama.cpp", "Q4_1", "81", "1.50, 4.00", "", "2.5", "1,080", "1"],
        ["llama.cpp", "bfloat16", "60", "1.50, 4.00", "70, 133", "2.5", "1,080", "1"],
    ]
    assert text.startswith("# Measured\n\n## A machine\n\n<!-- table: machine -->\n\n|")
    assert text.endswith("|\n\n<!-- end of table -->\n\nNotes.\n")
    assert "secret" not in (tmp_path / "results" / "machine.jsonl").read_text()
    # From the records that were kept, the same page is made again.
    assert run("--page", str(page), "--check").returncode == 0
    assert run("--page", str(page)).returncode == 0
    assert page.read_text() == text
    page.write_text(text.replace("310", "400"))
    assert run("--page", str(page), "--check").returncode == 1


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(PAGE)
    for bad, says in (
        (record("aiocb", "W1", 300, complete=False), "not complete: aiocb W1"),
        (record("other", "W1", 300), "unknown to this program: other"),
        (record("aiocb", "W9", 300), "unknown to this program: W9"),
    ):
        done = run("--page", str(page), "--add", "machine", write(tmp_path / "rounds", [bad]))
        assert done.returncode == 1
        assert done.stderr == f"{says}\n"
    done = run("--page", str(page), "--add", "elsewhere", write(tmp_path / "rounds", [record("aiocb", "W1", 300)]))
    assert "has no line `<!-- table: elsewhere -->`" in done.stderr
    assert page.read_text() == PAGE


def test_the_page_is_as_it_would_be_made() -> None:
    assert run("--check").returncode == 0
