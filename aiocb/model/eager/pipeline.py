"""Steps on an accelerator: the host sends a few integers per request, and need not wait for the step before.

    plan ─► numbers ──one upload──► tables, ids, positions, slots ─► model ─► logits ─► tokens ──one transfer──► result
                                         ▲                                      │
                                         └──────────── last tokens ◄────────────┘

Up to `depth` steps are under way. The tokens of the first are not known when the second is launched; they never leave
the device before they are embedded, and no placeholder is. A plan that has to know them (penalties, log-probabilities,
Python processors, prompts with more rows of logits than one, requests longer than a table) waits for all that are under
way and is then run on the host, as on any other device; `Pipeline.why_slow` says why.

Worker thread only. Legend: R rows of the step, T packed tokens, U blocks that are new to the tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aiocb.attention.packed import PackedBackend
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.device import Device, Numbers, Ticket
from aiocb.model.eager.graphs import Graphs
from aiocb.model.eager.handlers import PagedHandler
from aiocb.model.eager.tables import DeviceStep, DeviceTables, StepShape
from aiocb.model.kv import PagedCache
from aiocb.records import Record, Records
from aiocb.sampling.device import DeviceBatch, is_sampled_on_device
from aiocb.sampling.sampler import failure_of
from aiocb.step import BlockCopy, StepEntry, StepPlan, StepResult

__all__ = ["Flight", "Forwards", "Pipeline"]

_NO_UPDATES = np.zeros(0, np.int32)


class Flight:
    """A plan under way.

    Attributes:
        records: of its entries.
        result: None until it is known.
        ticket: of the step on the device; None where it ran on the host.
        logits: of each entry, [R, V], where they are kept.
        sampled: indices of the entries that sample.
    """

    __slots__ = ("logits", "records", "result", "sampled", "ticket")

    def __init__(
        self, records: Sequence[Record], sampled: Sequence[int], ticket: Ticket | None, result: StepResult | None = None
    ) -> None:
        self.records, self.sampled, self.ticket, self.result = records, sampled, ticket, result
        self.logits: Tensor | None = None


class _DeviceHandler(PagedHandler):
    """Handler of a step whose numbers are on the device."""

    def __init__(
        self, backend: PackedBackend, cache: PagedCache, adapter: ModelAdapter, steps: list[DeviceStep]
    ) -> None:
        batch: Any = None  # nothing asks for it: what it is for is in the steps
        super().__init__(backend, cache, adapter.specs, batch)
        self._metadata.update(enumerate(steps))


class Forwards:
    """The forward pass of a step of a shape, and the modules that run it.

    Args:
        adapter: of the model.
        backend: attends.
        cache: of keys and values.
        tables: on the device.

    Attributes:
        adapter: as given; another one when the model has been looked at anew.
        varlen, decode: what is called in place of the model, compiled or not; None is the model.
    """

    def __init__(self, adapter: ModelAdapter, backend: PackedBackend, cache: PagedCache, tables: DeviceTables) -> None:
        self.adapter, self._backend, self._cache, self._tables = adapter, backend, cache, tables
        self.varlen: Callable[..., Any] | None = None
        self.decode: Callable[..., Any] | None = None

    def __call__(self, shape: StepShape, numbers: Tensor) -> Tensor:
        """Run the model: logits of each row's last token, [R, V]. numbers [num_numbers] int32."""
        tables = self._tables
        step = tables.unpack(shape, numbers)
        steps = [DeviceStep(tables, group, step, shape) for group in range(len(tables.tables))]
        handler = _DeviceHandler(self._backend, self._cache, self.adapter, steps)
        call = self.decode if shape.max_queries == 1 else self.varlen
        return self.adapter.forward(
            step.ids.unsqueeze(0), step.positions.unsqueeze(0), step.starts[1:] - 1, handler, call=call
        )


