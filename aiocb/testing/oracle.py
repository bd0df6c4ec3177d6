"""A runner without a model that notices every mistake in the cache's bookkeeping: `KVOracle`.

Where a model writes K and V, the oracle writes a 64-bit hash of the whole history up to that token, per group and
physical slot. Before it "attends", it checks that every position which the new tokens can see holds exactly their own
history: a block that was shared wrongly, reused too early, not copied, dropped from a window or published before it
was written raises `KVMismatch` in the very step that reads it. So does one that was written for another cache salt or
by other weights. In place of a state it keeps how many tokens have gone into it, and the hash of their history: what a
request goes on from has to be its own. It keeps its own record of every open request, as a runner does, and obeys
nothing else: a plan that tells too little is noticed as well.

Its next token is a function of the history (and of the seed, when the request samples), so the output of a request is
the same alone, batched, chunked, preempted or forked, and `expected_output` tells it in advance.

Torch-free.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.records import Record
from aiocb.sampling_params import SamplingParams
from aiocb.step import NULL_BLOCK, CacheLayout, StepEntry, StepOutOfMemory, StepPlan, StepResult
from aiocb.testing.memory import Flight, OracleMemory
from aiocb.testing.records import CheckedRecords, KVMismatch, fake_result, simple_layout

if TYPE_CHECKING:
    from aiocb.scheduler.request import Request

__all__ = ["KVOracle"]

_MASK = (1 << 64) - 1


class _Seen:
    """What the oracle keeps of an open request beside its record.

    Attributes:
        ahead: sampled by plans whose results have not been collected.
        history: hash of the history up to each position, as far as it was needed, in this realm.
        salt: requests share prefixes with those of the same one.
        realm: of its salt and the weights: what is written in another one is not its own.
        is_failed: a plan in flight has failed it; what was submitted after that plan means nothing.
    """

    __slots__ = ("ahead", "history", "is_failed", "realm", "salt")

    def __init__(self, salt: object, realm: int) -> None:
        self.ahead: list[int] = []
        self.history: list[int] = []
        self.salt = salt
        self.realm = realm
        self.is_failed = False

    def extend(self, tokens: Sequence[int], end: int) -> list[int]:
        """The history up to position `end` of these tokens, which begin like all that came before."""
        history, realm = self.history, self.realm
        for position in range(len(history), end):
            history.append(_extend(history[-1] ^ realm if history else 0, position, tokens[position]) ^ realm)
        return history


class KVOracle:
    """A `Runner` that computes nothing and checks everything.

    Steps are executed as they are submitted, as on a device in order; their results are shown when they are collected.

    Args:
        layout: of the cache that it pretends to hold.
        vocab_size: tokens are below it.
        max_model_len: reported, and checked.
        depth: as in `Runner`.
        errors: called with each plan before it runs; returns failures by request id, or raises to fail the step.
        interrupt: called with `"collect"` or `"reload_weights"` before that happens; may raise. When any of the two
            raises `StepOutOfMemory`, what the step was to write is spoilt first.
        salt_of: tells the cache salt of an open request.
        foretell: tells tokens that are going to follow those of an open request, or none; results name them.

    Attributes:
        num_steps, num_tokens: executed so far, by plans with entries.
        max_requests, max_tokens: the largest step so far.
        is_released: it remembers nothing of a life.
        is_closed: nobody will use it again.
    """

    device_type = "cpu"
    max_batch_tokens = None
    choices = (Choice("model", "KVOracle", "hashes instead of keys and values"),)

    def __init__(
        self,
        layout: CacheLayout | None = None,
        *,
        vocab_size: int = 101,
        max_model_len: int = 1 << 20,
        depth: int = 1,
        errors: Callable[[StepPlan], Mapping[int, Exception] | None] | None = None,
        interrupt: Callable[[str], None] = lambda _what: None,
        salt_of: Callable[[int], object] = lambda _request_id: None,
        foretell: Callable[[Record], tuple[int, ...]] | None = None,
    ) -> None:
        self.cache_layout = layout or simple_layout()
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.depth = depth
        self._errors = errors
        self._interrupt = interrupt
        self._salt_of = salt_of
        self.foretell = foretell
        self._version = 0
        self._memory = OracleMemory(self.cache_layout)
        self._records = CheckedRecords(len(self.cache_layout.groups))  # each `state` is a `_Seen`
        self._flights: deque[Flight] = deque()
        self.num_steps = 0
        self.num_tokens = 0
        self.max_requests = 0
        self.max_tokens = 0
        self.is_released = True
        self.is_closed = False

    @property
    def num_open(self) -> int:
        """Requests that were opened and not closed."""
        return len(self._records)

    @property
    def oldest_tokens(self) -> int:
        """Tokens of the plan that is to be collected next; 0 when none is in flight."""
        return self._flights[0].plan.num_tokens if self._flights else 0

    def check_records(self, requests: Iterable[Request]) -> None:
        """Compare what it knows with the scheduler's truth.

        Args:
            requests: all that the scheduler takes for open.

        Raises:
            KVMismatch: a token or a block differs.
        """
        for request in requests:
            record = self._records[request.id]
            if record.tokens != request.tokens:
                raise KVMismatch(f"the runner has other tokens of {request!r}: {record.tokens}, {request.tokens}")
            if record.state_slot != request.state_slot:
                raise KVMismatch(f"the runner has the state of {request!r} in slot {record.state_slot}")
            for mine, table in zip(record.tables, request.tables, strict=True):
                told = table[: request.num_sent_blocks]
                if len(mine) != len(told) or any(block not in (NULL_BLOCK, known) for known, block in zip(mine, told)):
                    raise KVMismatch(f"the runner has other blocks of {request!r}: {mine}, {told}")

    def release(self) -> None:
        """Forget every request; ids that were used are not to come again."""
        self._records.clear()
        self._flights.clear()
        self.is_released = True

    def load_adapter(self, key: str, adapter: Any) -> None:
        """Refuse: there are no weights."""
        raise ConfigError("an oracle applies no adapters")

    def drop_adapter(self, key: str) -> None:
        """Refuse: there is none."""
        raise KeyError(key)

    def reload_weights(self) -> None:
        """Take the weights for new ones: what was written before is of no use to anyone.

        Raises:
            KVMismatch: a plan is in flight.
        """
        self._interrupt("reload_weights")
        if self._flights:
            raise KVMismatch("weights are reloaded while a plan is in flight")
        self._version += 1
        for record in self._records:
            record.state = _Seen(record.state.salt, self._realm(record.state.salt))

    def _realm(self, salt: object) -> int:
        # Even, so that a slot's hash stays odd, and never 0, which is what an unwritten one holds.
        return _mix((self._version << 32) + zlib.crc32(repr(salt).encode())) & ~1

    def close(self) -> None:
        """Drop all state. Idempotent."""
        self.release()
        self.is_closed = True

    def execute(self, plan: StepPlan) -> StepResult:
        """Submit a plan and collect it."""
        return self.collect(self.submit(plan))

    def submit(self, plan: StepPlan) -> StepPlan:
        """Write, check and "sample" one step.

        Raises:
            KVMismatch: the plan is inconsistent, or reads or writes a slot that it must not.
        """
        if len(self._flights) >= self.depth:
            raise KVMismatch(f"more than {self.depth} plans are in flight")
        self.is_released = False
        if {entry.request_id for flown in self._flights for entry in flown.plan.entries}.intersection(plan.closed):
            raise KVMismatch("a request is closed that a plan in flight names")
        if {opened.request_id for opened in plan.opened} - {entry.request_id for entry in plan.entries}:
            raise KVMismatch("a request is opened without an entry")
        records = self._records.begin(plan)
        for opened in plan.opened:
            salt = self._salt_of(opened.request_id)
            self._records[opened.request_id].state = _Seen(salt, self._realm(salt))
        self._check_plan(plan, records)
        flight = Flight(plan, records, StepResult(()), {}, {})
        try:
            self._flights.append(flight._replace(result=self._run(flight)) if plan.entries else flight)
        except StepOutOfMemory:
            self._memory.spoil(flight)
            raise
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        """Show the result of the oldest plan in flight.

        Raises:
            KVMismatch: another plan is the oldest.
        """
        try:
            self._interrupt("collect")
        except StepOutOfMemory:
            while self._flights:
                flight = self._flights.pop()
                self._memory.spoil(flight)
            raise
        plan, records, result, *_ = self._flights.popleft()
        if plan is not handle:
            raise KVMismatch("plans are collected out of order")
        self._records.finish(records, result)
        for record, token_ids in zip(records, result.token_ids, strict=True):
            del record.state.ahead[: len(token_ids)]
        if self.foretell is not None:
            for record in records:
                record.follows = () if record.state.is_failed else self.foretell(record)
            result = result._replace(
                follows={each.request_id: each.follows for each in records if each.follows} or None
            )
        return result

    def _check_plan(self, plan: StepPlan, records: Sequence[Record]) -> None:
        moves = (plan.swaps_out, plan.swaps_in, plan.copies_before, plan.states_before, plan.states_after)
        if not plan.entries and (plan.num_tokens or any(moves) or not plan.closed):
            raise KVMismatch("a plan that does nothing was executed")
        if plan.num_tokens != sum(entry.num_new_tokens for entry in plan.entries):
            raise KVMismatch("num_tokens is not the sum of the entries")
        if len({entry.request_id for entry in plan.entries}) != len(plan.entries):
            raise KVMismatch("a request has two entries in one plan")
        for entry, record in zip(plan.entries, records, strict=True):
            who = f"request {entry.request_id}"
            if entry.new_blocks and len(entry.new_blocks) != len(record.tables):
                raise KVMismatch(f"{who} gets blocks for {len(entry.new_blocks)} groups")
            if any(len(table) != record.num_blocks for table in record.tables):
                raise KVMismatch(f"{who} gets blocks behind the end of its table")
            if record.state.is_failed:
                continue
            num_tokens = len(record.tokens) + len(record.state.ahead)
            end = _known_end(entry)
            if entry.num_new_tokens < 1 or end > num_tokens or end > self.max_model_len:
                raise KVMismatch(f"{who} computes up to {end} of {num_tokens} tokens")
            if entry.is_sampled != (end == num_tokens):
                raise KVMismatch(f"{who} is sampled in the middle of its tokens, or not at the end")
            drafts = entry.draft_token_ids
            # What it has foretold needs no logits: it is not asked again.
            to_check = 0 if record.follows[: len(drafts)] == drafts else len(drafts)
            if not entry.is_sampled + to_check <= entry.num_logits <= entry.num_new_tokens:
                raise KVMismatch(f"{who} has {entry.num_logits} logit rows")

    def _run(self, flight: Flight) -> StepResult:
        """Execute a plan; its `blocks` and `slots` are filled."""
        plan, records, _, blocks, _ = flight
        memory, others = self._memory, self._flights
        if plan.swaps_out or plan.swaps_in:
            memory.swap(flight, others)
        errors = (self._errors(plan) if self._errors is not None else None) or {}
        rows = list(zip(plan.entries, records, strict=True))
        memory.copy(plan.copies_before)
        if memory.states:
            memory.restore(flight, others, self._records)
        # All writes come before all reads, as in a model's layer.
        written: set[tuple[int, int, int]] = set()
        for entry, record in rows:
            self._write(entry, record, written)
        for entry, record in rows:
            self._read(entry, record, blocks)
            if memory.states:
                memory.go_on(entry, record, record.state.history)
        memory.copy(plan.copies_after)
        if memory.states:
            memory.put_aside(flight, others, self._records)
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.max_requests = max(self.max_requests, len(plan.entries))
        self.max_tokens = max(self.max_tokens, plan.num_tokens)
        token_ids: list[tuple[int, ...]] = []
        for entry, record in rows:
            seen: _Seen = record.state
            seen.is_failed |= entry.request_id in errors
            token_ids.append(self._sample(entry, record) if entry.is_sampled and not seen.is_failed else ())
            seen.ahead += token_ids[-1]
            del seen.history[_known_end(entry) :]
        return fake_result(plan, records, token_ids, errors)

    def expected_output(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, seed: int = 0
    ) -> list[int]:
        """What a request will produce, whatever it is batched with.

        Args:
            prompt: its prompt.
            sampling: resolved parameters; end and stop ids are obeyed.
            max_tokens: prompt and output together.
            seed: as in `StepEntry`.
        """
        history = 0
        for position, token in enumerate(prompt):
            history = _extend(history, position, token)
        ends = _end_ids(sampling)
        output: list[int] = []
        while len(prompt) + len(output) < max_tokens:
            token = self._next_token(history, len(output), sampling, seed)
            output.append(token)
            if token in ends:
                break
            history = _extend(history, len(prompt) + len(output) - 1, token)
        return output

    def _write(self, entry: StepEntry, record: Record, written: set[tuple[int, int, int]]) -> None:
        seen: _Seen = record.state
        # 0 stands for the token that was not sampled.
        tokens = [*record.tokens, *seen.ahead, *entry.draft_token_ids, *([0] if seen.is_failed else ())]
        start = entry.num_computed_tokens
        end = start + entry.num_new_tokens
        history = seen.extend(tokens, end)
        page_size = self.cache_layout.page_size
        for g, (table, pages) in enumerate(zip(record.tables, self._memory.pages, strict=True)):
            for position in range(start, end):
                page, offset = divmod(position, page_size)
                if page >= len(table) or table[page] == NULL_BLOCK:
                    raise KVMismatch(f"request {entry.request_id}: no block for position {position} in group {g}")
                slot = (g, table[page], offset)
                if any(flight.blocks.get(slot[:2], entry.request_id) != entry.request_id for flight in self._flights):
                    raise KVMismatch(f"block {slot[1]} of group {g} is given away while a plan in flight names it")
                if slot in written:
                    raise KVMismatch(f"slot {slot} is written twice in one step")
                written.add(slot)
                pages[table[page]][offset] = history[position]

    def _read(self, entry: StepEntry, record: Record, blocks: dict[tuple[int, int], int]) -> None:
        history = record.state.history
        start = entry.num_computed_tokens
        end = start + entry.num_new_tokens
        page_size = self.cache_layout.page_size
        for g, (group, table) in enumerate(zip(self.cache_layout.groups, record.tables, strict=True)):
            first = group.first_visible(start)
            for page in range(first // page_size, -(-end // page_size)):
                low, high = max(first, page * page_size), min(end, (page + 1) * page_size)
                base = page * page_size
                blocks[g, table[page]] = entry.request_id
                found = self._memory.pages[g][table[page]][low - base : high - base]
                if table[page] == NULL_BLOCK or found != history[low:high]:
                    raise KVMismatch(
                        f"request {entry.request_id} computes {start}..{end - 1} and sees other KV than its own in "
                        f"group {g}, block {table[page]}, positions {low}..{high - 1}"
                    )

    def _sample(self, entry: StepEntry, record: Record) -> tuple[int, ...]:
        """One token, and one more for each draft that is what would have been sampled."""
        sampled: list[int] = []
        for position, draft in enumerate((*entry.draft_token_ids, None), _known_end(entry)):
            history = record.state.history[position - 1] ^ record.state.realm
            number = position - record.num_prompt_tokens
            sampled.append(self._next_token(history, number, record.sampling, record.seed))
            if sampled[-1] != draft:
                break
        return tuple(sampled)

    def _next_token(self, history: int, num_output_tokens: int, sampling: SamplingParams, seed: int) -> int:
        token = _mix(history if sampling.is_greedy else history ^ _mix(seed & _MASK)) % self.vocab_size
        if num_output_tokens < (sampling.min_new_tokens or 0):
            banned = _end_ids(sampling)
            while token in banned:
                token = (token + 1) % self.vocab_size
        return token


def _known_end(entry: StepEntry) -> int:
    """Where the drafts of an entry begin."""
    return entry.num_computed_tokens + entry.num_new_tokens - len(entry.draft_token_ids)


def _end_ids(sampling: SamplingParams) -> frozenset[int]:
    eos = sampling.eos_token_id or ()
    return frozenset((eos,) if isinstance(eos, int) else eos).union(sampling.stop_token_ids or ())


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _extend(history: int, position: int, token: int) -> int:
    # Never 0, which is what an unwritten slot holds.
    return _mix(history ^ _mix((position << 32) ^ token)) | 1
