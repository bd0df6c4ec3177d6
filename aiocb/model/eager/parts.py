"""What answers a split mixer for one part of a step: states in their slots, the keys of the part's requests alone.

Legend: B requests of a part, L tokens of one request, K key/value heads, D head dim, P keys of the longest request.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aiocb.attention.base import AttentionBackend, GroupTables, StepBatch
from aiocb.attention.paged import additive
from aiocb.model.eager.batch import PackedStep
from aiocb.model.eager.handlers import AttentionCall, Handler
from aiocb.model.eager.masks import MaskFunction, NotPlainError
from aiocb.model.eager.passes import Part, Pass
from aiocb.model.eager.states import StateKey, StateRows, StateStorage
from aiocb.model.eager.survey import INDEX_LAYERS, attend_as_model, indexed
from aiocb.model.kv import PagedCache

__all__ = ["PartHandler", "make_parts"]


def make_parts(
    packed: PackedStep,
    backend: AttentionBackend,
    cache: PagedCache,
    storage: StateStorage | None,
    dtype: torch.dtype,
    *,
    one_by_one: bool = False,
) -> list[Part]:
    """Make the parts of a step: what goes on, what begins with one token, then each prompt by itself."""
    batch = packed.batch
    num_going_on = int((batch.computed[: batch.num_decodes] > 0).sum())
    rows = [(0, num_going_on, True), (num_going_on, batch.num_decodes, True)]
    alone = [(row, row + 1, False) for row in range(batch.num_decodes, batch.num_rows)]
    if one_by_one:
        rows = [(row, row + 1, True) for row in range(batch.num_decodes)]
    return [_part(packed, backend, cache, storage, dtype, *each) for each in [*rows, *alone] if each[0] < each[1]]


def _part(
    packed: PackedStep,
    backend: AttentionBackend,
    cache: PagedCache,
    storage: StateStorage | None,
    dtype: torch.dtype,
    first: int,
    last: int,
    is_batch: bool,
) -> Part:
    batch = packed.batch
    start, stop = int(batch.starts[first]), int(batch.starts[last])
    computed = batch.computed[first:last]
    rows = None
    if storage is not None:
        rows = StateRows(storage, packed.state_slots[first:last], is_fresh=bool(computed[0] == 0))
    handler = PartHandler(backend, cache, _rows_of(batch, first, last), rows, dtype)
    positions = packed.positions[:, start:stop]
    inner = Pass(handler, positions.transpose(0, 1) if is_batch else positions, int(computed.max()))
    return Part(start, stop, is_batch, inner)


def _rows_of(batch: StepBatch, first: int, last: int) -> StepBatch:
    """The rows of a part, as a step of their own."""
    start, stop = batch.starts[first], batch.starts[last]
    groups = tuple(
        GroupTables(
            tables.window,
            tables.slots[start:stop],
            tables.pages[tables.page_starts[first] : tables.page_starts[last]],
            tables.page_starts[first : last + 1] - tables.page_starts[first],
            tables.key_starts[first:last],
            tables.chunk,
        )
        for tables in batch.groups
    )
    return StepBatch(
        int(min(max(batch.num_decodes - first, 0), last - first)),
        batch.starts[first : last + 1] - start,
        batch.computed[first:last],
        batch.lengths[first:last],
        groups,
        batch.page_size,
        batch.device,
        batch.dtype,
    )


class PartHandler(Handler):
    """Answers one part: B requests with one token each, or one request with L of them.

    Keys of several requests are filled up on the right, and hidden there by the masks.

    Args:
        batch: the rows of the part.
        rows: their states, None where the model keeps none.
        dtype: of masks.
    """

    def __init__(
        self, backend: AttentionBackend, cache: PagedCache, batch: StepBatch, rows: StateRows | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._backend, self._cache, self._batch, self._rows, self._dtype = backend, cache, batch, rows, dtype
        self._metadata: dict[int, object] = {}
        self._masks: dict[int, tuple[MaskFunction, Tensor]] = {}
        self._places: Tensor | None = None

    def mask_of(self, mask_function: MaskFunction) -> Tensor:
        """Return what the queries of the part may not see, as models write it: [B, 1, L, P]."""
        known = self._masks.get(id(mask_function))
        if known is None:
            batch = self._batch
            keys = torch.arange(int(batch.lengths.max()), device=batch.device)
            if batch.num_rows > 1:
                queries = torch.from_numpy(batch.computed).to(batch.device)[:, None]  # [B, 1]
            else:
                queries = torch.arange(int(batch.computed[0]), int(batch.lengths[0]), device=batch.device)[:, None]
            visible = mask_function(0, 0, queries, keys[None]) & (keys[None] <= queries)  # [B or L, P]
            mask = additive(visible.expand(len(queries), -1), self._dtype).clamp_min(torch.finfo(self._dtype).min)
            mask = mask[:, None, None] if batch.num_rows > 1 else mask[None, None]
            known = self._masks[id(mask_function)] = mask_function, mask
        return known[1]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, K, L, D] to their pages; return those of the requests: [B, K, P, D]."""
        group = self._cache.group_of_layer[layer]
        metadata = self._metadata.get(group)
        if metadata is None:
            metadata = self._metadata[group] = self._backend.prepare(self._batch, group)
        storage = self._cache.storage[layer]
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key, value))  # [B * L, K, D]
        self._backend.write(storage, metadata, key, value)
        all_keys, all_values = self._backend.gather(storage, metadata)  # [K, sum of lengths, D]
        if self._batch.num_rows == 1:
            return all_keys.unsqueeze(0), all_values.unsqueeze(0)
        return self._filled_up(all_keys), self._filled_up(all_values)

    def _filled_up(self, states: Tensor) -> Tensor:
        """[K, sum of lengths, D] -> [B, K, P, D], zeros behind each request's own."""
        if self._places is None:
            lengths = self._batch.lengths
            within = np.arange(lengths.max())
            starts = np.cumsum(lengths) - lengths
            places = np.where(within < lengths[:, None], starts[:, None] + within, lengths.sum())
            self._places = torch.from_numpy(places.reshape(-1)).to(states.device)
        padded = torch.cat([states, states.new_zeros(len(states), 1, states.shape[-1])], dim=1)
        taken = padded.index_select(1, self._places)
        return taken.view(len(states), self._batch.num_rows, -1, states.shape[-1]).transpose(0, 1)

    def update_indexer(self, states: Tensor, layer: int) -> Tensor:
        """Write an indexer's keys [B, L, D]; return those of the requests: [B, P, D]."""
        halves = self.update(*indexed(states, self._batch.dtype), INDEX_LAYERS + layer)
        return torch.cat(halves, dim=-1)[:, 0].view(states.dtype)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend as the model does, with the mask that the module passes."""
        return attend_as_model(call)

    def key_sizes(self, num_queries: int) -> tuple[int, int]:
        """How many keys there are; and 0, the position of the first."""
        return int(self._batch.lengths.max()), 0

    @property
    def distances(self) -> Tensor:
        """How far each query [L] of a single request is from each key [P]."""
        device = self._batch.device
        first, length = self.query_offset, int(self._batch.lengths[0])
        return torch.arange(first, length, device=device)[:, None] - torch.arange(length, device=device)

    @property
    def query_offset(self) -> int:
        """The position of the first query, of a single request."""
        if self._batch.num_rows > 1:
            raise NotPlainError("several requests are asked for one position")
        return int(self._batch.computed[0])

    @property
    def initial_state(self) -> Tensor | None:
        """The recurrent state [B, ...] that the mixer has asked for; None where its requests begin."""
        return None if self._rows is None else self._rows.initial

    def get_state(self, key: StateKey) -> Tensor | None:
        """Return a state of the rows."""
        return self._known_rows().get(key)

    def put_state(self, key: StateKey, state: Tensor) -> None:
        """Store a state of the rows."""
        self._known_rows().put(key, state)

    def convolve(self, key: StateKey, inputs: Tensor, width: int | None) -> Tensor:
        """Store a convolution's state; return all that it has to see."""
        return self._known_rows().convolve(key, inputs)

    def finish_part(self) -> None:
        """Write back what a mixer may have written to."""
        if self._rows is not None:
            self._rows.finish()

    def _known_rows(self) -> StateRows:
        if self._rows is None:
            raise NotPlainError("a state is asked for that was not there in the dry run")
        return self._rows
