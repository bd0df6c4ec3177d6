"""Truncation (top_k, min_p, top_p, typical_p) without a full sort of the vocabulary.

    logits of a row     [ . . . . . . . . . . . . . . . . . . . . . . . . ]     V values
    strided groups      maximum of every G-th value                             G maxima, one vectorised pass
    threshold           the K-th largest maximum: at least K values reach it
    candidates          every value >= threshold, sorted                        C values, K <= C, mostly C < 1.5 K

Everything that is not a candidate lies below all candidates. A row whose kept set ends inside its candidates is done;
the few others (a flat distribution) try a wider K, and at last the whole vocabulary. (A threshold from group maxima is
the first step of Dr. Top-k, Gaihre et al., 2021.)

Results do not depend on the batch, bit for bit, because
  - the order is canonical: value down, then token id up. Value and id are packed into one integer, so nothing ties;
  - sums over candidates are cumulative sums, which torch computes in order on the CPU; padding adds zeros at the end.
    `torch.sum` of a single row is split among threads and differs from the same row in a batch;
  - softmax and maxima work on one row at a time;
  - which width a row needs depends on that row alone.

Legend: N rows, V vocabulary, C candidates (most of any row), G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiocb.sampling.rows import parts, per_block, probabilities, take
from aiocb.sampling_params import SamplingParams

__all__ = ["Candidates", "Kept", "SelectionParams", "iterate_kept", "sorted_candidates"]

_WIDTHS = (256, 1024, 4096, 12288)
_LOWEST = torch.finfo(torch.float32).min


class SelectionParams(NamedTuple):
    """Parameters of selection as tensors, one element per row; constant while the batch is.

    Attributes:
        temperature: 0 takes the most likely token, [N] float64.
        top_k: 0 is off, [N] int64.
        top_p, min_p, typical_p: 1, 0 and 1 are off, [N] float64.
        is_truncated: rows that are sampled from a truncated vocabulary, [N] bool.
        whole_rows: rows that are sampled from the whole vocabulary, [.] int64.
        truncated_rows: rows that are drawn from a truncated vocabulary, [.] int64: all but those whose top_k is 1.
            All other rows are greedy.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    is_truncated: Tensor
    whole_rows: Tensor
    truncated_rows: Tensor

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device) -> SelectionParams:
        """Collect the resolved parameters of each row."""
        rows: list[Any] = [(one.temperature, one.top_p, one.min_p, one.typical_p) for one in params]
        columns = torch.tensor(rows, dtype=torch.float64).T.to(device).contiguous()  # [4, N]
        temperature, top_p, min_p, typical_p = columns.unbind()
        counts: list[Any] = [one.top_k for one in params]
        top_k = torch.tensor(counts, dtype=torch.int64, device=device)
        is_sampled = temperature > 0.0
        is_truncated = is_sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0) | (typical_p != 1.0))
        whole_rows = (is_sampled & ~is_truncated).nonzero()[:, 0]
        truncated_rows = (is_truncated & (top_k != 1)).nonzero()[:, 0]
        return cls(temperature, top_k, top_p, min_p, typical_p, is_truncated, whole_rows, truncated_rows)

    @property
    def has_samples(self) -> bool:
        """True when any row needs a random number."""
        return bool(len(self.whole_rows) or len(self.truncated_rows))

    def subset(self, rows: Tensor) -> SelectionParams:
        """The parameters of some rows; the row lists are left empty."""
        none = rows[:0]
        return SelectionParams._make([*(column[rows] for column in self[:6]), none, none])


class Kept(NamedTuple):
    """The tokens that truncation leaves of each row, most likely first.

    Attributes:
        ids: token ids, [N, C] int64.
        log_weights: (logit - maximum) / temperature, [N, C] float64.
        weights: its exponential, 0 where a token was dropped, [N, C] float64.
        is_complete: whether the kept set is inside the candidates, [N] bool.
    """

    ids: Tensor
    log_weights: Tensor
    weights: Tensor
    is_complete: Tensor


