"""Block tables that stay in native memory: what a step changes of them, and that a refused step changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from aiocb.kernels import KernelError, Library, NativeModel
from tests.kernels.helpers import Rows, Tensor, native
from tests.kernels.test_attention import attend

HEADS, KV, DIM = 4, 2, 32
WIDTH = (HEADS + 2 * KV) * DIM


def model_of(library: Library, *, num_groups: int = 1, window: int = 0) -> NativeModel:
    model = native(library, library.instruction_sets()[0], "float32", num_groups=num_groups, num_layers=num_groups)
    for group in range(num_groups):
        model.set_group(group, 32, 1)
        model.set_layer(group, window=window, rope=-1, group=group, group_layer=0, scale=0.2)
    return model


@pytest.fixture
def model(library: Library) -> Iterator[NativeModel]:
    made = model_of(library)
    yield made
    made.close()


def qkv_of(length: int, seed: int = 0) -> Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed))


def whole(library: Library, x: Tensor, table: Sequence[int]) -> Tensor:
    """What a fresh model gives for all tokens at once."""
    model = model_of(library)
    out = attend(model, 0, [Rows(table, 0, len(x))], x, HEADS * DIM)
    model.close()
    return out


def run(model: NativeModel, x: Tensor, *sequences: Rows) -> Tensor:
    return attend(model, 0, sequences, x, HEADS * DIM)


def test_a_step_brings_only_new_blocks(library: Library, model: NativeModel) -> None:
    """Two rows far apart, steps with and without new blocks, in changing order."""
    a, b = qkv_of(50), qkv_of(40, seed=1)
    found_a, found_b = torch.empty(50, HEADS * DIM), torch.empty(40, HEADS * DIM)
    found_a[:30] = run(model, a[:30], Rows([3, 9], 0, 30, row=700))
    out = run(model, torch.cat([b[:20], a[30:31]]), Rows([4, 5], 0, 20, row=2), Rows([], 30, 1, row=700, block_start=2))
    found_b[:20], found_a[30:31] = out[:20], out[20:]
    out = run(model, torch.cat([a[31:50], b[20:40]]), Rows([7, 8], 31, 19, row=700, block_start=2),
              Rows([20], 20, 20, row=2, block_start=2))  # fmt: skip
    found_a[31:], found_b[20:] = out[:19], out[19:]
    assert torch.equal(found_a, whole(library, a, [1, 2, 3, 4]))
    assert torch.equal(found_b, whole(library, b, [1, 2, 3]))


def test_what_follows_a_block_start_is_replaced(library: Library, model: NativeModel) -> None:
    x = qkv_of(40)
    run(model, x[:20], Rows([3, 9, 11], 0, 20))
    run(model, x, Rows([5, 6, 7], 0, 40))  # another request in the same row
    with pytest.raises(KernelError, match="needs 3 blocks, its table holds 2"):
        run(model, x[39:], Rows([], 39, 1, block_start=2))
    again = run(model, x[39:], Rows([], 39, 1, block_start=3))
    assert torch.equal(again, whole(library, x, [1, 2, 3])[39:])


def test_every_group_has_its_own_table(library: Library) -> None:
    """Blocks of a group are those of its part of the array; the counts are common."""
    import ctypes
    from array import array

    from tests.kernels.helpers import step_arguments

    model, x = model_of(library, num_groups=2), qkv_of(20)
    expected = whole(library, x, [1, 2])
    keep: list[Any] = []
    for layer, table in enumerate(([3, 4], [9, 8])):
        arguments = step_arguments([Rows([3, 4], 0, 20)], keep, num_groups=2)
        blocks = array("i", [3, 4, 9, 8])
        arguments.new_blocks = blocks.buffer_info()[0]
        out = torch.empty(20, HEADS * DIM)
        model.check(
            library.calls.aiocb_attention(model.handle, ctypes.byref(arguments), layer, x.data_ptr(), out.data_ptr())
        )
        assert torch.equal(out, expected)
        copied = torch.zeros(2 * 16 * KV * DIM * 4, dtype=torch.uint8).numpy()
        for block in table:
            model.read_block(layer, block, copied)
            assert copied.any()
    model.close()


def test_refused_steps_change_nothing(library: Library, model: NativeModel) -> None:
    x = qkv_of(33)
    run(model, x[:32], Rows([3, 9], 0, 32, row=1))
    good = Rows([4], 32, 1, row=1, block_start=2)
    wrong = {
        "row -1 of": Rows([5], 0, 1, row=-1),
        "row 1048576 of": Rows([5], 0, 1, row=1 << 20),
        "row 1 has two": Rows([5], 0, 1, row=1),
        "new blocks from 1 on, row 0 has 0": Rows([5], 0, 1, row=0, block_start=1),
        "new blocks from -1 on": Rows([5], 0, 1, row=0, block_start=-1),
        "block 0 of its table is 32, outside": Rows([32], 0, 1, row=0),
        "block 0 of its table is 0, outside": Rows([0], 0, 1, row=0),
        "needs 2 blocks, its table holds 1": Rows([5], 16, 1, row=0),
        "start -1": Rows([5], -1, 1, row=0),
    }
    for message, other in wrong.items():
        with pytest.raises(KernelError, match=message):  # the first sequence alone would have been right
            run(model, torch.cat([x[32:], x[:1]]), good, other)
        with pytest.raises(KernelError, match="new blocks from 3 on, row 1 has 2"):
            run(model, x[32:], Rows([], 32, 1, row=1, block_start=3))
    assert torch.equal(run(model, x[32:], good), whole(library, x, [1, 2, 3])[32:])


def test_counts_have_to_add_up(library: Library, model: NativeModel) -> None:
    from ctypes import byref

    from tests.kernels.helpers import step_arguments

    x = qkv_of(1)
    for count in (0, 2):
        keep: list[Any] = []
        arguments = step_arguments([Rows([5], 0, 1)], keep)
        arguments.num_new_blocks = count
        with pytest.raises(KernelError, match="new blocks given, counts add up to 1"):
            model.check(library.calls.aiocb_attention(model.handle, byref(arguments), 0, x.data_ptr(), None))
    keep[0]["block_counts"][0] = -1
    with pytest.raises(KernelError, match="-1 new blocks"):
        model.check(library.calls.aiocb_attention(model.handle, byref(arguments), 0, x.data_ptr(), None))


def test_blocks_out_of_the_window_may_be_anything(library: Library) -> None:
    model, x = model_of(library, window=16), qkv_of(64)
    run(model, x[:63], Rows([3, 9, 11, 12], 0, 63))
    expected = run(model, x[63:], Rows([], 63, 1, block_start=4))
    for stale in (0, -7, 1 << 30):
        assert torch.equal(run(model, x[63:], Rows([stale, stale, stale, 12], 63, 1)), expected)
    with pytest.raises(KernelError, match="block 3"):
        run(model, x[63:], Rows([3, 9, 11, 0], 63, 1))
    model.close()


def test_a_new_life_remembers_no_rows(library: Library, model: NativeModel) -> None:
    x = qkv_of(17)
    run(model, x[:16], Rows([3, 9], 0, 16))
    model.reset_rows()
    with pytest.raises(KernelError, match="new blocks from 2 on, row 0 has 0"):
        run(model, x[16:], Rows([], 16, 1, block_start=2))
    run(model, x[16:], Rows([3, 9], 16, 1))
