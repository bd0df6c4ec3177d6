"""What is recorded and replayed: shapes, padding that touches nobody, buffers that are fresh, a bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from aiocb.attention.base import LayerSpec
from aiocb.attention.varlen import VarlenBackend
from aiocb.model.eager.graphs import MAX_GRAPHS, Graphs, Padding, padded_numbers
from aiocb.model.eager.tables import DeviceStep, DeviceTables, StepShape
from aiocb.step import CacheGroup, CacheLayout
from tests.attention import twins
from tests.model.fake_device import FakeDevice

CPU = torch.device("cpu")
LAYOUT = CacheLayout(4, (CacheGroup(None, (0,), 12, 1), CacheGroup(6, (1,), 12, 1)))
PADDING = Padding(16, 64, max_rows=8, max_tokens=64, max_keys=128, max_len=32, num_groups=0)


def numbers_of(
    shape: StepShape, rows: list[int], computed: list[int], starts: list[int], ids: list[int]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    made = np.array([*rows, *computed, *starts, *ids], np.int32)
    assert len(made) == shape.num_numbers
    return made


class TestPadding:
    def test_every_padding_row_has_a_token_and_rows_end_where_tokens_do(self) -> None:
        shape, padded = StepShape(2, 5, 3, ()), StepShape(5, 16, 16, ())
        numbers = numbers_of(shape, [3, 1], [7, 0], [0, 2, 5], [11, 12, 13, 14, 15])
        made = padded_numbers(numbers, shape, padded, 99)
        assert made[:5].tolist() == [3, 1, 99, 99, 99]
        assert made[5:10].tolist() == [7, 0, 0, 0, 0]
        starts = made[10:16]
        assert starts[:3].tolist() == [0, 2, 5] and starts[-1] == 16 and (np.diff(starts) >= 1).all()
        assert made[16:].tolist() == [11, 12, 13, 14, 15] + [0] * 11

    def test_single_tokens_stay_single(self) -> None:
        shape, padded = StepShape(3, 3, 1, ()), StepShape(8, 8, 1, ())
        made = padded_numbers(numbers_of(shape, [0, 1, 2], [4, 5, 6], [0, 1, 2, 3], [1, 2, 3]), shape, padded, 9)
        assert made[16:25].tolist() == list(range(9))

    def test_numbers_of_rows_are_powers_of_two_and_the_most(self) -> None:
        rows = [shape.num_rows for shape in PADDING._replace(max_rows=6).shapes()]
        assert rows == [1, 2, 4, 6]

    def test_gathered_keys_are_powers_of_two_then_multiples(self) -> None:
        shapes = PADDING._replace(num_groups=2, kv_interval=4096, max_keys=10000, max_rows=1, max_len=20000).shapes()
        assert [shape.num_keys for shape in shapes] == [(size, size) for size in (1024, 2048, 4096, 8192, 16384)]

    def test_there_is_a_bound(self) -> None:
        padding = PADDING._replace(num_groups=1, max_keys=1 << 22, max_rows=512, max_len=8192, has_varlen=True)
        shapes = padding._replace(kv_interval=16384).shapes()
        assert len(shapes) <= MAX_GRAPHS
        assert max(shape.num_rows for shape in shapes if shape.max_queries == 1) == 512
        assert max(shape.num_keys for shape in shapes) == (1 << 22,)

    @pytest.mark.parametrize(
        ("shape", "fits"),
        [
            (StepShape(3, 9, 7, ()), True),
            (StepShape(4, 16, 7, ()), True),  # nothing to pad
            (StepShape(4, 15, 7, ()), False),  # no row for the token that is too many
            (StepShape(5, 15, 7, ()), False),
            (StepShape(3, 17, 7, ()), False),
            (StepShape(3, 3, 1, ()), False),  # recorded for single tokens only
        ],
    )
    def test_what_a_step_with_prompts_fits_into(self, shape: StepShape, fits: bool) -> None:
        assert PADDING.fits(shape, StepShape(4, 16, 16, ())) == fits

    def test_padding_is_no_more_than_the_work_and_no_longer_than_a_table(self) -> None:
        assert not PADDING.fits(StepShape(3, 20, 9, ()), StepShape(16, 64, 64, ()))
        assert PADDING.fits(StepShape(3, 40, 9, ()), StepShape(16, 64, 64, ()))
        assert not PADDING._replace(max_len=4).fits(StepShape(3, 40, 9, ()), StepShape(4, 64, 64, ()))

    def test_keys_of_the_padding_count(self) -> None:
        padded = StepShape(8, 8, 1, (64,))
        assert PADDING.fits(StepShape(5, 5, 1, (61,)), padded)
        assert not PADDING.fits(StepShape(5, 5, 1, (62,)), padded)


class Attends:
    """A "model" of one layer per group: keys and values of its ids, over real pages."""

    def __init__(self) -> None:
        self.tables = DeviceTables(LAYOUT, 8, 8, CPU)
        self.backend = VarlenBackend(twins.varlen_attn)
        self.specs = [LayerSpec(group, 2, 1, 8, 8, 0.3, window) for group, window in enumerate((None, 6))]
        self.storage = [self.backend.allocate(spec, 12, 4, torch.float32, CPU) for spec in self.specs]
        self.embedding = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def __call__(self, shape: StepShape, numbers: Tensor) -> Tensor:
        from aiocb.attention.base import Attention

        step = self.tables.unpack(shape, numbers)
        hidden = self.embedding[step.ids] + step.positions[:, None] * 0.1
        for group, (spec, storage) in enumerate(zip(self.specs, self.storage)):
            metadata = DeviceStep(self.tables, group, step, shape)
            key = hidden[:, None]
            self.backend.write(storage, metadata, key, key * 2.0)
            query = hidden[:, None].expand(-1, 2, -1).contiguous()
            hidden = self.backend.attend(Attention(spec, query, key, key * 2.0), storage, metadata).mean(1)
        return hidden[step.starts[1:] - 1]


def decode(
    rows: list[int], computed: list[int], ids: list[int]
) -> tuple[StepShape, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    count = len(rows)
    hidden = sum(max(one - 5, 0) // 4 * 4 for one in computed)
    total = sum(computed) + count
    shape = StepShape(count, count, 1, (total, total - hidden))
    return shape, numbers_of(shape, rows, computed, list(range(count + 1)), ids)


def opened(model: Attends, rows: int) -> None:
    """Give each row two blocks of its own, and keys for five tokens."""
    for row in range(rows):
        blocks = [1 + 2 * row, 2 + 2 * row]
        model.tables.update(torch.tensor([[row, row], [0, 1], blocks, blocks], dtype=torch.int32).view(-1))
    shape = StepShape(rows, 5 * rows, 5, (5 * rows, 5 * rows))
    starts = list(range(0, 5 * rows + 1, 5))
    ids = [(7 * place) % 60 for place in range(5 * rows)]
    model(shape, torch.from_numpy(numbers_of(shape, list(range(rows)), [0] * rows, starts, ids)))


def recorded(model: Attends, limit: int = MAX_GRAPHS) -> tuple[Graphs, FakeDevice]:
    device = FakeDevice()
    padding = PADDING._replace(num_groups=2, max_keys=64)
    graphs = Graphs(device, model, padding, model.tables.num_rows, limit)
    graphs.warm_up(padding.shapes())
    device.is_closed_to_recording = True
    return graphs, device


def test_a_replay_gives_what_the_step_gives_and_touches_nobody_else() -> None:
    plain, model = Attends(), Attends()
    for one in (plain, model):
        opened(one, 5)
    graphs, device = recorded(model)
    before = [pages.clone() for storage in model.storage for pages in storage]
    for storage in model.storage:  # what padding rows have left there is nobody's business
        storage.key[12] = storage.value[12] = math.nan
    shape, numbers = decode([4, 0, 2], [5, 5, 5], [33, 34, 35])
    expected = plain(shape, torch.from_numpy(numbers))
    padded = graphs.padded(shape)
    assert padded is not None and padded.num_rows == 4
    got = graphs.replay(padded, torch.from_numpy(graphs.fill(numbers, shape, padded)))[:3]
    torch.testing.assert_close(got, expected)
    assert device.num_replays == 1
    after = [pages for storage in model.storage for pages in storage]
    for old, new in zip(before, after):
        changed = (old[:12] != new[:12]).any(-1).any(-1).nonzero().tolist()
        assert changed == [[2, 1], [6, 1], [10, 1]], "only the new tokens of rows 0, 2 and 4 were written"
        assert not bool(new[0].any()), "the null block is zero"


def test_a_smaller_step_replays_with_fresh_numbers() -> None:
    plain, model = Attends(), Attends()
    for one in (plain, model):
        opened(one, 5)
    graphs, _ = recorded(model)
    for rows in ([0, 1, 2, 3], [3, 1, 0], [2, 4, 1]):
        shape, numbers = decode(rows, [5] * len(rows), [40 + row for row in rows])
        padded = graphs.padded(shape)
        assert padded is not None and padded.num_rows == 4
        got = graphs.replay(padded, torch.from_numpy(graphs.fill(numbers, shape, padded)))[: len(rows)]
        torch.testing.assert_close(got, plain(shape, torch.from_numpy(numbers)))


def test_the_last_token_of_a_row_is_taken_on_the_device() -> None:
    model = Attends()
    opened(model, 2)
    model.tables.tokens[:2] = torch.tensor([21, 22])
    shape, known = decode([1, 0], [5, 5], [22, 21])
    _, unknown = decode([1, 0], [5, 5], [-1, -1])
    ids = model.tables.unpack(shape, torch.from_numpy(unknown)).ids
    assert ids.tolist() == [22, 21], "no placeholder is embedded"
    torch.testing.assert_close(model(shape, torch.from_numpy(unknown)), model(shape, torch.from_numpy(known)))


def test_the_longest_unused_makes_room() -> None:
    model = Attends()
    opened(model, 1)
    graphs, device = recorded(model, limit=3)
    assert len(graphs) == 3 and device.num_records > 3
    kept = list(graphs._recorded)
    shape, numbers = decode([0], [5], [1])
    padded = graphs.padded(shape)
    assert padded is not None
    graphs.replay(padded, torch.from_numpy(graphs.fill(numbers, shape, padded)))
    assert list(graphs._recorded)[-1] == padded and set(graphs._recorded) == set(kept)


def test_what_was_not_recorded_runs_as_it_is() -> None:
    graphs, _ = recorded(Attends())
    assert graphs.padded(StepShape(9, 9, 1, (64, 64))) is None
    assert graphs.padded(StepShape(2, 2, 1, (1 << 20, 64))) is None
    assert graphs.padded(StepShape(2, 9, 8, (16, 16))) is None
