"""Mixtures of experts: who is chosen, what an expert without rows may hold, and what native code refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from aiocb.kernels import KernelError, Library, NativeModel
from aiocb.kernels.formats import FORMATS, WeightSource
from aiocb.model.native.runner import NativeRunner
from aiocb.records import Record
from aiocb.step import StepEntry, StepResult
from tests.kernels.helpers import MiniScheduler, Request, Rows, native, step_arguments
from tests.kernels.test_families import make, prompts_of, runner_of
from tests.kernels.test_invariance import _record
from tests.steps import CallbackSampler, execute

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")


def blocks_of(model: Any) -> list[Any]:
    return [getattr(layer, "block_sparse_moe", None) or layer.mlp for layer in model.model.layers]


def router_of(block: Any) -> Any:
    return getattr(block, "gate", None) or block.router


def logits_of(runner: NativeRunner, prompt: list[int]) -> Tensor:
    """Logits of every token of a prompt."""
    kept: list[Tensor] = []

    def keep(logits: Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        kept.append(logits.clone())
        return StepResult([()] * len(entries))

    runner._sampler = CallbackSampler(keep)
    entry = MiniScheduler(runner).entry(Request(0, prompt, 1), len(prompt))
    execute(runner, [entry._replace(num_logits=len(prompt), is_sampled=False)])
    return kept[0]


def module_logits(model: Any, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt])).logits[0].float()
    return logits


@pytest.mark.parametrize("name", MIXTURES)
def test_every_logit_is_the_modules(library: Library, instruction_set: str, name: str) -> None:
    model = make(name)
    runner = runner_of(model, library=library, instruction_set=instruction_set, checks_parity=False)
    prompt = prompts_of(3)[2]
    torch.testing.assert_close(logits_of(runner, prompt), module_logits(model, prompt), rtol=1e-4, atol=2e-4)
    runner.close()


def test_many_experts_and_choices(library: Library, instruction_set: str) -> None:
    """More of both than one vector holds, with shares of all experts and of the chosen ones; an odd size in bf16."""
    for renormalises in (True, False):
        fields: dict[str, Any] = {"num_experts": 41, "num_experts_per_tok": 19, "norm_topk_prob": renormalises}
        model = make("qwen3_moe", moe_intermediate_size=24, **fields)
        runner = runner_of(model, library=library, instruction_set=instruction_set, checks_parity=False)
        prompt = prompts_of(2)[1]
        torch.testing.assert_close(logits_of(runner, prompt), module_logits(model, prompt), rtol=1e-4, atol=2e-4)
        runner.close()
        runner_of(
            make("qwen3_moe", torch.bfloat16, moe_intermediate_size=33, **fields), instruction_set=instruction_set
        ).close()


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", MIXTURES)
def test_ties_go_to_the_lowest_ids_and_others_are_not_touched(
    library: Library, instruction_set: str, name: str, quantization: str | None
) -> None:
    """All scores are equal: the first experts are taken, and what the rest would compute (NaN) shows up nowhere."""
    model = make(name)
    for block in blocks_of(model):
        with torch.no_grad():
            router_of(block).weight.zero_()
    runner = runner_of(
        model, library=library, instruction_set=instruction_set, checks_parity=False, quantization=quantization
    )
    prompt = prompts_of(2)[1]
    before = logits_of(runner, prompt)
    runner.close()
    patches = []
    for block in blocks_of(model):
        router = router_of(block)
        count, k = len(router.weight), router.top_k
        weight = 1 / k if getattr(router, "norm_topk_prob", True) else 1 / count

        def choose(states: Tensor, k: int = k, weight: float = weight) -> tuple[None, Tensor, Tensor]:
            rows = len(states.reshape(-1, states.shape[-1]))
            return None, torch.full((rows, k), weight), torch.arange(k).expand(rows, k)

        with torch.no_grad():
            for weights in (block.experts.gate_up_proj, block.experts.down_proj):
                weights[k:] = 0.0
            block.experts.gate_up_proj[k:, 0] = torch.nan
        patches.append((router, choose))
    runner = runner_of(
        model, library=library, instruction_set=instruction_set, checks_parity=False, quantization=quantization
    )
    for router, choose in patches:
        router.forward = choose
    actual, expected = logits_of(runner, prompt), module_logits(model, prompt)
    assert not actual.isnan().any()
    if quantization is None:
        assert torch.equal(actual, before)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)
    else:
        assert (actual - expected).norm() < 0.1 * expected.norm()
    runner.close()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_any_number_of_threads(library: Library, quantization: str | None) -> None:
    """Threads take turns at the parts of an expert; whose part it was shows nowhere."""
    model = make("qwen2_moe", torch.bfloat16)
    results = []
    for threads in (1, 2, 3, 5):
        runner = runner_of(model, library=library, num_threads=threads, quantization=quantization)
        results.append(_record(runner, prompts_of(5), 50, seed=1))
        runner.close()
    for other in results[1:]:
        for index, rows in results[0].items():
            assert all(torch.equal(a, b) for a, b in zip(rows, other[index], strict=True))


def test_a_row_of_nan_ends_its_own_request(library: Library, instruction_set: str) -> None:
    model = make("qwen3_moe")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    runner = runner_of(model, library=library, instruction_set=instruction_set, checks_parity=False)
    scheduler = MiniScheduler(runner)
    prompts = [[5, 6], [5, 7], [9]]
    entries = [scheduler.entry(Request(i, prompt, 1), len(prompt)) for i, prompt in enumerate(prompts)]
    result = execute(runner, entries)
    assert result.errors is not None and list(result.errors) == [1]
    alone = execute(runner, [entries[0], entries[2]]).token_ids
    assert [result.token_ids[0], result.token_ids[2]] == list(alone)
    runner.close()


def mixture(library: Library, **fields: Any) -> NativeModel:
    sizes = {"num_experts": 4, "num_chosen": 2, "expert_size": 40, "is_gated": 1}
    return native(library, library.instruction_sets()[0], "float32", **(sizes | fields))


def test_shapes_that_are_refused(library: Library) -> None:
    for fields in ({"num_chosen": 0}, {"num_chosen": 5}, {"expert_size": 0}, {"is_gated": 0}, {"is_parallel": 1}):
        with pytest.raises(KernelError):
            mixture(library, **fields)
    model = mixture(library)
    weight = np.zeros((256, 256), np.float32)

    def pack(name: str, columns: int, depth: int, *, expert: int = 0, layer: int = 0, target: str = "float32") -> None:
        rows = np.uint64(weight.ctypes.data) + np.arange(columns, dtype=np.uint64) * np.uint64(1024)
        formats: dict[str, Any] = {"source": WeightSource.of("float32"), "weight_format": FORMATS[target]}
        model.set_linear(layer, name, rows, depth, expert=expert, **formats)

    for wrong in (("router", 3, 64), ("router", 4, 60), ("expert_gate_up", 80, 64), ("expert_down", 64, 48),
                  ("expert_down", 60, 40)):  # fmt: skip
        with pytest.raises(KernelError, match="columns"):
            pack(*wrong)
    for name, expert, layer in (("expert_down", 4, 0), ("expert_down", -3, 0), ("expert_down", 0, 1), ("router", 1, 0)):
        with pytest.raises(KernelError, match=r"no linear|no expert"):
            pack(name, 64, 40, expert=expert, layer=layer)
    with pytest.raises(KernelError, match="format"):
        pack("expert_down", 64, 40, target="bfloat16")
    pack("expert_down", 64, 40)
    with pytest.raises(KernelError, match="the layer's experts"):
        pack("expert_down", 64, 40, expert=1, target="int8")
    model.close()
    model = native(library, library.instruction_sets()[0], "float32")
    with pytest.raises(KernelError, match="no experts"):
        pack("router", 4, 64)
    model.close()


def test_a_layer_that_lacks_an_expert_does_not_run(library: Library) -> None:
    model = mixture(library)
    weight = np.zeros((128, 64), np.float32)
    rows = np.uint64(weight.ctypes.data) + np.arange(128, dtype=np.uint64) * np.uint64(256)
    plain: dict[str, Any] = {"source": WeightSource.of("float32"), "weight_format": FORMATS["float32"]}
    model.set_group(0, 4, 1)
    model.set_linear(0, "router", rows[:4], 64, **plain)
    for expert in range(4):
        model.set_linear(0, "expert_gate_up", rows, 64, expert=expert, **plain)
        if expert < 3:
            model.set_linear(0, "expert_down", rows[:64], 40, expert=expert, **plain)
    keep: list[Any] = []
    with pytest.raises(KernelError, match="layer 0 lacks 1 linears"):
        model.step(step_arguments([Rows([1], 0, 2)], keep))
    model.set_linear(0, "expert_down", rows[:64], 40, expert=3, **plain)
    model.set_linear(0, "router", rows[:5], 64, **plain)
    with pytest.raises(KernelError, match="shared expert"):
        model.step(step_arguments([Rows([1], 0, 2)], keep))
    model.close()
