"""What backends hand to device kernels, tried with plain torch in their place: equal to the reference."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from aiocb.attention import create_backend
from aiocb.attention.base import Attention, GroupTables, LayerSpec, StepBatch
from aiocb.attention.flash import FlashAttention2, FlashAttention3, FlashKernels
from aiocb.attention.packed import PackedBackend
from aiocb.attention.varlen import VarlenBackend
from aiocb.errors import ConfigError

from . import twins

CPU = torch.device("cpu")
BACKENDS: dict[str, Callable[[], PackedBackend]] = {
    "flash 2": lambda: FlashAttention2(twins.FLASH_2),
    "flash 3": lambda: FlashAttention3(twins.FLASH_3),
    "varlen": lambda: VarlenBackend(twins.varlen_attn),
    "varlen paged": lambda: VarlenBackend(twins.varlen_attn, "FA3"),
}


class Shape(NamedTuple):
    """Rows of a step: tokens in the cache, and new ones; single tokens come first."""

    computed: Sequence[int]
    new: Sequence[int]


SHAPES = {
    "decode": Shape([5, 18, 7, 3, 0], [1, 1, 1, 1, 1]),
    "mixed": Shape([5, 18, 7, 0, 9, 0], [1, 1, 1, 1, 6, 11]),
    "prompts": Shape([0, 0, 0], [3, 12, 5]),
    "chunks": Shape([4, 21], [4, 13]),
}


def batch_of(shape: Shape, window: int | None, page: int) -> StepBatch:
    computed, new = np.array(shape.computed), np.array(shape.new)
    lengths, starts = computed + new, np.concatenate([[0], np.cumsum(new)])
    blocks = iter((torch.randperm(90, generator=torch.Generator().manual_seed(0)) + 1).tolist())
    tables = [[next(blocks) for _ in range(-(-int(length) // page))] for length in lengths]
    first = np.zeros_like(computed) if window is None else np.maximum(computed - window + 1, 0) // page
    visible = [table[low:] for table, low in zip(tables, first)]
    slots = [
        table[position // page] * page + position % page
        for table, begin, end in zip(tables, computed, lengths)
        for position in range(int(begin), int(end))
    ]
    group = GroupTables(
        window,
        torch.tensor(slots),
        np.array(sum(visible, []), np.int32),
        np.concatenate([[0], np.cumsum([len(pages) for pages in visible])]),
        first * page,
    )
    num_decodes = sum(count == 1 for count in shape.new)
    return StepBatch(num_decodes, starts, computed, lengths, (group,), page, CPU, torch.float32)


def attended(backend: Any, spec: LayerSpec, batch: StepBatch, stale: float, is_gathered: bool = False) -> Tensor:
    """One step over pages in which others have left `stale` everywhere."""
    tables, page, generator = batch.groups[0], batch.page_size, torch.Generator().manual_seed(1)
    storage = backend.allocate(spec, 91, page, torch.float32, CPU)
    is_packed = isinstance(backend, PackedBackend)
    for pages in storage:
        (pages[1:] if is_packed else pages[:, 1:]).fill_(stale)
    for pages, width in zip(storage, (spec.key_dim, spec.value_dim)):
        for row, (begin, end) in enumerate(zip(tables.key_starts, batch.computed)):
            own = tables.pages[tables.page_starts[row] : tables.page_starts[row + 1]]
            for place in range(int(end - begin)):
                at: Any = (int(own[place // page]), place % page)
                value = torch.randn(spec.num_kv_heads, width, generator=generator)
                if is_packed:
                    pages[at] = value
                else:
                    pages[:, at[0], at[1]] = value
    total = int(batch.starts[-1])
    query = torch.randn(total, spec.num_heads, spec.key_dim, generator=generator)
    key = torch.randn(total, spec.num_kv_heads, spec.key_dim, generator=generator)
    value = torch.randn(total, spec.num_kv_heads, spec.value_dim, generator=generator)
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.has_sinks else None
    metadata = backend.prepare(batch, 0)
    backend.write(storage, metadata, key, value)
    if not is_gathered:
        out: Tensor = backend.attend(Attention(spec, query, key, value, sinks), storage, metadata)
        return out
    keys, values = backend.gather(storage, metadata)
    bias = torch.randn(spec.num_heads, total, keys.shape[1], generator=generator) if stale == 0.0 else None
    result: Tensor = backend.attend_gathered(Attention(spec, query, keys, values, sinks, bias), metadata)
    return result


def spec_of(name: str, window: int | None = None) -> LayerSpec:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "sinks": {"has_sinks": True},
        "cap": {"softcap": 2.0},
        "unequal": {"key_dim": 24, "value_dim": 12},
        "odd": {"key_dim": 10, "value_dim": 10},
    }
    spec = LayerSpec(0, 6, 2, 16, 16, 0.3, window)
    return spec._replace(**options[name])


@pytest.mark.parametrize("stale", [0.0, math.nan])
@pytest.mark.parametrize("page", [4, 256])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", ["plain", "sinks", "cap", "unequal", "odd"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_kernels_see_what_the_reference_sees(
    name: str, shape: str, kind: str, window: int | None, page: int, stale: float
) -> None:
    backend, spec, batch = BACKENDS[name](), spec_of(kind, window), batch_of(SHAPES[shape], window, page)
    if spec.softcap is not None and not backend.capabilities.has_softcap:
        refused = backend.capabilities.refusal([spec], "cuda", "bfloat16", page)
        assert refused is not None and "soft cap" in refused
        with pytest.raises(NotImplementedError):
            attended(backend, spec, batch, stale)
        return
    expected = attended(create_backend("reference"), spec, batch, 0.0)
    torch.testing.assert_close(attended(backend, spec, batch, stale), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stale", [0.0, math.nan])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", BACKENDS)
def test_gathered_layers_too_with_a_bias_or_without(name: str, window: int | None, stale: float) -> None:
    spec, batch = spec_of("unequal", window), batch_of(SHAPES["mixed"], window, 4)
    got = attended(BACKENDS[name](), spec, batch, stale, is_gathered=True)
    if stale == 0.0:
        expected = attended(create_backend("reference"), spec, batch, stale, is_gathered=True)
    else:
        expected = attended(create_backend("reference"), spec, batch, 0.0)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_pages_are_read_in_place_where_the_kernel_can() -> None:
    plain, unequal = spec_of("plain"), spec_of("unequal")
    assert FlashAttention2(twins.FLASH_2).reads_in_place(plain, 256)
    assert not FlashAttention2(twins.FLASH_2).reads_in_place(plain, 16)
    assert FlashAttention3(twins.FLASH_3).reads_in_place(plain, 16)
    assert not FlashAttention3(twins.FLASH_3).reads_in_place(unequal, 16)
    assert not VarlenBackend(twins.varlen_attn).reads_in_place(plain, 256)
    assert VarlenBackend(twins.varlen_attn, "FA4").reads_in_place(plain, 16)


def test_blocks_are_copied_whole() -> None:
    backend = BACKENDS["varlen"]()
    storage = backend.allocate(spec_of("plain"), 4, 4, torch.float32, CPU)
    storage.key[2], storage.value[2] = 1.0, 2.0
    backend.copy_block(storage, 2, 3)
    assert bool((storage.key[3] == 1.0).all()) and bool((storage.value[3] == 2.0).all())
    assert len(storage.key) == 5 and not bool(storage.key[4].any()), "the scratch block comes on top"


def test_a_log_sum_exp_of_another_shape_is_noticed() -> None:
    def turned(*args: Any, **options: Any) -> Any:
        out, lse = twins.varlen_attn(*args, **options)
        return out, lse.T

    with pytest.raises(ValueError, match="log-sum-exp"):
        attended(VarlenBackend(turned), spec_of("sinks"), batch_of(SHAPES["mixed"], None, 4), 0.0)


@pytest.mark.parametrize("other", [None, ModuleType("kernels")], ids=["nothing", "another package of that name"])
def test_without_flash_attn_the_refusal_says_what_to_install(
    other: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kernels", other)
    with pytest.raises(ConfigError, match=r"aiocb\[flash\]"):
        create_backend("flash_attention_2")
    with pytest.raises(ConfigError, match="flash_attn_interface"):
        create_backend("paged|flash_attention_3")


def test_the_names_of_transformers_are_known() -> None:
    assert create_backend("paged|eager").name == "eager"
    assert create_backend("paged|sdpa").name == "sdpa"
    with pytest.raises(ConfigError, match="unknown"):
        create_backend("paged|nothing")


def test_kernels_of_the_hub_stand_in_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        flash_attn_varlen_func = staticmethod(twins.flash_2_varlen)
        flash_attn_with_kvcache = staticmethod(twins.flash_2_with_kvcache)

        @classmethod
        def get_kernel(cls, name: str) -> type[Hub]:
            if name == "absent":
                raise ValueError("no such kernel")
            return cls

    import sys

    monkeypatch.setitem(sys.modules, "kernels", Hub)
    assert FlashKernels.load("flash_attn_of_nobody", "some") == twins.FLASH_2
    with pytest.raises(ImportError, match="no such kernel"):
        FlashKernels.load("flash_attn_of_nobody", "absent")
