"""What a runner keeps of the requests that are open: `Records`, the other half of the messages in `step`. Torch-free.

The scheduler knows the same things; the runner never asks it. `begin` applies what a plan says, `finish` appends what
the runner returned, so that after each step both agree on every token and every block.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from heapq import heappop, heappush
from typing import Any

from aiocb.sampling_params import SamplingParams
from aiocb.step import OpenedRequest, StepPlan, StepResult

__all__ = ["Record", "Records"]


class Record:
    """One open request.

    Attributes:
        request_id, num_prompt_tokens, sampling, seed, adapter: as in `OpenedRequest`.
        row: a small number that no other open request has; it stays the same while this one is open.
        tokens: prompt and output so far.
        num_opened: how many these were when it was opened, for the first time or once more.
        num_blocks: length of its block tables.
        tables: per cache group, the physical block of each logical block; none where they are kept elsewhere.
        is_plain: a plain argmax is all that it asks of a sampler.
        state: what the sampler remembers of it.
        state_slot: as in `OpenedRequest`.
        follows: tokens that have to come next, as the last result has said.
        num_drafts: how many of them the step computes; they are the last of `tokens` then.
        guesses: tokens that the step computes and that are to be verified; the last of `tokens` until they are.
    """

    __slots__ = (
        "adapter",
        "follows",
        "guesses",
        "is_plain",
        "num_blocks",
        "num_drafts",
        "num_opened",
        "num_prompt_tokens",
        "request_id",
        "row",
        "sampling",
        "seed",
        "state",
        "state_slot",
        "tables",
        "tokens",
    )

    def __init__(self, opened: OpenedRequest, row: int, num_groups: int) -> None:
        self.request_id = opened.request_id
        self.row = row
        self.tokens = list(opened.token_ids)
        self.num_opened = len(self.tokens)
        self.num_prompt_tokens = opened.num_prompt_tokens
        self.sampling: SamplingParams = opened.sampling
        self.seed = opened.seed
        self.adapter = opened.adapter
        self.is_plain = opened.sampling.is_plain
        self.state: Any = None
        self.state_slot = opened.state_slot
        self.follows: tuple[int, ...] = ()
        self.num_drafts = 0
        self.guesses: tuple[int, ...] = ()
        self.num_blocks = 0
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))


class Records:
    """All open requests of one runner.

    Args:
        num_groups: of the cache, for runners that read block tables here; 0 where they are kept elsewhere.
        adapters: keys of those that the runner applies, as they are at each step.
        takes_guesses: the runner verifies drafts; else it takes only what it has said to follow.
    """

    __slots__ = ("_adapters", "_by_id", "_free_rows", "_num_groups", "_takes_guesses")

    verifies_drafts = False
    """True where drafts are none of the records' business."""

    def __init__(self, num_groups: int = 0, adapters: Container[str] = (), *, takes_guesses: bool = False) -> None:
        self._num_groups = num_groups
        self._adapters = adapters
        self._takes_guesses = takes_guesses
        self._by_id: dict[int, Record] = {}
        self._free_rows: list[int] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, request_id: int) -> Record:
        return self._by_id[request_id]

    def begin(self, plan: StepPlan) -> list[Record]:
        """Close, open and extend what the plan names; return the record of each entry, in their order.

        Raises:
            NotImplementedError: it asks for what nobody would do: an adapter that was not loaded, a grammar by key, the
                check of guesses.
        """
        by_id = self._by_id
        for request_id in plan.closed:
            heappush(self._free_rows, by_id.pop(request_id).row)
        for opened in plan.opened:
            if opened.adapter is not None and opened.adapter not in self._adapters:
                raise NotImplementedError("the runner has no such adapter")
            if opened.grammar_key is not None:
                raise NotImplementedError("runners know no grammars")
            # The lowest row that is free, so that rows stay dense.
            row = heappop(self._free_rows) if self._free_rows else len(by_id)
            by_id[opened.request_id] = Record(opened, row, self._num_groups)
        records = [by_id[entry.request_id] for entry in plan.entries]
        for record, entry in zip(records, plan.entries):
            if entry.new_token_ids:
                record.tokens += entry.new_token_ids
            if entry.draft_token_ids and not self.verifies_drafts:
                drafts = entry.draft_token_ids
                if record.follows[: len(drafts)] == drafts:
                    record.num_drafts = len(drafts)
                elif self._takes_guesses:
                    record.guesses = drafts
                else:
                    raise NotImplementedError("this runner verifies no drafts")
                record.tokens += drafts
            fresh = entry.new_blocks
            if fresh:
                record.num_blocks = entry.block_start + len(fresh[0])
                for table, blocks in zip(record.tables, fresh):
                    table[entry.block_start :] = blocks
        return records

    @staticmethod
    def finish(records: Sequence[Record], result: StepResult) -> None:
        """Append what each entry has been given."""
        for record, token_ids in zip(records, result.token_ids):
            if record.num_drafts:
                token_ids = token_ids[record.num_drafts :]
                record.num_drafts = 0
            record.tokens += token_ids

    def clear(self) -> None:
        """Forget everything."""
        self._by_id.clear()
        self._free_rows.clear()

    def __repr__(self) -> str:
        return f"<Records [{len(self._by_id)} open]>"
