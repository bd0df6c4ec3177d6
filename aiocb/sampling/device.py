"""Selection without a word to the host: for steps that are launched before the last one's tokens are known.

The same tokens as `selection.select`, by other means: where that one asks how many rows are done, the whole vocabulary
of a truncated row is sorted here. What needs the history of a request, or its log-probabilities, is not for this.

Legend: N rows that sample, V vocabulary, C kept tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aiocb.records import Record
from aiocb.sampling.random import as_seeds, uniforms
from aiocb.sampling.rows import row_argmax
from aiocb.sampling.selection import EMPTY_ROW, INVALID_ROW, draw, draw_whole
from aiocb.sampling.truncation import Kept, SelectionParams, sorted_candidates
from aiocb.sampling_params import SamplingParams

__all__ = ["DeviceBatch", "is_sampled_on_device"]

_PART = 64
"""Rows of a vocabulary that are sorted at once: what sorting takes is a small multiple of them."""


def is_sampled_on_device(sampling: SamplingParams) -> bool:
    """True for requests whose sampling needs neither their history nor log-probabilities."""
    return not (
        sampling.needs_processing
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or sampling.typical_p != 1.0
    )


class DeviceBatch:
    """What is constant while the same requests sample in the same order.

    Args:
        records: of the requests, all of which are sampled on the device.
        device: where the logits are.
    """

    def __init__(self, records: Sequence[Record], device: torch.device) -> None:
        self.records = list(records)
        # Sorted out on the host: to ask the device how many rows there are of a kind is to wait for it.
        params = SelectionParams.build([record.sampling for record in records], torch.device("cpu"))
        self.has_samples = params.has_samples
        self._keys = as_seeds(record.seed for record in records) if self.has_samples else None
        parts = torch.split(params.truncated_rows, _PART) if len(params.truncated_rows) else ()
        self._parts = [(rows.to(device), _on(params.subset(rows), device)) for rows in parts]
        self._params = _on(params, device)

    def uniforms(self, positions: Sequence[int]) -> npt.NDArray[np.float64]:
        """One number for each row, by the position of its new token; nothing where all are greedy. [N]."""
        if self._keys is None:
            return np.zeros(0)
        return uniforms(self._keys, np.array(positions, np.uint64))

    def choose(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Choose a token for each row; `INVALID_ROW` or `EMPTY_ROW` where there is none.

        Args:
            logits: [N, V] of any float type. Not changed.
            numbers: what `uniforms` has returned. [N] float64

        Returns:
            [N] int64
        """
        token_ids, maxima = row_argmax(logits)
        if self.has_samples:
            # A row of NaN or infinities goes along as zeros: what it has drawn is overwritten below.
            usable = maxima.isfinite()
            work = torch.where(usable[:, None], logits.float(), 0.0)
            tops = torch.where(usable, maxima.float(), 0.0)
            drawn, whole = token_ids.clone(), self._params.whole_rows
            if len(whole):
                temperature = self._params.temperature[whole]
                drawn[whole] = draw_whole(work[whole], tops[whole], temperature, numbers[whole])
            for rows, params in self._parts:
                drawn[rows] = draw(_kept(work[rows], tops[rows], params), numbers[rows])
            token_ids = torch.where(usable, drawn, token_ids)
        bad = torch.where(maxima.isnan(), INVALID_ROW, EMPTY_ROW)
        return torch.where(maxima > -math.inf, token_ids, bad)


def _on(params: SelectionParams, device: torch.device) -> SelectionParams:
    return SelectionParams._make(column.to(device) for column in params)


def _kept(logits: Tensor, maxima: Tensor, params: SelectionParams) -> Kept:
    """What top_k, min_p and top_p leave of each row, of which all tokens are sorted; see `truncation`."""
    values, ids, counts, _ = sorted_candidates(logits, logits.shape[1])
    position = torch.arange(values.shape[1], device=values.device)
    log_weights = (values.double() - maxima.double()[:, None]) / params.temperature[:, None]  # [N, V]
    top_k = params.top_k[:, None]
    kth = values.gather(1, (top_k - 1).clamp(0, values.shape[1] - 1))
    keep = ((top_k == 0) | ((values >= kth) & ((top_k > 1) | (position == 0)))) & (position < counts[:, None])
    keep &= log_weights >= params.min_p.log()[:, None]
    weights = torch.where(keep, log_weights.exp(), 0.0)
    cumulative = weights.cumsum(dim=1)
    nucleus = (params.top_p < 1.0)[:, None]
    within = (cumulative - weights) < params.top_p[:, None] * cumulative[:, -1:]
    keep &= within | (position == 0) | ~nucleus
    return Kept(ids, log_weights, torch.where(keep, weights, 0.0), counts > 0)
