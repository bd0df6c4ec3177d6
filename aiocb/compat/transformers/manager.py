"""`ContinuousBatchingManager`: submit and read from plain threads, over the engine's own worker, core and scheduler."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.compat.transformers.hosting import engine_config, keep_on_model, kept_manager
from aiocb.compat.transformers.lifecycle import Lifecycle, State
from aiocb.compat.transformers.parameters import request_sampling
from aiocb.compat.transformers.results import GenerationOutput, StoppedError
from aiocb.compat.transformers.router import Callback, Record
from aiocb.compat.transformers.session import Ticket
from aiocb.engine.slot import End
from aiocb.engine.source import LoadedSource
from aiocb.errors import InvalidRequest, QueueFull

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from aiocb.config import EngineConfig
    from aiocb.engine.admission import Plan
    from aiocb.engine.source import Source

__all__ = ["ContinuousBatchingManager", "RequestQueueFull"]

logger = logging.getLogger("aiocb")

_QUEUE_TIMEOUT = 10.0
_DROPS: dict[State, str] = {
    "stopping": "the manager is stopping",
    "stopped": "the manager has been stopped; call start() for another session",
    "dead": "the manager's worker has died; call start() to try again",
    "destroyed": "the manager has been destroyed",
}


class RequestQueueFull(QueueFull, queue.Full):
    """The waiting queue (`max_queue_size`) had no room for as long as `add_request` waits: 10 seconds."""


class ContinuousBatchingManager(Lifecycle):
    """Runs requests in a background thread; results are read whenever and from whichever thread.

    Every request that was accepted has exactly one last output, whatever happens: finished, refused, cancelled,
    stopped, or the worker's death.

    Args:
        model: a transformers causal language model; used as it is, left as it was found.
        generation_config: what requests start from; None takes the model's.
        continuous_batching_config: transformers' own settings object, or an `EngineConfig`.
        workload_hints: accepted for compatibility; nothing here has to be sized by them.
        source: builds the runner, in place of `model`.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | EngineConfig | None = None,
        workload_hints: Any = None,
        *,
        source: Source | None = None,
    ) -> None:
        self.workload_hints = workload_hints
        self._numbers = itertools.count()
        config = engine_config(model, generation_config, continuous_batching_config)
        super().__init__(source if source is not None else LoadedSource(model, None), config, generation_config)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """As `Lifecycle.stop`; a manager that is kept is found on its model by `init_continuous_batching`."""
        if keep_for_next_session and self.is_running():
            keep_on_model(self.model, self)
        super().stop(block, timeout, keep_for_next_session, hard_stop)

    def destroy(self) -> None:
        """As `Lifecycle.destroy`; also takes the manager off its model."""
        super().destroy()
        if kept_manager(self.model) is self:
            keep_on_model(self.model, None)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **sampling: Any,
    ) -> str | None:
        """Submit one prompt; before `start` it waits for it.

        A request that cannot run as asked is not an exception here: its one output has the status `FAILED` and says
        why.

        Args:
            input_ids: token ids: a list, a tensor or array of one row, or a tokenizer's encoding.
            request_id: a label, best unique among what is alive; None generates one.
            max_new_tokens: most new tokens; None takes the config's, else whatever fits.
            streaming: one output per token instead of one at the end.
            record_timestamps: note the time of every token.
            eos_token_id: replaces the config's; -1 is none.
            sampling: `temperature`, `top_k`, `top_p` and every other field of `aiocb.SamplingParams`.

        Returns:
            The request's id, or None when the manager is not accepting (a warning says why).

        Raises:
            InvalidRequest: an unknown sampling parameter.
            RequestQueueFull: `max_queue_size` requests have been waiting for 10 seconds.
        """
        if request_id is None:
            request_id = f"req_{next(self._numbers)}"
        ticket = self._ticket(
            input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, sampling, None
        )
        return request_id if self._submit(ticket, _QUEUE_TIMEOUT) else None

    def add_requests(
        self,
        inputs: Sequence[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **sampling: Any,
    ) -> list[str]:
        """Submit several prompts, those with common prefixes one after the other; see `add_request`.

        Returns:
            Their ids, in the order of `inputs`; empty when the manager is not accepting. One that found no room in the
            queue has an output that says so.
        """
        return self.submit_all(inputs, max_new_tokens, streaming, record_timestamps, sampling)

    def submit_all(
        self,
        inputs: Sequence[Any],
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        sampling: dict[str, Any],
        sink: Callback | None = None,
    ) -> list[str]:
        """As `add_requests`; a `sink` takes the outputs, in the worker thread, and there is no hurry for the queue."""
        eos_token_id = sampling.pop("eos_token_id", None)
        tickets = []
        for prompt in inputs:
            name = f"req_{next(self._numbers)}"
            ticket = self._ticket(
                prompt, name, max_new_tokens, streaming, record_timestamps, eos_token_id, sampling, sink
            )
            tickets.append(ticket)
        with self._lock:
            if tickets and self._drops():
                return []
        ordered = tickets
        if self.config.allow_block_sharing:
            ordered = sorted(tickets, key=lambda ticket: ticket.token_ids, reverse=True)
        # From here on every ticket's id is promised: it gets its one output, whatever happens.
        refusal: Exception | None = None
        for ticket in ordered:
            if refusal is None:
                try:
                    if self._submit(ticket, _QUEUE_TIMEOUT if sink is None else None):
                        continue
                    refusal = StoppedError("the manager was stopped before this request was submitted")
                except RequestQueueFull as error:
                    refusal = error
            self._fail(ticket, refusal)
        return [ticket.records[0].request_id for ticket in tickets]

    def cancel_request(self, request_id: str) -> None:
        """End a request now: its last output has the status `FAILED`, and the tokens it had.

        With several samples per prompt, they end together. Unknown and ended ids are ignored.
        """
        with self._lock:
            for ticket in [one for one in self._buffered if request_id in (r.request_id for r in one.records)]:
                self._buffered.remove(ticket)
                self._router.deliver([(record, (), None, End("cancelled")) for record in ticket.records])
            for record in self._router.live(request_id):
                if record.slot is not None:
                    self._abandon(record.slot)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the next output, of one request or in order of arrival.

        Returns:
            None when `timeout` seconds have passed or nothing can come: nothing runs, or (without a timeout) there is
            no such request.
        """
        return self._router.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs in order of arrival; end when no request is left and everything has been read."""
        while (output := self._router.take(ends_when_idle=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the outputs of one request up to its last one."""
        while (output := self._router.take(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """Call `callback` on the running event loop with each output of a request, those that wait included.

        May come before or after `add_request`. One that raises goes to the loop's exception handler. If the loop
        closes, the request is cancelled.

        Raises:
            RuntimeError: there is no running event loop.
        """
        self._router.set_handler(request_id, callback, asyncio.get_running_loop())

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _ticket(
        self,
        prompt: Any,
        request_id: str,
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        eos_token_id: Any,
        sampling: dict[str, Any],
        sink: Callback | None,
    ) -> Ticket:
        params = request_sampling(
            sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            num_return_sequences=self.num_return_sequences,
        )
        count = params.n if isinstance(params.n, int) and 1 <= params.n <= 4096 else 1
        names = [request_id, *(f"{request_id}__child#{index}" for index in range(count - 1))]
        records = tuple(
            Record(name, is_streaming=streaming, has_timestamps=record_timestamps, sink=sink) for name in names
        )
        return Ticket(prompt, params, records)

    def _submit(self, ticket: Ticket, queue_timeout: float | None) -> bool:
        """Submit, keep for the start, or drop with a warning (False)."""
        plan: Plan | None = None
        deadline = None if queue_timeout is None else time.monotonic() + queue_timeout
        while True:
            with self._lock:
                if self._drops():
                    return False
                session = self._session if self._state == "running" else None
                if session is None:
                    self._check_buffer(len(ticket.records))
                    self._router.register(ticket.records)
                    self._buffered.append(ticket)
                    return True
                if plan is not None:
                    if session.room.has_room(len(ticket.records)):
                        self._router.register(ticket.records)
                        session.submit(ticket, plan)
                        return True
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if len(ticket.records) > self.config.max_queue_size or (remaining is not None and remaining <= 0):
                        raise RequestQueueFull(f"the queue is full (max_queue_size={self.config.max_queue_size})")
                    session.wait_for_room(remaining)
                    continue
            try:
                plan = session.plan(ticket, self._parameters)
            except InvalidRequest as error:
                self._fail(ticket, error)
                return True

    def _check_buffer(self, count: int) -> None:
        """Before the start nothing leaves the queue: to wait for room would be of no use."""
        limit = self.config.max_queue_size
        if limit and sum(len(ticket.records) for ticket in self._buffered) + count > limit:
            raise RequestQueueFull(f"the queue is full (max_queue_size={limit}) before the manager has started")

    def _drops(self) -> bool:
        reason = _DROPS.get(self._state)
        if reason is not None:
            logger.warning("%s: the request is dropped", reason)
        return reason is not None
