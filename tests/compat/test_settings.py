"""Every field of transformers' `ContinuousBatchingConfig` is obeyed, or warned of by name."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from transformers import CompileConfig, ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

import aiocb.compat.transformers as compat
from aiocb.compat.transformers.hosting import with_hints
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError

VALUES: dict[str, Any] = {
    "page_size": 32,
    "num_blocks": 64,
    "max_batch_tokens": 99,
    "max_memory_percent": 0.5,
    "max_requests_per_batch": 3,
    "max_blocks_per_request": 8,
    "allow_block_sharing": False,
    "use_async_batching": True,
    "use_cuda_graph": (True, False),
    "q_padding_interval_size": 32,
    "kv_padding_interval_size": 1024,
    "varlen_compile_config": CompileConfig(),
    "decode_compile_config": CompileConfig(),
    "default_compile_level": 2,
    "scheduler_type": "prefill_first",
    "safety_margin": 0.4,
    "return_logprobs": True,
    "seed": 5,
    "auto_switch_to_flash": False,
    "cpu_offload_space": 2.0,
    "cpu_offload_space_safety_threshold": 0.5,
    "max_queue_size": 9,
    "drop_unsupported_processors": False,
    "disable_nccl_graph_mixing": False,
    "cpu_group_timeout": None,
}
"""Others than the defaults."""
NO_MATTER = {
    "per_request_processors": "requests have parameters of their own whatever it says",
    "use_default_compile_configs": "deprecated: transformers makes default_compile_level of it",
    "max_cached_graphs": "deprecated: transformers itself says that it has no effect",
    "block_size": "deprecated: transformers makes page_size of it",
}


def test_every_field_of_the_reference_is_here() -> None:
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    assert fields == VALUES.keys() | NO_MATTER.keys()


@pytest.mark.parametrize("name", VALUES)
def test_a_field_is_taken_or_warned_of(name: str, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "aiocb"):
        manager = compat.init_continuous_batching(model, None, ContinuousBatchingConfig(**{name: VALUES[name]}))
    warnings = [record.getMessage() for record in caplog.records if record.name == "aiocb"]
    is_taken = getattr(manager.config, name, None) == VALUES[name]
    assert is_taken is not bool(warnings), (is_taken, warnings)
    if not is_taken:
        assert len(warnings) == 1 and name in warnings[0]


def test_what_does_not_matter_says_nothing(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    for value in (True, False):
        manager = compat.init_continuous_batching(model, None, ContinuousBatchingConfig(per_request_processors=value))
        assert manager.config == EngineConfig()
    assert not [record for record in caplog.records if record.name == "aiocb"]


class TestHints:
    def test_they_fill_what_is_open(self) -> None:
        hints = WorkloadHints(max_prompt_length=100, max_generated_length=28, num_requests=6)
        config = with_hints(EngineConfig(), hints)
        assert (config.max_prompt_length, config.max_generated_length, config.max_requests_per_batch) == (100, 28, 6)
        asked = EngineConfig(max_requests_per_batch=2, max_prompt_length=5, max_generated_length=6)
        assert with_hints(asked, hints) == asked
        assert with_hints(EngineConfig(), WorkloadHints(num_requests=5000)).max_requests_per_batch == 1024

    def test_none_of_them_changes_nothing(self) -> None:
        assert with_hints(EngineConfig(), None) == with_hints(EngineConfig(), WorkloadHints()) == EngineConfig()

    def test_half_of_a_length_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        assert with_hints(EngineConfig(), WorkloadHints(max_prompt_length=9)) == EngineConfig()
        assert "together" in caplog.text

    def test_what_makes_no_sense_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="max_prompt_length"):
            with_hints(EngineConfig(), WorkloadHints(max_prompt_length=-1, max_generated_length=3))
        with pytest.raises(ConfigError, match="max_requests_per_batch"):
            with_hints(EngineConfig(), WorkloadHints(num_requests=-1))

    def test_a_manager_plans_with_them(self, model: Any) -> None:
        hints = WorkloadHints(max_prompt_length=40, max_generated_length=24, num_requests=6)
        manager = compat.init_continuous_batching(model, None, EngineConfig(native=False), hints)
        with manager:
            said = {choice.name: choice for choice in manager.describe()}
        assert said["max_requests_per_batch"].value == "6"
        assert "tokens" in said["num_blocks"].reason and manager.config == EngineConfig(native=False)
        manager.destroy()
