"""The other side of the simulator: `Sink`, an event loop without a loop, and `Client`, a reader that knows its output.

Everything a real stream does on the loop is done by the real code (`Lane.push`, `Stream._take`, `Stream.close`); only
the wake-ups are left out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.engine.core import Command, EngineCore, lane_seed
from aiocb.engine.output import Submission
from aiocb.engine.prepare import Prepared, StreamSpec
from aiocb.engine.slot import Delta, Lane, Slot
from aiocb.engine.stream import Stream
from aiocb.errors import EngineClosed, EngineDead, RequestFailed, RequestTimeout
from aiocb.outputs import Chunk, FinishReason
from aiocb.text.output import TextOutput
from aiocb.text.pieces import Detokenizer

if TYPE_CHECKING:
    from aiocb.engine.room import Line, Place
    from aiocb.testing.oracle import KVOracle

__all__ = ["Client", "Expected", "Letters", "PlannedFault", "PlannedInterrupt", "Sink", "letters"]


class PlannedFault(Exception):
    """Raised by the simulator on purpose."""


class PlannedInterrupt(BaseException):
    """Raised where users' code runs; it is no `Exception` and cannot be printed."""

    def __str__(self) -> str:
        raise PlannedFault("no text")


def letters(tokens: Sequence[int]) -> str:
    """The text of tokens: one letter each, of a small alphabet, so that stop strings occur."""
    return "".join(chr(ord("a") + token % 7) for token in tokens)


class Letters(Detokenizer):
    """A detokenizer that may raise after some tokens.

    Args:
        fault: what to raise; None never raises.
        fail_after: raise once so many tokens have been pushed.
    """

    __slots__ = ("_fault", "_left")

    def __init__(self, fault: BaseException | None = None, fail_after: int = 0) -> None:
        self._fault = fault
        self._left = fail_after

    def push(self, token_ids: Sequence[int]) -> str:
        """One letter per token."""
        self._left -= len(token_ids)
        if self._fault is not None and self._left < 0:
            raise self._fault
        return letters(token_ids)


