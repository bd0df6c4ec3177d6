"""What a step asks of an accelerator: one upload, some work, one transfer back; and to record work for replay.

Worker thread only. Everything goes through one stream, in order, so that no step sees what a later one writes. Pinned
memory is torch's: it is not handed out again before the copies that use it are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["CudaDevice", "Device", "Numbers", "Recording", "Ticket", "Work"]

Numbers = npt.NDArray[np.int32]
"""All that a step sends to the device: integers, and what was viewed as such."""

Work = Callable[[Tensor], Tensor]
"""From the uploaded numbers to what is brought back."""


class Ticket(Protocol):
    """A step under way."""

    def wait(self) -> Tensor:
        """Wait until it is done; what its work has returned, on the host."""


class Recording(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Run it again, over the same tensors."""


class Device(Protocol):
    """Where steps run."""

    kind: torch.device

    def launch(self, numbers: Numbers, work: Work) -> Ticket:
        """Queue a step behind those that were launched before; returns at once."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        """Run work once to warm it up and once to record it; returns also what every replay writes its result to.

        All recordings share their memory.

        Raises:
            RuntimeError: it cannot be recorded.
        """


class _CudaTicket:
    def __init__(self, result: Tensor, done: torch.cuda.Event) -> None:
        self._result, self._done = result, done

    def wait(self) -> Tensor:
        """Wait until the device has brought it back."""
        self._done.synchronize()
        return self._result


class CudaDevice:
    """A device that has streams, events and graphs as CUDA has them.

    Args:
        kind: with its index.
    """

    def __init__(self, kind: torch.device) -> None:
        self.kind = kind
        self._pool: Any = None

    def launch(self, numbers: Numbers, work: Work) -> Ticket:
        """Queue a step on the current stream."""
        with torch.cuda.device(self.kind):  # whose streams are meant, in whatever thread this is
            uploaded = torch.from_numpy(numbers).pin_memory().to(self.kind, non_blocking=True)
            made = work(uploaded)
            result = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
            result.copy_(made, non_blocking=True)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.kind))
        return _CudaTicket(result, done)

    def record(self, work: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        """Capture a graph into the one memory pool."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.kind):
            beside: Any = torch.cuda.Stream(self.kind)  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream(self.kind))
            with torch.cuda.stream(beside):
                work()
            torch.cuda.current_stream(self.kind).wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: what they do is none of the graph's business.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
            return graph, result
