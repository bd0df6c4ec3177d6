"""The accelerator's way on the CPU: twins of the kernels, a device that is late, graphs that run their work again."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import aiocb
from aiocb.attention.varlen import VarlenBackend
from aiocb.config import Choice, EngineConfig
from aiocb.engine.engine import Engine
from aiocb.errors import ConfigError, RequestFailed
from aiocb.model.eager.device_runner import Accelerator, DeviceRunner
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.swap import SwapBuffer
from aiocb.sampling.sampler import Sampler
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import assert_quiescent
from tests.attention import twins
from tests.model import fake_device
from tests.model.fake_device import FakeDevice, accelerator

from .helpers import VOCAB, generate, prompt, tiny

pytestmark = pytest.mark.slow

LONGEST = 128
LENGTHS = (3, 40, 17, 1, 9, 26, 33, 5)
NEW = 10


def settings(**values: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "num_blocks": 48,
            "page_size": 4,
            "max_requests_per_batch": 8,
            "max_batch_tokens": 48,
            "native": False,
            "debug_checks": True,
            **values,
        }
    )


def runner_of(model: Any, machine: Accelerator, **values: Any) -> DeviceRunner:
    return DeviceRunner(model, settings(**values), Sampler(VOCAB), max_model_len=LONGEST, accelerator=machine)


def engine_of(make: Callable[[EngineConfig], Any]) -> Engine:
    return Engine.from_runner(make, ModelDefaults(VOCAB, LONGEST), None, config=settings())


def choices_of(runner: Any) -> dict[str, Choice]:
    return {choice.name: choice for choice in runner.choices}


async def served(
    model: Any, machine: Accelerator, requests: list[dict[str, Any]], **values: Any
) -> tuple[list[Any], DeviceRunner]:
    """All requests at once through a whole engine."""
    made: list[DeviceRunner] = []

    def make(_: EngineConfig) -> DeviceRunner:
        made.append(runner_of(model, machine, **values))
        if isinstance(machine.device, FakeDevice):
            machine.device.is_closed_to_recording = True
        return made[0]

    async with engine_of(make) as engine:
        done = await asyncio.gather(*(engine.generate(**request) for request in requests), return_exceptions=True)
        pipeline = made[0]._pipeline
        await assert_quiescent(engine)
        counts = pipeline
    assert counts is None or not counts._flights
    return done, made[0]


def plain(lengths: tuple[int, ...] = LENGTHS, new: int = NEW) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt(length, number), "max_new_tokens": new, "temperature": 0.0}
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "flash_attention_2"),
        ("llama", "flash_attention_3"),
        ("llama", "varlen"),
        ("gemma3_text", "varlen"),
        ("gemma2", "flash_attention_3"),
        ("gpt_oss", "flash_attention_3"),
        ("gpt_oss", "varlen"),
        ("deepseek_v3", "flash_attention_2"),
    ],
)
@pytest.mark.asyncio
async def test_tokens_are_those_of_generate(name: str, attention: str) -> None:
    model, device = tiny(name), FakeDevice()
    done, runner = await served(model, accelerator(device), plain(), attention=attention, use_cuda_graph=(True, True))
    for request, completion in zip(plain(), done):
        assert list(completion.token_ids) == generate(model, request["prompt"], NEW)
    assert device.num_replays > NEW, "steps were replayed"
    assert device.most_waiting >= 2, "steps were launched ahead"
    assert {choices_of(runner)[one].value for one in ("decode_path", "async_batching")} == {"on"}


@pytest.mark.asyncio
async def test_pages_of_flash_2_are_read_in_place() -> None:
    model, device = tiny("llama"), FakeDevice()
    done, runner = await served(
        model, accelerator(device), plain(), attention="flash_attention_2", page_size=None, num_blocks=16
    )
    assert choices_of(runner)["page_size"].value == "256"
    assert [list(one.token_ids) for one in done] == [generate(model, one["prompt"], NEW) for one in plain()]


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.3, "top_p": 0.8, "seed": 2},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"temperature": 1.1, "min_p": 0.05, "top_k": 40, "top_p": 0.95, "seed": 4},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1, "seed": 5},
]
HISTORY: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 7, "typical_p": 0.7},
    {
        "temperature": 0.0,
        "logits_processors": [lambda tokens, logits: logits.index_fill(0, torch.tensor([tokens[-1] % 7]), 9.0)],
    },
]


@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.asyncio
async def test_sampling_is_that_of_the_host(has_history: bool) -> None:
    model, device = tiny("llama"), FakeDevice()
    parameters = SAMPLED + (HISTORY if has_history else [])
    requests = [
        {"prompt": prompt(5 + number, number), "max_new_tokens": 8 if has_history else 14, **one}
        for number, one in enumerate(parameters)
    ]
    async with engine_of(
        lambda _: TorchRunner(model, settings(attention="sdpa"), Sampler(VOCAB), max_model_len=LONGEST)
    ) as engine:
        expected = await asyncio.gather(*(engine.generate(**request) for request in requests))
    done, runner = await served(model, accelerator(device), requests)
    for index, (got, wanted) in enumerate(zip(done, expected)):
        assert got.token_ids == wanted.token_ids, parameters[index]
    if has_history:
        assert done[7].logprobs is not None
    assert device.most_waiting >= (1 if has_history else 2)


@pytest.mark.asyncio
async def test_steps_that_need_history_wait_and_say_so() -> None:
    model, device = tiny("llama"), FakeDevice()
    made: list[DeviceRunner] = []
    async with engine_of(lambda _: made.append(runner_of(model, accelerator(device))) or made[0]) as engine:  # type: ignore[func-returns-value]
        pipeline = made[0]._pipeline
        assert pipeline is not None
        before, launched, waited = pipeline.num_slow, device.num_launches, device.num_waits
        await engine.generate(prompt(5), max_new_tokens=6)
        assert pipeline.num_slow == before
        # A step is one upload and one transfer back; one more may have been under way when the last token came.
        assert 6 <= device.num_waits - waited <= device.num_launches - launched <= 6 + 2
        await engine.generate(prompt(5), max_new_tokens=6, repetition_penalty=1.2)
        assert pipeline.num_slow >= before + 6 and "history" in pipeline.why_slow


@pytest.mark.asyncio
async def test_a_request_that_has_ended_costs_one_row_at_most() -> None:
    model, device = tiny("llama"), FakeDevice()
    tokens = generate(model, prompt(6), 12)
    stop = tokens[5]
    requests: list[dict[str, Any]] = [
        {"prompt": prompt(6), "max_new_tokens": 12, "temperature": 0.0, "stop_token_ids": [stop]},
        {"prompt": prompt(9), "max_new_tokens": 12, "temperature": 0.0},
    ]
    done, _ = await served(model, accelerator(device), requests)
    assert list(done[0].token_ids) == tokens[: tokens.index(stop) + 1]
    assert list(done[1].token_ids) == generate(model, prompt(9), 12)


@pytest.mark.asyncio
async def test_whoever_leaves_in_the_middle_harms_nobody() -> None:
    model, device = tiny("llama"), FakeDevice()
    made: list[DeviceRunner] = []
    async with engine_of(lambda _: made.append(runner_of(model, accelerator(device))) or made[0]) as engine:  # type: ignore[func-returns-value]

        async def leave(number: int) -> None:
            count = 0
            async for _ in engine.stream(prompt(4 + number, number), max_new_tokens=40, temperature=0.0):
                count += 1
                if count > number % 5:
                    break

        others = [asyncio.create_task(leave(number)) for number in range(24)]
        stays = await asyncio.gather(*(engine.generate(**request) for request in plain((6, 21, 13))))
        await asyncio.gather(*others)
        await assert_quiescent(engine)
    assert [list(one.token_ids) for one in stays] == [generate(model, one["prompt"], NEW) for one in plain((6, 21, 13))]


@pytest.mark.asyncio
async def test_one_that_fails_in_flight_fails_alone() -> None:
    model: Any = tiny("llama")
    device = FakeDevice()
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = math.nan
    requests = [*plain((5, 12)), {"prompt": [9, 77, 11], "max_new_tokens": 8, "temperature": 0.0}]
    requests[0]["prompt"] = [token if token != 77 else 78 for token in requests[0]["prompt"]]
    requests[1]["prompt"] = [token if token != 77 else 78 for token in requests[1]["prompt"]]
    done, _ = await served(model, accelerator(device), requests)
    assert isinstance(done[2], RequestFailed) and "NaN" in str(done[2])
    for request, completion in zip(requests[:2], done):
        if 77 not in (expected := generate(model, request["prompt"], NEW)):
            assert list(completion.token_ids) == expected


@pytest.mark.parametrize("offload", [0.0, 0.001])
@pytest.mark.asyncio
async def test_a_small_cache_preempts_and_everybody_ends(offload: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device, moved, swap_out = tiny("llama"), FakeDevice(), [], SwapBuffer.swap_out

    def spy(self: SwapBuffer, swaps: Any) -> None:
        moved.extend(swaps)
        swap_out(self, swaps)

    monkeypatch.setattr(SwapBuffer, "swap_out", spy)
    requests = plain((30, 28, 25, 22), 20)
    done, runner = await served(model, accelerator(device), requests, num_blocks=26, cpu_offload_space=offload)
    assert (choices_of(runner)["cpu_offload_space"].value == "off") == (offload == 0.0) == (not moved)
    expected = [generate(model, request["prompt"], 20) for request in plain((30, 28, 25, 22))]
    assert [list(one.token_ids) for one in done] == expected


class SmallDevice(FakeDevice):
    """Has memory for small steps only, once there is traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0

    def launch(self, numbers: Any, work: Any) -> Any:
        if self.is_closed_to_recording and len(numbers) > 90:
            self.num_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().launch(numbers, work)


