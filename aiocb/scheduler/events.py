"""What `Scheduler.update` reports: `Update` per request and step, `Finished` once per request."""

from __future__ import annotations

from typing import NamedTuple

from aiocb.outputs import FinishReason, TokenLogprobs
from aiocb.scheduler.request import Request

__all__ = ["Finished", "Update"]


class Finished(NamedTuple):
    """The end of a request; there is exactly one."""

    request: Request
    reason: FinishReason
    stop_reason: str | int | None = None
    error: Exception | None = None


class Update(NamedTuple):
    """What a step has brought one request. `finished` is set on its last update."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finished: Finished | None = None
