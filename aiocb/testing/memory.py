"""What `KVOracle` has in place of a device's memory: `OracleMemory`, and what plans in flight name of it.

Where keys and values would be there are hashes of the history up to their token; in place of a state how many tokens
have gone into it, and the hash of the last. What is moved must not be in use by plans in flight. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiocb.records import Record
from aiocb.step import NULL_BLOCK, BlockCopy, CacheLayout, StepEntry, StepPlan, StepResult
from aiocb.testing.records import KVMismatch

__all__ = ["Flight", "OracleMemory"]

_FRESH = (0, 0)
_SPOILT = (-1, 0)
_SNAPSHOT = -1  # who a slot belongs to that nobody lives in


class Flight(NamedTuple):
    """A plan in flight; `blocks` and `slots` say whom it reads and writes them for (by group and block; by slot)."""

    plan: StepPlan
    records: list[Record]
    result: StepResult
    blocks: dict[tuple[int, int], int]
    slots: dict[int, int]


class OracleMemory:
    """Blocks, slots of states and places of the swap space.

    Args:
        layout: of the cache.

    Attributes:
        pages: by group, block and offset.
        states: by slot; empty for models without.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.pages: list[list[list[int]]] = [
            [[0] * layout.page_size for _ in range(group.num_blocks)] for group in layout.groups
        ]
        self.states: list[tuple[int, int]] = [_FRESH] * (0 if layout.states is None else layout.states.num_slots)
        self._places: dict[tuple[int, int], Sequence[int]] = {}  # by group and place
        self._swap_places = layout.swap_places

    def swap(self, flight: Flight, others: Iterable[Flight]) -> None:
        """Move blocks to places of the swap space, and from there to others that requests of this plan hold."""
        plan, records = flight.plan, flight.records
        held = {(g, block) for record in records for g, table in enumerate(record.tables) for block in table}
        held |= {(len(self.pages), record.state_slot) for record in records}
        named = [flight for flight in others if flight.plan.entries]
        read = {(swap.group, swap.place) for flight in named for swap in flight.plan.swaps_in}
        for group, block, place in plan.swaps_out:
            if block == NULL_BLOCK or not 0 <= place < self._swap_places[group] or (group, place) in read:
                raise KVMismatch(f"block {block} of group {group} is moved to place {place}, which is in use")
            is_state = group == len(self.pages)
            self._places[group, place] = self.states[block] if is_state else list(self.pages[group][block])
        for group, block, place in plan.swaps_in:
            is_named = any((group, block) in flight.blocks for flight in named)
            if block == NULL_BLOCK or is_named or (group, block) not in held:
                raise KVMismatch(f"place {place} is moved to block {block} of group {group}, which is in use")
            kept = self._places[group, place]
            if group < len(self.pages):
                self.pages[group][block] = list(kept)
            else:
                num_tokens, history = kept
                self.states[block] = num_tokens, history

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks, in order."""
        for group, source, target in copies:
            if NULL_BLOCK in (source, target):
                raise KVMismatch(f"the null block of group {group} is copied")
            self.pages[group][target] = list(self.pages[group][source])

    def restore(self, flight: Flight, others: Iterable[Flight], open_records: Iterable[Record]) -> None:
        """Copy states before the step, into slots that its requests live in."""
        slots, others = flight.slots, tuple(others)
        live = {record.state_slot: record.request_id for record in flight.records}
        if NULL_BLOCK in live or len(live) < len(flight.records):
            raise KVMismatch("a request has no slot of its own")
        for slot, owner in live.items():
            if any(other.slots.get(slot, owner) != owner for other in others):
                raise KVMismatch(f"slot {slot} is given away while a plan in flight names it")
        owners = {record.state_slot: record.request_id for record in open_records}
        for source, target in flight.plan.states_before:
            if NULL_BLOCK in (source, target) or source == target or target not in live:
                raise KVMismatch(f"slot {source} is copied to {target} before the step, where nobody of it lives")
            self.states[target] = self.states[source]
            slots[source] = owners.get(source, _SNAPSHOT)
        slots.update(live)

    def go_on(self, entry: StepEntry, record: Record, history: Sequence[int]) -> None:
        """Let a request's state take in its new tokens, if it is what it has come to."""
        start, end = entry.num_computed_tokens, entry.num_computed_tokens + entry.num_new_tokens
        found = self.states[record.state_slot] if start else _FRESH
        if found != ((start, history[start - 1]) if start else _FRESH):
            raise KVMismatch(
                f"request {entry.request_id} computes {start}..{end - 1} from a state that is not its own: slot "
                f"{record.state_slot}, of {found[0]} tokens"
            )
        self.states[record.state_slot] = end, history[end - 1]

    def put_aside(self, flight: Flight, others: Iterable[Flight], open_records: Iterable[Record]) -> None:
        """Copy states after the step, from slots that its requests live in to some that nobody uses."""
        slots = flight.slots
        sources = {record.state_slot for record in flight.records}
        taken = {NULL_BLOCK, *slots, *(record.state_slot for record in open_records)}
        taken.update(slot for other in others for slot in other.slots)
        for source, target in flight.plan.states_after:
            if target in taken or source not in sources:
                raise KVMismatch(f"slot {source} is copied to {target} after the step, which is in use")
            self.states[target] = self.states[source]
            slots[target] = _SNAPSHOT
            taken.add(target)

    def spoil(self, flight: Flight) -> None:
        """Leave nothing right in what a step was to write, as one may that has ended halfway."""
        plan = flight.plan
        for entry, record in zip(plan.entries, flight.records, strict=True):
            for table, pages in zip(record.tables, self.pages, strict=True):
                size = len(pages[0])
                for position in range(entry.num_computed_tokens, entry.num_computed_tokens + entry.num_new_tokens):
                    page, offset = divmod(position, size)
                    if page < len(table) and table[page] != NULL_BLOCK:
                        pages[table[page]][offset] = 0
        for copy in plan.copies_before:
            self.pages[copy.group][copy.target] = [0] * len(self.pages[copy.group][copy.target])
        if self.states:
            for slot in (*(record.state_slot for record in flight.records), *(to.target for to in plan.states_after)):
                self.states[slot] = _SPOILT
