"""What a step takes is measured where memory is lent: with a meter that stands for a device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aiocb.config import EngineConfig
from aiocb.engine.limits import make_scheduler
from aiocb.engine.source import Built
from aiocb.errors import ConfigError
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.measure import DeviceMeter, measure_step, meter_of
from aiocb.records import Record
from aiocb.sampling.sampler import Sampler
from aiocb.sampling_params import ModelDefaults
from aiocb.step import StepEntry
from aiocb.text.processor import TextProcessor

from .helpers import VOCAB, ManualScheduler, generate, prompt, tiny


class FakeMeter:
    """A device with so much memory, on which a token of a step takes so many bytes."""

    def __init__(self, free: int, token_bytes: int, error: Exception | None = None) -> None:
        self.num_free, self.token_bytes, self.error = free, token_bytes, error
        self.measured: list[int] = []
        self.num_tokens = 0

    def free(self) -> int:
        return self.num_free

    def peak(self, run: Callable[[], object]) -> int:
        run()
        taken = self.num_tokens * self.token_bytes
        if taken > self.num_free:
            raise self.error or torch.OutOfMemoryError("CUDA out of memory")
        return taken

    def note(self, num_tokens: int) -> None:
        self.measured.append(num_tokens)
        self.num_tokens = num_tokens


@pytest.mark.parametrize(
    ("free", "config", "expected", "measured"),
    [
        (1 << 30, {}, 8192, [8192]),
        (1 << 23, {}, 2048, [8192, 4096, 2048]),  # 8192 tokens take all of it, 4096 more than half of what may be taken
        (1 << 20, {}, 256, [8192, 4096, 2048, 1024, 512, 256]),
        (300 << 10, {}, 256, [8192, 4096, 2048, 1024, 512, 256]),  # more than half, yet not below 256
        (1 << 23, {"max_memory_percent": 0.5}, 2048, [8192, 4096, 2048]),
        (1 << 23, {"max_batch_tokens": 6000}, 6000, [6000]),
        (1 << 30, {"max_batch_tokens": 16}, 16, [16]),
    ],
)
def test_the_budget_is_bounded_by_memory(free: int, config: dict[str, Any], expected: int, measured: list[int]) -> None:
    meter = FakeMeter(free, 1 << 10)
    step = measure_step(meter, EngineConfig(**config), meter.note)
    assert (step.max_tokens, step.num_bytes, meter.measured) == (expected, expected << 10, measured)
    assert ("would take" in step.choice.reason) is (len(measured) > 1)


def test_a_step_that_cannot_be_taken_is_refused() -> None:
    configs: list[dict[str, Any]] = [{}, {"max_batch_tokens": 300}]
    for config in configs:
        meter = FakeMeter(100 << 10, 1 << 10)
        with pytest.raises(ConfigError, match=r"a step of (256|300) tokens takes more.*100.0 KiB are free"):
            measure_step(meter, EngineConfig(**config), meter.note)


def test_a_step_that_fails_otherwise_is_for_others_to_judge() -> None:
    meter = FakeMeter(0, 1, error=RuntimeError("an illegal memory access"))
    step = measure_step(meter, EngineConfig(), meter.note)
    assert (step.max_tokens, step.num_bytes) == (8192, 1 << 30)
    assert "not measured" in step.choice.reason and "illegal" in step.choice.reason


class Steps:
    """What the model was run with, in place of a device's counter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meter: FakeMeter) -> None:
        self.entries: list[Sequence[StepEntry]] = []
        run = ModelAdapter.run

        def noted(
            adapter: ModelAdapter, entries: Any, records: Sequence[Record], *rest: Any, **options: Any
        ) -> torch.Tensor:
            self.entries.append(entries)
            meter.num_tokens = sum(entry.num_new_tokens for entry in entries)
            return run(adapter, entries, records, *rest, **options)

        monkeypatch.setattr(ModelAdapter, "run", noted)


def built_on(meter: FakeMeter, name: str = "llama", **config: Any) -> TorchRunner:
    settings = EngineConfig(native=False, **config)
    return TorchRunner(tiny(name), settings, Sampler(VOCAB), max_model_len=512, meter=meter)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_a_runner_is_measured_before_its_cache_is_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    meter = FakeMeter(4 << 20, 1 << 10)
    steps = Steps(monkeypatch, meter)
    runner = built_on(meter, name, max_memory_percent=1.0, max_requests_per_batch=40)
    largest, last = steps.entries[0], steps.entries[2]
    assert [sum(entry.num_new_tokens for entry in entries) for entries in steps.entries[:3]] == [8192, 4096, 2048]
    assert len(last) == 4 + 39 and len(largest) == 16 + 39, "chunks of the longest request, and rows that decode"
    assert max(entry.num_computed_tokens + entry.num_new_tokens for entry in last) == 512
    assert runner.max_batch_tokens == 2048
    reasons = {choice.name: choice.reason for choice in runner.choices}
    assert "4096 tokens would take 4.0 MiB of 4.0 MiB" in reasons["step_memory"]
    assert "less 2.0 MiB for a step of 2048 tokens" in reasons["num_blocks"]
    size = sum(group.num_blocks * group.block_bytes for group in runner.cache_layout.groups)
    assert size <= 2 << 20
    scheduler = ManualScheduler(runner)
    scheduler.add(prompt(9), 6)
    assert scheduler.run()[0] == generate(runner._model, prompt(9), 6), "the dry step has left nothing behind"
    runner.close()


