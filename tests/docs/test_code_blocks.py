"""Every Python block in README, CONTRIBUTING and docs runs, top to bottom, page by page, against the packaged model."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiocb

from .helpers import DOCS, EXAMPLES, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```", re.DOTALL | re.MULTILINE)

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def blocks_of(page: Path) -> list[tuple[int, str]]:
    text = page.read_text(encoding="utf-8")
    return [(text[: match.start()].count("\n") + 2, match[1]) for match in BLOCK.finditer(text)]


async def run_block(source: str, name: str, line: int, namespace: dict[str, Any]) -> None:
    tree = ast.parse(source, name)
    ast.increment_lineno(tree, line - 1)
    code = compile(tree, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        await eval(code, namespace)
    else:
        # A whole program that calls asyncio.run: give it a thread without a loop.
        await asyncio.to_thread(exec, code, namespace)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[aiocb.Engine]:
    """One engine for all pages that begin in the middle of a program: it keeps its model from page to page."""
    yield aiocb.Engine.from_pretrained("smollm2")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name)
def test_blocks_run(page: Path, smollm2: aiocb.Engine) -> None:
    blocks = blocks_of(page)
    needs_engine = any(re.search(r"\bengine\.", block) and "from_pretrained" not in block for _, block in blocks)

    async def main() -> None:
        namespace: dict[str, Any] = {"__name__": "docs", "aiocb": aiocb, "asyncio": asyncio}
        if not needs_engine:
            for line, block in blocks:
                await run_block(block, page.name, line, namespace)
            return
        async with smollm2 as engine:
            for line, block in blocks:
                namespace["engine"] = engine
                await run_block(block, page.name, line, namespace)

    asyncio.run(main())


def test_pages_are_found() -> None:
    names = {page.name for page in PAGES if blocks_of(page)}
    guides = {"streams.md", "chat.md", "sampling.md", "serving.md", "models.md", "configuration.md", "operation.md"}
    assert {"README.md", "CONTRIBUTING.md"} | guides <= names
    assert sum(len(blocks_of(page)) for page in PAGES) >= 35


def test_the_server_on_the_page_is_the_example() -> None:
    """docs/serving.md shows the program that tests/docs/test_serving.py runs."""

    def statements(source: str) -> set[str]:
        return {ast.unparse(node) for node in ast.parse(source).body}

    example = statements((EXAMPLES / "fastapi_chat.py").read_text(encoding="utf-8"))
    shown = set.union(*(statements(block) for _, block in blocks_of(DOCS / "serving.md")))
    assert not shown - example
    assert len(example - shown) == 2  # its docstring and the import from __future__
