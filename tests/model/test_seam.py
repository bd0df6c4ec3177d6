"""Windows at their edges, soft caps and sinks that matter, refusals, and a model that is left as it was found."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.adapter import ATTENTION_NAME, ModelAdapter
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.swap import SwapBuffer
from aiocb.records import Record
from aiocb.sampling.sampler import Sampler
from aiocb.step import BlockCopy, BlockSwap, StepEntry, StepOutOfMemory, StepPlan, StepResult
from tests.steps import CallbackSampler, Work, execute

from .helpers import GREEDY, MLA, MOE, ManualScheduler, argmax_sampler, generate, prompt, tiny

SPARSE = {**MLA, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **MOE}


def build(model: PreTrainedModel, **config: Any) -> TorchRunner:
    values = {"num_blocks": 96, "page_size": 4, **config}
    return TorchRunner(model, EngineConfig(**values), argmax_sampler, max_model_len=512)


def recording_sampler(rows: list[torch.Tensor]) -> Sampler:
    def sample(logits: torch.Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        rows.append(logits.clone())
        return argmax_sampler(logits, entries, records)

    return CallbackSampler(sample)


def run(runner: TorchRunner, tokens: list[int], num_new: int, chunk: int = 1 << 30) -> list[int]:
    scheduler = ManualScheduler(runner, chunk=chunk)
    scheduler.add(tokens, num_new)
    return scheduler.run()[0]


@pytest.fixture(scope="module", params=["mistral", "gemma3_text", "gpt_oss"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, TorchRunner]:
    model = tiny(request.param, sliding_window=8)
    return model, build(model)


class TestWindows:
    WINDOW = 8

    @pytest.mark.parametrize("chunk", [5, 12, 1 << 30])
    @pytest.mark.parametrize("length", [3, 7, 8, 9, 17, 31])
    def test_lengths_around_the_window(
        self, pair: tuple[PreTrainedModel, TorchRunner], length: int, chunk: int
    ) -> None:
        model, runner = pair
        tokens = prompt(length)
        assert run(runner, tokens, 10, chunk) == generate(model, tokens, 10)

    def test_one_token_at_a_time(self, pair: tuple[PreTrainedModel, TorchRunner]) -> None:
        model, runner = pair
        assert run(runner, prompt(9), 4, chunk=1) == generate(model, prompt(9), 4)

    def test_the_window_is_exact(self) -> None:
        # One layer: the logits at t must not move when t - window does, and must when t - window + 1 does.
        model = tiny("mistral", num_hidden_layers=1, sliding_window=self.WINDOW)
        tokens = prompt(20)

        def logits(position: int | None) -> torch.Tensor:
            changed = list(tokens)
            if position is not None:
                changed[position] = (changed[position] + 1) % 128
            rows: list[torch.Tensor] = []
            runner = TorchRunner(
                model,
                EngineConfig(num_blocks=32, page_size=4),
                recording_sampler(rows),
                max_model_len=512,
            )
            run(runner, changed, 1, chunk=7)
            return rows[-1]

        last = len(tokens) - 1
        assert torch.equal(logits(last - self.WINDOW), logits(None))
        assert not torch.allclose(logits(last - self.WINDOW + 1), logits(None))

    def test_groups_and_dropped_blocks(self) -> None:
        runner = build(tiny("gemma3_text"))
        groups = runner.cache_layout.groups
        assert [(group.window, group.layers) for group in groups] == [(None, (1,)), (8, (0,))]
        scheduler = ManualScheduler(runner)
        sequence = scheduler.add(prompt(40), 8)
        scheduler.step()
        scheduler.step()
        assert sequence.tables[1][:8] == [0] * 8
        assert all(sequence.tables[0])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("mistral", {"sliding_window": None}),
        ("granite", {"attention_multiplier": 1.0}),
    ],
)
def test_settings_matter(name: str, change: dict[str, Any]) -> None:
    """What a family adds to attention changes its logits, and the same way in packed steps."""
    model, other = tiny(name), tiny(name, **change)
    tokens = torch.tensor([prompt(30)])
    assert not torch.allclose(model(tokens).logits, other(tokens).logits, atol=1e-3)
    for each in (model, other):
        assert run(build(each), prompt(30), 8, chunk=9) == generate(each, prompt(30), 8)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "reference"])
def test_sinks_matter(backend: str) -> None:
    model = tiny("gpt_oss")
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if "sinks" in name:
            parameter.fill_(-30.0)
    tokens = torch.tensor([prompt(30)])
    assert not torch.allclose(model(tokens).logits, other(tokens).logits, atol=1e-3)
    for each in (model, other):
        # The parity probe compares logits, not only tokens.
        assert run(build(each, attention=backend), prompt(30), 8, chunk=9) == generate(each, prompt(30), 8)


class TestLeftAsFound:
    def test_model_and_configs(self) -> None:
        model = tiny("gemma3_text")
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        config, generation = model.config.to_dict(), model.generation_config.to_dict()
        buffers = {name: (tensor.clone(), tensor.is_inference()) for name, tensor in model.named_buffers()}
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        before = model(torch.tensor([prompt(9)])).logits
        runner = build(model)
        run(runner, prompt(19), 4)
        runner.close()
        runner.close()
        assert model.config.to_dict() == config
        assert model.config._attn_implementation != ATTENTION_NAME
        assert model.generation_config.to_dict() == generation
        assert torch.equal(model(torch.tensor([prompt(9)])).logits, before)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        for name, (tensor, was_inference) in buffers.items():
            found = dict(model.named_buffers())[name]
            assert torch.equal(found, tensor) and found.is_inference() == was_inference
        assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    def test_restored_when_a_step_raises(self) -> None:
        model = tiny("llama")
        runner = build(model)
        implementation = model.config._attn_implementation

        def broken(*_: Any) -> None:
            raise RuntimeError("planned")

        handle = model.get_submodule("model.layers.1").register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="planned"):
            run(runner, prompt(5), 2)
        handle.remove()
        assert model.config._attn_implementation == implementation
        assert run(runner, prompt(5), 6) == generate(model, prompt(5), 6)

    def test_training_goes_on_between_steps(self) -> None:
        model = tiny("llama")
        model.requires_grad_(True)
        runner = build(model)
        run(runner, prompt(9), 2)
        output: Any = model(torch.tensor([prompt(9)]), labels=torch.tensor([prompt(9)]))
        output.loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        assert run(runner, prompt(9), 6) == generate(model, prompt(9), 6)


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "values", "reason"),
        [
            ("deepseek_v4", {"num_hidden_layers": 2}, "works on its cache by itself"),
            ("bert", {}, "not causal"),
        ],
    )
    def test_what_packed_batches_cannot_do(self, name: str, values: dict[str, Any], reason: str) -> None:
        with pytest.raises(ConfigError, match=rf"cannot be run in packed batches: .*{reason}.*generate\(\) runs it"):
            build(tiny(name, **values))

    def test_unknown_attention(self) -> None:
        with pytest.raises(ConfigError, match="choose one of"):
            build(tiny("llama"), attention="nope")

    def test_parity_probe_catches_a_wrong_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aiocb.attention import paged

        monkeypatch.setattr(paged, "explicit_attention", lambda spec, q, k, v, mask, sinks: q * 0)
        with pytest.raises(ConfigError, match="differ"):
            build(tiny("llama"))

    def test_state_that_a_module_keeps_is_caught(self) -> None:
        model = tiny("llama")
        layer: Any = model.get_submodule("model.layers.0")
        memory: list[torch.Tensor] = []

        def leaky(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            memory.append(output[:, -1:].clone())
            return output + 0.5 * memory[-2] if len(memory) > 1 else output

        handle = layer.register_forward_hook(leaky)
        with pytest.raises(ConfigError, match="differ"):
            build(model)
        handle.remove()


def test_block_copies_happen_before_the_step() -> None:
    model = tiny("gemma3_text")
    runner = build(model)
    tokens = prompt(10)
    scheduler = ManualScheduler(runner, scatter=False)
    first = scheduler.add(tokens, 1)
    expected = generate(model, tokens, 1)
    tables = [list(range(1, 4)), list(range(1, 4))]
    scheduler.run()
    assert first.output == expected
    # The last, partial block of the first request becomes block 50 of a second one.
    forked = tuple([*table[:2], 50] for table in tables)
    entry = Work(9, tokens, 10, 9, 1, forked, 1, True, GREEDY, 0)
    copies = tuple(BlockCopy(group, 3, 50) for group in range(2))
    assert execute(runner, [entry], copies).token_ids == expected


def test_empty_plan() -> None:
    runner = build(tiny("llama"))
    assert list(runner.submit(StepPlan((), 0)).token_ids) == []


@pytest.mark.parametrize("wanted", ["adapter", "grammar_key", "draft_token_ids"])
def test_what_no_runner_does_is_refused(wanted: str) -> None:
    work = Work(9, prompt(10), 10, 9, 1, ([1, 2, 3],), 1, True, GREEDY, 0)
    entry, opened = work.entry(), work.opened()
    changes: dict[str, Any] = {wanted: (5,)}
    if wanted in entry._fields:
        entry = entry._replace(**changes)
    else:
        opened = opened._replace(**changes)
    with pytest.raises(NotImplementedError, match=r"adapter|grammars|drafts"):
        build(tiny("llama")).submit(StepPlan((entry,), 1, (opened,)))


def test_blocks_are_copied_after_a_step_and_without_one() -> None:
    runner, tokens = build(tiny("llama")), prompt(10)
    work = Work(9, tokens, 10, 0, 10, ([1, 2, 3],), 1, True, GREEDY, 0)
    runner.submit(StepPlan((work.entry(),), 10, (work.opened(),), copies_after=(BlockCopy(0, 3, 50),)))
    runner.submit(StepPlan((), 0, copies_before=(BlockCopy(0, 1, 51),), copies_after=(BlockCopy(0, 51, 52),)))
    for rows in runner._cache.block_rows()[0]:
        assert rows[3].any() and torch.equal(rows[50], rows[3])
        assert rows[1].any() and torch.equal(rows[52], rows[1])


def test_a_plan_that_has_no_memory_to_move_blocks_in_counts_but_for_its_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swap_in(self: SwapBuffer, swaps: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner, tokens = build(tiny("llama"), cpu_offload_space=0.001), prompt(10)
    work = Work(9, tokens, 10, 9, 1, ([1, 2, 3],), 1, True, GREEDY, 0)
    plan = StepPlan((work.entry(),), 1, (work.opened(),), swaps_in=(BlockSwap(0, 1, 0),))
    with monkeypatch.context() as patched:
        patched.setattr(SwapBuffer, "swap_in", swap_in)
        with pytest.raises(StepOutOfMemory):
            runner.submit(plan)
    again = plan._replace(closed=(9,), swaps_in=())
    assert len(runner.submit(again).token_ids) == 1


def test_several_logit_rows_per_entry() -> None:
    model = tiny("llama")
    rows: list[torch.Tensor] = []
    runner = TorchRunner(
        model,
        EngineConfig(num_blocks=32, page_size=4),
        recording_sampler(rows),
        max_model_len=512,
    )
    a, b = prompt(9), prompt(6, 1)
    entries = (
        Work(0, a, 9, 0, 9, ([1, 2, 3],), 4, True, GREEDY, 0),
        Work(1, b, 6, 0, 1, ([4],), 0, False, GREEDY, 0),
        Work(2, b, 6, 0, 6, ([5, 6],), 6, False, GREEDY, 0),
    )
    execute(runner, entries)
    expected = torch.cat([model(torch.tensor([a])).logits[0, -4:], model(torch.tensor([b])).logits[0]])
    torch.testing.assert_close(rows[-1], expected, atol=1e-5, rtol=1e-4)


def test_adapter_learns_the_layers() -> None:
    specs = ModelAdapter(tiny("gpt_oss")).specs
    assert [(spec.window, spec.has_sinks) for spec in specs.values()] == [(8, True), (None, True)]
    latent = ModelAdapter(tiny("deepseek_v3")).specs
    assert all(spec.is_gathered for spec in latent.values())
