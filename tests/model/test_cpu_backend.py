"""Native attention and packed linears under any model: tokens equal to `generate`, rows that do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from aiocb.attention import create_backend
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import KernelUnavailable, load
from aiocb.model.eager.runner import TorchRunner
from aiocb.records import Record
from aiocb.step import StepEntry, StepResult
from tests.steps import CallbackSampler, Work, described, execute

from .helpers import GREEDY, ManualScheduler, argmax_sampler, generate, open_module, prompt, tiny

pytestmark = pytest.mark.slow

NUM_NEW = 10
LENGTHS = (5, 19, 35, 7)
MODELS = ("mixtral", "gpt_oss", "cohere2", "phi", "opt", "gpt_neox", "gemma2", "gpt2", "mistral")
# Not mixtral and gpt_oss in fp32: their experts and routers are not linears, and torch computes those by batch size.
BIT_EQUAL = ("cohere2", "phi", "opt", "gpt_neox", "gpt2", "gemma2")


@pytest.fixture(scope="module", autouse=True)
def _needs_kernels() -> None:
    loaded = load()
    if isinstance(loaded, KernelUnavailable):
        pytest.skip(loaded.reason)


def build(model: PreTrainedModel, sampler: Any = argmax_sampler, **config: Any) -> TorchRunner:
    values = {"num_blocks": 64, **config}
    return TorchRunner(model, EngineConfig(**values), sampler, max_model_len=512)


def run(runner: TorchRunner, *prompts: list[int], num_new: int = NUM_NEW, **options: Any) -> list[list[int]]:
    scheduler = ManualScheduler(runner, **options)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, num_new, start_step=index)
    return scheduler.run()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_generate(name: str) -> None:
    model = tiny(name)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [generate(model, tokens, NUM_NEW) for tokens in prompts]
    runner = build(model)
    assert described(runner)["attention"].startswith("cpu")
    assert described(runner)["linears"].startswith("native")
    assert run(runner, prompts[0]) == expected[:1]
    assert run(runner, *prompts) == expected
    assert run(runner, *prompts, chunk=6, budget=13) == expected
    runner.close()


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_lengths_around_the_window(name: str) -> None:
    model = tiny(name, sliding_window=24)
    runner = build(model)
    for length in (15, 16, 23, 24, 25, 40):
        for chunk in (7, 1 << 30):
            assert run(runner, prompt(length), chunk=chunk)[0] == generate(model, prompt(length), NUM_NEW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (20, None, True), (None, 3.0, True)])
def test_attention_agrees_with_the_written_out_one(
    dtype: torch.dtype, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    import numpy as np

    from aiocb.attention.base import Attention, GroupTables, LayerSpec, StepBatch

    # Two decodes and a chunk; heads in groups of three, tables scattered, the first pages of the window's rows unseen.
    spec = LayerSpec(0, 6, 2, 32, 32, 0.3, window, softcap, has_sinks)
    computed, new = np.array([40, 3, 17]), np.array([1, 1, 21])
    lengths, starts = computed + new, np.concatenate([[0], np.cumsum(new)])
    generator = torch.Generator().manual_seed(0)
    blocks = (torch.randperm(15, generator=generator) + 1).tolist()
    tables = [[blocks.pop() for _ in range(-(-int(length) // 16))] for length in lengths]
    sinks = torch.randn(6, generator=generator).to(dtype) if has_sinks else None
    outputs = []
    for name in ("cpu", "eager"):
        backend = create_backend(name)
        storage = backend.allocate(spec, 16, 16, dtype, torch.device("cpu"))
        values = torch.Generator().manual_seed(1)
        for count, done in ((computed, np.zeros_like(computed)), (new, computed)):
            first = np.maximum(done - window + 1, 0) // 16 if window else np.zeros_like(done)
            last = -(-(done + count) // 16)
            visible = [table[low:high] for table, low, high in zip(tables, first, last)]
            slots = [
                table[position // 16] * 16 + position % 16
                for table, n, begin in zip(tables, count, done)
                for position in range(int(begin), int(begin + n))
            ]
            group = GroupTables(
                window,
                torch.tensor(slots),
                np.array(sum(visible, []), np.int32),
                np.concatenate([[0], np.cumsum([len(pages) for pages in visible])]),
                first * 16,
            )
            bounds = np.concatenate([[0], np.cumsum(count)])
            decodes = int((count == 1).sum()) if count is new else 0
            batch = StepBatch(decodes, bounds, done, done + count, (group,), 16, torch.device("cpu"), dtype)
            query, key, value = (
                torch.randn(int(count.sum()), heads, 32, generator=values).to(dtype) for heads in (6, 2, 2)
            )
            metadata = backend.prepare(batch, 0)
            backend.write(storage, metadata, key, value)
            attended = backend.attend(Attention(spec, query, key, value, sinks), storage, metadata)
        outputs.append(attended.float())
    assert starts[-1] == len(outputs[0])
    torch.testing.assert_close(*outputs, atol=2e-5 if dtype == torch.float32 else 3e-2, rtol=1e-3)


def _logits(model: PreTrainedModel, chunk: int, *prompts: list[int]) -> torch.Tensor:
    """Logits of the first prompt's sampled rows."""
    rows: list[torch.Tensor] = []

    def sample(logits: torch.Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        sampled = [entry.request_id for entry in entries if entry.num_logits]
        if 0 in sampled:
            rows.append(logits[sampled.index(0)].clone())
        return argmax_sampler(logits, entries, records)

    run(build(model, CallbackSampler(sample)), *prompts, num_new=4, chunk=chunk)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BIT_EQUAL)
