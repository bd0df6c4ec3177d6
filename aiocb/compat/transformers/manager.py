"""`ContinuousBatchingManager`: submit and read from plain threads, over the engine's own worker, core and scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.checks import check_integer
from aiocb.compat.transformers.hosting import engine_config, keep_on_model, kept_manager, with_hints
from aiocb.compat.transformers.lifecycle import Lifecycle
from aiocb.compat.transformers.parameters import LogitProcessors, Parameters, Scope, request_sampling
from aiocb.compat.transformers.results import GenerationOutput, RequestQueueFull, StoppedError
from aiocb.compat.transformers.router import Callback, Reply
from aiocb.compat.transformers.session import ThreadSession, Ticket
from aiocb.engine.source import LoadedSource
from aiocb.errors import InvalidRequest, show_value
from aiocb.sampling_params import MAX_SAMPLES
from aiocb.text.prompts import take_prompt

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from transformers import ContinuousBatchingConfig, GenerationConfig

    from aiocb.config import Choice, EngineConfig
    from aiocb.engine.source import Source

__all__ = ["ContinuousBatchingManager"]

_QUEUE_TIMEOUT = 10.0


class ContinuousBatchingManager:
    """Runs requests in a background thread; results are read whenever and from whichever thread.

    Every request that was accepted has exactly one last output, whatever happens: finished, refused, cancelled,
    stopped, or the worker's death. In a process that was forked from the one in which the thread runs there is no
    thread: `is_running()` is False, and what needs it raises `EngineClosed`.

    Args:
        model: a transformers causal language model; used as it is, left as it was found.
        generation_config: what requests start from; None takes the model's.
        continuous_batching_config: transformers' own settings object, or an `EngineConfig`.
        workload_hints: transformers' `WorkloadHints`; what memory and seats are planned for where the settings leave
            that open.
        source: builds the runner, in place of `model`.

    Attributes:
        config: the engine's settings.
        model: the model.

    Raises:
        ConfigError: a setting cannot work.
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
        self.config = engine_config(model, generation_config, continuous_batching_config)
        source = source or LoadedSource(model, None)
        self.model = source.model
        self._scope = Scope(self.model, self.config.return_logprobs, self.config.drop_unsupported_processors)
        self._parameters = Parameters(self._scope, generation_config)
        self._num_return_sequences = self._parameters.num_return_sequences
        self._numbers = itertools.count()
        self._life = Lifecycle(source, with_hints(self.config, workload_hints))
        self._router = self._life.router

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._life}>"

    # ── what requests start from ─────────────────────────────────────────────────────────────────────────────────

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The config that requests start from: the caller's own object, or the model's.

        What is assigned to it, and what is changed in it, counts for requests to come. Nothing is changed by us.
        """
        return self._parameters.config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        """Take another config for requests to come; None takes the model's.

        Raises:
            ConfigError: it asks for beams, or for something unsupported.
        """
        self._parameters = Parameters(self._scope, config)
        self._num_return_sequences = self._parameters.num_return_sequences

    @property
    def num_return_sequences(self) -> int:
        """Samples per prompt of requests to come; what was written last counts, here or in the config."""
        self._current()
        return self._num_return_sequences

    @num_return_sequences.setter
    def num_return_sequences(self, count: int) -> None:
        self._current()
        self._num_return_sequences = check_integer("num_return_sequences", count, 1, MAX_SAMPLES)

    @property
    def logit_processor(self) -> LogitProcessors:
        """What is done to the logits of requests to come: `clear()` it, or append to its `logits_processor`."""
        return self._scope.processors

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Change nothing: the engine brings its own attention, whichever the model was loaded with.

        Where the reference switches the model and back again, a program may call this; which attention the engine
        takes is decided when it starts (see `describe`) and asked for with `EngineConfig.attention`.
        """

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def warmed_up(self) -> bool:
        """True when `warmup` has been called and what it built is there."""
        return self._life.warmed_up

    def is_running(self) -> bool:
        """True from `start` until the last request of a stopped session has ended."""
        return self._life.is_running()

    @property
    def follows(self) -> bool:
        """True where another process takes the requests and gives the results: on all ranks but 0."""
        return self._life.follows

    def describe(self) -> list[Choice]:
        """What was decided at start, and why; empty before the manager has run. The start logs it, at INFO."""
        session = self._session
        return [] if session is None else list(session.choices)

    def warmup(self) -> None:
        """Build everything now, so that `start` returns at once. Nothing runs before `start`.

        Raises:
            ConfigError: the model or the settings cannot work.
        """
        self._life.warmup()

    def start(self) -> None:
        """Start the background thread, or start it again after `stop`; returns when it can serve.

        Raises:
            ConfigError: the model or the settings cannot work; nothing is left running.
            RuntimeError: the manager has been destroyed.
        """
        self._life.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Accept nothing more and end when every queued and active request has finished.

        Results that have not been read stay readable.

        Args:
            block: wait for the end.
            timeout: seconds to wait for; None has no bound. Afterwards the session still finishes, in the background.
            keep_for_next_session: keep the worker and its cache, and the manager on the model, where
                `init_continuous_batching` finds it, for another `start`.
            hard_stop: fail queued and active requests with a `RuntimeError` at the next step. Also after an ordinary
                `stop` that has not come to its end.

        Raises:
            RuntimeError: this thread is inside `pause()`.
        """
        if keep_for_next_session and self.is_running():
            keep_on_model(self.model, self)
        self._life.stop(block, timeout, keep_for_next_session, hard_stop)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait until the manager is not running any more, for at most `timeout` seconds."""
        self._life.join(timeout)

    def destroy(self) -> None:
        """Stop if it is running, and give everything back. Idempotent; the manager cannot be started again.

        Raises:
            RuntimeError: this thread is inside `pause()`.
        """
        self._life.destroy()
        if kept_manager(self.model) is self:
            keep_on_model(self.model, None)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop; hard when the block raised."""
        if self.is_running():
            self.stop(hard_stop=exc_type is not None)

    @contextlib.contextmanager
    def pause(self) -> Iterator[Any]:
        """Hold the step loop while the model is used or changed; yields the model.

        Requests stay as they are and go on when the last thread has left. Prefixes cached before are not hit after
        it, because the weights may have changed.

        Raises:
            RuntimeError: the manager is not running.
        """
        with self._life.pause():
            yield self.model

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
            ConfigError: the generation config asks for something that cannot be had.
            RequestQueueFull: `max_queue_size` requests have been waiting for 10 seconds.
        """
        if request_id is not None and not isinstance(request_id, (str, int)):
            raise InvalidRequest(f"request_id must be a text, not {show_value(request_id)}")
        keywords = {**sampling, "max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        [ticket] = self.tickets([input_ids], streaming, record_timestamps, keywords, name=request_id)
        return ticket.request_id if self._life.submit(ticket, _QUEUE_TIMEOUT) else None

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
        keywords = {**sampling, "max_new_tokens": max_new_tokens}
        tickets = self.tickets(inputs, streaming, record_timestamps, keywords)
        return [ticket.request_id for ticket in tickets] if self.submit(tickets, _QUEUE_TIMEOUT) else []

    def tickets(
        self,
        inputs: Sequence[Any],
        streaming: bool,
        record_timestamps: bool,
        keywords: Mapping[str, Any],
        *,
        name: str | None = None,
        config: GenerationConfig | None = None,
        sink: Callback | None = None,
    ) -> list[Ticket]:
        """Make requests that are not submitted yet; a `config` is for them alone, a `sink` takes their outputs."""
        parameters = self._current() if config is None else Parameters(self._scope, config)
        count = self._num_return_sequences if config is None else parameters.num_return_sequences
        params = request_sampling(keywords, count)
        samples = params.n if isinstance(params.n, int) and 1 <= params.n <= MAX_SAMPLES else 1
        tickets = []
        for prompt in inputs:
            first = name if name is not None else f"req_{next(self._numbers)}"
            names = [first, *(f"{first}__child#{index}" for index in range(samples - 1))]
            taken = take_prompt(prompt)
            ids = [token for token in taken if isinstance(token, int)] if isinstance(taken, tuple) else []
            replies = tuple(Reply(one, ids, streaming, [] if record_timestamps else None, sink) for one in names)
            tickets.append(Ticket(taken, params, parameters, replies))
        return tickets

    def submit(self, tickets: Sequence[Ticket], timeout: float | None) -> bool:
        """Submit several; False when the manager is not accepting. Else each gets its outputs, whatever happens."""
        if tickets and self._life.drops():
            return False
        ordered = tickets
        if self.config.allow_block_sharing:
            ordered = sorted(tickets, key=lambda ticket: ticket.replies[0].prompt_ids, reverse=True)
        refusal: Exception | None = None
        for ticket in ordered:
            if refusal is None:
                try:
                    if self._life.submit(ticket, timeout):
                        continue
                    refusal = StoppedError("the manager was stopped before this request was submitted")
                except RequestQueueFull as error:
                    refusal = error
            self._life.fail(ticket, refusal)
        return True

    def cancel_request(self, request_id: str) -> None:
        """End a request now: its last output has the status `FAILED`, and the tokens it had.

        With several samples per prompt, they end together. Unknown and ended ids are ignored.
        """
        self._life.cancel(request_id)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the next output, of one request or in order of arrival.

        Returns:
            None when `timeout` seconds have passed or nothing can come: nothing runs, or (without a timeout) there is
            no such request.
        """
        self._life.raise_if_foreign()
        return self._router.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs in order of arrival; end when no request is left and everything has been read."""
        self._life.raise_if_foreign()
        while (output := self._router.take(ends_when_idle=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the outputs of one request up to its last one."""
        while (output := self.get_result(request_id)) is not None:
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
        self._life.raise_if_foreign()
        self._router.set_handler(request_id, callback, asyncio.get_running_loop())

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _session(self) -> ThreadSession | None:
        return self._life.last

    def _current(self) -> Parameters:
        """What the config says now; its number of samples counts if that is what has changed."""
        before = self._parameters
        self._parameters = before.current()
        if self._parameters.num_return_sequences != before.num_return_sequences:
            self._num_return_sequences = self._parameters.num_return_sequences
        return self._parameters
