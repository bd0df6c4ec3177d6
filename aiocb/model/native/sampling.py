"""Thread: the worker's only. `NativeSampler`: selection and log-probabilities in the native kernels.

Everything else (penalties, bans, processors, random numbers) is `Sampler`'s. The arithmetic follows the torch code step
by step: doubles over the candidates in the same order, floats over the whole vocabulary. What differs is how the
floats of a whole vocabulary are added up, by one part in ten million. A row's result depends on that row alone.

Legend: N rows that sample, A rows of the step's logits, V vocabulary, W width of the tables of most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aiocb.kernels import NativeModel
from aiocb.kernels.selection import ARGMAX, CHOOSE, LOG_PROBABILITIES, SKIP, TRUNCATED, WHOLE, SelectArguments
from aiocb.outputs import TokenLogprobs
from aiocb.sampling.logprobs import token_logprobs
from aiocb.sampling.sampler import Sampler
from aiocb.sampling.truncation import SelectionParams

__all__ = ["NativeSampler"]


class _Columns(NamedTuple):
    """Parameters as the kernel reads them, [N] each; kept while `of` is the batch's."""

    of: SelectionParams
    tensors: dict[str, Tensor]
    typical_rows: Tensor

    @classmethod
    def build(cls, params: SelectionParams, kinds: Tensor) -> _Columns:
        # The one truncation that stays in torch: it needs the entropy of the whole vocabulary, and is rare.
        typical = (kinds == TRUNCATED) & (params.typical_p != 1.0)
        tensors = {
            "kinds": kinds.masked_fill(typical, SKIP), "temperature": params.temperature, "top_k": params.top_k,
            "top_p": params.top_p, "log_min_p": params.min_p.log(),
        }  # fmt: skip
        return cls(params, tensors, typical.nonzero()[:, 0])


class NativeSampler(Sampler):
    """A `Sampler` for logits in this process's memory: float32, contiguous along the vocabulary.

    The logits of a step may be changed: it processes them in place when nobody asks for them afterwards.
    """

    def __init__(self, vocab_size: int, native: NativeModel) -> None:
        """Args:
        vocab_size: columns of the logits.
        native: whose threads and instruction set are used; its weights play no part.
        """
        super().__init__(vocab_size)
        self._native = native
        self._columns: _Columns | None = None

    def select(self, logits: Tensor, params: SelectionParams, uniforms: Tensor | None) -> Tensor:
        """Choose one token id for each row; see `Sampler.select`."""
        columns = self._columns
        if columns is None or columns.of is not params:
            kinds = torch.full((len(logits),), ARGMAX, dtype=torch.int32)
            kinds[params.whole_rows] = WHOLE
            kinds[params.truncated_rows] = TRUNCATED
            columns = self._columns = _Columns.build(params, kinds)
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        numbers = {} if uniforms is None else {"uniforms": uniforms}
        self._run(CHOOSE, logits, 0, columns.tensors | numbers, ids=token_ids)
        rows = columns.typical_rows
        if len(rows) and uniforms is not None:
            part = params.subset(rows)._replace(truncated_rows=torch.arange(len(rows)))
            token_ids[rows] = super().select(logits[rows], part, uniforms[rows])
        return token_ids

    def raw_logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Look up some rows of the model's logits; see `Sampler.raw_logprobs`."""
        kinds = torch.full((len(rows),), WHOLE, dtype=torch.int32)
        return self._look_up(logits, rows, {"kinds": kinds}, token_ids, num_top)

    def processed_logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        params: SelectionParams,
        is_truncated: Tensor,
        token_ids: Sequence[int],
        num_top: Sequence[int],
    ) -> list[TokenLogprobs]:
        """Look up some rows of processed logits under what `select` kept of them; see `Sampler.processed_logprobs`."""
        columns = _Columns.build(params, torch.where(is_truncated, TRUNCATED, WHOLE).to(torch.int32))
        found = self._look_up(logits, rows, columns.tensors, token_ids, num_top)
        typical = columns.typical_rows
        if len(typical):
            places = typical.tolist()
            rest = super().processed_logprobs(
                logits,
                rows[typical],
                params.subset(typical),
                is_truncated[typical],
                [token_ids[at] for at in places],
                [num_top[at] for at in places],
            )
            for at, one in zip(places, rest, strict=True):
                found[at] = one
        return found

    def _look_up(
        self,
        logits: Tensor,
        rows: Tensor,
        columns: dict[str, Tensor],
        token_ids: Sequence[int],
        num_top: Sequence[int],
    ) -> list[TokenLogprobs]:
        """Log-probabilities of one token and of the most likely ones, for each of `rows`."""
        count, width = len(rows), min(max(num_top, default=0), logits.shape[1])
        chosen, ranks = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
        top_values = torch.zeros(count, width, dtype=torch.float64)
        top_ids = torch.zeros(count, width, dtype=torch.int64)
        self._run(
            LOG_PROBABILITIES, logits, width, columns, rows=rows, tokens=torch.tensor(token_ids, dtype=torch.int64),
            num_top=torch.tensor(num_top, dtype=torch.int64), chosen=chosen, ranks=ranks, top_values=top_values,
            top_ids=top_ids,
        )  # fmt: skip
        return [
            token_logprobs(token_id, value, rank, list(zip(ids[:size], values[:size], strict=True)))
            for token_id, value, rank, size, ids, values in zip(
                token_ids, chosen.tolist(), ranks.tolist(), num_top, top_ids.tolist(), top_values.tolist(), strict=True
            )
        ]

    def _run(self, mode: int, logits: Tensor, width: int, columns: dict[str, Tensor], **others: Tensor) -> None:
        """Call the kernel with the addresses of tensors, by the names that `SelectArguments` has for them."""
        addresses = {name: values.data_ptr() for name, values in (columns | others).items()}
        self._native.select(
            SelectArguments(
                mode=mode, num_rows=len(columns["kinds"]), vocab=logits.shape[1], stride=logits.stride(0), width=width,
                logits=logits.data_ptr(), **addresses,
            )
        )  # fmt: skip

    def _workspace(self, logits: Tensor, is_read_later: bool) -> Tensor:
        """The logits themselves, when nothing reads them after they were processed."""
        return super()._workspace(logits, is_read_later) if is_read_later else logits