def test_hints_are_the_longest_request_of_the_measured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = FakeMeter(1 << 30, 1)
    steps = Steps(monkeypatch, meter)
    hints: dict[str, Any] = {"max_prompt_length": 70, "max_generated_length": 30, "num_blocks": 8}
    runner = built_on(meter, max_batch_tokens=64, max_requests_per_batch=4, **hints)
    first = steps.entries[0][0]
    assert (first.num_computed_tokens, first.num_new_tokens) == (39, 61)
    assert [entry.num_new_tokens for entry in steps.entries[0][1:]] == [1, 1, 1]
    runner.close()


def test_the_scheduler_obeys_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = FakeMeter(4 << 20, 1 << 10)
    Steps(monkeypatch, meter)
    runner = built_on(meter, max_memory_percent=1.0)
    defaults = ModelDefaults(VOCAB, 512)
    built = Built(runner, TextProcessor(None), defaults)
    scheduler, _, choices = make_scheduler(EngineConfig(), built)
    assert scheduler.max_batch_tokens == 2048 == scheduler.max_step_tokens
    assert "step_memory" in next(choice.reason for choice in choices if choice.name == "max_batch_tokens")
    asked = EngineConfig(max_batch_tokens=16, max_requests_per_batch=100, max_prefill_chunk=50)
    scheduler, _, choices = make_scheduler(asked, built)
    assert (scheduler.max_batch_tokens, scheduler.max_requests_per_batch, scheduler.max_prefill_chunk) == (16, 16, 16)
    said = {choice.name: choice for choice in choices}
    assert said["max_requests_per_batch"].value == "16" and "configured as 100" in said["max_requests_per_batch"].reason
    assert "configured as 50" in said["max_prefill_chunk"].reason
    runner.close()


def test_on_the_cpu_nothing_is_measured() -> None:
    runner = TorchRunner(tiny("llama"), EngineConfig(native=False), Sampler(VOCAB), max_model_len=512)
    assert runner.max_batch_tokens is None
    assert "step_memory" not in {choice.name for choice in runner.choices}
    scheduler, _, choices = make_scheduler(
        EngineConfig(), Built(runner, TextProcessor(None), ModelDefaults(VOCAB, 512))
    )
    assert scheduler.max_batch_tokens == 128
    assert "time between tokens" in next(choice.reason for choice in choices if choice.name == "max_batch_tokens")
    runner.close()


def test_settings_of_states_are_warned_of_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    runner = TorchRunner(tiny("llama"), EngineConfig(native=False), Sampler(VOCAB), max_model_len=512)
    built = Built(runner, TextProcessor(None), ModelDefaults(VOCAB, 512))
    make_scheduler(EngineConfig(), built)
    assert not caplog.messages
    make_scheduler(EngineConfig(state_interval=64, max_state_memory=1.0), built)
    assert [message.partition(" has no effect")[0] for message in caplog.messages] == [
        "state_interval=64",
        "max_state_memory=1.0",
    ]
    runner.close()


def test_hints_come_together() -> None:
    with pytest.raises(ConfigError, match="together"):
        EngineConfig(max_prompt_length=5)


class DeviceModule:
    """What torch has for each kind of accelerator, with an allocator that keeps what it had."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reserved, self.highest = 100, 5000

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            self.calls.append(name)
            if name == "empty_cache":
                self.reserved = 40
            elif name == "reset_peak_memory_stats":
                self.highest = self.reserved
            results = {"mem_get_info": (7000, 9000), "memory_reserved": self.reserved}
            return {**results, "max_memory_reserved": self.highest}.get(name)

        return call


def test_a_devices_own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    module = DeviceModule()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    meter = meter_of(torch.device("xpu"))
    assert isinstance(meter, DeviceMeter) and meter.free() == 7000

    def step() -> None:
        module.calls.append("the step")
        module.highest = 340

    module.reserved = 100
    assert meter.peak(step) == 300
    at = module.calls.index("the step")
    assert module.calls[at - 2 : at + 2] == ["reset_peak_memory_stats", "memory_reserved", "the step", "synchronize"]
    assert meter_of(torch.device("cpu")) is None and meter_of(torch.device("mps")) is None
