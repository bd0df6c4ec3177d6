"""What the processes of a world do; each function runs on every rank."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.distributed.configuration_utils import DistributedConfig

import aiocb
import aiocb.compat.transformers as compat
from tests.parallel.worlds import Rank

CONFIG: dict[str, Any] = {"page_size": 4, "num_blocks": 24, "num_threads": 1, "debug_checks": True, "native": False}
PROMPTS: list[list[int]] = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [5, 6, 7, 8, 9, 10, 11, 12, 99, 3],
    [44, 45],
    list(range(20, 51)),
    [7],
]
LIMIT_S = 2.0
SHORT_S = 1.0
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    # Sinks, a window, experts.
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8},
    # A recurrent state, which is not spread, norms per head, a shared expert.
    "qwen3_next": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


async def answers(engine: aiocb.Engine) -> list[tuple[int, ...]]:
    """Greedy, and sampled with a seed; more than the cache holds at once."""
    greedy = engine.generate_batch(PROMPTS, temperature=0.0, max_new_tokens=16, ignore_eos=True)
    sampled = engine.generate_batch(PROMPTS, temperature=1.0, seed=3, max_new_tokens=8, ignore_eos=True)
    both = await asyncio.gather(greedy, sampled)
    return [completion.token_ids for completions in both for completion in completions]


def negate(model: Any) -> None:
    """Change the weights, alike on every rank."""
    with torch.no_grad():
        model.lm_head.weight.neg_()


async def answers_of_one(folder: str) -> list[tuple[int, ...]]:
    """What one process gives."""
    config = aiocb.EngineConfig(page_size=4, num_threads=1, native=False)
    async with aiocb.Engine.from_pretrained(folder, dtype="float32", config=config) as engine:
        return await answers(engine)


async def single(folder: str) -> list[list[tuple[int, ...]]]:
    """What one process gives, before and after the weights have changed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    async with aiocb.Engine(model, config=aiocb.EngineConfig(**CONFIG)) as engine:
        before = await answers(engine)
        async with engine.pause() as paused:
            negate(paused)
        return [before, await answers(engine)]


async def everything(rank: Rank) -> Any:
    """Tokens, prefix hits, preemption, aborts, deadlines, a pause, another entry."""
    engine = aiocb.Engine.from_pretrained(
        rank.folder,
        dtype="float32",
        distributed_config=aiocb.DistributedConfig(),
        config=aiocb.EngineConfig(**{**CONFIG, "native": None}, cpu_group_timeout=30.0),
    )
    result: dict[str, Any] = {}
    async with engine:
        result["processes"] = next(choice.value for choice in engine.describe() if choice.name == "processes")
        result["cache"] = next(choice.reason for choice in engine.describe() if choice.name == "num_blocks")
        assert engine.rank == rank.number
        if rank.number == 0:
            result["before"] = await answers(engine)
            result["stats"] = engine.stats()
            await leave_some(engine, result)
        else:
            result["refusal"] = refusal(engine)
        async with engine.pause() as model:
            negate(model)
        if rank.number == 0:
            result["after"] = await answers(engine)
    async with engine:
        if rank.number == 0:
            again = await engine.generate(PROMPTS[0], temperature=0.0, max_new_tokens=16, ignore_eos=True)
            result["again"] = again.token_ids
            result["usage"] = engine.stats().kv_cache_usage_perc
    return result


async def leave_some(engine: aiocb.Engine, result: dict[str, Any]) -> None:
    """One stream is left, one runs into its deadline, one goes on."""

    async def leave() -> int:
        async with engine.stream(PROMPTS[0], temperature=0.0, max_new_tokens=60, ignore_eos=True) as stream:
            async for chunk in stream:
                return len(chunk.token_ids)
        return 0

    async def overrun() -> str:
        try:
            await engine.generate(PROMPTS[1], temperature=0.0, max_new_tokens=80, ignore_eos=True, timeout=0.05)
        except aiocb.RequestTimeout as error:
            return error.stage
        return "in time"

    async def go_on() -> tuple[int, ...]:
        return (await engine.generate(PROMPTS[0], temperature=0.0, max_new_tokens=16, ignore_eos=True)).token_ids

    result["left"], result["overrun"], result["went_on"] = await asyncio.gather(leave(), overrun(), go_on())


def refusal(engine: aiocb.Engine) -> str:
    try:
        engine.stream([1])
    except aiocb.EngineError as error:
        return str(error)
    return ""


async def sharded_by_its_owner(rank: Rank) -> Any:
    """A model that transformers has spread; the engine over it is entered twice."""
    model = AutoModelForCausalLM.from_pretrained(
        rank.folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=rank.size)
    )
    num_blocks = 24 + 100 * (1 - rank.number)
    engine = aiocb.Engine(
        model, config=aiocb.EngineConfig(**CONFIG | {"num_blocks": num_blocks, "cpu_offload_space": 1e-3})
    )
    results: list[Any] = []
    for _ in range(2):
        async with engine:
            results.append({choice.name: choice.value for choice in engine.describe()}["num_blocks"])
            if rank.number == 0:
                results.append(await answers(engine))
                results.append(engine.stats().num_restores > 0)
    return results