@pytest.mark.asyncio
async def test_steps_without_memory_are_taken_in_smaller_ones() -> None:
    model, device = tiny("llama"), SmallDevice()
    done, runner = await served(model, accelerator(device), plain(), use_async_batching=True, attention="varlen")
    assert choices_of(runner)["async_batching"].value == "on" and device.num_refused > 0
    assert [list(one.token_ids) for one in done] == [generate(model, one["prompt"], NEW) for one in plain()]


@pytest.mark.asyncio
async def test_samples_of_one_prompt_share_its_blocks() -> None:
    model, device = tiny("llama"), FakeDevice()
    made: list[DeviceRunner] = []
    async with engine_of(lambda _: made.append(runner_of(model, accelerator(device))) or made[0]) as engine:  # type: ignore[func-returns-value]
        together = await engine.generate(prompt(11), n=3, max_new_tokens=9, temperature=1.0, seed=4)
        assert isinstance(together, list)
        first = await engine.generate(prompt(11), max_new_tokens=9, temperature=1.0, seed=4)
    assert together[0].token_ids == first.token_ids
    assert len({one.token_ids for one in together}) > 1


@pytest.mark.asyncio
async def test_requests_longer_than_a_table_go_by_the_host() -> None:
    model, device = tiny("llama"), FakeDevice()
    requests = plain((5, 30))
    done, runner = await served(model, accelerator(device), requests, max_blocks_per_request=4)
    assert [list(one.token_ids) for one in done] == [generate(model, one["prompt"], NEW) for one in requests]
    assert "tables of 4 blocks" in choices_of(runner)["decode_path"].reason


