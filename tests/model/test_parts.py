"""Packing, cache sizes, and the choice of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import masking_utils

from aiocb.attention.base import KVFormat, LayerSpec
from aiocb.cache.manager import CacheManager
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.defaults import model_defaults
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.batch import PackedStep, pack
from aiocb.model.eager.masks import MaskKind, NotPlainError, kind_of
from aiocb.model.kv import choose_layout
from aiocb.records import Record, Records
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import CacheGroup, CacheLayout, StepEntry, StepPlan, StepResult
from tests.steps import CallbackSampler, Work, execute

from .helpers import GREEDY, VOCAB, ManualScheduler, argmax_sampler, generate, open_module, prompt, tiny

CPU = torch.device("cpu")


def work(number: int, computed: int, new: int, tables: tuple[list[int], ...], num_logits: int = 1) -> Work:
    tokens = list(range(100 * number, 100 * number + computed + new))
    return Work(number, tokens, computed + new, computed, new, tables, num_logits, True, GREEDY, 0)


def packed_of(works: Sequence[Work], layout: CacheLayout) -> PackedStep:
    records = Records(len(layout.groups)).begin(
        StepPlan(tuple(one.entry() for one in works), 0, tuple(one.opened() for one in works))
    )
    return pack([one.entry() for one in works], records, layout, CPU, torch.float32)


class TestPack:
    LAYOUT = CacheLayout(4, (CacheGroup(None, (0,), 32, 1), CacheGroup(6, (1,), 32, 1)))

    def test_decodes_come_first_and_logits_in_the_order_of_the_plan(self) -> None:
        entries = (
            work(1, 0, 5, ([1, 2], [11, 12]), num_logits=2),
            work(2, 9, 1, ([3, 4, 5], [0, 14, 15])),
            work(3, 4, 3, ([6, 7], [16, 17]), num_logits=0),
            work(4, 0, 1, ([8], [18])),
        )
        packed = packed_of(entries, self.LAYOUT)
        assert packed.input_ids.tolist() == [[209, 400, 100, 101, 102, 103, 104, 304, 305, 306]]
        assert packed.positions.tolist() == [[9, 0, 0, 1, 2, 3, 4, 4, 5, 6]]
        assert packed.logit_rows.tolist() == [5, 6, 0, 1]
        batch = packed.batch
        assert (batch.num_decodes, batch.starts.tolist()) == (2, [0, 1, 2, 7, 10])
        full, sliding = batch.groups
        assert full.slots.tolist() == [21, 32, 4, 5, 6, 7, 8, 28, 29, 30]
        assert full.pages.tolist() == [3, 4, 5, 8, 1, 2, 6, 7]
        # The query at 9 sees 4..9 with a window of 6: the first page is not needed.
        assert sliding.pages.tolist() == [14, 15, 18, 11, 12, 16, 17]
        assert sliding.key_starts.tolist() == [4, 0, 0, 0]
        assert sliding.slots[0] == 15 * 4 + 1

    def test_short_table_is_refused(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            packed_of([work(1, 4, 5, ([1, 2], [3, 4]))], self.LAYOUT)

    def test_random_plans_name_the_right_slots(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(20):
            entries = []
            for number in range(int(random.integers(1, 9))):
                computed, new = int(random.integers(0, 30)), int(random.choice([1, 1, 3, 9]))
                table = [int(block) for block in random.integers(1, 32, -(-(computed + new) // 4))]
                entries.append(work(number, computed, new, (table, table)))
            packed = packed_of(entries, self.LAYOUT)
            rows = [one for one in entries if one.num_new_tokens == 1] + [
                one for one in entries if one.num_new_tokens != 1
            ]
            expected = [
                one.block_tables[0][position // 4] * 4 + position % 4
                for one in rows
                for position in range(one.num_computed_tokens, one.num_computed_tokens + one.num_new_tokens)
            ]
            for group in packed.batch.groups:
                assert group.slots.tolist() == expected


class TestMasks:
    @pytest.mark.parametrize("size", [1, 2, 7, 8, 512, 4096, 8191])
    def test_windows_and_chunks(self, size: int) -> None:
        window = masking_utils.sliding_window_causal_mask_function(size)
        assert kind_of(window) == MaskKind(window=size) or size == 1
        if size > 1:
            chunked = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
            assert kind_of(chunked) == MaskKind(chunk=size)

    def test_full(self) -> None:
        assert kind_of(masking_utils.causal_mask_function) == MaskKind()

    def test_others_are_refused(self) -> None:
        with pytest.raises(NotPlainError, match="not causal"):
            kind_of(lambda b, h, q, k: q >= 0)
        with pytest.raises(NotPlainError, match="neither"):
            kind_of(lambda b, h, q, k: (k <= q) & (k % 3 == q % 3))

    def test_a_window_that_only_the_mask_knows(self) -> None:
        # phimoe's modules say nothing of the window.
        specs = ModelAdapter(tiny("phimoe", sliding_window=8, num_local_experts=4)).specs
        assert [spec.window for spec in specs.values()] == [8, 8]

    def test_chunks_are_layers_of_their_own_kind(self) -> None:
        types = ["chunked_attention", "full_attention"]
        model = tiny("llama4_text", attention_chunk_size=32, layer_types=types, num_local_experts=2)
        runner = open_module(model, EngineConfig(native=False, num_blocks=64), argmax_sampler).runner
        assert runner.max_model_len == 512
        kinds = [(group.window, group.chunk, group.layers) for group in runner.cache_layout.groups]
        assert kinds == [(None, None, (1,)), (None, 32, (0,))]


class TestCacheSize:
    SPECS = (LayerSpec(0, 4, 2, 64, 64, 0.1), LayerSpec(1, 4, 2, 64, 64, 0.1, window=128))

    def layout(
        self,
        max_model_len: int = 2048,
        *,
        device: torch.device = CPU,
        reserved: dict[str, int] | None = None,
        free: int | None = None,
        **config: Any,
    ) -> Any:
        settings = EngineConfig(**config)
        kv_format = KVFormat.of(torch.float32)
        page_size = settings.page_size or 16
        return choose_layout(kv_format, self.SPECS, page_size, settings, max_model_len, device, reserved, free)

    def test_default_is_modest_and_explained(self) -> None:
        layout, choice = self.layout()
        full, sliding = (group.num_blocks for group in layout.groups)
        assert full == 64 * 1024 // 16 + 1 and sliding < full
        assert "64 requests" in choice.reason

    def test_one_long_request_fits(self) -> None:
        assert (self.layout(max_model_len=100_000)[0].groups[0].num_blocks - 1) * 16 >= 100_000

    def test_as_many_blocks_as_were_asked_for_can_be_had(self) -> None:
        layout, choice = self.layout(num_blocks=7, page_size=8)
        assert [CacheManager(layout).pools[group].num_usable for group in (0, 1)] == [7, 7]
        assert choice.value == "7" and layout.page_size == 8
        assert [group.block_bytes for group in layout.groups] == [8 * 2 * 128 * 4] * 2

    def test_share_of_the_memory(self) -> None:
        small, large = (self.layout(max_memory_percent=share)[0].groups[0] for share in (0.001, 0.002))
        assert 1.5 < large.num_blocks / small.num_blocks < 3

    def test_hints_are_what_there_is_room_for(self) -> None:
        hints: dict[str, Any] = {"max_prompt_length": 300, "max_generated_length": 200}
        layout, choice = self.layout(**hints, max_requests_per_batch=8)
        # 8 requests of 32 pages, and the safety margin of 15 %.
        assert layout.groups[0].num_blocks - 1 == 302 and "8 requests of 500" in choice.reason
        without = self.layout(**hints, max_requests_per_batch=8, scheduler_type="prefill_first")[0]
        assert without.groups[0].num_blocks - 1 == 256
        assert "64 requests of 500" in self.layout(**hints)[1].reason
        assert (self.layout(9000, **hints, max_requests_per_batch=1)[0].groups[0].num_blocks - 1) * 16 >= 9000

    def test_what_others_take_is_not_had(self) -> None:
        gpu = torch.device("cuda")
        alone = self.layout(device=gpu, free=1 << 24)[0].groups[0].num_blocks
        layout, choice = self.layout(device=gpu, free=1 << 24, reserved={"states": 1 << 22, "a step": 1 << 20})
        assert layout.groups[0].num_blocks < alone * 0.7
        assert "90%" in choice.reason and "less 4.0 MiB for states, less 1.0 MiB for a step" in choice.reason

    # One block of a layer: 16 tokens of 2 heads of 64 + 64 numbers of 4 bytes: 16 KiB.
    def test_one_token_of_one_request_is_the_least(self) -> None:
        gpu = torch.device("cuda")
        least = 2 * 2 * (16 << 10)
        layout, _ = self.layout(device=gpu, free=least, max_memory_percent=1.0)
        assert [group.num_blocks for group in layout.groups] == [2, 2]
        assert CacheManager(layout).max_request_tokens == 17
        with pytest.raises(ConfigError) as refused:
            self.layout(device=gpu, free=least + 1023, max_memory_percent=1.0, reserved={"a step of 256 tokens": 1024})
        for part in ("one token of one request", "1 of 65.0 KiB free", "less 1.0 KiB for a step of 256", "64.0 KiB"):
            assert part in str(refused.value), refused.value


class TestBuild:
    def test_a_step_has_the_threads_that_were_configured(self) -> None:
        seen = []

        def sampler(logits: torch.Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
            seen.append(torch.get_num_threads())
            return argmax_sampler(logits, entries, records)

        before = torch.get_num_threads()
        runner = open_module(tiny("llama"), EngineConfig(native=False, num_blocks=64, num_threads=before + 1),
                                 CallbackSampler(sampler)).runner  # fmt: skip
        scheduler = ManualScheduler(runner)
        scheduler.add(prompt(9), 2)
        scheduler.run()
        assert seen and set(seen) == {before + 1} and torch.get_num_threads() == before

    def test_torch_runner_with_the_real_sampler(self) -> None:
        model = tiny("qwen2")
        opened = open_module(model, EngineConfig(native=False, num_blocks=64))
        runner, choices = opened.runner, opened.choices
        scheduler = ManualScheduler(runner)
        for index in range(3):
            scheduler.add(prompt(9 + index), 6)
        assert scheduler.run() == [generate(model, prompt(9 + index), 6) for index in range(3)]
        sampling = SamplingParams(temperature=1.0, top_p=0.9).resolve(ModelDefaults(VOCAB, 512))
        one = Work(9, prompt(5), 5, 0, 5, ([1],), 1, True, sampling, 3)
        first, second = (execute(runner, [one]).token_ids for _ in range(2))
        assert first == second and first[0] is not None
        assert {"runner", "attention", "page_size", "num_blocks", "parity", "max_model_len"} <= {
            choice.name for choice in choices
        }

    def test_lengths(self) -> None:
        model = tiny("llama")
        assert model_defaults(model).max_model_len == 512
        runner = open_module(model, EngineConfig(native=False, num_blocks=64, max_model_len=100)).runner
        assert runner.max_model_len == 100
        with pytest.raises(ConfigError, match="more than the model"):
            open_module(model, EngineConfig(native=False, max_model_len=513))

    def test_lengths_at_which_the_rotation_changes_are_no_bound(self) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        assert model_defaults(tiny("llama", rope_parameters=rope)).max_model_len == 1024
        factors = [1.0] * 8
        longrope = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
        }
        model = tiny("phi3", rope_parameters=longrope, original_max_position_embeddings=64)
        assert model_defaults(model).max_model_len == 512

    def test_native_that_cannot_be(self) -> None:
        with pytest.raises(ConfigError, match="native=True"):
            open_module(tiny("opt"), EngineConfig(native=True, attention=None, num_blocks=8), argmax_sampler)

    def test_defaults(self) -> None:
        model = tiny("llama")
        model.generation_config.temperature = 0.7
        model.generation_config.do_sample = True
        model.generation_config.eos_token_id = [2, 5]
        defaults = model_defaults(model)
        assert defaults.eos_token_ids == (2, 5) and defaults.vocab_size == VOCAB
        assert defaults.generation["temperature"] == 0.7 and defaults.generation["do_sample"] is True
