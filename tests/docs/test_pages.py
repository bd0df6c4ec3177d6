"""The pages are complete and their links lead somewhere."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiocb
import aiocb.testing
from aiocb.engine.settings import _UNBUILT
from aiocb.sampling_params import _ALIASES

from .helpers import DOCS, EXAMPLES, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
GUIDES = [page for page in PAGES if page.parent == DOCS and page.stem not in ("api", "architecture", "changes")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLISHED = PROJECT["urls"]["Documentation"] + "/en/latest/"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s+(\S+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def named_in(text: str) -> set[str]:
    """Names in backticks, alone or as keywords with a value."""
    return {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\b[a-z]\w*", code)}


def section(page: str, title: str) -> str:
    return re.split(r"^## ", read(DOCS / page).split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


def keywords(call: object) -> set[str]:
    skipped = {"self", "cls", "prompt", "prompts", "params", "sampling", "options"}
    return set(inspect.signature(call).parameters) - skipped  # type: ignore[arg-type]


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_sampling_parameter_is_in_its_guide() -> None:
    fields = {field.name for field in dataclasses.fields(aiocb.SamplingParams) if field.init}
    assert not (fields | set(_ALIASES)) - named_in(read(DOCS / "sampling.md"))


@pytest.mark.parametrize(
    "call",
    [
        aiocb.Engine,
        aiocb.Engine.from_pretrained,
        aiocb.Engine.from_runner,
        aiocb.Engine.stream,
        aiocb.Engine.generate,
        aiocb.Engine.generate_batch,
        aiocb.Engine.as_completed,
        aiocb.Engine.aclose,
    ],
    ids=lambda call: call.__name__,
)
def test_every_keyword_is_in_a_guide(call: object) -> None:
    assert not keywords(call) - named_in("".join(map(read, GUIDES)))


def test_every_public_call_is_in_a_guide() -> None:
    shown = "".join(map(read, GUIDES))
    calls = {name for kind in (aiocb.Engine, aiocb.Stream) for name in vars(kind) if not name.startswith("_")}
    assert not {name for name in calls if not re.search(rf"\b{name}\b", shown)}


def test_every_setting_is_in_its_guide() -> None:
    fields = set(inspect.signature(aiocb.EngineConfig).parameters)
    assert not fields - named_in(read(DOCS / "configuration.md"))
    unbuilt = section("configuration.md", "Names without effect")
    listed = {name for row in re.findall(r"^\| (`[^|]+)\|", unbuilt, re.MULTILINE) for name in named_in(row)}
    assert listed == set(_UNBUILT), "what is refused for now is listed as such, and nothing else"


def test_every_public_name_is_in_the_reference() -> None:
    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)$", read(DOCS / "api.md"), re.MULTILINE))
    assert {f"aiocb.{name}" for name in aiocb.__all__} <= documented
    assert {f"aiocb.testing.{name}" for name in aiocb.testing.__all__} <= documented


def test_every_error_is_in_a_guide() -> None:
    shown = "".join(map(read, GUIDES))
    assert not [name for name in aiocb.errors.__all__ if name[0].isupper() and name not in shown]


def test_files_named_by_the_architecture_exist() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "aiocb").rglob("*.*")}
    for page in (DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"):
        for name in set(re.findall(r"[\w./]+\.(?:py|cpp|h)\b", read(page))):
            assert any(f"/{file}".endswith(f"/{name}") for file in files) or (ROOT / name).exists(), name


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def links_of(page: Path) -> Iterator[str]:
    for inline, reference in LINK.findall(FENCE.sub("", read(page))):
        yield inline or reference


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        target, _, anchor = link.partition("#")
        if target.startswith(PUBLISHED):
            file = DOCS / target.removeprefix(PUBLISHED).replace(".html", ".md")
        elif "://" in target:
            continue
        else:
            file = page.parent / target if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors_of(file), link


def test_links_of_the_readme_work_on_a_package_index() -> None:
    links = list(links_of(ROOT / "README.md"))
    assert all(link.startswith("https://") for link in links)
    shown = {link.removeprefix(PUBLISHED) for link in links if link.startswith(PUBLISHED)}
    assert len(shown) > 12
    assert {f"{page.stem}.html" for page in GUIDES} - shown == {"index.html"}


def test_references_of_the_readme_are_defined() -> None:
    text = read(ROOT / "README.md")
    defined = re.findall(r"^\[([^\]]+)\]: \S+$", text, re.MULTILINE)
    used = re.findall(r"\[([^\]]+)\](?!: http)", FENCE.sub("", text))
    assert sorted(used) == sorted(defined)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_readme_begins_with_the_two_commands() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", read(ROOT / "README.md"), re.DOTALL | re.MULTILINE)
    assert blocks[0].startswith("make demo") and "make test" in blocks[0]
    assert "pip install aiocb\n" in blocks[1]


def test_extras_and_programs_that_are_named_exist() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    for page in [*PAGES, *programs]:
        for extra in re.findall(r"aiocb\[(\w+)\]", read(page)):
            assert extra in PROJECT["optional-dependencies"], f"{page.name}: aiocb[{extra}]"
        for program in re.findall(r"--app-dir examples (\w+):app|examples/(\w+)\.py", read(page)):
            assert EXAMPLES / f"{''.join(program)}.py" in programs, f"{page.name}: {program}"


def test_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", read(ROOT / "Makefile"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([\w-]+)`", read(page)))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_events_on_the_wire_are_json() -> None:
    """A line end within a text would end the event's line."""
    for page in [*PAGES, *sorted(EXAMPLES.glob("*.py"))]:
        lines = read(page).splitlines()
        assert not [line for line in lines if re.search(r"""f["'].*data: \{""", line) and "json.dumps(" not in line]


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    arguments = ["-W", "--keep-going", "-E", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    command = [sys.executable, "-m", "sphinx", *arguments, str(DOCS), str(tmp_path / "html")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert built.returncode == 0, built.stderr


def test_every_command_and_option_is_on_a_page() -> None:
    import typer

    from aiocb.cli.app import app

    shown = "".join(map(read, GUIDES))
    commands: Any = typer.main.get_command(app)
    for name, command in commands.commands.items():
        assert f"aiocb {name}" in shown
        if name == "bench":
            continue
        for parameter in command.params:
            options = [option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("--")]
            assert not options or any(option in shown for option in options), (name, options)