def test_hints_are_what_tables_have_room_for() -> None:
    runner = runner_of(tiny("llama"), accelerator(FakeDevice()), max_prompt_length=30, max_generated_length=20)
    assert "tables of 13 blocks" in choices_of(runner)["decode_path"].reason
    runner.close()


class TestSettings:
    def test_nothing_is_prepared_on_the_device(self, caplog: pytest.LogCaptureFixture) -> None:
        device = FakeDevice()
        runner = runner_of(tiny("llama"), accelerator(device), max_blocks_per_request=0)
        assert choices_of(runner)["decode_path"] == ("decode_path", "off", "max_blocks_per_request=0")
        assert device.num_launches == 0 and runner.depth == 1 and not caplog.records

    def test_asked_for_and_not_to_be_had_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        runner = runner_of(
            tiny("llama"), accelerator(), attention="sdpa", max_blocks_per_request=8, use_cuda_graph=True
        )
        assert "sdpa" in choices_of(runner)["decode_path"].reason
        assert {record.args[0] for record in caplog.records} == {"max_blocks_per_request", "use_cuda_graph"}  # type: ignore[index]

    @pytest.mark.parametrize(
        ("values", "recorded"),
        [
            ({}, {1, 2, 4, 8}),
            ({"use_cuda_graph": False}, set()),
            ({"use_cuda_graph": (False, True)}, {1, 2, 4, 8}),
            ({"use_accelerator_graph": (True, False), "q_padding_interval_size": 16}, {16, 32, 64}),
            ({"q_padding_interval_size": 32}, {1, 2, 4, 8, 32, 64}),
        ],
    )
    def test_what_is_recorded(self, values: dict[str, Any], recorded: set[int]) -> None:
        device = FakeDevice()
        runner = runner_of(tiny("llama"), accelerator(device), attention="flash_attention_3", **values)
        pipeline = runner._pipeline
        assert pipeline is not None
        shapes = set() if pipeline.graphs is None else {shape.num_tokens for shape in pipeline.graphs._recorded}
        assert shapes == recorded and device.num_records == len(recorded)

    def test_gathered_keys_are_padded_too(self) -> None:
        runner = runner_of(tiny("llama"), accelerator(), attention="varlen", kv_padding_interval_size=64)
        pipeline = runner._pipeline
        assert pipeline is not None and pipeline.graphs is not None
        keys = {shape.num_keys for shape in pipeline.graphs._recorded}
        assert keys == {(64,), (128,), (256,)}

    def test_steps_may_be_launched_one_by_one(self) -> None:
        device = FakeDevice()
        runner = runner_of(tiny("llama"), accelerator(device), use_async_batching=False)
        assert runner.depth == 1 and choices_of(runner)["async_batching"].reason == "configured"
        assert runner_of(tiny("llama"), accelerator()).depth == 2

    def test_without_flash(self) -> None:
        runner = runner_of(tiny("llama"), accelerator(), auto_switch_to_flash=False)
        attention = choices_of(runner)["attention"]
        assert attention.value == "varlen" and "auto_switch_to_flash=False" in attention.reason
        assert choices_of(runner_of(tiny("llama"), accelerator()))["attention"].value == "flash_attention_3"

    def test_what_a_backend_cannot_do_makes_the_next_one_be_taken(self) -> None:
        backends = {"varlen": fake_device.BACKENDS["varlen"]}
        runner = runner_of(tiny("gemma2"), accelerator(backends=backends))
        attention = choices_of(runner)["attention"]
        assert attention.value == "sdpa" and "soft cap" in attention.reason and "not installed" in attention.reason

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({"default_compile_level": 1}, [{"mode": "default", "dynamic": True}]),
            ({"default_compile_level": 2}, [{"mode": "max-autotune-no-cudagraphs", "dynamic": True}]),
            ({"default_compile_level": 3}, [{"mode": "max-autotune-no-cudagraphs", "dynamic": False}]),
            (
                {"default_compile_level": 3, "decode_compile_config": {"backend": "eager", "dynamic": True}},
                [{"backend": "eager", "dynamic": True}],
            ),
            (
                {"varlen_compile_config": {"backend": "eager", "mode": "default", "options": {"a": 1}}},
                [{"backend": "eager", "options": {"a": 1}}],
            ),
        ],
    )
    def test_what_is_compiled(self, values: dict[str, Any], expected: list[dict[str, Any]]) -> None:
        asked, calls = [], []

        def compiler(model: Any, **options: Any) -> Any:
            asked.append(options)

            def call(**inputs: Any) -> Any:
                calls.append(inputs["input_ids"].shape[1])
                return model(**inputs)

            return call

        runner = runner_of(tiny("llama"), accelerator(compiler=compiler), **values)
        assert asked == expected and calls
        is_varlen = "varlen_compile_config" in values
        assert all((count > 8) == is_varlen for count in calls if count not in (6, 13))
        assert choices_of(runner)["compile"].value.startswith("varlen" if is_varlen else "decode")

    def test_fields_that_no_compile_config_has_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="speed"):
            runner_of(tiny("llama"), accelerator(), decode_compile_config={"speed": 2})

    def test_the_settings_of_transformers_are_taken(self) -> None:
        from transformers import CompileConfig

        asked = []

        def compiler(model: Any, **options: Any) -> Any:
            asked.append(options)
            return model

        runner_of(tiny("llama"), accelerator(compiler=compiler), decode_compile_config=CompileConfig(dynamic=True))
        assert asked == [{"fullgraph": False, "dynamic": True, "backend": "inductor", "mode": "reduce-overhead"}]

    @pytest.mark.parametrize("values", [{"use_cuda_graph": 1}, {"use_cuda_graph": (True,)}, {"use_async_batching": 2}])
    def test_switches_are_checked(self, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(values))):
            EngineConfig(**values)

    def test_on_a_cpu_they_are_refused_by_name(self) -> None:
        model = tiny("llama")
        with pytest.raises(ConfigError, match="use_async_batching=True needs a CUDA device"):
            aiocb.Engine(model, config=EngineConfig(use_async_batching=True))
        with pytest.raises(ConfigError, match="max_blocks_per_request=4"):
            aiocb.Engine(model, config=EngineConfig(max_blocks_per_request=4))
        aiocb.Engine(model, config=EngineConfig(use_cuda_graph=False, max_blocks_per_request=0))