def test_rows_do_not_see_the_batch(name: str, dtype: torch.dtype) -> None:
    model = tiny(name).to(dtype)  # type: ignore[arg-type]
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = _logits(model, 1 << 30, prompts[0])
    assert torch.equal(alone, _logits(model, 1 << 30, *prompts)), "in a batch"
    assert torch.equal(alone, _logits(model, 3, *prompts)), "chunked"


class TestTheModelIsTheUsers:
    def test_it_is_untouched(self) -> None:
        model = tiny("phi")
        ids = torch.tensor([prompt(9)])
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        attributes = [set(vars(module)) for module in model.modules()]
        before = model(ids).logits
        runner = build(model)
        run(runner, prompt(9))
        assert attributes == [set(vars(module)) for module in model.modules()]
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(model(ids).logits, before)
        runner.close()
        assert torch.equal(model(ids).logits, before)

    def test_it_is_untouched_after_a_failure(self) -> None:
        def fail(logits: torch.Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
            raise ValueError("sampler")

        model = tiny("opt")
        runner = build(model, CallbackSampler(fail))
        attributes = [set(vars(module)) for module in model.modules()]
        with pytest.raises(ValueError, match="sampler"):
            run(runner, prompt(9))
        entry = Work(0, prompt(9), 9, 0, 9, ([60, 99],), 1, True, GREEDY, 0)
        with pytest.raises(Exception, match="slot|block"):
            execute(runner, [entry._replace(block_tables=([9999],))])
        assert attributes == [set(vars(module)) for module in model.modules()]

    def test_new_weights_are_used_after_a_reload(self) -> None:
        model, tokens = tiny("mixtral"), prompt(9)
        runner = build(model)
        first = run(runner, tokens)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.copy_(parameter.flip(0))
        expected = generate(model, tokens, NUM_NEW)
        runner.reload_weights()
        assert run(runner, tokens) == [expected] != first


class TestChoices:
    def test_plain_torch_is_still_there(self) -> None:
        notes = described(build(tiny("phi"), attention="sdpa", native=False))
        assert notes["attention"].startswith("sdpa")
        assert notes["linears"] == "torch (native=False)"
        assert described(build(tiny("phi"), native=False))["attention"].startswith("sdpa")

    def test_what_native_attention_cannot_do_says_why(self) -> None:
        model = tiny("deepseek_v3")
        notes = described(build(model))
        assert notes["attention"].startswith("sdpa")
        assert "gathered" in notes["attention"]
        assert notes["linears"].startswith("native")
        with pytest.raises(ConfigError, match="gathered"):
            build(model, attention="cpu")

    def test_odd_heads_are_refused(self) -> None:
        notes = described(build(tiny("llama", head_dim=24)))
        assert "not a multiple of 16" in notes["attention"]

    def test_other_page_sizes_are_refused(self) -> None:
        assert "pages of 16" in described(build(tiny("phi"), page_size=8))["attention"]

    def test_a_family_can_be_forced_to_be_generic(self) -> None:
        model = tiny("gemma2")
        built = open_module(model, EngineConfig(num_blocks=64, attention="cpu"), argmax_sampler)
        assert isinstance(built.runner, TorchRunner)
        tokens = prompt(30)
        assert run(built.runner, tokens) == [generate(model, tokens, NUM_NEW)]