class Candidates(NamedTuple):
    """The largest values of each row in canonical order; see the module's docstring.

    Attributes:
        values, ids: padded with -inf, [N, C].
        counts: valid candidates of each row, [N]; 0 when there were too many.
        has_all: True where every token that is not banned is a candidate, [N].
    """

    values: Tensor
    ids: Tensor
    counts: Tensor
    has_all: Tensor


def iterate_kept(logits: Tensor, maxima: Tensor, params: SelectionParams) -> Iterator[tuple[Tensor, Kept]]:
    """Yield (row indices, what truncation keeps of these rows) until every row was yielded once.

    Args:
        logits: processed, [N, V] float32. Rows of NaN, +inf or nothing but -inf give meaningless tokens.
        maxima: of each row, [N].
        params: temperatures must be > 0.
    """
    num_rows, vocab_size = logits.shape
    usable = maxima.isfinite()
    if not usable.all():
        logits = torch.where(usable[:, None], logits, 0.0)
        maxima = torch.where(usable, maxima, 0.0)
    masses = _masses(logits, maxima, params)
    pending = torch.arange(num_rows, device=logits.device)
    for width in (*_WIDTHS, vocab_size):
        if width * 3 > vocab_size and width != vocab_size:
            continue
        undone: list[Tensor] = []
        for part in parts(pending, logits, min(3 * width, vocab_size)):
            rows = pending[part] if isinstance(part, slice) else part
            chosen = params if len(rows) == num_rows else params.subset(rows)
            kept = _truncate(take(logits, rows), maxima[rows], chosen, width, _Masses(*(one[rows] for one in masses)))
            done = kept.is_complete
            if done.all():
                yield rows, kept
                continue
            if done.any():
                yield rows[done], Kept(*(field[done] for field in kept))
            undone.append(rows[~done])
        if not undone:
            return
        pending = torch.cat(undone)


class _Masses(NamedTuple):
    """What is known of the whole vocabulary of each row.

    Attributes:
        is_needed: rows whose truncation refers to all tokens, not to what top_k or min_p left, [N] bool.
        total: sum of exp((logit - maximum) / temperature) where needed, [N] float64.
        entropy: of the shares, where typical_p needs it, [N] float64.
    """

    is_needed: Tensor
    total: Tensor
    entropy: Tensor


def _masses(logits: Tensor, maxima: Tensor, params: SelectionParams) -> _Masses:
    """One softmax over the rows that need it; its sum over its largest value is the total."""
    nucleus, typical = params.top_p < 1.0, params.typical_p != 1.0
    is_needed = (nucleus | typical) & (params.top_k == 0) & (params.min_p == 0.0)
    total = torch.ones_like(params.top_p)
    entropy = torch.zeros_like(params.top_p)
    rows = is_needed.nonzero()[:, 0]
    for part in parts(rows, logits, logits.shape[1]):
        shares = probabilities(logits[part], maxima[part], params.temperature[part])
        # Added up again by block: softmax adds thousands of floats in a row, and is off by more than a rare token.
        whole = per_block(shares, "sum").cumsum(dim=1, dtype=torch.float64)[:, -1]
        total[part] = whole / shares.amax(dim=1).to(torch.float64)
        if (typical[part] & ~nucleus[part]).any():
            # Block sums and then a cumulative sum: a plain sum of one row depends on the number of threads.
            sums = per_block(torch.special.entr(shares), "sum")
            entropy[part] = sums.cumsum(dim=1, dtype=torch.float64)[:, -1]
    return _Masses(is_needed, total, entropy)