class BrokenKernel:
    """A twin that goes wrong in one way."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __call__(self, *args: Any, **options: Any) -> Any:
        out = twins.varlen_attn(*args, **options)
        if self._how == "raises":
            raise RuntimeError("no kernel image is available")
        if self._how == "NaN":
            return out * math.nan
        if self._how == "all":
            return out * 1.5
        assert self._how == "device"
        return out * 1.5 if args[6] == LONGEST else out  # only the device bounds rows by its tables


def with_varlen(kernel: Any) -> dict[str, Any]:
    return {"varlen": lambda: fake_device._on_cpu(VarlenBackend(kernel))}


class LateDevice(FakeDevice):
    """Brings back the result of the step before, once two are under way."""

    def launch(self, numbers: Any, work: Any) -> Any:
        is_late = len(self.queue) > 0
        ticket = super().launch(numbers, work)
        if is_late:
            done = ticket.wait
            ticket.wait = lambda: (done() + 1) % VOCAB  # type: ignore[method-assign]
        return ticket


class ForgetfulDevice(FakeDevice):
    """Replays a graph that does nothing."""

    def record(self, work: Callable[[], Tensor]) -> Any:
        recording, result = super().record(work)
        recording.replay = lambda: None  # type: ignore[method-assign]
        return recording, result


def refuse_to_record() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


class TestSelfCheck:
    @pytest.mark.parametrize("how", ["raises", "NaN", "all"])
    @pytest.mark.asyncio
    async def test_attention_that_is_wrong_is_not_taken(self, how: str) -> None:
        model = tiny("llama")
        done, runner = await served(model, accelerator(backends=with_varlen(BrokenKernel(how))), plain((4, 19)))
        attention = choices_of(runner)["attention"]
        assert attention.value == "sdpa" and "not varlen" in attention.reason
        assert [list(one.token_ids) for one in done] == [generate(model, one["prompt"], NEW) for one in plain((4, 19))]

    def test_memory_of_what_is_not_taken_is_free_for_the_next(self) -> None:
        first: list[weakref.ref[Tensor]] = []

        class Wrong(VarlenBackend):
            name = "flash_attention_3"

            def allocate(self, *args: Any) -> Any:
                storage = super().allocate(*args)
                first.append(weakref.ref(storage.key))
                return storage

        class Right(VarlenBackend):
            def allocate(self, *args: Any) -> Any:
                assert len(first) == 2 and not any(pages() is not None for pages in first)
                return super().allocate(*args)

        backends = {
            "flash_attention_3": lambda: fake_device._on_cpu(Wrong(BrokenKernel("all"))),
            "varlen": lambda: fake_device._on_cpu(Right(twins.varlen_attn)),
        }
        assert choices_of(runner_of(tiny("llama"), accelerator(backends=backends)))["attention"].value == "varlen"

    def test_attention_that_was_asked_for_is_refused_instead(self) -> None:
        with pytest.raises(ConfigError, match="differ"):
            runner_of(tiny("llama"), accelerator(backends=with_varlen(BrokenKernel("all"))), attention="varlen")

    @pytest.mark.asyncio
    async def test_a_decode_path_that_is_wrong_is_switched_off(self) -> None:
        model = tiny("llama")
        machine = accelerator(backends=with_varlen(BrokenKernel("device")))
        runner = runner_of(model, machine)
        assert "differ" in choices_of(runner)["decode_path"].reason and runner.depth == 1

    @pytest.mark.parametrize(
        ("device", "reason"),
        [(FakeDevice(refuse_to_record), "capturing"), (ForgetfulDevice(), "differ")],
        ids=["raises", "wrong"],
    )
    @pytest.mark.asyncio
    async def test_graphs_that_are_wrong_are_switched_off(self, device: FakeDevice, reason: str) -> None:
        model = tiny("llama")
        done, runner = await served(model, accelerator(device), plain((4, 19)))
        graphs = choices_of(runner)["cuda_graph"]
        assert graphs.value == "off" and reason in graphs.reason
        assert choices_of(runner)["async_batching"].value == "on"
        assert [list(one.token_ids) for one in done] == [generate(model, one["prompt"], NEW) for one in plain((4, 19))]

    def test_steps_that_overlap_wrongly_are_kept_apart(self) -> None:
        runner = runner_of(tiny("llama"), accelerator(LateDevice()))
        overlap = choices_of(runner)["async_batching"]
        assert overlap.value == "off" and "differ" in overlap.reason and runner.depth == 1

    @pytest.mark.parametrize("fails_at", ["compiling", "running", "wrong"])
    @pytest.mark.asyncio
    async def test_what_does_not_compile_runs_as_it_is(self, fails_at: str) -> None:
        def compiler(model: Any, **_: Any) -> Any:
            if fails_at == "compiling":
                raise RuntimeError("no compiler here")

            def call(**inputs: Any) -> Any:
                if fails_at == "running":
                    raise RuntimeError("graph break")
                made = model(**inputs)
                made.logits = made.logits.flip(-1)
                return made

            return call

        model = tiny("llama")
        done, runner = await served(model, accelerator(compiler=compiler), plain((4, 19)), default_compile_level=1)
        choice = choices_of(runner)["compile"]
        assert choice.value == "off" and "not decode" in choice.reason
        assert [list(one.token_ids) for one in done] == [generate(model, one["prompt"], NEW) for one in plain((4, 19))]

    def test_a_cache_too_small_to_try_it_in(self) -> None:
        runner = runner_of(tiny("llama"), accelerator(), num_blocks=2)
        assert "too small" in choices_of(runner)["decode_path"].reason

    def test_states_and_foreign_samplers_stay_on_the_host(self) -> None:
        class Own(Sampler):
            pass

        runner = DeviceRunner(tiny("llama"), settings(), Own(VOCAB), max_model_len=LONGEST, accelerator=accelerator())
        assert "sampler" in choices_of(runner)["decode_path"].reason


@pytest.mark.asyncio
async def test_weights_that_have_changed_are_seen_by_what_was_recorded() -> None:
    model, other, device = tiny("llama"), tiny("llama", seed=5), FakeDevice()
    runner = runner_of(model, accelerator(device))
    records = device.num_records
    model.load_state_dict(other.state_dict())
    runner.reload_weights()
    assert device.num_records == 2 * records
    async with engine_of(lambda _: runner) as engine:
        done = await engine.generate(**plain((9,))[0])
    assert list(done.token_ids) == generate(other, prompt(9, 0), NEW)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.asyncio
async def test_random_lives_end_as_on_the_host(seed: int) -> None:
    """Lengths, sampling, ends and leaving at random, in too small a cache: whoever stays gets his own tokens."""
    model, device, random = tiny("llama"), FakeDevice(), Random(seed)
    requests: list[dict[str, Any]] = []
    for number in range(20):
        one: dict[str, Any] = {"prompt": prompt(random.randint(1, 34), number), "max_new_tokens": random.randint(1, 16)}
        one |= random.choice([{"temperature": 0.0}, {"temperature": 1.0, "seed": number}, HISTORY[0], HISTORY[1]])
        if random.random() < 0.3:
            one["stop_token_ids"] = [random.randrange(VOCAB) for _ in range(8)]
        requests.append(one)
    leaves = {number: random.randint(1, 5) for number in random.sample(range(20), 6)}

    async def read(engine: Engine, number: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        async with engine.stream(**requests[number]) as stream:
            async for chunk in stream:
                tokens += chunk.token_ids
                if len(tokens) >= leaves.get(number, 99):
                    return ()
        return tokens

    outputs = []
    for make in (
        lambda _: TorchRunner(model, settings(attention="sdpa"), Sampler(VOCAB), max_model_len=LONGEST),
        lambda _: runner_of(model, accelerator(device), num_blocks=30, use_cuda_graph=(True, True)),
    ):
        async with engine_of(make) as engine:
            outputs.append(await asyncio.gather(*(read(engine, number) for number in range(20))))
            await assert_quiescent(engine)
    assert outputs[0] == outputs[1]
    assert device.most_waiting >= 2, "steps were launched ahead"
