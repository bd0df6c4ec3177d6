"""A few types in every way that may go wrong; `make models` does all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.check import check
from tests.models.tiny import EXCLUDED, TYPES

pytestmark = pytest.mark.slow

RESULTS = json.loads((Path(__file__).parents[2] / "docs" / "model-types.json").read_text(encoding="utf-8"))
SUBSET = (
    "llama", "gemma3_text", "gpt2", "deepseek_v3", "bert", "bart",
    "qwen3_next", "lfm2", "mamba2", "jamba", "falcon_h1", "rwkv", "zaya",  # states
    "bloom", "gpt_neo", "llama4_text", "deepseek_v32", "inkling_text", "phimoe",  # attention of other kinds
)  # fmt: skip


@pytest.mark.parametrize("model_type", SUBSET)
def test_a_type_is_right(model_type: str) -> None:
    verdict = check(model_type)
    assert verdict.outcome == "right", verdict.note


def test_every_type_was_tried_and_none_is_wrong() -> None:
    assert sorted(RESULTS) == sorted(set(TYPES) - set(EXCLUDED))
    assert {verdict["outcome"] for verdict in RESULTS.values()} <= {"right", "refused"}
    assert sum(verdict["outcome"] == "right" for verdict in RESULTS.values()) >= 178
