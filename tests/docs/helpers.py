"""Where the pages are, and how examples become modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"


def load_example(name: str) -> Any:
    """Import an example anew, so that it has an engine of its own."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved through it
    spec.loader.exec_module(module)
    return module


def read_events(wire: str) -> list[tuple[str, str]]:
    """What a client makes of server-sent events: name and data of each, as the standard has them parsed."""
    events, name, data = [], "message", list[str]()
    for line in wire.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        field, _, value = line.partition(":")
        if not line:
            if data:
                events.append((name, "\n".join(data)))
            name, data = "message", []
        elif field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            data.append(value.removeprefix(" "))
    return events
