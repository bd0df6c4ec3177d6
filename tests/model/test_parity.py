"""The self-check finds what a runner does wrong, whatever the runner, and finds nothing where nothing is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from aiocb.attention.base import GroupTables
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.model import parity
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.parity import check_parity, probe_ids
from aiocb.records import Record
from aiocb.step import CacheGroup, CacheLayout, LengthSwitch, StepEntry
from tests.steps import described

from .helpers import argmax_sampler, tiny


class Recomputing:
    """A runner without a cache: the model's own forward over each entry's tokens.

    Args:
        model: computes.
        num_blocks, page_size, window, chunk, switch: of a cache that nobody reads.
        max_model_len: as reported.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int = 64,
        page_size: int = 16,
        max_model_len: int = 512,
        window: int | None = None,
        chunk: int | None = None,
        switch: LengthSwitch | None = None,
    ) -> None:
        self.model = model
        group = CacheGroup(window, (0, 1), num_blocks, 1, chunk)
        self.cache_layout = CacheLayout(page_size, (group,), switch=switch)
        self.max_model_len = max_model_len
        self.steps: list[Sequence[StepEntry]] = []
        self.records: dict[int, Record] = {}

    def logits(self, entries: Sequence[StepEntry], records: Sequence[Record]) -> Tensor:
        self.steps.append(entries)
        rows = []
        for entry, record in zip(entries, records, strict=True):
            self.records[entry.request_id] = record
            end = entry.num_computed_tokens + entry.num_new_tokens
            logits = self.model(input_ids=torch.tensor([record.tokens[:end]])).logits[0]
            rows.append(self.changed(logits[-entry.num_logits :], entry.request_id, end))
        return torch.cat(rows)

    def changed(self, logits: Tensor, request_id: int, end: int) -> Tensor:
        return logits


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(64, 512), (64, 8), (64, 1), (3, 512), (2, 512)])
def test_every_size_of_cache_is_checked(num_blocks: int, max_model_len: int, page_size: int) -> None:
    runner = Recomputing(tiny("llama"), num_blocks=num_blocks, max_model_len=max_model_len, page_size=page_size)
    choice = check_parity(runner.model, runner, "float32")
    assert float(choice.value) < 1e-6
    computed: dict[int, int] = {}
    for entries in runner.steps:
        assert sum(entry.num_new_tokens for entry in entries) > 0
        for entry in entries:
            assert entry.num_computed_tokens == computed.get(entry.request_id, 0)
            computed[entry.request_id] = entry.num_computed_tokens + entry.num_new_tokens
    for number, record in runner.records.items():
        assert computed[number] == len(record.tokens) <= min(max_model_len, len(record.tables[0]) * page_size)
    blocks = sum((record.tables[0] for record in runner.records.values()), [])
    assert len(set(blocks)) == len(blocks) and set(blocks) <= set(range(1, num_blocks))
    if num_blocks == 64 and max_model_len > 1:
        assert any(len(entries) == 2 for entries in runner.steps)
        assert computed.keys() == {0, 1}


@pytest.mark.parametrize("where", [(0, 21), (1, 7), (0, 8)])
def test_one_wrong_chunk_is_enough(where: tuple[int, int]) -> None:
    class Wrong(Recomputing):
        def changed(self, logits: Tensor, request_id: int, end: int) -> Tensor:
            return logits.roll(1, -1) if (request_id, end) == where else logits

    model = tiny("llama")
    with pytest.raises(ConfigError, match="differ from the model's own forward"):
        check_parity(model, Wrong(model), "float32")


