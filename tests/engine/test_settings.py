"""Every field of `EngineConfig` does something that a test observes, or is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from aiocb.attention.base import KVFormat, LayerSpec
from aiocb.config import EngineConfig
from aiocb.engine.limits import make_scheduler
from aiocb.engine.prepare import Limits
from aiocb.engine.settings import refuse_unbuilt
from aiocb.engine.source import Built
from aiocb.errors import ConfigError
from aiocb.model.kv import choose_layout, choose_page_size
from aiocb.sampling_params import ModelDefaults
from aiocb.scheduler.scheduler import Scheduler
from aiocb.step import CacheLayout
from aiocb.testing import FakeRunner
from aiocb.text.processor import TextProcessor

from .helpers import running

TESTS = Path(__file__).parents[1]


class Sized(NamedTuple):
    """What a life is made of."""

    scheduler: Scheduler
    limits: Limits


def size(**config: Any) -> Sized:
    built = Built(FakeRunner(), TextProcessor(None), ModelDefaults(260, 4096))
    scheduler, limits, _ = make_scheduler(EngineConfig(**config), built)
    return Sized(scheduler, limits)


def lay_out(**config: Any) -> CacheLayout:
    settings = EngineConfig(**config)
    page_size, _ = choose_page_size(settings, 16, "a test")
    specs = [LayerSpec(0, 4, 2, 64, 64, 0.1)]
    return choose_layout(KVFormat("float32", 32), specs, page_size, settings, 2048, torch.device("cpu"), free=1 << 30)[
        0
    ]


IN_THE_SCHEDULER: dict[str, tuple[Any, Callable[[Sized], Any]]] = {
    "max_batch_tokens": (100, lambda made: made.scheduler.max_batch_tokens),
    "max_requests_per_batch": (7, lambda made: made.scheduler.max_requests_per_batch),
    "max_prefill_chunk": (9, lambda made: made.scheduler.max_prefill_chunk),
    "target_itl": (0.25, lambda made: made.scheduler.pace and made.scheduler.pace.target_itl),
    "scheduler_type": ("priority", lambda made: made.scheduler.scheduler_type),
    "safety_margin": (0.5, lambda made: made.scheduler.safety_margin),
    "allow_block_sharing": (False, lambda made: made.scheduler.cache.sharing),
    "max_model_len": (33, lambda made: made.limits.defaults.max_model_len),
    "return_logprobs": (True, lambda made: made.limits.return_logprobs),
    "max_prompt_characters": (11, lambda made: made.limits.max_prompt_characters),
    "jump_ahead": (False, lambda made: made.scheduler._planner._jumps),
    "max_request_strings": (12, lambda made: made.limits.max_request_strings),
}
IN_THE_CACHE: dict[str, tuple[dict[str, Any], Callable[[CacheLayout], Any], Any]] = {
    "page_size": ({"page_size": 64}, lambda layout: layout.page_size, 64),
    "num_blocks": ({"num_blocks": 5}, lambda layout: layout.groups[0].num_blocks - 1, 5),
    # One page of 16 tokens, 2 heads and 128 numbers of 4 bytes: 16 KiB.
    "max_memory_percent": (
        {"max_memory_percent": 0.25}, lambda layout: layout.groups[0].num_blocks, (1 << 28) // (16 << 10),
    ),
    "max_prompt_length": (
        {"max_prompt_length": 3000, "max_generated_length": 200, "max_requests_per_batch": 2, "safety_margin": 0.0},
        lambda layout: (layout.groups[0].num_blocks - 1) * 16, 2 * 2048,
    ),
    "max_generated_length": (
        {"max_prompt_length": 30, "max_generated_length": 2, "max_requests_per_batch": 100, "safety_margin": 0.0},
        lambda layout: (layout.groups[0].num_blocks - 1) * 16, 100 * 32,
    ),
}  # fmt: skip
ELSEWHERE = {
    "cpu_offload_space": "model/test_swap.py::test_each_group_has_its_share",
    "cpu_offload_space_safety_threshold": "model/test_swap.py::test_more_than_is_safe_is_cut_with_a_warning",
    "state_interval": "model/test_states.py::test_the_interval_follows_the_size",
    "max_state_memory": "model/test_states.py::test_slots_for_requests_and_for_snapshots",
    "target_ttft": "engine/test_settings.py::test_time_bounds_steps_where_it_is_asked_to",
    "speculation": "e2e/test_speculation.py::test_outputs_are_those_without",
    "num_speculative_tokens": "e2e/test_speculation.py::test_outputs_are_those_without",
    "max_queue_size": "engine/test_queue.py::test_a_full_queue_refuses_when_asked_to",
    "tool_parser": "engine/test_tools.py::test_a_parser_may_be_chosen",
    "reasoning_parser": "engine/test_tools.py::test_reasoning_may_stay_in_the_text",
    "seed": "engine/test_outputs.py::test_unseeded_requests_differ_and_an_engine_seed_repeats_them",
    "debug_checks": "engine/test_settings.py::test_every_step_is_checked_where_that_is_asked_for",
    "attention": "model/test_snapshot.py::test_other_settings_take_the_whole_way",
    "num_threads": "model/test_parts.py::test_a_step_has_the_threads_that_were_configured",
    "native": "model/test_parts.py::test_native_that_cannot_be",
    "freeze_gc": "engine/test_lives.py::test_every_life_says_once_what_it_chose",
    "start_timeout": "engine/test_lives.py::test_who_waits_too_long_is_told_for_whom",
    "cpu_group_timeout": "parallel/test_processes.py::test_a_process_that_is_lost_ends_all_streams",
    "tracing": "engine/test_tracing.py::test_it_is_switched_by_the_setting",
    "latency_buckets": "serve/test_metrics.py::test_buckets_are_the_operator_s",
    "hang_timeout": "engine/test_life.py::test_a_step_that_wedges_is_seen",
    # Observed through the interface of transformers, for which they are there.
    "auto_switch_to_flash": "compat/test_generate_batch.py::test_attention_is_kept_when_asked",
    "drop_unsupported_processors": "compat/test_generate_batch.py::test_what_cannot_be_honoured",
}
REFUSED: dict[str, Any] = {"per_request_processors": False}
OF_ACCELERATORS: dict[str, Any] = {
    "use_cuda_graph": True,
    "q_padding_interval_size": 32,
    "kv_padding_interval_size": 1024,
    "use_async_batching": True,
    "default_compile_level": 1,
    "varlen_compile_config": {"dynamic": True},
    "decode_compile_config": {"dynamic": True},
    "max_blocks_per_request": 8,
}
"""Refused on a CPU; what each does on a device is observed in tests/model/test_device_runner.py."""


def test_time_bounds_steps_where_it_is_asked_to() -> None:
    pace = size(target_itl=0.1, target_ttft=2.0).scheduler.pace
    assert pace is not None and (pace.target_itl, pace.target_ttft) == (0.1, 2.0)
    assert size().scheduler.pace is None  # not the native kernels
    assert size(target_itl=None).scheduler.pace is None
    for wrong in (0.0, -1.0, float("nan"), "fast"):
        with pytest.raises(ConfigError, match="target_itl"):
            EngineConfig(target_itl=wrong)  # type: ignore[arg-type]


def test_every_field_is_in_one_table() -> None:
    listed = [*IN_THE_SCHEDULER, *IN_THE_CACHE, *ELSEWHERE, *REFUSED, *OF_ACCELERATORS]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(EngineConfig))


@pytest.mark.parametrize("name", IN_THE_SCHEDULER)
def test_what_a_life_is_made_of(name: str) -> None:
    value, look = IN_THE_SCHEDULER[name]
    assert look(size(**{name: value})) == value != look(size())


@pytest.mark.parametrize("name", IN_THE_CACHE)
def test_what_the_cache_is_made_of(name: str) -> None:
    config, look, expected = IN_THE_CACHE[name]
    assert look(lay_out(**config)) == expected != look(lay_out())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_test_that_observes_it_is_there(name: str) -> None:
    file, _, test = ELSEWHERE[name].partition("::")
    source = (TESTS / file).read_text(encoding="utf-8")
    assert re.search(rf"def {test}", source)
    assert name in source or file.startswith("compat/")


@pytest.mark.parametrize("name", [*REFUSED, *OF_ACCELERATORS])
def test_what_cannot_be_obeyed_is_refused_by_name(name: str) -> None:
    config = EngineConfig(**{name: {**REFUSED, **OF_ACCELERATORS}[name]})
    with pytest.raises(ConfigError, match=name):
        refuse_unbuilt(config, "cpu")
    if name in OF_ACCELERATORS:
        assert refuse_unbuilt(config, "cuda") is config
        assert name in (TESTS / "model" / "test_device_runner.py").read_text(encoding="utf-8")


def test_the_defaults_are_refused_nowhere() -> None:
    for device_type in ("cpu", "cuda", None):
        assert refuse_unbuilt(EngineConfig(), device_type) == EngineConfig()


@pytest.mark.parametrize("is_asked_for", [True, False])
async def test_every_step_is_checked_where_that_is_asked_for(
    is_asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Scheduler] = []
    monkeypatch.setattr(Scheduler, "check_invariants", lambda self: checked.append(self))
    async with running(config=EngineConfig(debug_checks=is_asked_for)) as setup:
        await setup.engine.generate([1, 2], max_new_tokens=5)
        assert (len(checked) >= 5) is is_asked_for
