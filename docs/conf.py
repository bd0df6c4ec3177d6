from __future__ import annotations

from typing import Any

project = "aiocb"
author = "the aiocb authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
exclude_patterns = ["_build"]
default_role = "code"  # `name` in docstrings
nitpicky = False


def mark_code(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings show code as an indented block after a paragraph; reStructuredText wants a mark before it."""
    paragraph = ""
    marked = []
    for before, line in zip(["", *lines], lines):
        starts = line.startswith("    ") and not before.strip()
        if starts and paragraph and not paragraph.startswith(" ") and not paragraph.endswith("::"):
            marked += ["::", ""]
        if line.strip():
            paragraph = line
        marked.append(line)
    lines[:] = marked


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon makes sections of it
