"""A runner without a model that notices every mistake in the cache's bookkeeping: `KVOracle`.

Where a model writes K and V, the oracle writes a 64-bit hash of the whole history up to that token, per group and
physical slot. Before it "attends", it checks that every position which the new tokens can see holds exactly their own
history: a block that was shared wrongly, reused too early, not copied, dropped from a window or published before it
was written raises `KVMismatch` in the very step that reads it. So does one that was written for another cache salt or
by other weights. It keeps its own record of every open request, as a runner does, and obeys nothing else: a plan that
tells too little is noticed as well.

Its next token is a function of the history (and of the seed, when the request samples), so the output of a request is
the same alone, batched, chunked, preempted or forked, and `expected_output` tells it in advance.

Torch-free.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from aiocb.config import Choice
from aiocb.outputs import TokenLogprobs
from aiocb.sampling_params import SamplingParams
from aiocb.step import (
    NULL_BLOCK,
    BlockCopy,
    CacheGroup,
    CacheLayout,
    OpenedRequest,
    StepEntry,
    StepPlan,
    StepResult,
)

if TYPE_CHECKING:
    from aiocb.scheduler.request import Request

__all__ = ["KVMismatch", "KVOracle", "simple_layout"]

_MASK = (1 << 64) - 1


class KVMismatch(AssertionError):
    """A plan reads or writes a slot of the cache that it must not."""


def simple_layout(
    num_blocks: int | Sequence[int] = 64, *, page_size: int = 4, windows: Sequence[int | None] = (None,)
) -> CacheLayout:
    """A cache layout with one layer per group.

    Args:
        num_blocks: blocks per group, the null block included; one number for all groups, or one each.
        page_size: tokens per block.
        windows: one group for each: its sliding window, or None for full attention.
    """
    counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
    groups = (
        CacheGroup(window, (layer,), count, page_size)
        for layer, (window, count) in enumerate(zip(windows, counts, strict=True))
    )
    return CacheLayout(page_size, tuple(groups))


class _Mirror:
    """What the oracle knows of one open request.

    Attributes:
        tokens: as the scheduler has told, and as the results that were collected say.
        ahead: sampled by plans whose results have not been collected.
        tables: per group, the physical block of each logical block.
        history: hash of the history up to each position, as far as it was needed, in this realm.
        salt: requests share prefixes with those of the same one.
        realm: of its salt and the weights: what is written in another one is not its own.
        is_failed: a plan in flight has failed it; what was submitted after that plan means nothing.
    """

    __slots__ = (
        "ahead",
        "history",
        "is_failed",
        "num_prompt_tokens",
        "realm",
        "salt",
        "sampling",
        "seed",
        "tables",
        "tokens",
    )

    def __init__(self, opened: OpenedRequest, num_groups: int, salt: object, realm: int) -> None:
        self.tokens = list(opened.token_ids)
        self.num_prompt_tokens = opened.num_prompt_tokens
        self.sampling = opened.sampling
        self.seed = opened.seed
        self.ahead: list[int] = []
        self.is_failed = False
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.history: list[int] = []
        self.salt = salt
        self.realm = realm

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
        interrupt: called with `"collect"` or `"reload_weights"` before that happens; may raise.
        salt_of: tells the cache salt of an open request.

    Attributes:
        num_steps, num_tokens: executed so far, by plans with entries.
        max_requests, max_tokens: the largest step so far.
        is_closed: nobody will use it again.
    """

    device_type = "cpu"
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
    ) -> None:
        self.cache_layout = layout or simple_layout()
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.depth = depth
        self._errors = errors
        self._interrupt = interrupt
        self._salt_of = salt_of
        self._version = 0
        self._pages: list[list[list[int]]] = [
            [[0] * self.cache_layout.page_size for _ in range(group.num_blocks)] for group in self.cache_layout.groups
        ]
        self._mirrors: dict[int, _Mirror] = {}
        self._ended: dict[int, list[int]] = {}  # tokens of closed requests, which may be opened again
        self._flights: deque[tuple[StepPlan, StepResult]] = deque()
        self._last_id = 0  # of the lives before this one
        self._thread: int | None = None
        self.num_steps = 0
        self.num_tokens = 0
        self.max_requests = 0
        self.max_tokens = 0
        self.is_closed = False

    @property
    def num_open(self) -> int:
        """Requests that were opened and not closed."""
        return len(self._mirrors)

    def check_records(self, requests: Iterable[Request]) -> None:
        """Compare what it knows with the scheduler's truth.

        Args:
            requests: all that the scheduler takes for open.

        Raises:
            KVMismatch: a token or a block differs.
        """
        for request in requests:
            mirror = self._mirrors[request.id]
            if mirror.tokens != request.tokens:
                raise KVMismatch(f"the runner has other tokens of {request!r}: {mirror.tokens}, {request.tokens}")
            for mine, table in zip(mirror.tables, request.tables, strict=True):
                told = table[: request.num_sent_blocks]
                if len(mine) != len(told) or any(block not in (NULL_BLOCK, known) for known, block in zip(mine, told)):
                    raise KVMismatch(f"the runner has other blocks of {request!r}: {mine}, {told}")

    def release(self) -> None:
        """Forget every request; ids that were used are not to come again."""
        self._last_id = max([self._last_id, *self._mirrors, *self._ended])
        self._mirrors.clear()
        self._ended.clear()
        self._flights.clear()
        self._thread = None

    def reload_weights(self) -> None:
        """Take the weights for new ones: what was written before is of no use to anyone.

        Raises:
            KVMismatch: a plan is in flight.
        """
        self._interrupt("reload_weights")
        if self._flights:
            raise KVMismatch("weights are reloaded while a plan is in flight")
        self._version += 1
        for mirror in self._mirrors.values():
            mirror.realm = self._realm(mirror.salt)
            mirror.history.clear()

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
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            raise KVMismatch("two threads use one runner")
        self._thread = thread
        if len(self._flights) >= self.depth:
            raise KVMismatch(f"more than {self.depth} plans are in flight")
        self._apply(plan)
        self._check_plan(plan)
        result = self._run(plan) if plan.entries else StepResult(())
        self._flights.append((plan, result))
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        """Show the result of the oldest plan in flight.

        Raises:
            KVMismatch: another plan is the oldest.
        """
        self._interrupt("collect")
        plan, result = self._flights.popleft()
        if plan is not handle:
            raise KVMismatch("plans are collected out of order")
        for entry, token_ids in zip(plan.entries, result.token_ids, strict=True):
            mirror = self._mirrors.get(entry.request_id)
            if mirror is None:
                raise KVMismatch(f"request {entry.request_id} was closed while a plan in flight named it")
            mirror.tokens += token_ids
            del mirror.ahead[: len(token_ids)]
        return result

    def _apply(self, plan: StepPlan) -> None:
        """Close, open and extend."""
        in_flight = {entry.request_id for flown, _ in self._flights for entry in flown.entries}
        for request_id in plan.closed:
            if request_id not in self._mirrors or request_id in in_flight:
                raise KVMismatch(f"request {request_id} is closed, but it is not open, or in flight")
            self._ended[request_id] = self._mirrors.pop(request_id).tokens
        for opened in plan.opened:
            before = self._ended.pop(opened.request_id, [])
            if opened.request_id in self._mirrors or opened.request_id <= self._last_id:
                raise KVMismatch(f"the id {opened.request_id} is used a second time")
            # What came while its request was preempted was dropped, and is sampled again.
            if any(told != known for told, known in zip(opened.token_ids, before)):
                raise KVMismatch(f"request {opened.request_id} is opened again with other tokens than it had")
            salt = self._salt_of(opened.request_id)
            self._mirrors[opened.request_id] = _Mirror(opened, len(self.cache_layout.groups), salt, self._realm(salt))
        if {opened.request_id for opened in plan.opened} - {entry.request_id for entry in plan.entries}:
            raise KVMismatch("a request is opened without an entry")
        for entry in plan.entries:
            mirror = self._mirrors.get(entry.request_id)
            if mirror is None:
                raise KVMismatch(f"request {entry.request_id} has an entry, but it is not open")
            mirror.tokens += entry.new_token_ids
            if entry.new_blocks and len(entry.new_blocks) != len(mirror.tables):
                raise KVMismatch(f"request {entry.request_id} gets blocks for {len(entry.new_blocks)} groups")
            for table, blocks in zip(mirror.tables, entry.new_blocks):
                if entry.block_start > len(table):
                    raise KVMismatch(f"request {entry.request_id} gets blocks behind the end of its table")
                table[entry.block_start :] = blocks

    def _run(self, plan: StepPlan) -> StepResult:
        errors = self._errors(plan) if self._errors is not None else None
        self._copy(plan.copies_before)
        rows = [self._new_tokens(entry) for entry in plan.entries]
        # All writes come before all reads, as in a model's layer.
        written: set[tuple[int, int, int]] = set()
        histories = [self._write(entry, tokens, written) for entry, tokens in zip(plan.entries, rows, strict=True)]
        for entry, history in zip(plan.entries, histories, strict=True):
            self._read(entry, history)
        self._copy(plan.copies_after)
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.max_requests = max(self.max_requests, len(plan.entries))
        self.max_tokens = max(self.max_tokens, plan.num_tokens)
        token_ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[TokenLogprobs, ...] | None] = []
        prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        for entry, history in zip(plan.entries, histories, strict=True):
            mirror = self._mirrors[entry.request_id]
            mirror.is_failed |= errors is not None and entry.request_id in errors
            sampled = self._sample(entry, mirror, history) if entry.is_sampled and not mirror.is_failed else ()
            mirror.ahead += sampled
            token_ids.append(sampled)
            wants = bool(sampled) and mirror.sampling.logprobs is not None
            logprobs.append(tuple(map(_fake_logprobs, sampled)) if wants else None)
            if mirror.sampling.prompt_logprobs is not None:
                end = entry.num_computed_tokens + entry.num_new_tokens
                targets = range(end - entry.num_logits + 1, min(end + 1, mirror.num_prompt_tokens))
                if targets:
                    prompt_logprobs[entry.request_id] = [_fake_logprobs(mirror.tokens[at]) for at in targets]
            del mirror.history[entry.num_computed_tokens + entry.num_new_tokens - len(entry.draft_token_ids) :]
        return StepResult(token_ids, logprobs if any(logprobs) else None, prompt_logprobs or None, errors)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        for group, source, target in copies:
            if NULL_BLOCK in (source, target):
                raise KVMismatch(f"the null block of group {group} is copied")
            self._pages[group][target] = list(self._pages[group][source])

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
        eos = sampling.eos_token_id or ()
        ends = {*((eos,) if isinstance(eos, int) else eos), *(sampling.stop_token_ids or ())}
        output: list[int] = []
        while len(prompt) + len(output) < max_tokens:
            token = self._next_token(history, len(output), sampling, seed)
            output.append(token)
            if token in ends:
                break
            history = _extend(history, len(prompt) + len(output) - 1, token)
        return output

    def _check_plan(self, plan: StepPlan) -> None:
        if not plan.entries and (plan.num_tokens or plan.opened or plan.copies_before or not plan.closed):
            raise KVMismatch("a plan that does nothing was executed")
        if plan.num_tokens != sum(entry.num_new_tokens for entry in plan.entries):
            raise KVMismatch("num_tokens is not the sum of the entries")
        ids = [entry.request_id for entry in plan.entries]
        if len(set(ids)) != len(ids):
            raise KVMismatch("a request has two entries in one plan")
        for entry in plan.entries:
            mirror = self._mirrors[entry.request_id]
            if mirror.is_failed:
                continue
            num_tokens = len(mirror.tokens) + len(mirror.ahead)
            end = entry.num_computed_tokens + entry.num_new_tokens - len(entry.draft_token_ids)
            if entry.num_new_tokens < 1 or end > num_tokens or end > self.max_model_len:
                raise KVMismatch(f"request {entry.request_id} computes up to {end} of {num_tokens} tokens")
            if entry.is_sampled != (end == num_tokens):
                raise KVMismatch(
                    f"request {entry.request_id} is sampled in the middle of its tokens, or not at the end"
                )
            if not (entry.is_sampled + len(entry.draft_token_ids)) <= entry.num_logits <= entry.num_new_tokens:
                raise KVMismatch(f"request {entry.request_id} has {entry.num_logits} logit rows")

    def _new_tokens(self, entry: StepEntry) -> list[int]:
        """The tokens of a request, those that are still on their way and drafts included."""
        mirror = self._mirrors[entry.request_id]
        tokens = [*mirror.tokens, *mirror.ahead, *entry.draft_token_ids]
        return [*tokens, 0] if mirror.is_failed else tokens  # 0 stands for the token that was not sampled

    def _write(self, entry: StepEntry, tokens: list[int], written: set[tuple[int, int, int]]) -> list[int]:
        mirror = self._mirrors[entry.request_id]
        start = entry.num_computed_tokens
        end = start + entry.num_new_tokens
        history = mirror.extend(tokens, end)
        page_size = self.cache_layout.page_size
        for g, (table, pages) in enumerate(zip(mirror.tables, self._pages, strict=True)):
            for position in range(start, end):
                page, offset = divmod(position, page_size)
                if page >= len(table) or table[page] == NULL_BLOCK:
                    raise KVMismatch(f"request {entry.request_id}: no block for position {position} in group {g}")
                slot = (g, table[page], offset)
                if slot in written:
                    raise KVMismatch(f"slot {slot} is written twice in one step")
                written.add(slot)
                pages[table[page]][offset] = history[position]
        return history

    def _read(self, entry: StepEntry, history: list[int]) -> None:
        start = entry.num_computed_tokens
        end = start + entry.num_new_tokens
        page_size = self.cache_layout.page_size
        tables = self._mirrors[entry.request_id].tables
        for g, (group, table) in enumerate(zip(self.cache_layout.groups, tables, strict=True)):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for page in range(first // page_size, -(-end // page_size)):
                low, high = max(first, page * page_size), min(end, (page + 1) * page_size)
                base = page * page_size
                found = self._pages[g][table[page]][low - base : high - base]
                if table[page] == NULL_BLOCK or found != history[low:high]:
                    raise KVMismatch(
                        f"request {entry.request_id} computes {start}..{end - 1} and sees other KV than its own in "
                        f"group {g}, block {table[page]}, positions {low}..{high - 1}"
                    )

    def _sample(self, entry: StepEntry, mirror: _Mirror, history: list[int]) -> tuple[int, ...]:
        """One token, and one more for each draft that is what would have been sampled."""
        end = entry.num_computed_tokens + entry.num_new_tokens - len(entry.draft_token_ids)
        sampled: list[int] = []
        for draft in (*entry.draft_token_ids, None):
            position = end + len(sampled)
            number = position - mirror.num_prompt_tokens
            sampled.append(self._next_token(history[position - 1] ^ mirror.realm, number, mirror.sampling, mirror.seed))
            if sampled[-1] != draft:
                break
        return tuple(sampled)

    def _next_token(self, history: int, num_output_tokens: int, sampling: SamplingParams, seed: int) -> int:
        is_greedy = sampling.temperature in (None, 0.0)
        token = _mix(history if is_greedy else history ^ _mix(seed & _MASK)) % self.vocab_size
        if num_output_tokens < (sampling.min_new_tokens or 0):
            eos = sampling.eos_token_id or ()
            banned = {*((eos,) if isinstance(eos, int) else eos), *(sampling.stop_token_ids or ())}
            while token in banned:
                token = (token + 1) % self.vocab_size
        return token


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _extend(history: int, position: int, token: int) -> int:
    # Never 0, which is what an unwritten slot holds.
    return _mix(history ^ _mix((position << 32) ^ token)) | 1


def _fake_logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, ((token, -0.5),))