class Sink:
    """A `Bridge` into a list. Batches wait until `deliver`, as they would in a busy event loop.

    Args:
        line: for the bounded queue.

    Attributes:
        is_closed: the loop is gone: `post` fails.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.outbox: list[Delta] = []
        self.num_posts = 0
        self.is_closed = False
        self._batches: deque[list[Delta]] = deque()

    @property
    def is_waiting_for_room(self) -> bool:
        """See `Bridge`."""
        return self.line.is_waiting

    def post(self, batch: list[Delta]) -> bool:
        """See `Bridge`."""
        if self.is_closed:
            return False
        self.num_posts += 1
        self._batches.append(batch)
        return True

    def lane_ended(self, lane: Lane) -> None:
        """See `Bridge`: nobody counts."""

    def wake(self, slot: Slot) -> None:
        """See `Bridge`: nobody is parked here."""

    def deliver(self) -> None:
        """Push everything that was posted (also an empty batch), and let in whom there is room for.

        Raises:
            AssertionError: something was delivered to a lane after its end.
        """
        if not self._batches:
            return
        while self._batches:
            for lane, token_ids, text, logprobs, end, answer in self._batches.popleft():
                assert lane.end is None, f"{lane.slot.request_id} sample {lane.index}: a delivery after the end"
                lane.push(token_ids, text, logprobs, end, answer)
        self.line.let_in()

    def close(self) -> None:
        """The loop is closed: what is on its way is lost."""
        self.is_closed = True
        self._batches.clear()


class Expected(NamedTuple):
    """What a lane yields when nothing intervenes."""

    tokens: list[int]
    text: str
    reason: FinishReason
    stop_reason: str | int | None


class Client:
    """One stream and what has come out of it.

    Args:
        spec, prepared: what it asks for.
        sink: the event loop that it lives in.
        laziness: chance that it does not read in a step.

    Attributes:
        place: where it stands in line for the bounded queue.
        submission: None while it stands there.
        was_left: it was closed or dropped: nothing is read any more.
        may_end_early: it was told to finish, or is cancelled when its reader is behind.
        may_fail: a fault was planned for it.
    """

    def __init__(self, spec: StreamSpec, prepared: Prepared, sink: Sink, laziness: float) -> None:
        self.spec = spec
        self.prepared = prepared
        self.sink = sink
        self.laziness = laziness
        self.place: Place | None = None
        self.submission: Submission | None = None
        self.stream: Stream | None = None
        self.tokens: list[list[int]] = []
        self.texts: list[str] = []
        self.last: list[Chunk | None] = []
        self.error: Exception | None = None
        self.was_left = False
        self.may_end_early = spec.on_unread == "cancel" and spec.max_unread_tokens is not None
        self.may_fail = False

    @property
    def name(self) -> str:
        """The request's label."""
        return self.spec.request_id

    def submit(self, now: float, texts: tuple[TextOutput, ...], put: Callable[[Command], None]) -> None:
        """Leave the line, if it stood there, and become a stream that is submitted."""
        spec, prepared, count = self.spec, self.prepared, self.prepared.sampling.n
        if self.place is not None:
            self.sink.line.leave(self.place)
            self.place = None  # it refers to the client, which has to be freed when it is dropped
        self.sink.line.enter(count)
        slot = Slot(spec.request_id, self.sink, count)
        lanes = slot.make_lanes()
        self.submission = Submission(
            slot,
            lanes,
            prepared.prompt_token_ids,
            prepared.sampling,
            prepared.max_output_tokens,
            now,
            spec.priority,
            None if spec.timeout is None else now + spec.timeout,
            None if spec.queue_timeout is None else now + spec.queue_timeout,
            spec.cache_salt,
            spec.stream_interval,
            spec.max_unread_tokens,
            spec.on_unread,
            prepared.drop_output,
            texts,
        )
        engine: Any = None
        session: Any = SimpleNamespace(put=put)  # all that an open stream needs of one
        self.stream = Stream(engine, spec)
        self.stream._session, self.stream._slot, self.stream._lanes = session, slot, lanes
        self.stream._state = "open"
        self.tokens = [[] for _ in lanes]
        self.texts = ["" for _ in lanes]
        self.last = [None for _ in lanes]
        put((EngineCore.submit, self.submission))

    @property
    def is_over(self) -> bool:
        """True when nothing more will come out of it."""
        return self.was_left or self.sink.is_closed or self.error is not None or None not in self.last

    def leave(self, chance: random.Random) -> None:
        """Close the stream, or just drop it."""
        self.was_left = True
        if self.stream is not None and chance.random() < 0.5:
            self.stream.close()
        self.stream = None  # freed here: `__del__` aborts

    def read(self) -> int:
        """Take everything that has arrived; return how many tokens that were."""
        stream, submission = self.stream, self.submission
        count = 0
        if stream is None or submission is None:
            return 0
        slot = submission.slot
        while slot.ready and not slot.is_closed:
            try:
                chunk = stream._take(slot)
            except Exception as error:
                self.error = error.with_traceback(None)  # its frames would keep the stream alive
                return count
            if chunk is None:
                continue
            assert self.last[chunk.index] is None, f"{self.name}: a chunk after the last one"
            self.tokens[chunk.index] += chunk.token_ids
            self.texts[chunk.index] += chunk.text
            count += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                self.last[chunk.index] = chunk
        return count

    def check(self, oracle: KVOracle, now: float) -> None:
        """Compare what was read with what a solo run gives.

        Raises:
            AssertionError: tokens, text, finish reason or error are not what they have to be.
        """
        submission = self.submission
        assert submission is not None
        for index, last in enumerate(self.last):
            expected = expect(oracle, submission, index)
            tokens = self.tokens[index]
            text = self.texts[index] if submission.texts else letters(tokens)
            what = f"{self.name} sample {index}"
            assert submission.texts or not self.texts[index], f"{what}: text that nobody wants"
            assert tokens == expected.tokens[: len(tokens)], f"{what}: {tokens} is no prefix of {expected.tokens}"
            assert letters(tokens).startswith(text), f"{what}: the text {text!r} does not belong to {tokens}"
            if last is None:
                continue
            usage = last.usage
            assert usage is not None and usage.num_output_tokens == len(tokens), f"{what}: {usage} for {tokens}"
            if last.finish_reason == "cancelled":
                assert self.may_end_early, f"{what}: cancelled by nobody"
                assert text == letters(tokens), f"{what}: text was kept back at the end"
            else:
                found = Expected(tokens, text, last.finish_reason or "error", last.stop_reason)
                assert found == expected, f"{what}: {found} instead of {expected}"
        error = self.error
        if isinstance(error, RequestTimeout):
            bounds = [bound for bound in (submission.deadline, submission.queue_deadline) if bound is not None]
            assert bounds and min(bounds) <= now, f"{self.name}: {error!r} too early"
            if len(self.tokens) == 1 and error.stage == "queue":
                assert not any(self.tokens), f"{self.name}: {error!r}, yet it has run"
        elif isinstance(error, RequestFailed):
            assert self.may_fail, f"{self.name}: {error!r} was not planned"
        elif error is not None:
            assert isinstance(error, (EngineDead, EngineClosed)), f"{self.name}: {error!r}"
            cause = error.__cause__
            assert isinstance(cause, PlannedFault) or type(error) is EngineClosed, f"{self.name}: {cause!r}"


def expect(oracle: KVOracle, submission: Submission, index: int) -> Expected:
    """The output of one sample when it runs alone and to its end."""
    sampling = submission.sampling
    prompt = submission.prompt_token_ids
    seed = lane_seed(sampling.seed or 0, index)
    if submission.drop_output:
        return Expected([], "", "length", None)
    tokens = oracle.expected_output(prompt, sampling, max_tokens=len(prompt) + submission.max_output_tokens, seed=seed)
    text = letters(tokens)
    for count in range(max(sampling.min_new_tokens or 0, 1), len(tokens) + 1):
        matching = [stop for stop in sampling.stop or () if text[:count].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            shown = count if sampling.include_stop_str_in_output else count - len(stop)
            return Expected(tokens[:count], text[:shown], "stop", stop)
    eos = sampling.eos_token_id or ()
    if tokens[-1] in ((eos,) if isinstance(eos, int) else eos):
        return Expected(tokens, text, "stop", None)
    if tokens[-1] in (sampling.stop_token_ids or ()):
        return Expected(tokens, text, "stop", tokens[-1])
    return Expected(tokens, text, "length", None)
