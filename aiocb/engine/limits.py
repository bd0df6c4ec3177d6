"""The budgets of a session: what the config leaves open is decided here, once, with a reason. Worker thread."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from aiocb.cache.manager import CacheManager
from aiocb.config import Choice, EngineConfig
from aiocb.engine.prepare import Limits
from aiocb.errors import ConfigError
from aiocb.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from aiocb.engine.source import Built

__all__ = ["make_scheduler", "most_tokens"]

_GPU_BATCH_TOKENS = 8192
_CPU_BATCH_TOKENS = 128
_CPU_PREFILL_CHUNK = 128
_MAX_REQUESTS = 1024
_CHARACTERS_PER_TOKEN = 32
_MIN_PROMPT_CHARACTERS = 1_000_000
_TOO_SMALL = "the cache is too small for any request; raise num_blocks or max_memory_percent"
_SAFETY_MARGINS = {"fifo": 0.15, "priority": 0.15, "prefill_first": 0.0}


def make_scheduler(config: EngineConfig, built: Built) -> tuple[Scheduler, Limits, list[Choice]]:
    """Build the scheduler over a runner's cache.

    Raises:
        ConfigError: the cache cannot hold a single useful request.
    """
    layout = built.runner.cache_layout
    is_cpu = built.runner.device_type == "cpu"
    choices: list[Choice] = []

    def choose(name: str, given: int | float | None, value: int | float, reason: str) -> int | float:
        if given is not None:
            choices.append(Choice(name, f"{given:g}", "as configured"))
            return given
        choices.append(Choice(name, f"{value:g}", reason))
        return value

    max_batch_tokens = int(
        choose(
            "max_batch_tokens",
            config.max_batch_tokens,
            _CPU_BATCH_TOKENS if is_cpu else _GPU_BATCH_TOKENS,
            "on the CPU a step's time grows with its tokens: a small budget keeps the time between tokens even"
            if is_cpu
            else "the field's default for a GPU",
        )
    )
    chunk = int(
        choose(
            "max_prefill_chunk",
            config.max_prefill_chunk,
            min(_CPU_PREFILL_CHUNK, max_batch_tokens) if is_cpu else max(max_batch_tokens // 2, 1),
            "one long prompt must not hold up the streams that decode",
        )
    )
    smallest = min(group.num_blocks - 1 for group in layout.groups)
    if smallest < 1:
        raise ConfigError(_TOO_SMALL)
    cache = CacheManager(layout, config.allow_block_sharing)
    max_requests = int(
        choose(
            "max_requests_per_batch",
            config.max_requests_per_batch,
            min(_MAX_REQUESTS, max_batch_tokens, smallest),
            "bounded by the token budget and by one block each",
        )
    )
    margin = float(
        choose(
            "safety_margin",
            config.safety_margin,
            _SAFETY_MARGINS[config.scheduler_type],
            f"the default of scheduler_type {config.scheduler_type}",
        )
    )
    if not cache.can_ever_fit(2):
        raise ConfigError(_TOO_SMALL)
    scheduler = Scheduler(
        cache,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        max_prefill_chunk=chunk,
        scheduler_type=config.scheduler_type,
        safety_margin=margin,
    )
    longest = min(built.defaults.max_model_len, built.runner.max_model_len, config.max_model_len or sys.maxsize)
    defaults = dataclasses.replace(built.defaults, max_model_len=longest)
    max_characters = config.max_prompt_characters
    reason = "as configured"
    if max_characters is None:
        max_characters = max(_MIN_PROMPT_CHARACTERS, _CHARACTERS_PER_TOKEN * defaults.max_model_len)
        reason = "more than the model's positions hold as text: longer ones need not be read to be refused"
    choices.append(Choice("max_prompt_characters", str(max_characters), reason))
    limits = Limits(
        defaults,
        most_tokens(cache, defaults.max_model_len),
        config.return_logprobs,
        max_characters,
        config.max_request_strings,
    )
    choices.append(
        Choice(
            "max_request_tokens",
            str(min(limits.max_request_tokens, defaults.max_model_len)),
            "the smaller of the model's positions and the cache",
        )
    )
    return scheduler, limits, choices


def most_tokens(cache: CacheManager, longest: int) -> int:
    """The most tokens of one request that fit an empty cache: what its full groups hold, or `longest` if the sliding
    ones do not allow as much.
    """
    most = min(cache.max_request_tokens, 2**62)
    if cache.can_ever_fit(min(most, longest)):
        return most
    low, high = 2, min(most, longest)  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cache.can_ever_fit(middle) else (low, middle)
    return low
