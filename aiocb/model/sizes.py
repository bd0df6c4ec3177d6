"""What a step and the cache are sized for, as far as settings alone say it. Torch-free.

The token budget of a step is decided once, when the runner is built: on an accelerator a step's memory is measured
with it (`measure`) before the cache takes the rest. `engine.limits` says so in `describe()`.
"""

from __future__ import annotations

import math

from aiocb.config import EngineConfig

__all__ = [
    "CPU_BATCH_TOKENS",
    "CPU_PACED_TOKENS",
    "CPU_REQUESTS",
    "GPU_BATCH_TOKENS",
    "MAX_REQUESTS",
    "MIN_BATCH_TOKENS",
    "SAFETY_MARGINS",
    "expected_length",
    "expected_tokens",
]

GPU_BATCH_TOKENS = 8192
MIN_BATCH_TOKENS = 256
"""The automatic budget on an accelerator is never lower: below it steps cost as much and do less."""
CPU_BATCH_TOKENS = 128
"""Not memory but time is short there: a step of 8192 tokens would hold up every stream for seconds."""
CPU_PACED_TOKENS = 1024
"""Where a step's time is bounded by itself, and its tokens are bounded for the memory that it takes."""
CPU_REQUESTS = 64
"""What a cache has room for on the CPU, where nothing is configured."""
MAX_REQUESTS = 1024
"""Of a step, where nothing is configured."""
SAFETY_MARGINS = {"fifo": 0.15, "priority": 0.15, "prefill_first": 0.0}
"""By `scheduler_type`, where nothing is configured."""


def expected_length(config: EngineConfig, max_model_len: int) -> int | None:
    """The longest request that the hints announce, prompt and output; None without hints."""
    if config.max_prompt_length is None or config.max_generated_length is None:
        return None
    return min(config.max_prompt_length + config.max_generated_length, max_model_len)


def expected_tokens(config: EngineConfig, num_requests: int, length: int, page_size: int) -> int:
    """Tokens of a cache in which so many requests of a length run at once, in whole pages, with the safety margin."""
    margin = SAFETY_MARGINS[config.scheduler_type] if config.safety_margin is None else config.safety_margin
    num_pages = num_requests * -(-length // page_size)
    return math.ceil(num_pages / (1 - min(margin, 0.5))) * page_size
