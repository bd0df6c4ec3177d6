"""A wrong plan is refused and nothing crashes; NaN ends one request only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aiocb.errors import RequestFailed
from aiocb.kernels import KernelError, Library
from aiocb.model.native.runner import NativeRunner
from aiocb.step import StepResult
from tests.kernels.helpers import MiniScheduler, Request, Rows, native, step_arguments
from tests.kernels.test_families import make, runner_of
from tests.steps import CallbackSampler, execute


def test_wrong_plans(library: Library) -> None:
    runner = runner_of(make("mistral"), library=library)  # window 24
    scheduler = MiniScheduler(runner)
    good = scheduler.entry(Request(0, list(range(3, 43)), 1), 40)
    assert good.block_tables[0] != []
    table = list(good.block_tables[0])
    wrong = {
        "id 131": good._replace(tokens=[131] * 40),
        "id -1": good._replace(tokens=[-1] * 40),
        "needs 3 blocks": good._replace(block_tables=(table[:2],)),
        "is 64, outside": good._replace(block_tables=([*table[:2], 64],)),
        "is -5, outside": good._replace(block_tables=([*table[:2], -5],)),
        "is 0, outside": good._replace(block_tables=([*table[:2], 0],)),
        "empty step": good._replace(num_new_tokens=0, num_logits=0),
        "start -1": good._replace(num_computed_tokens=-1, num_new_tokens=1),
        "output 0 is row -1": good._replace(num_new_tokens=1, num_logits=2, is_sampled=False),
    }
    runner._sampler = CallbackSampler(lambda *_: StepResult(()))
    for message, entry in wrong.items():
        with pytest.raises(KernelError, match=message):
            execute(runner, [entry])
    # A block that fell out of the window may be null; the first one inside may not.
    late = good._replace(tokens=list(range(3, 83)), num_computed_tokens=79, num_new_tokens=1)
    execute(runner, [late._replace(block_tables=([0, 0, 0, *table[:2]],))])
    with pytest.raises(KernelError, match="block 3"):
        execute(runner, [late._replace(block_tables=([0, 0, 0, 0, table[0]],))])
    execute(runner, [good])
    runner.close()
    runner.close()
    with pytest.raises(KernelError, match="closed"):
        execute(runner, [good])


def test_unsupported_shapes(library: Library) -> None:
    for fields in ({"head_dim": 24}, {"head_dim": 272}, {"num_heads": 5}, {"rotary_dim": 33}):
        with pytest.raises(KernelError):
            native(library, library.instruction_sets()[0], "float32", **fields)
    with pytest.raises(KernelError):
        native(library, "no-such-set", "float32")
    model = native(library, library.instruction_sets()[0], "float32")
    model.set_group(0, 4, 1)
    calls: list[Callable[[], None]] = [
        lambda: model.copy_block(0, 4, 1),
        lambda: model.copy_block(1, 0, 1),
        lambda: model.set_layer(1, window=0, rope=-1, group=0, group_layer=0, scale=1.0),
        lambda: model.set_layer(0, window=0, rope=0, group=0, group_layer=0, scale=1.0),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()
    model.close()


def test_nan_logits_end_one_request(library: Library) -> None:
    model = make("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    runner = runner_of(model, library=library, checks_parity=False)
    scheduler = MiniScheduler(runner)
    entries = tuple(
        scheduler.entry(Request(i, prompt, 1), len(prompt)) for i, prompt in enumerate([[5, 6], [5, 7], [9]])
    )
    result = execute(runner, entries)
    assert result.token_ids[1] is None
    assert result.token_ids[0] is not None
    assert result.token_ids[2] is not None
    assert result.errors is not None
    assert list(result.errors) == [1]
    assert isinstance(result.errors[1], RequestFailed)
    runner.close()


def _logits(runner: NativeRunner, sequences: Sequence[Rows], ids: list[int]) -> torch.Tensor:
    keep: list[Any] = []
    arguments = step_arguments(sequences, keep, ids=ids, num_groups=len(runner.cache_layout.groups))
    logits, argmax = torch.empty(len(ids), runner.vocab_size), torch.empty(len(ids), dtype=torch.int32)
    rows = torch.arange(len(ids), dtype=torch.int32)
    arguments.num_outputs, arguments.logits, arguments.argmax = len(ids), logits.data_ptr(), argmax.data_ptr()
    arguments.output_rows = arguments.logit_targets = rows.data_ptr()
    runner.native.step(arguments)
    return logits


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "qwen2_moe-mixed", "olmoe"])
def test_rows_that_are_not_finite_reach_nobody(
    library: Library, instruction_set: str, name: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Neither those beside them in the step nor those who get their pages and the buffers' rows afterwards."""
    model = make(name, dtype, tie_word_embeddings=False)
    runner = runner_of(model, library=library, instruction_set=instruction_set, quantization=quantization)
    ids = list(range(3, 46))
    good = [Rows([9, 30, 7], 0, 33), Rows([41], 0, 10)]
    clean = _logits(runner, good, ids)
    assert clean.isfinite().all()
    for value in (torch.nan, torch.inf, 3e38):
        with torch.no_grad():
            model.get_input_embeddings().weight[2] = value
        everywhere = _logits(runner, [Rows(range(1, 64), 0, 300)], [2] * 300)
        assert value == 3e38 or not everywhere.isfinite().any()
        assert torch.equal(_logits(runner, good, ids), clean)
        beside = _logits(runner, [Rows([50, 51], 0, 20), *good, Rows([52], 0, 1)], [2] * 20 + ids + [2])
        assert torch.equal(beside[20:63], clean)
    runner.close()
