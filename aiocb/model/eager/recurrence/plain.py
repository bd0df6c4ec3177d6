"""Recurrences over packed rows in plain torch: wherever the native kernels do not run.

Each takes all rows of a step at once. Rows with one token take one step of the recurrence together; longer ones are
scanned in chunks, all rows side by side (`rows.Chunks`). Sums and states are float32, whatever the model's type.

Legend: T packed tokens, R rows, N chunks, L tokens of a chunk, S slots, H heads, K heads of keys or groups, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aiocb.model.eager.recurrence.rows import PackedRows

__all__ = ["ConvolutionWeights", "TorchScans"]

CHUNK = 64
CHUNK_BY_CHANNEL = 16
"""Decays between all pairs of tokens are held for each channel of the keys."""
_FLOOR = 1e-6


class ConvolutionWeights(NamedTuple):
    """Of a depthwise convolution, in float32.

    Attributes:
        taps: the last one is for the newest input. [width, C]
        bias: [C] or None.
    """

    taps: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> ConvolutionWeights:
        """Take a convolution's weight [C, width] and bias."""
        return cls(weight.detach().float().t().contiguous(), None if bias is None else bias.detach().float())


class TorchScans:
    """See `recurrence.Scans`."""

    name = "torch"

    def convolve(
        self, inputs: Tensor, weights: ConvolutionWeights, activation: str | None, state: Tensor, rows: PackedRows
    ) -> Tensor:
        """See `recurrence.Scans`."""
        width = len(weights.taps)
        windows, last = rows.windows(width)
        before = rows.states(state, 0, rows.num_rows).transpose(1, 2)  # [R, width, C]
        known = torch.cat([before.reshape(-1, before.shape[-1]), inputs.float()])
        out = (known[windows] * weights.taps).sum(1)
        if weights.bias is not None:
            out = out + weights.bias
        rows.store(state, 0, rows.num_rows, known[last].transpose(1, 2))
        return _activate(out, activation).to(inputs.dtype)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        is_normed: bool,
    ) -> Tensor:
        """See `recurrence.Scans`."""
        kind = value.dtype
        share = value.shape[1] // key.shape[1]
        query, key, value, beta, decay = (x.float() for x in (query, key, value, beta, decay))
        if is_normed:
            query, key = _unit(query), _unit(key)
        query = query * query.shape[-1] ** -0.5
        if share > 1:
            query, key = query.repeat_interleave(share, 1), key.repeat_interleave(share, 1)
        if decay.dim() == 2:
            decay = decay[..., None]  # [T, H, 1 or Dk]
        out = torch.empty_like(value, dtype=kind)
        if rows.num_single:
            self._delta_step(query, key, value, decay, beta, state, rows, out)
        if rows.num_single < rows.num_rows:
            self._delta_chunks(query, key, value, decay, beta, state, rows, out)
        return out

    @staticmethod
    def _delta_step(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: PackedRows,
        out: Tensor,
    ) -> None:
        count = rows.num_single
        factor = decay[:count].exp()  # [rows, H, 1 or Dk]
        # The old state is read once for what it predicts and for the output, which takes the new part from k . q.
        asked = torch.stack([key[:count], query[:count]], 2) * factor[:, :, None]  # [rows, H, 2, Dk]
        states = rows.states(state, 0, count)  # [rows, H, Dk, Dv]
        predicted, read = (asked @ states).unbind(2)
        delta = (value[:count] - predicted) * beta[:count, :, None]
        new = (key[:count] * query[:count]).sum(-1, keepdim=True) * delta
        out[:count] = (read + new).to(out.dtype)
        states.mul_(factor[..., None]).addcmul_(key[:count, ..., None], delta[:, :, None])
        rows.store(state, 0, count, states)

    @staticmethod
    def _delta_chunks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: PackedRows,
        out: Tensor,
    ) -> None:
        is_by_channel = decay.shape[-1] > 1
        chunks = rows.chunks(CHUNK_BY_CHANNEL if is_by_channel else CHUNK)
        query, key, value, decay, beta = (
            chunks.gather(x).transpose(1, 2) for x in (query, key, value, decay, beta[..., None])
        )  # [N, H, L, ...]
        since = decay.cumsum(2)
        learned = key * beta
        if is_by_channel:
            between = _lower(since[:, :, :, None] - since[:, :, None], 2).exp()  # [N, H, L, L, Dk]
            system = torch.einsum("nhik,nhjk,nhijk->nhij", learned, key, between)
            seen = torch.einsum("nhik,nhjk,nhijk->nhij", query, key, between)
        else:
            between = _lower(since - since.transpose(2, 3), 2).exp()  # [N, H, L, L]
            system = learned @ key.transpose(2, 3) * between
            seen = query @ key.transpose(2, 3) * between
        # What each token changes follows from all before it: solved at once, for the old state and without it.
        both = torch.cat([value * beta, learned * since.exp()], -1)
        changed, by_state = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(
            [value.shape[-1], key.shape[-1]], -1
        )
        query = query * since.exp()
        until = since[:, :, -1:]
        kept = key * (until - since).exp()
        states = rows.states(state, rows.num_single, rows.num_rows)[chunks.rows - rows.num_single]
        result = torch.empty_like(changed)
        for level, count in chunks.levels:
            before = states[:count]
            delta = changed[level] - by_state[level] @ before
            result[level] = query[level] @ before + seen[level] @ delta
            states[:count] = before * until[level].exp().transpose(2, 3) + kept[level].transpose(2, 3) @ delta
        chunks.scatter(result.transpose(1, 2), out)
        state.index_copy_(0, rows.slot_ids[chunks.rows], states.to(state.dtype))

    def selective_heads(
        self,
        inputs: Tensor,
        steps: Tensor,
        rates: Tensor,
        write: Tensor,
        read: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        skip: Tensor | None,
        bias: Tensor | None,
        is_softplus: bool,
        limits: tuple[float, float],
    ) -> Tensor:
        """See `recurrence.Scans`."""
        inputs, write, read = inputs.float(), write.float(), read.float()
        steps = _steps(steps, bias, is_softplus)
        steps = torch.where(rows.steps_on()[:, None], steps, steps.clamp(*limits))
        decay, added = steps * rates.float(), inputs * steps[..., None]
        out = torch.empty_like(inputs)
        if rows.num_single:
            count, share = rows.num_single, inputs.shape[1] // write.shape[1]
            states = rows.states(state, 0, count).mul_(decay[:count, :, None, None].exp())  # [rows, H, P, N]
            states.addcmul_(added[:count, ..., None], write[:count].repeat_interleave(share, 1)[:, :, None])
            out[:count] = (states @ read[:count].repeat_interleave(share, 1)[..., None])[..., 0]
            rows.store(state, 0, count, states)
        if rows.num_single < rows.num_rows:
            self._selective_chunks(added, decay, write, read, state, rows, out)
        return out if skip is None else out.add_(inputs * skip.float()[:, None])

    @staticmethod
    def _selective_chunks(
        added: Tensor, decay: Tensor, write: Tensor, read: Tensor, state: Tensor, rows: PackedRows, out: Tensor
    ) -> None:
        chunks = rows.chunks(CHUNK)
        groups = write.shape[1]
        added, decay, write, read = (
            chunks.gather(x).transpose(1, 2) for x in (added, decay[..., None], write, read)
        )  # [N, H or groups, L, ...]
        # Heads as [groups, heads of a group]: what they share is computed once.
        added, decay = (x.reshape(len(x), groups, -1, *x.shape[2:]) for x in (added, decay))
        since = decay.cumsum(3)  # [N, K, H / K, L, 1]
        between = _lower(since - since.transpose(3, 4), 3).exp()
        result = ((read @ write.transpose(2, 3))[:, :, None] * between) @ added
        until = since[:, :, :, -1:]
        kept = (added * (until - since).exp()).transpose(3, 4)
        read, write, factor, until = read[:, :, None], write[:, :, None], since.exp(), until.exp()
        states = rows.states(state, rows.num_single, rows.num_rows)[chunks.rows - rows.num_single]
        states = states.reshape(len(states), groups, -1, *states.shape[2:])  # [rows, K, H / K, P, N]
        for level, count in chunks.levels:
            before = states[:count]
            result[level] += read[level] @ before.transpose(3, 4) * factor[level]
            states[:count] = before * until[level] + kept[level] @ write[level]
        chunks.scatter(result.flatten(1, 2).transpose(1, 2), out)
        state.index_copy_(0, rows.slot_ids[chunks.rows], states.flatten(1, 2).to(state.dtype))

    def selective_channels(
        self,
        inputs: Tensor,
        steps: Tensor,
        rates: Tensor,
        write: Tensor,
        read: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        skip: Tensor | None,
        bias: Tensor | None,
        is_softplus: bool,
    ) -> Tensor:
        """See `recurrence.Scans`."""
        inputs, write, read = inputs.float(), write.float(), read.float()
        steps = _steps(steps, bias, is_softplus)
        added = inputs * steps
        out = torch.empty_like(inputs)
        rates = rates.float()

        def go(before: Tensor, at: Tensor) -> Tensor:
            after = before * (steps[at][..., None] * rates).exp() + added[at][..., None] * write[at][:, None]
            out[at] = torch.einsum("rcn,rn->rc", after, read[at])
            return after

        count = rows.num_single
        if count:
            first = torch.arange(count, device=inputs.device)
            rows.store(state, 0, count, go(rows.states(state, 0, count), first))
        if count < rows.num_rows:
            chunks = rows.chunks(1)
            states = rows.states(state, count, rows.num_rows)[chunks.rows - count]
            for level, num_rows in chunks.levels:
                states[:num_rows] = go(states[:num_rows], chunks.tokens[level, 0])
            state.index_copy_(0, rows.slot_ids[chunks.rows], states.to(state.dtype))
        return out if skip is None else out.add_(inputs * skip.float())


def _activate(values: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return values
    if activation == "silu":
        return F.silu(values)
    from transformers.activations import ACT2FN

    activated: Tensor = ACT2FN[activation](values)
    return activated


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _FLOOR)


def _lower(values: Tensor, dim: int) -> Tensor:
    """Hide what lies behind a token: dimensions `dim` and `dim + 1` are query and key."""
    length = values.shape[dim]
    hidden = torch.ones(length, length, dtype=torch.bool, device=values.device).triu(1)
    return values.masked_fill_(hidden.view(length, length, *[1] * (values.dim() - dim - 2)), float("-inf"))


def _steps(steps: Tensor, bias: Tensor | None, is_softplus: bool) -> Tensor:
    steps = steps.float()
    if bias is not None:
        steps = steps + bias.float()
    return F.softplus(steps) if is_softplus else steps
