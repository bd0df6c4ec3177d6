"""A step's plan as the flat arrays of the C interface. Worker thread only.

Shape legend: T tokens of the step, R requests, G cache groups, B new blocks, O rows of outputs, N rows with logits, V
vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set

from aiocb.kernels import KernelError
from aiocb.kernels.interface import StepArguments
from aiocb.records import Record
from aiocb.step import StepEntry

__all__ = ["NativeStep"]


class NativeStep:
    """A plan as flat arrays; alive as long as the call. Every step brings whole block tables, for rows in plan order.

    Attributes:
        num_outputs: rows that the output matrix is applied to, O.
        num_logits: rows of them whose logits are written, N.
        argmax: the largest logit's id (or a `SelectFailure`) of each of them, [O]; filled by the step.
    """

    def __init__(
        self, entries: Sequence[StepEntry], records: Sequence[Record], num_groups: int, with_logits: Set[int]
    ) -> None:
        """Args:
        entries, records: aligned.
        num_groups: of the cache.
        with_logits: positions in `entries` of those whose logits are wanted, not only their argmax.
        """
        ids, starts, lengths, rows, slots = array("i"), array("i"), array("i"), array("i"), array("i")
        tables = [array("i") for _ in range(num_groups)]
        counts = array("i")
        row = slot = 0
        for position, (entry, record) in enumerate(zip(entries, records, strict=True)):
            start, count, wanted = entry.num_computed_tokens, entry.num_new_tokens, entry.num_logits
            if count == 1:
                ids.append(record.tokens[start])
            else:
                ids.extend(record.tokens[start : start + count])
            starts.append(start)
            lengths.append(count)
            row += count
            if wanted == 1:
                rows.append(row - 1)
            elif wanted:
                rows.extend(range(row - wanted, row))
            if with_logits and wanted:
                is_written = position in with_logits
                slots.extend(range(slot, slot + wanted) if is_written else [-1] * wanted)
                slot += wanted if is_written else 0
            counts.append(len(record.tables[0]))
            for table, blocks in zip(tables, record.tables, strict=True):
                table.extend(blocks)
        self.num_outputs = len(rows)
        self.num_logits = slot
        self.argmax = array("i", bytes(4 * len(rows)))
        self._num_blocks = len(tables[0])
        new_blocks = array("i")
        for table in tables:
            new_blocks += table  # [G, B]
        if len(new_blocks) != num_groups * self._num_blocks:
            raise KernelError("a request's block tables are of different lengths")
        requests = array("i", range(len(starts)))
        self._arrays: dict[str, array[int]] = {
            "token_ids": ids, "rows": requests, "starts": starts, "lengths": lengths, "block_counts": counts,
            "block_starts": array("i", bytes(4 * len(starts))), "new_blocks": new_blocks, "output_rows": rows,
            "argmax": self.argmax,
        }  # fmt: skip
        self._slots = slots

    def arguments(self, logits: int | None) -> StepArguments:
        """Return the C structure; `logits` is the address of [N, V] floats, or None for the argmax only."""
        arrays = self._arrays if logits is None else self._arrays | {"logit_slots": self._slots}
        return StepArguments(
            num_tokens=len(arrays["token_ids"]),
            num_sequences=len(arrays["starts"]),
            num_outputs=self.num_outputs,
            num_new_blocks=self._num_blocks,
            logits=logits,
            **{name: values.buffer_info()[0] for name, values in arrays.items()},
        )
