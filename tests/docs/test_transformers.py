"""The page for those who come from transformers names everything that its classes have."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable

import pytest
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, ContinuousMixin
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import WorkloadHints

from aiocb.compat.transformers import auto, manager, results

from .helpers import DOCS

PAGE = (DOCS / "transformers.md").read_text(encoding="utf-8")


def rows(title: str) -> set[str]:
    """Names in the first cells of the tables below a heading."""
    part = re.split(r"^##+ ", PAGE.split(f"### {title}\n")[1], flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| ([^|]+)\|", part, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def attributes(kind: type) -> set[str]:
    """What its constructor sets."""
    return public(re.findall(r"self\.(\w+)\s*[:=]", inspect.getsource(kind.__init__)))  # type: ignore[misc]


def test_every_setting_has_a_row() -> None:
    assert rows("Every setting") == fields(ContinuousBatchingConfig)
    assert all(f"`{name}`" in PAGE for name in fields(WorkloadHints))


def test_every_method_and_attribute_has_a_row() -> None:
    theirs = public(vars(ContinuousMixin)) | public(vars(ContinuousBatchingManager))
    theirs |= attributes(ContinuousBatchingManager) | fields(GenerationOutput) | {"is_finished"}
    assert rows("Every method") == theirs


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (auto.ContinuousMixin, ContinuousMixin),
        (manager.ContinuousBatchingManager, ContinuousBatchingManager),
    ],
)
def test_every_method_is_here_with_its_arguments(ours: type, theirs: type) -> None:
    for name in public(vars(theirs)):
        mine = inspect.signature(getattr(ours, name)).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in mine.values())
        for argument in list(inspect.signature(getattr(theirs, name)).parameters.values())[1:]:
            assert argument.name in mine or takes_any, f"{name}({argument.name})"


def test_every_field_of_an_output_is_here() -> None:
    assert fields(GenerationOutput) <= set(dir(results.GenerationOutput(request_id="r", prompt_ids=[])))
