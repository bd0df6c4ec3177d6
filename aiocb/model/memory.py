"""Whether a failure means that there was no memory, and steps that say so as `StepOutOfMemory`. Worker thread only."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from aiocb.kernels import KernelError
from aiocb.step import StepOutOfMemory

__all__ = ["is_out_of_memory", "run_in_memory"]

P = ParamSpec("P")
R = TypeVar("R")

_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "std::bad_alloc")
"""What torch says where it has no type for it: of the CPU's allocator, of cuBLAS and of other libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """True when an exception means that memory could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, KernelError):
        return error.is_out_of_memory
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def run_in_memory(device: torch.device, run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that computes a step.

    Raises:
        StepOutOfMemory: there was no memory for it. What the call had taken has been given back.
        Exception: whatever else the function raises.
    """
    try:
        return run(*args, **kwargs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).strip().partition("\n")[0]
    # Out here nothing refers to the error any more: the frames of its traceback hold the tensors of the step.
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()  # what is left over in pieces, of other sizes
    raise StepOutOfMemory(message)
