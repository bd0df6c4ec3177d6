"""A step's plan as the flat arrays of the C interface. Worker thread only.

Shape legend: T tokens of the step, R requests, G cache groups, B new pages, O rows of outputs, N rows with logits, V
vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set

from aiocb.kernels.interface import PAGE_SIZE, StepArguments
from aiocb.records import Record
from aiocb.step import StepEntry

__all__ = ["NativeStep"]


class NativeStep:
    """A plan as flat arrays; alive as long as the call.

    Block tables lie in native memory, by the row of a request: a step brings what is new of them.

    Attributes:
        num_logits: rows of outputs whose logits are written, N.
        argmax: the largest logit's id (or a `SelectFailure`) of each output, [O]; filled by the step.
    """

    def __init__(
        self,
        entries: Sequence[StepEntry],
        records: Sequence[Record],
        num_groups: int,
        page_size: int,
        with_logits: Set[int],
    ) -> None:
        """Args:
        entries, records: aligned.
        num_groups: of the cache.
        page_size: tokens of a block, a multiple of the kernels' own pages.
        with_logits: positions in `entries` of those whose logits are wanted, not only their argmax.
        """
        ids: list[int] = []
        outputs: list[int] = []
        num_blocks: list[int] = []
        block_starts: list[int] = []
        tables: list[list[int]] = [[] for _ in range(num_groups)]
        row = 0
        for entry, record in zip(entries, records):
            start, count, wanted, fresh = (
                entry.num_computed_tokens, entry.num_new_tokens, entry.num_logits, entry.new_blocks,
            )  # fmt: skip
            if count == 1:
                ids.append(record.tokens[start])
            else:
                ids += record.tokens[start : start + count]
            row += count
            if wanted == 1:
                outputs.append(row - 1)
            elif wanted:
                outputs += range(row - wanted, row)
            if fresh:
                block_starts.append(entry.block_start)
                num_blocks.append(len(fresh[0]))
                for table, blocks in zip(tables, fresh):
                    table += blocks
            else:
                block_starts.append(record.num_blocks)
                num_blocks.append(0)
        pages = page_size // PAGE_SIZE
        if pages > 1:
            tables = [[block * pages + page for block in table for page in range(pages)] for table in tables]
            block_starts = [start * pages for start in block_starts]
            num_blocks = [count * pages for count in num_blocks]
        self.argmax = array("i", bytes(4 * len(outputs)))
        self._num_new_blocks = len(tables[0])
        self._arrays = {
            "token_ids": array("i", ids),
            "rows": array("i", [record.row for record in records]),
            "starts": array("i", [entry.num_computed_tokens for entry in entries]),
            "lengths": array("i", [entry.num_new_tokens for entry in entries]),
            "block_starts": array("i", block_starts),
            "block_counts": array("i", num_blocks),
            "new_blocks": array("i", [block for table in tables for block in table]),  # [G, B]
            "output_rows": array("i", outputs),
            "argmax": self.argmax,
        }
        self.num_logits = 0
        if with_logits:
            places = array("i")
            for position, entry in enumerate(entries):
                if position in with_logits:
                    places.extend(range(self.num_logits, self.num_logits + entry.num_logits))
                    self.num_logits += entry.num_logits
                else:
                    places.extend([-1] * entry.num_logits)
            self._arrays["logit_targets"] = places

    def arguments(self, logits: int | None) -> StepArguments:
        """Return the C structure; `logits` is the address of [N, V] floats, None where none are wanted."""
        arrays = self._arrays
        return StepArguments(
            num_tokens=len(arrays["token_ids"]),
            num_sequences=len(arrays["starts"]),
            num_outputs=len(self.argmax),
            num_new_blocks=self._num_new_blocks,
            logits=logits,
            **{name: values.buffer_info()[0] for name, values in arrays.items()},
        )
