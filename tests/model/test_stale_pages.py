"""Pages keep what the last owner wrote: whatever it was, nobody else's attention may see it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aiocb.attention import create_backend
from aiocb.attention.base import Attention, GroupTables, LayerSpec, StepBatch

PAGE = 4
COMPUTED = np.array([5, 18, 7, 3, 9])
NEW = np.array([1, 1, 1, 1, 6])
"""Four decode rows of different lengths, none of which fills its last page, and a chunk."""


def batch_of(window: int | None) -> StepBatch:
    lengths, starts = COMPUTED + NEW, np.concatenate([[0], np.cumsum(NEW)])
    blocks = iter((torch.randperm(30, generator=torch.Generator().manual_seed(0)) + 1).tolist())
    tables = [[next(blocks) for _ in range(-(-int(length) // PAGE))] for length in lengths]
    first = np.zeros_like(COMPUTED) if window is None else np.maximum(COMPUTED - window + 1, 0) // PAGE
    visible = [table[low:] for table, low in zip(tables, first)]
    slots = [
        table[position // PAGE] * PAGE + position % PAGE
        for table, begin, end in zip(tables, COMPUTED, lengths)
        for position in range(int(begin), int(end))
    ]
    group = GroupTables(
        window,
        torch.tensor(slots),
        np.array(sum(visible, []), np.int32),
        np.concatenate([[0], np.cumsum([len(pages) for pages in visible])]),
        first * PAGE,
    )
    return StepBatch(4, starts, COMPUTED, lengths, (group,), PAGE, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("left", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (2.0, True)])
@pytest.mark.parametrize("name", ["sdpa", "eager", "reference"])
def test_what_others_left_is_not_seen(
    name: str, softcap: float | None, has_sinks: bool, window: int | None, left: float
) -> None:
    spec = LayerSpec(0, 6, 2, 8, 8, 0.3, window, softcap, has_sinks)
    batch = batch_of(window)
    tables = batch.groups[0]
    outputs = []
    for rest in (0.0, left):
        backend = create_backend(name)
        storage = backend.allocate(spec, 31, PAGE, torch.float32, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        for pages in storage:
            pages[:, 1:] = rest
            for row, (begin, end) in enumerate(zip(tables.key_starts, batch.computed)):
                own = tables.pages[tables.page_starts[row] : tables.page_starts[row + 1]]
                for place in range(int(end - begin)):
                    pages[:, own[place // PAGE], place % PAGE] = torch.randn(2, 8, generator=generator)
        total = int(batch.starts[-1])
        query, key, value = (torch.randn(total, heads, 8, generator=generator) for heads in (6, 2, 2))
        sinks = torch.randn(6, generator=generator) if has_sinks else None
        metadata = backend.prepare(batch, 0)
        backend.write(storage, metadata, key, value)
        in_place = backend.attend(Attention(spec, query, key, value, sinks), storage, metadata)
        keys, values = backend.gather(storage, metadata)
        gathered = backend.attend_gathered(Attention(spec, query, keys, values, sinks), metadata)
        outputs.append((in_place, gathered))
    for clean, dirty in zip(*outputs):
        assert torch.equal(clean, dirty)
    torch.testing.assert_close(outputs[0][0], outputs[0][1])
