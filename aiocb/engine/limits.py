"""The budgets of a session: what the config leaves open is decided here, once, with a reason. Worker thread."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, TypeVar

from aiocb.cache.manager import CacheManager
from aiocb.config import Choice, EngineConfig
from aiocb.engine.prepare import Limits
from aiocb.errors import ConfigError
from aiocb.model.sizes import CPU_BATCH_TOKENS, CPU_PACED_TOKENS, GPU_BATCH_TOKENS, MAX_REQUESTS, SAFETY_MARGINS
from aiocb.scheduler.lookup import PromptLookup
from aiocb.scheduler.pace import Pace
from aiocb.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from aiocb.engine.source import Built
    from aiocb.step import Runner

__all__ = ["make_scheduler"]

logger = logging.getLogger("aiocb")

_CPU_PREFILL_CHUNK = 128
_PACED_REQUESTS = 256
_TARGET_ITL = 0.08
_CHARACTERS_PER_TOKEN = 32
_MIN_PROMPT_CHARACTERS = 1_000_000

N = TypeVar("N", int, float)


def _is_native(built: Built) -> bool:
    return any(choice.name == "runner" and choice.value == "native" for choice in built.choices)


def _drafter(config: EngineConfig, built: Built) -> PromptLookup | None:
    """What proposes tokens, where that is asked for."""
    if config.speculation is None:
        return None
    if not _is_native(built):
        why = next((choice.reason for choice in built.choices if choice.name == "runner"), "this runner verifies none")
        raise ConfigError(
            f"speculation={config.speculation!r} needs the native CPU kernels, which verify drafts ({why}): leave it "
            "out"
        )
    return PromptLookup(config.num_speculative_tokens)


def _target_itl(config: EngineConfig, built: Built) -> tuple[float | None, str]:
    """How long a step may last, None where its tokens alone are bounded; and why."""
    if config.target_itl != "auto":
        return config.target_itl, "as configured"
    if _is_native(built):
        return _TARGET_ITL, "prompts get what decoding leaves of it; their output does not depend on it"
    return None, "how prompts are cut may change their output here"


def _batch_tokens(runner: Runner, *, is_paced: bool) -> tuple[int, str]:
    """The automatic token budget of a step, and why."""
    measured = runner.max_batch_tokens
    if measured is not None and measured < GPU_BATCH_TOKENS:
        return measured, f"half of {GPU_BATCH_TOKENS} until a step leaves memory for the cache (see step_memory)"
    if measured is not None or runner.device_type != "cpu":
        return GPU_BATCH_TOKENS, "the field's default for an accelerator"
    if is_paced:
        return CPU_PACED_TOKENS, "for the memory of a step; target_itl bounds its time"
    return (
        CPU_BATCH_TOKENS,
        "on the CPU a step's time grows with its tokens: a small budget keeps the time between tokens even",
    )


def make_scheduler(config: EngineConfig, built: Built) -> tuple[Scheduler, Limits, list[Choice]]:
    """Build the scheduler over a runner's cache.

    Raises:
        ConfigError: the cache cannot hold a single useful request.
    """
    layout = built.runner.cache_layout
    is_cpu = built.runner.device_type == "cpu"
    choices: list[Choice] = []

    def choose(name: str, given: N | None, value: N, reason: str, most: N | None = None) -> N:
        chosen, reason = (value, reason) if given is None else (given, "as configured")
        if most is not None and chosen > most:
            chosen, reason = most, f"configured as {given}, of which a step of max_batch_tokens has room for {most}"
        choices.append(Choice(name, str(chosen), reason))
        return chosen

    target, why = _target_itl(config, built)
    choices.append(Choice("target_itl", "none" if target is None else f"{target:g} s", why))
    pace = None if target is None else Pace(target, config.target_ttft)
    max_batch_tokens = choose(
        "max_batch_tokens", config.max_batch_tokens, *_batch_tokens(built.runner, is_paced=pace is not None)
    )
    if pace is not None:
        most_chunk, why = max_batch_tokens, "target_itl bounds what one long prompt may take"
    else:
        most_chunk = min(_CPU_PREFILL_CHUNK, max_batch_tokens) if is_cpu else max(max_batch_tokens // 2, 1)
        why = "one long prompt must not hold up the streams that decode"
    chunk = choose("max_prefill_chunk", config.max_prefill_chunk, most_chunk, why, max_batch_tokens)
    for name in ("state_interval", "max_state_memory"):
        if layout.states is None and getattr(config, name) is not None:
            logger.warning("%s=%r has no effect: the model keeps no states", name, getattr(config, name))
    # The null block and the null slot hold nobody's.
    smallest = min(group.num_blocks for group in layout.groups) - 1
    if layout.states is not None:
        smallest = min(smallest, layout.states.num_slots - 1)
    if smallest < 1:
        raise ConfigError("the cache is too small for any request; raise num_blocks or max_memory_percent")
    max_requests = choose(
        "max_requests_per_batch",
        config.max_requests_per_batch,
        min(MAX_REQUESTS if pace is None else _PACED_REQUESTS, max_batch_tokens, smallest),
        f"{_PACED_REQUESTS}, so that decoding alone stays short; bounded by the token budget and by one block each"
        if pace is not None
        else "bounded by the token budget and by one block each"
        if layout.states is None
        else "bounded by the token budget, by one block and by one slot for a state each",
        max_batch_tokens,
    )
    margin = choose(
        "safety_margin",
        config.safety_margin,
        SAFETY_MARGINS[config.scheduler_type],
        f"the default of scheduler_type {config.scheduler_type}",
    )
    lookup = _drafter(config, built)
    cache = CacheManager(layout, config.allow_block_sharing)
    scheduler = Scheduler(
        cache,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        max_prefill_chunk=chunk,
        scheduler_type=config.scheduler_type,
        safety_margin=margin,
        drafter=lookup,
        max_draft_rows=None if lookup is None else lookup.max_rows,
        jumps=config.jump_ahead,
        pace=pace,
    )
    longest = min(built.defaults.max_model_len, built.runner.max_model_len, config.max_model_len or sys.maxsize)
    max_characters = choose(
        "max_prompt_characters",
        config.max_prompt_characters,
        max(_MIN_PROMPT_CHARACTERS, _CHARACTERS_PER_TOKEN * longest),
        "more than the model's positions hold as text: longer ones need not be read to be refused",
    )
    limits = Limits(
        dataclasses.replace(built.defaults, max_model_len=longest),
        cache.max_request_tokens,
        config.return_logprobs,
        max_characters,
        config.max_request_strings,
        (config.tool_parser, config.reasoning_parser),
    )
    choose("max_request_tokens", None, limits.longest, "the smaller of the model's positions and the cache")
    return scheduler, limits, choices