async def interrupted(rank: Rank) -> Any:
    """Streams that would go on for long; the test does something to a process meanwhile."""
    engine = aiocb.Engine.from_pretrained(
        rank.folder,
        dtype="float32",
        distributed_config=DistributedConfig(tp_size=rank.size),
        config=aiocb.EngineConfig(cpu_group_timeout=LIMIT_S, page_size=4),
    )
    try:
        async with engine:
            if rank.number == 0:
                return await streams(rank, engine)
    except aiocb.EngineDead as error:
        return str(error)
    return "closed"


async def streams(rank: Rank, engine: aiocb.Engine) -> Any:
    ended: list[tuple[str, float]] = []

    async def read(number: int) -> None:
        try:
            async for _ in engine.stream([number + 1], temperature=0.0, max_new_tokens=4000, ignore_eos=True):
                if number == 0 and not told:
                    told.append(True)
                    rank.say("running")
        except aiocb.EngineDead as error:
            ended.append((str(error), time.monotonic()))

    told: list[bool] = []
    await asyncio.gather(*map(read, range(3)))
    health = engine.health()
    try:
        await engine.aclose()
        async with engine:
            pass
    except aiocb.EngineError as error:
        return ended, health.state, str(error)
    return ended, health.state, ""


async def several_models(rank: Rank) -> Any:
    """One model after the other, each of which has something of its own to spread."""
    results = []
    for kind in KINDS:
        engine = aiocb.Engine.from_pretrained(
            f"{rank.folder}/{kind}",
            dtype="float32",
            distributed_config=aiocb.DistributedConfig(),
            config=aiocb.EngineConfig(page_size=4, num_threads=1),
        )
        async with engine:
            if rank.number == 0:
                results.append(await answers(engine))
    return results


async def slow_to_load(rank: Rank) -> Any:
    """Rank 1 takes longer than a step may; then nothing runs, until the test does something."""

    def progress(stage: str, fraction: float) -> None:
        if rank.number == 1 and (stage, fraction) == ("load", 0.0):
            time.sleep(1.5 * SHORT_S)

    engine = aiocb.Engine.from_pretrained(
        rank.folder,
        distributed_config=aiocb.DistributedConfig(tp_size=rank.size, tp_plan="auto"),
        progress=progress,
        config=aiocb.EngineConfig(cpu_group_timeout=SHORT_S),
    )
    async with engine:
        if rank.number == 0:
            rank.say(len((await engine.generate([1], max_new_tokens=3, ignore_eos=True)).token_ids))
            while engine.state == "running":
                await asyncio.sleep(0.01)
    return str(engine.health().error)


async def through_the_manager(rank: Rank) -> Any:
    """A program that was written for transformers runs on every rank."""
    model = AutoModelForCausalLM.from_pretrained(
        rank.folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=rank.size)
    )
    settings = ContinuousBatchingConfig(
        page_size=4, num_blocks=24, use_cuda_graph=False, cpu_group_timeout=30.0, disable_nccl_graph_mixing=False
    )
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=16, eos_token_id=-1
    )

    def generate() -> list[list[int]]:
        results = compat.generate_batch(model, PROMPTS, config, settings)
        return [list(result.generated_tokens) for result in results.values()]

    async def add() -> str:
        with compat.continuous_batching_context_manager(model, config, continuous_batching_config=settings) as manager:
            manager.add_request([1, 2, 3], request_id="one")
            result = await asyncio.to_thread(manager.get_result, "one")
            return "" if result is None else f"{len(result.generated_tokens)} {result.error}"

    return [await asyncio.to_thread(generate), await asyncio.to_thread(generate), await add()]


async def from_the_page(rank: Rank) -> Any:
    """The program of the documentation, with this model."""
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    source = page.split("```python\n")[1].split("```")[0]
    assert '"Qwen/Qwen3-4B"' in source
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(source.replace('"Qwen/Qwen3-4B"', repr(rank.folder)), namespace)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        await namespace["main"]()
    return len(printed.getvalue())


async def fails_on_one(rank: Rank) -> Any:
    """Rank 1 raises in the middle of a step."""
    model = AutoModelForCausalLM.from_pretrained(
        rank.folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=rank.size)
    )
    engine = aiocb.Engine(model, config=aiocb.EngineConfig(**CONFIG, cpu_group_timeout=30.0))
    is_armed: list[bool] = []

    def hook(*_: Any) -> None:
        if is_armed and rank.number == 1:
            raise ValueError("of this rank only")

    model.model.layers[1].register_forward_pre_hook(hook)
    try:
        async with engine:
            is_armed.append(True)
            if rank.number == 0:
                await engine.generate([1, 2, 3], max_new_tokens=3)
    except aiocb.EngineDead as error:
        return str(error)


async def loads_on_one(rank: Rank) -> Any:
    """Rank 1 finds no model."""
    folder = rank.folder if rank.number == 0 else "/nowhere/at/all"
    engine = aiocb.Engine.from_pretrained(folder, distributed_config=aiocb.DistributedConfig(tp_size=rank.size))
    try:
        async with engine:
            return "entered"
    except aiocb.AiocbError as error:
        return type(error).__name__, str(error)
