"""Real processes, which talk over gloo on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parallel.programs import (
    KINDS,
    LIMIT_S,
    PROMPTS,
    SHORT_S,
    SIZES,
    answers_of_one,
    everything,
    fails_on_one,
    from_the_page,
    interrupted,
    loads_on_one,
    several_models,
    sharded_by_its_owner,
    single,
    slow_to_load,
    through_the_manager,
)
from tests.parallel.worlds import world_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[tuple[int, ...]]]:
    return asyncio.run(single(folder))


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_are_one_engine(folder: str, expected: Any, size: int) -> None:
    with world_of(everything, size, folder) as world:
        leader, *followers = world.results()
    before, after = expected
    assert leader["before"] == before
    assert leader["stats"].prefix_cache_hits > 0
    assert leader["stats"].num_preemptions > 0
    assert leader["overrun"] in ("queue", "run") and leader["left"] > 0
    assert leader["went_on"] == before[0]
    assert leader["after"] == after and leader["again"] == after[0]
    assert leader["usage"] == 0.0
    assert [each["processes"] for each in (leader, *followers)] == [
        f"{size}, this is rank {number}" for number in range(size)
    ]
    # 25 blocks of 4 tokens, 2 layers of 4 heads of 4 numbers for keys and values each: 25 KiB in one process.
    assert all(f"({25 / size:.1f} KiB)" in each["cache"] for each in (leader, *followers))
    assert all("rank 0" in each["refusal"] for each in followers)


def test_a_model_that_its_owner_has_spread(folder: str, expected: Any) -> None:
    with world_of(sharded_by_its_owner, 2, folder) as world:
        leader, follower = world.results()
    assert leader == ["24", expected[0], True] * 2  # one of them has room for no more
    assert follower == ["24"] * 2


def test_models_with_more_than_dense_layers(tmp_path: Path) -> None:
    expected = []
    for kind, values in KINDS.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **SIZES | values)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)  # type: ignore[no-untyped-call]
        expected.append(asyncio.run(answers_of_one(str(tmp_path / kind))))
    with world_of(several_models, 2, str(tmp_path)) as world:
        leader, _ = world.results()
    assert leader == expected


def test_a_program_for_transformers(folder: str, expected: Any) -> None:
    with world_of(through_the_manager, 2, folder) as world:
        leader, follower = world.results()
    greedy = [list(tokens) for tokens in expected[0][: len(PROMPTS)]]
    assert leader == [greedy, greedy, "16 None"]
    assert follower[:2] == [[], []] and "on rank 0" in follower[2]


def test_the_program_of_the_page(folder: str) -> None:
    with world_of(from_the_page, 2, folder) as world:
        leader, follower = world.results()
    assert leader > 0 and follower == 0


def test_the_command_line(folder: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "aiocb"]
    command = [*torchrun, "run", folder, "--raw", "--max-new-tokens", "5", "--temperature", "0", "one", "two"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("2 prompts, 10 tokens") == 1 and result.stdout.count("[1] (temperature 0) one") == 1


def test_loading_may_take_longer_than_a_step_and_idle_processes_are_watched(folder: str) -> None:
    with world_of(slow_to_load, 2, folder) as world:
        assert world.hear(0) == 3
        world.signal(1, signal.SIGSTOP)
        began = time.monotonic()
        assert "rank 1" in world.hear(0)
        assert time.monotonic() - began < SHORT_S + 0.5


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_ends_all_streams(folder: str, which: signal.Signals) -> None:
    with world_of(interrupted, 2, folder) as world:
        assert world.hear(0) == "running"
        world.signal(1, which)
        began = time.monotonic()
        ended, state, refusal = world.hear(0)
        assert [text for text, _ in ended if "rank 1" in text] == [ended[0][0]] * 3
        assert max(at for _, at in ended) - began < LIMIT_S + 0.5
        assert state == "dead"
        assert which is signal.SIGKILL or f"cpu_group_timeout={LIMIT_S:g}" in ended[0][0]
        assert "start all of them anew" in refusal
        world.processes[0].join(10.0)
        assert world.processes[0].exitcode == 0


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
def test_followers_end_with_rank_0(folder: str, which: signal.Signals) -> None:
    with world_of(interrupted, 2, folder) as world:
        assert world.hear(0) == "running"
        world.signal(0, which)
        began = time.monotonic()
        assert "rank 0" in world.hear(1)
        assert time.monotonic() - began < LIMIT_S + 0.5


def test_what_one_process_raises_ends_all(folder: str) -> None:
    with world_of(fails_on_one, 2, folder) as world:
        assert ["rank 1" in text and "of this rank only" in text for text in world.results()] == [True, True]


def test_what_one_process_cannot_load_is_refused_by_all(folder: str) -> None:
    with world_of(loads_on_one, 2, folder) as world:
        results = world.results()
    assert [(name, "/nowhere/at/all" in text) for name, text in results] == [("ConfigError", True)] * 2
