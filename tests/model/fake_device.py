"""A device on the CPU that does nothing before somebody waits for it, and graphs that run their work again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aiocb.attention.base import AttentionBackend
from aiocb.attention.flash import FlashAttention2, FlashAttention3
from aiocb.attention.varlen import VarlenBackend
from aiocb.model.eager.device import Numbers, Work
from aiocb.model.eager.device_runner import Accelerator
from tests.attention import twins


class FakeTicket:
    def __init__(self, device: FakeDevice, numbers: Numbers, work: Work) -> None:
        self._device, self.numbers, self.work = device, numbers, work
        self.result: Tensor | None = None

    def run(self) -> None:
        # Uploaded as late as it can be: a buffer that was written to meanwhile would show.
        self.result = self.work(torch.from_numpy(self.numbers.copy()))

    def wait(self) -> Tensor:
        self._device.num_waits += 1
        self._device.run_until(self)
        assert self.result is not None
        return self.result


class FakeRecording:
    """Runs its work again, and puts what comes out where it came out the first time."""

    def __init__(self, device: FakeDevice, work: Callable[[], Tensor]) -> None:
        self._device, self._work = device, work
        self.result = work()

    def replay(self) -> None:
        self._device.num_replays += 1
        self.result.copy_(self._work())


class FakeDevice:
    """Counts what is asked of it.

    Attributes:
        most_waiting: steps that were queued at once.
    """

    kind = torch.device("cpu")

    def __init__(self, record: Callable[[], None] = lambda: None) -> None:
        self.queue: deque[FakeTicket] = deque()
        self.num_launches = self.num_waits = self.num_replays = self.most_waiting = self.num_records = 0
        self.is_closed_to_recording = False
        self._record = record

    def launch(self, numbers: Numbers, work: Work) -> FakeTicket:
        self.num_launches += 1
        ticket = FakeTicket(self, numbers, work)
        self.queue.append(ticket)
        self.most_waiting = max(self.most_waiting, len(self.queue))
        return ticket

    def run_until(self, ticket: FakeTicket) -> None:
        while ticket.result is None:
            self.queue.popleft().run()

    def record(self, work: Callable[[], Tensor]) -> tuple[FakeRecording, Tensor]:
        assert not self.is_closed_to_recording, "nothing is recorded in the middle of traffic"
        self._record()
        self.num_records += 1
        recording = FakeRecording(self, work)
        return recording, recording.result


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "flash_attention_2": lambda: _on_cpu(FlashAttention2(twins.FLASH_2)),
    "flash_attention_3": lambda: _on_cpu(FlashAttention3(twins.FLASH_3)),
    "varlen": lambda: _on_cpu(VarlenBackend(twins.varlen_attn)),
}


def _on_cpu(backend: Any) -> Any:
    backend.capabilities = backend.capabilities._replace(devices=(), dtypes=())
    return backend


def accelerator(device: FakeDevice | None = None, **options: Any) -> Accelerator:
    return Accelerator(device or FakeDevice(), **{"backends": BACKENDS, **options})
