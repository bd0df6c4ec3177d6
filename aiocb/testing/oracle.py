"""A runner without a model that notices every mistake in the cache's bookkeeping: `KVOracle`.

Where a model writes K and V, the oracle writes a 64-bit hash of the whole history up to that token, per group and
physical slot. Before it "attends", it checks that every position which the new tokens can see holds exactly their own
history: a block that was shared wrongly, reused too early, not copied, dropped from a window or published before it
was written raises `KVMismatch` in the very step that reads it.

Its next token is a function of the history (and of the seed, when the request samples), so the output of a request is
the same alone, batched, chunked, preempted or forked, and `expected_output` tells it in advance.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aiocb.sampling_params import SamplingParams
from aiocb.step import NULL_BLOCK, CacheGroup, CacheLayout, StepEntry, StepPlan, StepResult, TokenLogprobs

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


class KVOracle:
    """A `Runner` that computes nothing and checks everything.

    Args:
        layout: of the cache that it pretends to hold.
        vocab_size: tokens are below it.
        max_model_len: reported, and checked.
        errors: called with each plan before it runs; returns failures by request id, or raises to fail the step.

    Attributes:
        num_steps, num_tokens: executed so far.
        max_requests, max_tokens: the largest step so far.
    """

    def __init__(
        self,
        layout: CacheLayout | None = None,
        *,
        vocab_size: int = 101,
        max_model_len: int = 1 << 20,
        errors: Callable[[StepPlan], Mapping[int, Exception] | None] | None = None,
    ) -> None:
        self._layout = layout or simple_layout()
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._errors = errors
        self._pages: list[list[list[int]]] = [
            [[0] * self._layout.page_size for _ in range(group.num_blocks)] for group in self._layout.groups
        ]
        self._histories: dict[int, list[int]] = {}
        self._released: set[int] = set()
        self.num_steps = 0
        self.num_tokens = 0
        self.max_requests = 0
        self.max_tokens = 0
        self.is_closed = False

    @property
    def cache_layout(self) -> CacheLayout:
        """The layout it was built with."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """The vocabulary it was built with."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """The length it was built with."""
        return self._max_model_len

    @property
    def num_tracked(self) -> int:
        """Requests that it keeps state for: those that have run and were not released."""
        return len(self._histories)

    def describe(self) -> dict[str, str]:
        """One line: it is not a model."""
        return {"model": "KVOracle: hashes instead of keys and values"}

    def close(self) -> None:
        """Drop all state. Idempotent."""
        self._histories.clear()
        self.is_closed = True

    def execute(self, plan: StepPlan) -> StepResult:
        """Write, check and "sample" one step.

        Raises:
            KVMismatch: the plan is inconsistent, or reads or writes a slot that it must not.
        """
        for request_id in plan.released_ids:
            self._histories.pop(request_id, None)
            self._released.add(request_id)
        self._check_plan(plan)
        errors = self._errors(plan) if self._errors is not None else None
        for group, source, target in plan.block_copies:
            if NULL_BLOCK in (source, target):
                raise KVMismatch(f"the null block of group {group} is copied")
            self._pages[group][target] = list(self._pages[group][source])
        # All writes come before all reads, as in a model's layer.
        written: set[tuple[int, int, int]] = set()
        for entry in plan.entries:
            self._write(entry, written)
        for entry in plan.entries:
            self._read(entry)
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.max_requests = max(self.max_requests, len(plan.entries))
        self.max_tokens = max(self.max_tokens, plan.num_tokens)
        tokens: list[int | None] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        for entry in plan.entries:
            is_failed = bool(errors) and entry.request_id in (errors or ())
            token = self._sample(entry) if entry.is_sampled and not is_failed else None
            tokens.append(token)
            wants = token is not None and entry.sampling.logprobs is not None
            logprobs.append(_fake_logprobs(token) if wants and token is not None else None)
            if entry.sampling.prompt_logprobs is not None:
                end = entry.num_computed_tokens + entry.num_new_tokens
                targets = range(end - entry.num_logits + 1, min(end + 1, entry.num_prompt_tokens))
                rows = [_fake_logprobs(entry.tokens[position]) for position in targets]
                if rows:
                    prompt_logprobs[entry.request_id] = rows
        has_logprobs = any(logprob is not None for logprob in logprobs)
        return StepResult(tokens, logprobs if has_logprobs else None, prompt_logprobs or None, errors)

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
        if not plan.entries:
            raise KVMismatch("a plan without entries was executed")
        if plan.num_tokens != sum(entry.num_new_tokens for entry in plan.entries):
            raise KVMismatch("num_tokens is not the sum of the entries")
        ids = [entry.request_id for entry in plan.entries]
        if len(set(ids)) != len(ids):
            raise KVMismatch("a request has two entries in one plan")
        if released := self._released.intersection(ids):
            raise KVMismatch(f"requests {sorted(released)} run after they were released")
        for entry in plan.entries:
            end = entry.num_computed_tokens + entry.num_new_tokens
            if entry.num_new_tokens < 1 or end > len(entry.tokens) or end > self._max_model_len:
                raise KVMismatch(f"request {entry.request_id} computes up to {end} of {len(entry.tokens)} tokens")
            if entry.is_sampled != (end == len(entry.tokens)):
                raise KVMismatch(
                    f"request {entry.request_id} is sampled in the middle of its tokens, or not at the end"
                )
            if not entry.is_sampled <= entry.num_logits <= entry.num_new_tokens:
                raise KVMismatch(f"request {entry.request_id} has {entry.num_logits} logit rows")

    def _history(self, entry: StepEntry, end: int) -> list[int]:
        history = self._histories.setdefault(entry.request_id, [])
        previous = history[-1] if history else 0
        for position in range(len(history), end):
            previous = _extend(previous, position, entry.tokens[position])
            history.append(previous)
        return history

    def _write(self, entry: StepEntry, written: set[tuple[int, int, int]]) -> None:
        start = entry.num_computed_tokens
        end = start + entry.num_new_tokens
        history = self._history(entry, end)
        page_size = self._layout.page_size
        for g, (table, pages) in enumerate(zip(entry.block_tables, self._pages, strict=True)):
            for position in range(start, end):
                page, offset = divmod(position, page_size)
                if page >= len(table) or table[page] == NULL_BLOCK:
                    raise KVMismatch(f"request {entry.request_id}: no block for position {position} in group {g}")
                slot = (g, table[page], offset)
                if slot in written:
                    raise KVMismatch(f"slot {slot} is written twice in one step")
                written.add(slot)
                pages[table[page]][offset] = history[position]

    def _read(self, entry: StepEntry) -> None:
        start = entry.num_computed_tokens
        end = start + entry.num_new_tokens
        history = self._histories[entry.request_id]
        page_size = self._layout.page_size
        for g, (group, table) in enumerate(zip(self._layout.groups, entry.block_tables, strict=True)):
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

    def _sample(self, entry: StepEntry) -> int:
        end = entry.num_computed_tokens + entry.num_new_tokens
        history = self._histories[entry.request_id][end - 1]
        return self._next_token(history, end - entry.num_prompt_tokens, entry.sampling, entry.seed)

    def _next_token(self, history: int, num_output_tokens: int, sampling: SamplingParams, seed: int) -> int:
        is_greedy = sampling.temperature in (None, 0.0)
        token = _mix(history if is_greedy else history ^ _mix(seed & _MASK)) % self._vocab_size
        if num_output_tokens < (sampling.min_new_tokens or 0):
            eos = sampling.eos_token_id or ()
            banned = {*((eos,) if isinstance(eos, int) else eos), *(sampling.stop_token_ids or ())}
            while token in banned:
                token = (token + 1) % self._vocab_size
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
