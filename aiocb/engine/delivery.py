"""From updates to deltas: the worker's side of all outputs, `Delivery`. Worker thread only.

```
updates ─► OutputState (text, stop strings, intervals) ─► outbox of a bridge ─► flush: one wake-up per step and loop
```

Every request that was opened here ends here, once: whoever ends it in the scheduler gets a `Finished` once, and `end`
takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from aiocb.engine.slot import Delta, End, Lane, Slot
from aiocb.errors import AiocbError, RequestError, RequestFailed, explain
from aiocb.scheduler.request import Request
from aiocb.scheduler.scheduler import Finished, Scheduler, Update

if TYPE_CHECKING:
    from aiocb.engine.output import OutputState, Submission
    from aiocb.engine.slot import Bridge
    from aiocb.engine.stats import Recorder
    from aiocb.outputs import FinishReason

__all__ = ["Delivery", "error_delta", "failed"]


class Delivery:
    """Every open stream and what is on its way to it.

    Args:
        scheduler: ends requests whose text or reader says so.
        recorder: counts ends and aborts.
        clock: seconds, monotone.
    """

    def __init__(self, scheduler: Scheduler, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._recorder = recorder
        self._clock = clock
        self._requests: dict[Slot, list[Request]] = {}
        self._touched: list[Bridge] = []

    @property
    def num_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._requests)

    def streams(self) -> Iterator[tuple[Slot, tuple[Request, ...]]]:
        """Every open stream with its living requests."""
        return ((slot, tuple(requests)) for slot, requests in tuple(self._requests.items()))

    def requests_of(self, slot: Slot) -> tuple[Request, ...]:
        """The living requests of a stream; none when it has ended, or is not known."""
        return tuple(self._requests.get(slot, ()))

    def open(self, slot: Slot, requests: list[Request]) -> None:
        """Take note of a stream that the scheduler has taken."""
        self._requests[slot] = requests

    def refuse(self, submission: Submission, error: BaseException) -> None:
        """End a stream that the scheduler has not taken: every lane has an error of its own."""
        for lane in submission.lanes:
            failure = error if isinstance(error, RequestError) and lane.index == 0 else failed(error)
            self.post(submission.slot, error_delta(lane, failure))

    # ── what a step has brought ──────────────────────────────────────────────────────────────────────────────────

    def take(self, updates: Iterable[Update], now: float) -> None:
        """Turn updates into deltas. Whatever raises on the way ends its own request."""
        touched = self._touched
        new_delta = tuple.__new__
        for update in updates:
            request, token_ids, logprobs, prompt_logprobs, finished = update
            output: OutputState = request.payload
            try:
                if output.is_plain and finished is None and prompt_logprobs is None:
                    slot = output.slot
                    detokenizer = output.detokenizer
                    text = detokenizer.push(token_ids) if detokenizer is not None else ""
                    slot.num_sent += len(token_ids)
                    bridge = slot.bridge
                    outbox = bridge.outbox
                    if not outbox:
                        touched.append(bridge)
                    outbox.append(new_delta(Delta, (output.lane, token_ids, text, logprobs, None, None)))
                else:
                    self._take_slowly(update, now)
                    if finished is not None:
                        continue
                if output.max_unread is not None:
                    self._check_reader(request, output, now)
            except BaseException as error:  # tokenizers are users' code, too
                failure = failed(error)
                self.end(finished or self._scheduler.finish(request, "error", error=failure), now, failure)

    def _take_slowly(self, update: Update, now: float) -> None:
        request, token_ids, logprobs, prompt_logprobs, finished = update
        output: OutputState = request.payload
        if prompt_logprobs is not None:
            output.add_prompt_logprobs(prompt_logprobs)
        matched = output.add(token_ids, logprobs) if token_ids else None
        if output.has_ended:
            request.cut(request.num_output_tokens - output.num_cut)
            if finished is None:
                finished = self._scheduler.finish(request, "stop", stop_reason=matched)
        if finished is not None:
            self.end(finished, now)
        elif output.interval is not None and len(output.token_ids) >= output.interval:
            delta = output.take(None)
            if delta.token_ids or delta.text or delta.answer is not None:
                self.post(output.slot, delta)

    def _check_reader(self, request: Request, output: OutputState, now: float) -> None:
        """Hold a request back, or end it, when its reader is too far behind."""
        slot = output.slot
        assert output.max_unread is not None
        if slot.num_sent - slot.num_read < output.max_unread:
            return
        if output.on_unread == "cancel":
            self.end(self._scheduler.finish(request, "cancelled"), now)
            return
        for sibling in self.requests_of(slot):
            self._scheduler.pause(sibling)
        slot.is_paused = True
        # The reader may have caught up before it could see the flag: it would then never ask to be resumed.
        if slot.num_sent - slot.num_read < output.max_unread:
            self.resume(slot)

    def resume(self, slot: Slot) -> None:
        """Go on with a stream that was paused because its reader was behind."""
        slot.is_paused = False
        for request in self.requests_of(slot):
            self._scheduler.resume(request)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def end_stream(self, slot: Slot, reason: FinishReason, make_error: Callable[[], Exception] | None = None) -> int:
        """End whatever lives of a stream, each request with an error of its own; returns how many that were."""
        now = self._clock()
        requests = self.requests_of(slot)
        for request in requests:
            error = make_error() if make_error else None
            self.end(self._scheduler.finish(request, reason, error=error), now)
        return len(requests)

    def end_all(self, make_error: Callable[[], Exception]) -> None:
        """End every stream with errors of their own."""
        for slot in tuple(self._requests):
            self.end_stream(slot, "error", make_error)
        self.flush()

    def end(self, finished: Finished | None, now: float, error: Exception | None = None) -> None:
        """Deliver a request's terminal event; exactly once, because `Scheduler.finish` answers exactly once."""
        if finished is None:
            return
        request = finished.request
        output: OutputState = request.payload
        slot = output.slot
        error = error or finished.error
        reason, stop_reason = finished.reason, finished.stop_reason
        if error is None:
            try:
                matched = output.flush()
                if matched is not None:  # perhaps only by what the end has released
                    reason, stop_reason = "stop", matched
            except BaseException as flush_error:
                error = failed(flush_error)
        elif not isinstance(error, AiocbError):
            error = failed(error)
        if error is not None:
            reason = "timeout" if reason == "timeout" else "error"
        elif output.drop_output and reason == "stop":
            reason, stop_reason = "length", None
        end = output.end(request, now, reason, stop_reason, error)
        self.post(slot, output.take(end))
        siblings = self._requests.get(slot)
        if siblings is not None:
            siblings.remove(request)
            if not siblings:
                del self._requests[slot]
        self._recorder.record_end(request, end)
        if output.trace is not None:
            output.trace.end(request, end, now)

    def end_all_dead(self, make_error: Callable[[], Exception]) -> None:
        """End every stream without asking the scheduler, which may be broken."""
        for slot, requests in self.streams():
            for request in requests:
                self.post(slot, error_delta(request.payload.lane, make_error()))
        self._requests.clear()
        self.flush()

    # ── on the way ───────────────────────────────────────────────────────────────────────────────────────────────

    def post(self, slot: Slot, delta: Delta) -> None:
        """Put a delta into the outbox of its bridge."""
        self.touch(slot.bridge)
        slot.bridge.outbox.append(delta)

    def touch(self, bridge: Bridge) -> None:
        """Let the next flush reach a bridge, be it with an empty batch."""
        if not bridge.outbox and bridge not in self._touched:
            self._touched.append(bridge)

    def flush(self) -> None:
        """Hand every touched bridge its batch: one wake-up per step and event loop."""
        while self._touched:
            touched, self._touched = self._touched, []
            for bridge in touched:
                batch, bridge.outbox = bridge.outbox, []
                if not bridge.post(batch):
                    self._abandon(bridge)

    def _abandon(self, bridge: Bridge) -> None:
        """The loop behind a bridge is closed: end its streams and no others."""
        for slot, _ in self.streams():
            if slot.bridge is bridge:
                self._recorder.num_aborts += self.end_stream(slot, "cancelled")
        bridge.outbox = []

    def check_invariants(self) -> None:
        """Raise `AssertionError` when a stream is open without a living request."""
        for slot, requests in self._requests.items():
            assert requests, f"{slot.request_id} is registered without a living request"
            assert all(not request.is_finished for request in requests), f"{slot.request_id} keeps an ended request"


def error_delta(lane: Lane, error: Exception) -> Delta:
    """A lane's end by an error, where nothing of its output is left."""
    return Delta(lane, (), "", None, End("error", error=error))


def failed(error: BaseException) -> RequestFailed:
    """A new error for one lane, with what really happened as its cause."""
    failure = RequestFailed(f"this request could not be processed: {explain(error)}")
    failure.__cause__ = error
    return failure
