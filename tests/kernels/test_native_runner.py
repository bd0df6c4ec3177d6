"""What the native runner leaves to the sampler, what it does itself, and how it follows changed weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import aiocb
from aiocb.errors import ConfigError, RequestFailed
from aiocb.kernels import Library, NativeModel
from aiocb.kernels.interface import StepArguments
from aiocb.model.native.runner import NativeRunner
from aiocb.model.native.sampling import NativeSampler
from aiocb.records import Record
from aiocb.sampling import Sampler
from aiocb.sampling_params import SamplingParams
from aiocb.step import BlockCopy, StepEntry, StepPlan, StepResult
from tests.kernels.helpers import MiniScheduler, Request
from tests.kernels.test_families import make, runner_of
from tests.sampling.helpers import params
from tests.steps import Work, execute

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


class Spy(Sampler):
    """A sampler that remembers what it was shown; its token is always 1."""

    def __init__(self) -> None:
        super().__init__(131)
        self.steps: list[tuple[torch.Tensor, list[int]]] = []
        self.num_forgotten = 0

    def __call__(self, logits: torch.Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        assert [entry.request_id for entry in entries] == [record.request_id for record in records]
        self.steps.append((logits.clone(), [entry.request_id for entry in entries]))
        return StepResult([(1,) if entry.is_sampled else () for entry in entries])

    def forget(self) -> None:
        self.num_forgotten += 1


def entries_of(runner: NativeRunner, *samplings: SamplingParams | None) -> list[Work]:
    scheduler = MiniScheduler(runner)
    entries = [
        scheduler.entry(Request(i, prompt, 1), len(prompt)) for i, prompt in enumerate(PROMPTS[: len(samplings)])
    ]
    return [
        entry if sampling is None else entry._replace(sampling=sampling)
        for entry, sampling in zip(entries, samplings, strict=True)
    ]


def test_only_what_is_not_plain_gets_logits(library: Library) -> None:
    model, spy = make("llama"), Spy()
    runner = runner_of(model, library=library)
    runner._sampler = spy
    sampled = params(131, temperature=1.0)
    entries = entries_of(runner, None, sampled, None)
    plain = params(131, temperature=0.0)
    others = [entry._replace(request_id=10 + at, sampling=plain) for at, entry in enumerate(entries)]
    greedy = execute(runner, others).token_ids
    assert not spy.steps
    result = execute(runner, entries)
    assert list(result.token_ids) == [greedy[0], 1, greedy[2]]
    ((logits, request_ids),) = spy.steps
    assert request_ids == [1]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    runner.close()


def test_prompt_rows_go_to_the_sampler(library: Library) -> None:
    """Several rows of one entry come in order; one row that is not sampled is no argmax."""
    model, spy = make("llama"), Spy()
    runner = runner_of(model, library=library)
    runner._sampler = spy
    entries = entries_of(runner, None, None, None)
    entries[0] = entries[0]._replace(num_logits=3)
    entries[2] = entries[2]._replace(num_logits=1, is_sampled=False, sampling=params(131, prompt_logprobs=0))
    result = execute(runner, entries)
    assert result.token_ids[0] == 1
    assert result.token_ids[1] not in (None, 1)
    assert result.token_ids[2] is None
    ((logits, request_ids),) = spy.steps
    assert request_ids == [0, 2]
    with torch.no_grad():
        expected = torch.cat(
            [model(torch.tensor([PROMPTS[0]])).logits[0, 1:], model(torch.tensor([PROMPTS[2]])).logits[0, -1:]]
        )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    runner.close()


def test_closed_requests_are_forgotten_by_runner_and_sampler(library: Library) -> None:
    spy = Spy()
    runner = runner_of(make("llama"), library=library)
    runner._sampler = spy
    (work,) = entries_of(runner, None)
    runner.submit(StepPlan((work.entry(),), work.num_new_tokens, (work.opened(),)))
    assert len(runner._records) == 1 and spy.num_forgotten == 0
    assert runner.submit(StepPlan((), 0, closed=(work.request_id,))) == StepResult(())
    assert len(runner._records) == 0 and spy.num_forgotten == 1
    runner.submit(StepPlan((work.entry(),), work.num_new_tokens, (work.opened(),)))
    runner.release()
    assert len(runner._records) == 0 and spy.num_forgotten == 2
    runner.close()


def test_a_record_grows_with_what_was_returned(library: Library) -> None:
    """Steady decoding names neither tokens nor blocks."""
    model = make("llama")
    runner = runner_of(model, library=library)
    (work,) = entries_of(runner, None)
    tokens = [*work.tokens]
    plan = StepPlan((work.entry(),), work.num_new_tokens, (work.opened(),))
    for _ in range(5):
        tokens += runner.collect(runner.submit(plan)).token_ids[0]
        plan = StepPlan((StepEntry(work.request_id, len(tokens) - 1, 1, 1, True),), 1)
    ids = torch.tensor([work.tokens])
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tokens == ids[0].tolist()
    runner.close()


def test_one_nan_among_the_logits_fails_the_request(library: Library, instruction_set: str) -> None:
    model = make("llama")
    with torch.no_grad():
        model.lm_head.weight[130] = float("nan")  # the last column of an uneven panel
    runner = runner_of(model, library=library, instruction_set=instruction_set, checks_parity=False)
    result = execute(runner, entries_of(runner, None, None, None))
    assert result.errors is not None
    assert len(result.errors) == 3
    assert all("NaN" in str(error) and isinstance(error, RequestFailed) for error in result.errors.values())
    assert list(result.token_ids) == [None] * 3
    runner.close()


def test_tokens_are_selected_in_native_code(library: Library) -> None:
    model = make("llama")
    runner = runner_of(model, library=library)
    assert type(runner._sampler) is NativeSampler
    runner.close()
    spy = Spy()
    runner = runner_of(model, library=library, sampler=spy)
    assert runner._sampler is spy
    runner.close()


@pytest.mark.parametrize("name", ["llama", "qwen2", "starcoder2", "qwen2_moe-mixed"])  # biases, plain MLPs, experts
def test_weights_are_read_again(library: Library, name: str) -> None:
    model = make(name)
    runner = runner_of(model, library=library)
    entries = entries_of(runner, None, None, None)
    spy = Spy()
    runner._sampler = spy
    logged = [entry._replace(num_logits=entry.num_new_tokens) for entry in entries]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.7)
    runner.reload_weights()
    execute(runner, logged)
    fresh = runner_of(model, library=library)
    other = Spy()
    fresh._sampler = other
    execute(fresh, logged)
    assert torch.equal(spy.steps[0][0], other.steps[0][0])
    fresh.close()
    with torch.no_grad():
        model.resize_token_embeddings(140)
    with pytest.raises(ConfigError, match="shape"):
        runner.reload_weights()
    runner.close()


def test_freed_weights_are_not_read_again(library: Library) -> None:
    runner = runner_of(make("llama"), library=library, is_owned=True)
    before = execute(runner, entries_of(runner, None, None)).token_ids
    assert runner._module is None
    runner.reload_weights()
    assert execute(runner, entries_of(runner, None, None)).token_ids == before
    runner.close()


CONFIG: dict[str, Any] = {"native": True, "num_threads": 1, "debug_checks": True, "seed": 0}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": 2, "logprobs_mode": "processed"},
    {"temperature": 1.2, "top_k": 20, "seed": 3, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "min_p": 0.05, "seed": 4, "prompt_logprobs": 1},
]


async def outputs_of(model: Any, together: bool, **options: Any) -> tuple[list[aiocb.Completion], int]:
    prompts = [[5 + n, *range(20, 30 + 3 * n)] for n in range(len(SETTINGS))]
    async with aiocb.Engine(model, config=aiocb.EngineConfig(**CONFIG, **options)) as engine:
        assert any(choice.name == "runner" and choice.value == "native" for choice in engine.describe())
        calls = [
            engine.generate(prompt, max_new_tokens=24, ignore_eos=True, **setting)
            for prompt, setting in zip(prompts, SETTINGS, strict=True)
        ]
        found = await asyncio.gather(*calls) if together else [await call for call in calls]
        return found, engine.stats().num_preemptions


@pytest.mark.asyncio
async def test_seeded_requests_repeat_alone_together_and_preempted(library: Library) -> None:
    model = make("llama", torch.bfloat16)
    alone, _ = await outputs_of(model, False)
    together, _ = await outputs_of(model, True)
    preempted, count = await outputs_of(model, True, num_blocks=4, max_batch_tokens=24, safety_margin=0.0)
    assert count > 0
    assert len({tuple(one.token_ids) for one in alone}) == len(alone)
    large_pages, _ = await outputs_of(model, True, page_size=48)
    for others in (together, preempted, large_pages):
        assert [one.token_ids for one in others] == [one.token_ids for one in alone]
        assert [one.logprobs for one in others] == [one.logprobs for one in alone]


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.asyncio
async def test_steady_decode_sends_no_tables(library: Library, monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    """Pages are named when a block begins, by the kernels' own count, and never again."""
    sent = []
    step = NativeModel.step

    def recorded(self: NativeModel, arguments: StepArguments) -> None:
        sent.append(arguments.num_new_blocks)
        step(self, arguments)

    config = aiocb.EngineConfig(**CONFIG, num_blocks=20, page_size=page_size)
    async with aiocb.Engine(make("gemma3"), config=config) as engine:
        monkeypatch.setattr(NativeModel, "step", recorded)
        await engine.generate(list(range(20, 45)), max_new_tokens=40, temperature=0.0, ignore_eos=True)
    pages = page_size // 16
    begun = [pages * (length % page_size == 1) for length in range(26, 25 + 40)]
    assert sent == [-(-25 // page_size) * pages, *begun]


@pytest.mark.asyncio
async def test_a_pause_may_change_a_users_model(library: Library) -> None:
    model = make("llama", torch.bfloat16)
    async with aiocb.Engine(model, config=aiocb.EngineConfig(**CONFIG)) as engine:
        before = await engine.generate([5, 6, 7], max_new_tokens=8, temperature=0.0, ignore_eos=True)
        async with engine.pause() as paused:
            assert paused is model
            with torch.no_grad():
                model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        after = await engine.generate([5, 6, 7], max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert after.token_ids[0] == 130 - before.token_ids[0]


@pytest.mark.asyncio
async def test_a_model_whose_weights_were_taken_over_is_none(library: Library, tmp_path: Any) -> None:
    make("llama", torch.bfloat16).save_pretrained(tmp_path)
    for native in (True, False):
        engine = aiocb.Engine.from_pretrained(str(tmp_path), config=aiocb.EngineConfig(**CONFIG | {"native": native}))
        async with engine:
            before = await engine.generate([5, 6, 7], max_new_tokens=8, temperature=0.0, ignore_eos=True)
            async with engine.pause() as paused:
                assert (paused is None) is native
            after = await engine.generate([5, 6, 7], max_new_tokens=8, temperature=0.0, ignore_eos=True)
            assert after.token_ids == before.token_ids


@pytest.mark.asyncio
async def test_it_starts_whatever_the_default_type_of_torch_is() -> None:
    model, before = make("llama"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        async with aiocb.Engine(model, config=aiocb.EngineConfig(num_blocks=8)) as engine:
            runner = {choice.name: choice for choice in engine.describe()}["runner"]
            await engine.generate(PROMPTS[0], temperature=0.0, max_new_tokens=3, logprobs=1)
    finally:
        torch.set_default_dtype(before)
    assert runner.value == "native", runner.reason


def test_blocks_are_copied_after_a_step_and_without_one(library: Library) -> None:
    runner = runner_of(make("llama"), library=library)
    [work] = entries_of(runner, None)
    [[block]] = work.block_tables
    first, second = [number for number in (1, 2, 3) if number != block][:2]
    plan = StepPlan((work.entry(),), 4, (work.opened(),), copies_after=(BlockCopy(0, block, first),))
    runner.submit(plan)
    runner.submit(StepPlan((), 0, copies_after=(BlockCopy(0, first, second),)))
    [group] = runner.cache_layout.groups
    read = [np.empty(group.block_bytes, np.uint8) for _ in range(3)]
    for data, number in zip(read, (block, first, second), strict=True):
        runner.native.read_block(0, number, data)
    assert read[0].any() and all((data == read[0]).all() for data in read)
    runner.close()