def _truncate(logits: Tensor, maxima: Tensor, params: SelectionParams, width: int, masses: _Masses) -> Kept:
    """Apply top_k, min_p, top_p and typical_p to the `width` (or some more) largest values of each row."""
    values, ids, counts, has_all = sorted_candidates(logits, width)
    size = values.shape[1]
    position = torch.arange(size, device=values.device)  # [C]
    last = (counts - 1).clamp(min=0)[:, None]

    temperature = params.temperature[:, None]
    log_weights = (values.to(torch.float64) - maxima.to(torch.float64)[:, None]) / temperature  # [N, C]
    # top_k keeps what equals the k-th value, as the reference does, except that k = 1 is the argmax and nothing else.
    top_k = params.top_k[:, None]
    kth = values.gather(1, (top_k - 1).clamp(0, size - 1))
    keep = ((top_k == 0) | ((values >= kth) & ((top_k > 1) | (position == 0)))) & (position < counts[:, None])
    keep &= log_weights >= params.min_p.log()[:, None]

    weights = torch.where(keep, log_weights.exp(), 0.0)
    cumulative = weights.cumsum(dim=1)
    # Inside: the kept set ended before the candidates did, or they are all there is.
    is_inside = has_all | ((params.top_k > 0) & (params.top_k <= counts)) | ~keep.gather(1, last)[:, 0]
    is_complete = is_inside
    nucleus, typical = params.top_p < 1.0, params.typical_p != 1.0
    # Open: what is not a candidate counts, too.
    is_open = masses.is_needed & ~is_inside
    if nucleus.any():
        totals = torch.where(is_open, masses.total, cumulative[:, -1])
        within = (cumulative - weights) < (params.top_p * totals)[:, None]
        keep &= within | (position == 0) | ~nucleus[:, None]
        weights = torch.where(keep, weights, 0.0)
        is_complete = is_inside | (is_open & nucleus & ~keep.gather(1, last)[:, 0])
    if typical.any():
        is_open &= typical & ~nucleus
        totals = torch.where(is_open, masses.total, weights.cumsum(dim=1)[:, -1])
        weights, is_within = _keep_typical(
            weights, log_weights, totals, masses.entropy, is_open, last, params.typical_p
        )
        is_complete = torch.where(is_open, is_within, is_complete)
    return Kept(ids, log_weights, weights, is_complete & (counts > 0))


