"""The swap space of a runner: how large it is, and what it copies where."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError, EngineError
from aiocb.model import swap
from aiocb.model.memory import run_in_memory
from aiocb.model.swap import SwapBuffer, choose_swap
from aiocb.step import BlockSwap, CacheGroup, CacheLayout, StateLayout

MIB = 1 << 20
LAYOUT = CacheLayout(16, (CacheGroup(None, (0,), 9, MIB), CacheGroup(64, (1,), 5, MIB)))  # 12 MiB of blocks


def chosen(
    monkeypatch: pytest.MonkeyPatch, layout: CacheLayout = LAYOUT, *, is_on_host: bool = False, **settings: Any
) -> tuple[tuple[int, ...], str, str]:
    """What is decided where 100 MiB are left."""
    monkeypatch.setattr(swap, "free_memory", lambda: 100 * MIB)
    config = EngineConfig(**settings)
    layout, choice = choose_swap(layout, config, is_on_host=is_on_host)
    assert choice.name == "cpu_offload_space"
    return layout.swap_places, choice.value, choice.reason


class TestSize:
    def test_none_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        places, value, reason = chosen(monkeypatch)
        assert (places, value) == ((), "off") and "recomputed" in reason

    def test_each_group_has_its_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        places, value, reason = chosen(monkeypatch, cpu_offload_space=24 / 1024)
        assert (places, value, reason) == ((16, 8), "24.0 MiB, 16 + 8 blocks", "configured")

    def test_states_have_theirs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layout = LAYOUT._replace(states=StateLayout(7, 2 * MIB, 64))
        assert chosen(monkeypatch, layout, cpu_offload_space=24 / 1024)[0] == (8, 4, 6)

    def test_as_much_as_is_safe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        places, value, reason = chosen(monkeypatch, cpu_offload_space=None)
        assert places == (53, 26) and "80% of 100.0 MiB" in reason and value.startswith("80.0 MiB")
        half = chosen(monkeypatch, cpu_offload_space=None, cpu_offload_space_safety_threshold=0.5)
        assert half[0] == (33, 16)
        # The cache itself takes from the same memory, when it comes to be used.
        assert chosen(monkeypatch, cpu_offload_space=None, is_on_host=True)[0] == (46, 23)

    def test_more_than_is_safe_is_cut_with_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "aiocb"):
            places, _, reason = chosen(monkeypatch, cpu_offload_space=8.0)
        assert places == (53, 26) and "8 GiB were asked for, cut to 80%" in reason
        assert "cpu_offload_space" in caplog.text

    @pytest.mark.parametrize("settings", [{"cpu_offload_space": 0.001}, {"cpu_offload_space_safety_threshold": 0.01}])
    def test_too_little_for_one_block_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match=r"cpu_offload_space has no room: .* raise it to 3\.0 MiB"):
            chosen(monkeypatch, **({"cpu_offload_space": None} | settings))


class TestBuffer:
    def test_blocks_come_back_elsewhere(self) -> None:
        plain = torch.arange(8 * 3.0).view(8, 3)
        # Blocks that are no rows of the memory: as keys [K, B, S, D] by block.
        keys = torch.arange(2 * 8 * 2.0).view(2, 8, 2)
        before = plain.clone(), keys.clone()
        buffer = SwapBuffer([[plain, keys.transpose(0, 1)], [torch.zeros(4, 1)]], (6, 2))
        buffer.swap_out([BlockSwap(0, 3, 1), BlockSwap(0, 5, 4), BlockSwap(0, 1, 2), BlockSwap(1, 2, 0)])
        plain.zero_(), keys.zero_()
        buffer.swap_in([BlockSwap(0, 7, 2), BlockSwap(0, 2, 4), BlockSwap(0, 6, 1)])
        expected = {7: 1, 2: 5, 6: 3}
        for block in range(8):
            source = expected.get(block)
            wanted = torch.zeros(3) if source is None else before[0][source]
            assert torch.equal(plain[block], wanted)
            assert torch.equal(keys[:, block], torch.zeros(2, 2) if source is None else before[1][:, source])
        buffer.swap_out(())
        buffer.close()

    def test_without_memory_for_all_at_once_each_block_is_moved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("out of memory")

        keys = torch.arange(2 * 8 * 2.0).view(2, 8, 2)
        before = keys.clone()
        buffer = SwapBuffer([[keys.transpose(0, 1)]], (6,))
        for name in ("index_select", "index_copy_"):
            monkeypatch.setattr(torch.Tensor, name, fail)
        buffer.swap_out([BlockSwap(0, 3, 1), BlockSwap(0, 5, 4)])
        keys.zero_()
        buffer.swap_in([BlockSwap(0, 2, 4), BlockSwap(0, 6, 1)])
        assert torch.equal(keys[:, [2, 6]], before[:, [5, 3]]) and not keys[:, [0, 1, 3, 4, 5, 7]].any()

    def test_other_failures_are_not_hidden(self) -> None:
        with pytest.raises(IndexError):
            SwapBuffer([[torch.zeros(4, 1)]], (2,)).swap_out([BlockSwap(0, 9, 0)])

    def test_what_cannot_be_had_is_said(self) -> None:
        with pytest.raises(ConfigError, match="lower cpu_offload_space"):
            SwapBuffer([[torch.zeros(2, 1 << 20)]], (1 << 40,))

    def test_blocks_go_out_one_by_one_where_memory_is_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = torch.arange(8 * 3.0).view(8, 3)
        buffer, before = SwapBuffer([[rows]], (6,)), rows.clone()
        monkeypatch.setattr(torch.Tensor, "index_select", out_of_memory)
        buffer.swap_out([BlockSwap(0, 3, 1), BlockSwap(0, 5, 4)])
        monkeypatch.undo()
        buffer.swap_in([BlockSwap(0, 1, 4), BlockSwap(0, 2, 1)])
        assert torch.equal(rows[1:3], before[[5, 3]])

    def test_blocks_that_cannot_go_out_are_no_reason_to_try_a_smaller_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        buffer = SwapBuffer([[torch.zeros(8, 3)]], (6,))
        for name in ("index_select", "copy_"):
            monkeypatch.setattr(torch.Tensor, name, out_of_memory)
        with pytest.raises(EngineError, match=r"no memory to move .* cpu_offload_space to 0\.0") as caught:
            run_in_memory(torch.device("cpu"), buffer.swap_out, [BlockSwap(0, 3, 1)])
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
