"""What a step takes besides weights and cache: measured, where memory is a device's own. Worker thread only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.kv import GPU_SHARE, LENDING, format_size, free_memory
from aiocb.model.memory import is_out_of_memory
from aiocb.model.sizes import GPU_BATCH_TOKENS, MIN_BATCH_TOKENS

__all__ = ["DeviceMeter", "Meter", "StepMemory", "measure_step", "meter_of"]

UNMEASURED_BYTES = 1 << 30
STEP_SHARE = 0.5
"""Of the memory that may be taken, what a step may need at most before its automatic budget is lowered."""


class Meter(Protocol):
    """Tells how much memory a device has and what a call takes of it."""

    def free(self) -> int:
        """Bytes that can still be had."""

    def peak(self, run: Callable[[], object]) -> int:
        """Call, and return how many bytes more than before were taken at the worst moment.

        Raises:
            Exception: whatever the call raises.
        """


class DeviceMeter:
    """The memory of an accelerator, as torch's allocator takes it: with what it loses in pieces.

    Args:
        device: one of the kinds in `LENDING`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def free(self) -> int:
        """Bytes that can still be had, by this process and others."""
        return free_memory(self._device)

    def peak(self, run: Callable[[], object]) -> int:
        """See `Meter.peak`."""
        module, device = self._module, self._device
        module.synchronize(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)
        before: int = module.memory_reserved(device)
        run()
        module.synchronize(device)
        taken: int = module.max_memory_reserved(device)
        return max(taken - before, 0)


def meter_of(device: torch.device) -> Meter | None:
    """The meter of a device; None where steps are not measured: on the CPU they are small, and memory is not lent."""
    return DeviceMeter(device) if device.type in LENDING else None


class StepMemory(NamedTuple):
    """What a step may be, and what it then takes.

    Attributes:
        max_tokens: token budget.
        num_bytes: that a step of so many tokens takes.
        choice: the same, for people.
    """

    max_tokens: int
    num_bytes: int
    choice: Choice


def measure_step(meter: Meter, config: EngineConfig, run: Callable[[int], object]) -> StepMemory:
    """Run steps without requests until one leaves enough memory for the cache.

    Args:
        meter: of the device.
        config: an explicit `max_batch_tokens` is obeyed.
        run: takes a step of so many tokens.

    Raises:
        ConfigError: not even the smallest step can be taken.
    """
    allowed = int(meter.free() * (config.max_memory_percent or GPU_SHARE))
    num_tokens, smaller = config.max_batch_tokens or GPU_BATCH_TOKENS, ""
    while True:
        try:
            taken = _try(meter, run, num_tokens)
        except Exception as error:
            # Whether the model can be run is for the comparison with its own forward to say.
            reason = f"not measured, the step failed with {type(error).__name__}: {error}"
            return StepMemory(
                num_tokens, UNMEASURED_BYTES, Choice("step_memory", format_size(UNMEASURED_BYTES), reason)
            )
        is_last = config.max_batch_tokens is not None or num_tokens <= MIN_BATCH_TOKENS
        if taken is not None and (is_last or taken <= allowed * STEP_SHARE):
            break
        found = "more than there is" if taken is None else format_size(taken)
        if is_last:
            raise ConfigError(
                f"a step of {num_tokens} tokens takes {found}, {format_size(meter.free())} are free: lower "
                "max_batch_tokens, or free memory"
            )
        smaller = f"; {num_tokens} tokens would take {found} of {format_size(allowed)} allowed"
        num_tokens = max(num_tokens // 2, MIN_BATCH_TOKENS)
    reason = f"measured with {num_tokens} tokens, sampling included{smaller}"
    return StepMemory(num_tokens, taken, Choice("step_memory", format_size(taken), reason))


def _try(meter: Meter, run: Callable[[int], object], num_tokens: int) -> int | None:
    """What a step takes; None when there is not so much."""
    try:
        return meter.peak(lambda: run(num_tokens))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None