class Pipeline:
    """Plans on an accelerator, in order, at most `depth` of them under way.

    Args:
        forwards: runs the model.
        cache: of keys and values.
        records: of open requests, shared with the runner.
        tables: on the device.
        device: where steps run.
        gathers: some layer gathers its keys.
        run_on_host: runs a whole plan, when none is under way.

    Attributes:
        depth: plans that may be under way.
        graphs: recorded steps, or None.
        num_fast, num_slow: plans launched, and run on the host.
        why_slow: of the last of these.
        keeps_logits: flights keep theirs, for a check.
    """

    def __init__(
        self,
        forwards: Forwards,
        cache: PagedCache,
        records: Records,
        tables: DeviceTables,
        device: Device,
        *,
        gathers: bool,
        run_on_host: Callable[[StepPlan], StepResult],
    ) -> None:
        self._forwards, self._cache, self._records, self._tables = forwards, cache, records, tables
        self._device = device
        self._gathers = gathers
        self._run_on_host = run_on_host
        self._flights: deque[Flight] = deque()
        self._synced = [0] * (tables.num_rows + 1)  # by row: blocks that its device table has
        self._slow: dict[int, str] = {}  # open requests that are not for the device, and why
        self._batch: DeviceBatch | None = None
        self.depth = 1
        self.graphs: Graphs | None = None
        self.num_fast = self.num_slow = 0
        self.why_slow = ""
        self.keeps_logits = False

    def submit(self, plan: StepPlan) -> Flight:
        """Launch a plan, or run it on the host once nothing is under way any more."""
        for request_id in plan.closed:
            self._slow.pop(request_id, None)
        for one in plan.opened:
            if not is_sampled_on_device(one.sampling):
                self._slow[one.request_id] = "sampling needs the history of a request, or its log-probabilities"
        reason = self._refusal(plan)
        flight = self._launch(plan) if reason is None else self._wait_and_run(plan, reason)
        self._flights.append(flight)
        return flight

    def collect(self, flight: Flight) -> StepResult:
        """The result of a plan, which is the oldest that was not collected."""
        while flight.result is None:
            self._land()
        if self._flights and self._flights[0] is flight:
            self._flights.popleft()
        return flight.result

    def release(self) -> None:
        """Let what is under way end, and forget every request."""
        for flight in self._flights:
            if flight.ticket is not None and flight.result is None:
                flight.ticket.wait()
        self._flights.clear()
        self._slow.clear()
        self._batch = None

    def abandon(self) -> None:
        """Forget a life that went wrong: nothing that is under way is waited for."""
        self._flights.clear()
        self._records.clear()
        self.release()

    # ── which way ────────────────────────────────────────────────────────────────────────────────────────────────

    def _refusal(self, plan: StepPlan) -> str | None:
        """Why the host has to run a plan; None where it has not."""
        if plan.swaps_in or plan.swaps_out or plan.states_before or plan.states_after:
            return "blocks or states are moved"
        entries, slow = plan.entries, self._slow
        longest = self._tables.max_blocks * self._tables.page_size
        for entry in entries:
            if entry.num_logits > 1 or entry.draft_token_ids:
                return "more rows of logits than one are wanted of a request"
            if entry.num_computed_tokens + entry.num_new_tokens > longest:
                return f"a request is longer than a table of {self._tables.max_blocks} blocks"
        if slow:
            for entry in entries:
                if entry.request_id in slow:
                    return slow[entry.request_id]
        if len(self._records) + len(plan.opened) - len(plan.closed) > self._tables.num_rows:
            return f"more than {self._tables.num_rows} requests are open"
        return None

    def _wait_and_run(self, plan: StepPlan, reason: str) -> Flight:
        self.num_slow, self.why_slow = self.num_slow + 1, reason
        self._land_all()
        result = self._run_on_host(plan)
        for one in plan.opened:
            row = self._records[one.request_id].row
            if row < self._tables.num_rows:
                self._synced[row] = 0
            else:  # it keeps its row for as long as it is open
                self._slow[one.request_id] = f"more than {self._tables.num_rows} requests were open"
        for entry in plan.entries:
            if entry.new_blocks:
                row = self._records[entry.request_id].row
                if row < self._tables.num_rows:
                    self._synced[row] = min(self._synced[row], entry.block_start)
        return Flight([], (), None, result)

    def _land_all(self) -> None:
        while any(flight.result is None for flight in self._flights):
            self._land()

    def _land(self) -> None:
        """Wait for the oldest step whose result is not known."""
        flight = next(flight for flight in self._flights if flight.result is None)
        assert flight.ticket is not None
        chosen: list[int] = flight.ticket.wait().tolist()
        tokens: list[tuple[int, ...]] = [()] * len(flight.records)
        errors: dict[int, Exception] = {}
        for index, token in zip(flight.sampled, chosen):
            if token < 0:
                errors[flight.records[index].request_id] = failure_of(token)
            else:
                tokens[index] = (token,)
        flight.result = StepResult(tokens, None, None, errors or None)
        self._records.finish(flight.records, flight.result)

    # ── the launch ───────────────────────────────────────────────────────────────────────────────────────────────

    def _launch(self, plan: StepPlan) -> Flight:
        self.num_fast += 1
        records = self._records.begin(plan)
        for one in plan.opened:
            self._synced[self._records[one.request_id].row] = 0
        if plan.closed:
            self._batch = None
        entries = plan.entries
        before, after = plan.copies_before, plan.copies_after
        if not entries:
            self._device.launch(np.zeros(1, np.int32), lambda numbers: self._copy(numbers, before, after))
            return Flight([], (), None, StepResult(()))
        updates = self._updates(entries, records)
        numbers, shape = self._numbers(entries, records)
        padded = None if self.graphs is None else self.graphs.padded(shape)
        if padded is not None and self.graphs is not None:
            numbers = self.graphs.fill(numbers, shape, padded)
        sampled = [index for index, entry in enumerate(entries) if entry.is_sampled]
        batch, drawn, places = None, np.zeros(0), _NO_UPDATES
        if sampled:
            sampling = records if len(sampled) == len(records) else [records[index] for index in sampled]
            batch = self._batch_of(sampling)
            ends = [entries[index].num_computed_tokens + entries[index].num_new_tokens for index in sampled]
            drawn = batch.uniforms(ends)
            if len(sampled) != len(records):
                places = np.array(sampled, np.int32)
        # What is eight bytes wide comes first, where it is aligned.
        sent = np.concatenate([drawn.view(np.int32), places, updates, numbers])
        sizes = [len(sent) - len(numbers) - len(updates) - len(places), len(places), len(updates), len(numbers)]

        flight = Flight(records, sampled, None)

        def work(uploaded: Tensor) -> Tensor:
            uniforms, rows, new_blocks, step = torch.split(uploaded, sizes)
            self._cache.copy_blocks(before)
            if len(new_blocks):
                self._tables.update(new_blocks)
            with torch.inference_mode():
                logits = self._logits(shape, padded, step)
                if self.keeps_logits:
                    flight.logits = logits.clone()
                chosen = step[:0] if batch is None else self._sample(batch, logits, step, rows, uniforms)
            self._cache.copy_blocks(after)
            return chosen

        flight.ticket = self._device.launch(sent, work)
        return flight

    def _copy(self, numbers: Tensor, *copies: Sequence[BlockCopy]) -> Tensor:
        for some in copies:
            self._cache.copy_blocks(some)
        return numbers

    def _logits(self, shape: StepShape, padded: StepShape | None, numbers: Tensor) -> Tensor:
        """Run the model: logits of each row's last token, [R, V]."""
        if padded is not None and self.graphs is not None:
            return self.graphs.replay(padded, numbers)[: shape.num_rows]
        return self._forwards(shape, numbers)

    def _sample(self, batch: DeviceBatch, logits: Tensor, numbers: Tensor, places: Tensor, uniforms: Tensor) -> Tensor:
        """Choose tokens, and keep them for the next step; places are the rows that sample, or none for all."""
        rows = numbers[: len(logits)].long()
        if len(places):
            at = places.long()
            rows, logits = rows.index_select(0, at), logits.index_select(0, at)
        chosen = batch.choose(logits, uniforms.view(torch.float64))
        # One that failed has a token below 0, and may be in the next step already: it goes on with any other.
        self._tables.tokens.index_copy_(0, rows, chosen.clamp_min(0))
        return chosen

    def _batch_of(self, records: list[Record]) -> DeviceBatch:
        if self._batch is None or self._batch.records != records:
            self._batch = DeviceBatch(records, self._device.kind)
        return self._batch

    def _updates(self, entries: Sequence[StepEntry], records: Sequence[Record]) -> Numbers:
        """What the device's tables do not have yet: rows, columns, and the blocks of each group, [(2 + groups) * U]."""
        synced = self._synced
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[list[int]] = [[] for _ in self._tables.tables]
        for entry, record in zip(entries, records):
            row = record.row
            start = synced[row]
            if entry.new_blocks and entry.block_start < start:
                start = entry.block_start
            stop = record.num_blocks
            if start < stop:
                # Blocks may be handed out before they are needed, more than a table holds.
                stop = min(stop, self._tables.max_blocks)
                rows += [row] * (stop - start)
                columns += range(start, stop)
                for new, table in zip(blocks, record.tables):
                    new += table[start:stop]
                synced[row] = stop
        if not rows:
            return _NO_UPDATES
        return np.array([rows, columns, *blocks], np.int32).reshape(-1)

    def _numbers(self, entries: Sequence[StepEntry], records: Sequence[Record]) -> tuple[Numbers, StepShape]:
        """A step in integers (see `StepShape`), and its shape."""
        num_rows = len(entries)
        computed = np.fromiter((entry.num_computed_tokens for entry in entries), np.int32, num_rows)
        new = np.fromiter((entry.num_new_tokens for entry in entries), np.int32, num_rows)
        starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(new, out=starts[1:])
        num_tokens = int(starts[-1])
        if num_tokens == num_rows:
            ids = np.fromiter(
                (
                    record.tokens[entry.num_computed_tokens] if entry.num_computed_tokens < len(record.tokens) else -1
                    for entry, record in zip(entries, records)
                ),
                np.int32,
                num_rows,
            )
        else:
            found: list[int] = []
            for entry, record in zip(entries, records):
                first = entry.num_computed_tokens
                own = record.tokens[first : first + entry.num_new_tokens]
                found += own
                if len(own) < entry.num_new_tokens:  # only the last one can still be on the device
                    found.append(-1)
            ids = np.array(found, np.int32)
        rows = np.fromiter((record.row for record in records), np.int32, num_rows)
        shape = StepShape(num_rows, num_tokens, int(new.max()), self._num_keys(computed, new))
        return np.concatenate([rows, computed, starts, ids]), shape

    def _num_keys(self, computed: Numbers, new: Numbers) -> tuple[int, ...]:
        """Visible keys of all rows, per group."""
        if not self._gathers:
            return ()
        page_size, counts = self._tables.page_size, []
        for window in self._tables.windows:
            hidden = 0 if window is None else int((np.maximum(computed - window + 1, 0) // page_size * page_size).sum())
            counts.append(int((computed + new).sum()) - hidden)
        return tuple(counts)
