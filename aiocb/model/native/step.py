"""A step's plan as the flat arrays of the C interface. Worker thread only.

Shape legend: T tokens of the step, R requests, O rows of outputs, N rows with logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence, Set

from aiocb.kernels.library import StepArguments
from aiocb.records import Record
from aiocb.step import StepEntry

__all__ = ["NativeStep"]


class NativeStep:
    """A plan as flat arrays; alive as long as the call.

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
        offsets = [array("i", (0,)) for _ in range(num_groups)]
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
            for table, offset, blocks in zip(tables, offsets, record.tables, strict=True):
                table.extend(blocks)
                offset.append(len(table))
        self.num_outputs = len(rows)
        self.num_logits = slot
        self.argmax = array("i", bytes(4 * len(rows)))
        self._arrays = (ids, starts, lengths, rows)
        self._tables = tables
        self._offsets = offsets
        self._slots = slots

    def arguments(self, logits: int | None) -> StepArguments:
        """Return the C structure; `logits` is the address of [N, V] floats, or None for the argmax only."""
        ids, starts, lengths, rows = self._arrays
        pointers = ctypes.c_void_p * max(1, len(self._tables))
        return StepArguments(
            num_tokens=len(ids),
            num_sequences=len(starts),
            num_outputs=self.num_outputs,
            token_ids=_address(ids),
            starts=_address(starts),
            lengths=_address(lengths),
            tables=pointers(*map(_address, self._tables)),
            table_offsets=pointers(*map(_address, self._offsets)),
            output_rows=_address(rows),
            logit_slots=_address(self._slots) if logits is not None else None,
            logits=logits,
            argmax=_address(self.argmax),
        )


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