class TestBeyond:
    """Windows, chunks and changes of the rotation that the short prompts do not reach."""

    class Wrong(Recomputing):
        """Wrong from token 42 on."""

        def changed(self, logits: Tensor, request_id: int, end: int) -> Tensor:
            return logits.roll(1, -1) if end > 42 else logits

    @pytest.mark.parametrize("boundary", [{"window": 30}, {"chunk": 30}, {"switch": LengthSwitch(30)}])
    def test_what_is_wrong_there_is_found(self, boundary: dict[str, Any]) -> None:
        model = tiny("llama")
        check_parity(model, self.Wrong(model), "float32")
        with pytest.raises(ConfigError, match="differ"):
            check_parity(model, self.Wrong(model, **boundary), "float32")
        right = Recomputing(model, **boundary)
        assert check_parity(model, right, "float32").reason.endswith("up to 54 tokens")
        assert right.steps[-1][0].num_computed_tokens == 53, "the last tokens are computed one by one"

    def test_what_no_request_reaches_is_no_boundary(self) -> None:
        model = tiny("llama")
        for runner in (self.Wrong(model, window=300, max_model_len=310), self.Wrong(model, window=16)):
            assert check_parity(model, runner, "float32").reason.endswith("relative")

    @pytest.mark.parametrize("limit", ["FAR_TOKENS", "FAR_WORK_CPU"])
    def test_what_takes_too_long_is_said(self, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parity, limit, 50)
        model = tiny("llama")
        reason = check_parity(model, self.Wrong(model, window=30), "float32").reason
        assert "not beyond a window of 30" in reason and "too long" in reason

    def test_logits_that_cannot_be_left_out_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parity, "FAR_LOGITS", 100)
        model = tiny("llama")
        for keeps in (True, False):
            monkeypatch.setattr(parity, "_keeps_logits", lambda model, keeps=keeps: keeps)
            assert ("up to" in check_parity(model, Recomputing(model, chunk=30), "float32").reason) == keeps

    def test_a_cache_that_is_too_small_is_said(self) -> None:
        model = tiny("llama")
        reason = check_parity(model, self.Wrong(model, chunk=30, num_blocks=4), "float32").reason
        assert "not beyond chunks of 30" in reason and "cache" in reason

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("mistral", {"sliding_window": 40}),
            ("llama4_text", {"attention_chunk_size": 40, "layer_types": ["chunked_attention", "full_attention"]}),
        ],
    )
    def test_a_backend_that_hides_nothing_is_found(
        self, name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def build() -> TorchRunner:
            config = EngineConfig(num_blocks=64, native=False)
            return TorchRunner(tiny(name, **values), config, argmax_sampler, max_model_len=512)

        assert "up to 64 tokens" in described(build())["parity"]
        monkeypatch.setattr(GroupTables, "first_visible", lambda self, queries: queries * 0)
        monkeypatch.setattr("aiocb.model.eager.batch.first_visible", lambda queries, window, chunk: queries * 0)
        with pytest.raises(ConfigError, match="differ"):
            build()


def test_a_shift_of_a_row_changes_no_probability() -> None:
    class Shifted(Recomputing):
        def changed(self, logits: Tensor, request_id: int, end: int) -> Tensor:
            return logits + 3.0

    model = tiny("llama")
    check_parity(model, Shifted(model), "float32")


def test_the_tolerance_is_that_of_the_format() -> None:
    class Noisy(Recomputing):
        def changed(self, logits: Tensor, request_id: int, end: int) -> Tensor:
            noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(end))
            return logits + 0.02 * noise * logits.std()

    model = tiny("llama")
    check_parity(model, Noisy(model), "bfloat16")
    check_parity(model, Noisy(model), "int8")
    with pytest.raises(ConfigError, match="in float32"):
        check_parity(model, Noisy(model), "float32")


def test_nan_is_a_difference() -> None:
    class Broken(Recomputing):
        def changed(self, logits: Tensor, request_id: int, end: int) -> Tensor:
            return logits * math.nan

    model = tiny("llama")
    with pytest.raises(ConfigError, match="differ"):
        check_parity(model, Broken(model), "float32")


def test_tokens_that_nobody_trained_are_no_difference() -> None:
    model: Any = tiny("llama")
    for token in {*probe_ids(model, 21, 0)[:3], *probe_ids(model, 7, 1)[:1]}:
        model.model.embed_tokens.weight[token] = math.nan
    runner = TorchRunner(model, EngineConfig(num_blocks=64), argmax_sampler, max_model_len=512)
    assert "parity" in described(runner)
    model.model.embed_tokens.weight.fill_(math.nan)
    with pytest.raises(ConfigError, match="not finite"):
        TorchRunner(model, EngineConfig(num_blocks=64), argmax_sampler, max_model_len=512)


def test_ids_with_a_meaning_are_passed_over() -> None:
    model: Any = tiny("llama")
    model.config.image_token_id = probe_ids(model, 4)[3]
    assert model.config.image_token_id not in probe_ids(model, 200)


def test_the_owner_is_compared_as_if_in_eval_mode() -> None:
    model = tiny("llama", attention_dropout=0.5)
    runner = Recomputing(tiny("llama"))
    model.train()
    check_parity(model, runner, "float32")
    assert model.training
