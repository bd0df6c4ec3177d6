"""Imports of the package go one way, also those inside functions; types alone may look back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import aiocb

ROOT = Path(aiocb.__file__).parent


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, but for the bodies of `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield from statements(node)


def imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return names


def circle_of(sources: dict[str, str]) -> list[str]:
    """The modules of a circle, or none; a package's own `__init__` counts only for who names nothing below it."""
    graph = {}
    for name, source in sources.items():
        names = imported(source) & sources.keys() - {name}
        graph[name] = {one for one in names if not any(other.startswith(f"{one}.") for other in names)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_circle() -> None:
    sources = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(("aiocb", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        sources[name] = path.read_text(encoding="utf-8")
    assert len(sources) > 50
    assert circle_of(sources) == []


@pytest.mark.parametrize("line", ["from p import b", "def late():\n    from p.b import f", "import p.b"])
def test_a_circle_is_found(line: str) -> None:
    assert circle_of({"p": "", "p.a": line, "p.b": "from p.a import f"})
    typed = f"if TYPE_CHECKING:\n    {line.splitlines()[-1].strip()}"
    assert not circle_of({"p": "", "p.a": typed, "p.b": "from p.a import f"})