def _keep_typical(
    weights: Tensor,
    log_weights: Tensor,
    totals: Tensor,
    whole_entropy: Tensor,
    is_open: Tensor,
    last: Tensor,
    typical_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """Drop the tokens whose surprise is far from the entropy (Meister et al., 2022, as transformers does it).

    Args:
        weights, log_weights: [N, C].
        totals: the mass that shares refer to, [N].
        whole_entropy: of the rows that are open, [N].
        is_open: rows with mass outside the candidates, [N].
        last: column of the last candidate, [N, 1].
        typical_p: [N].

    Returns:
        The weights, and for open rows whether everything that is kept is a candidate: the kept tokens are a band of
        the sorted ones, and what lies below all candidates is further from the entropy than the band's edge.
    """
    present = weights > 0
    log_shares = log_weights - totals.log()[:, None]  # [N, C]
    shares = weights / totals[:, None]
    # Where a share is 0 its logarithm may be -inf; their product counts as 0.
    entropy = -torch.where(present, shares * log_shares, 0.0).cumsum(dim=1)[:, -1:]
    entropy = torch.where(is_open[:, None], whole_entropy[:, None], entropy)
    surplus = (-log_shares - entropy).to(torch.float32)
    distance = torch.where(present, surplus.abs(), math.inf)
    size = weights.shape[1]
    # The bits of floats that are not negative sort as integers do.
    keys = (distance.view(torch.int32).to(torch.int64) << 32) | torch.arange(size, device=weights.device)
    order = _sort_keys(keys) & 0xFFFFFFFF  # [N, C]
    cumulative = shares.gather(1, order).cumsum(dim=1)
    at = (cumulative < typical_p[:, None]).sum(dim=1, keepdim=True)
    limit = distance.gather(1, order.gather(1, at.clamp(max=size - 1)))
    is_within = ((at < size) & (surplus.gather(1, last) > limit))[:, 0]
    keep = (distance <= limit) | (typical_p == 1.0)[:, None]
    return torch.where(keep, weights, 0.0), is_within


def sorted_candidates(logits: Tensor, width: int) -> Candidates:
    """Return at least the `width` largest values of each row (fewer when the rest is -inf), in canonical order.

    Args:
        logits: [N, V] float32 without NaN.
        width: at most V; V sorts everything.
    """
    num_rows, vocab_size = logits.shape
    if width * 3 > vocab_size:
        ids = torch.arange(vocab_size, device=logits.device)
        values, ids = _unpack(_sort_keys(_pack(logits, ids)))
        everything = torch.ones(num_rows, dtype=torch.bool, device=logits.device)
        return Candidates(values, ids, (values > -math.inf).sum(dim=1), everything)

    stride = vocab_size // (3 * width)
    num_groups = vocab_size // stride
    groups = logits[:, : stride * num_groups].view(num_rows, stride, num_groups).amax(dim=1)  # [N, G]
    tail = logits[:, stride * num_groups :]
    if tail.shape[1]:
        head = torch.maximum(groups[:, : tail.shape[1]], tail)
        groups = torch.cat((head, groups[:, tail.shape[1] :]), dim=1)
    threshold = _kth_largest(groups, width)  # [N]
    has_all = threshold < _LOWEST
    # No -inf among the candidates: with few allowed tokens that would be the whole vocabulary.
    flat = _flat_nonzero(logits >= threshold.clamp(min=_LOWEST)[:, None])
    row = flat // vocab_size
    counts = torch.bincount(row, minlength=num_rows)
    has_all |= counts == vocab_size
    # Many equal values at the threshold would widen every row: such a row is left to the next width.
    too_many = counts > 8 * width
    if too_many.any():
        fits = ~too_many[row]
        flat, row = flat[fits], row[fits]
        counts = torch.where(too_many, 0, counts)
        has_all &= ~too_many
    size = max(int(counts.max()), 1)
    column = torch.arange(len(flat), device=flat.device) - (counts.cumsum(dim=0) - counts)[row]
    keys = torch.full((num_rows * size,), 2**63 - 1, dtype=torch.int64, device=flat.device)
    keys[row * size + column] = _pack(logits.reshape(-1)[flat], flat - row * vocab_size)
    values, ids = _unpack(_sort_keys(keys.view(num_rows, size)))
    padding = torch.arange(size, device=flat.device) >= counts[:, None]  # [N, C]
    return Candidates(values.masked_fill_(padding, -math.inf), ids.masked_fill_(padding, 0), counts, has_all)


def _pack(values: Tensor, ids: Tensor) -> Tensor:
    """Integers that sort by value (down), then by id (up)."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((~ordered).to(torch.int64) << 32) | ids


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The values and ids that `_pack` took."""
    ordered = ~(keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32), keys & 0xFFFFFFFF


def _sort_keys(keys: Tensor) -> Tensor:
    """Sort each row upwards; `keys` may be reused."""
    if keys.device.type != "cpu":
        return keys.sort(dim=-1).values
    # numpy sorts integers with AVX-512 (x86-simd-sort): four times as fast as torch on short rows.
    keys.numpy().sort(axis=-1)
    return keys


def _kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest value of each row, [N, G] -> [N]."""
    if values.device.type != "cpu":
        return values.topk(k, dim=-1, sorted=False).values.amin(dim=-1)
    index = values.shape[1] - k
    values.numpy().partition(index, axis=-1)
    return values[:, index]


def _flat_nonzero(mask: Tensor) -> Tensor:
    """Flat indices of the true elements, in order."""
    if mask.device.type != "cpu":
        return mask.view(-1).nonzero()[:, 0]
    # Ten times as fast as torch.nonzero on the CPU.
    return torch.from_numpy(mask.numpy().reshape(-1).nonzero()[0])
