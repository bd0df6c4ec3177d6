"""Log-probabilities of chosen tokens and of prompts, with ranks and the most likely alternatives.

Two distributions, both returned as plain numbers:

- raw: log-softmax of the model's own logits in float32, before any penalty, ban, bias, temperature or truncation;
- processed: of what the token was really drawn from. Sampled: after the temperature and over the kept tokens only.
  Greedy: after penalties, bans, biases and processors.

Every number is JSON-ready: a token of probability 0 is left out of `top`, and where the token itself has probability
0 (a processor forced it, or a prompt holds it) its value is `LOWEST_LOGPROB`, as OpenAI returns it.

Legend: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aiocb.outputs import TokenLogprobs
from aiocb.sampling.rows import parts, row_argmax
from aiocb.sampling.truncation import SelectionParams, iterate_kept, sorted_candidates

__all__ = ["LOWEST_LOGPROB", "full_logprobs", "processed_logprobs", "raw_logprobs", "token_logprobs"]

LOWEST_LOGPROB = -9999.0

_MIN_WIDTH = 128
_HIGHEST = torch.finfo(torch.float32).max


def raw_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities under the model's own distribution, a few rows at a time (a prompt has many).

    Args:
        logits: of the model, [N, V], any float type, no NaN. Not changed.
        token_ids: the token of each row, [N].
        num_top: how many alternatives each row wants, [N].
    """
    found: list[TokenLogprobs] = []
    rows = torch.arange(len(token_ids))
    for part in parts(rows, logits, logits.shape[1]):
        assert isinstance(part, slice)
        values = logits[part].to(torch.float32)
        if values.amax().isposinf():
            values = values.clamp(max=_HIGHEST)
        found += full_logprobs(values.log_softmax(dim=-1), token_ids[part], num_top[part])
    return found


def full_logprobs(logprobs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> Iterator[TokenLogprobs]:
    """Read tokens, ranks and alternatives off log-probabilities of the whole vocabulary, [N, V] float32."""
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])  # [N, 1]
    ranks = (logprobs > chosen).count_nonzero(dim=1) + 1
    values, ids = _most_likely(logprobs, num_top)
    for token_id, value, rank, size, top_values, top_ids in zip(
        token_ids, chosen[:, 0].tolist(), ranks.tolist(), num_top, values.tolist(), ids.tolist(), strict=True
    ):
        yield token_logprobs(token_id, value, rank, list(zip(top_ids[:size], top_values[:size], strict=True)))


def _most_likely(logprobs: Tensor, num_top: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The values and ids of at least `max(num_top)` tokens, most likely first; equal ones by their id."""
    width = min(max(num_top, default=0), logprobs.shape[1])
    if not width:
        return logprobs[:, :0], torch.empty((len(logprobs), 0), dtype=torch.int64)
    # Narrow groups of values are slow to reduce: not fewer than some hundred, whatever is asked.
    candidates = sorted_candidates(logprobs, min(max(width, _MIN_WIDTH), logprobs.shape[1]))
    if not candidates.counts.all():  # too many equal values
        candidates = sorted_candidates(logprobs, logprobs.shape[1])
    return candidates.values[:, :width], candidates.ids[:, :width]


def processed_logprobs(
    logits: Tensor, params: SelectionParams, is_truncated: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities under the distribution that the tokens were drawn from.

    Args:
        logits: processed, [N, V] float32, every row with a finite maximum or +inf. Not changed.
        params: of these rows.
        is_truncated: rows whose token was drawn from a truncated vocabulary, [N] bool.
        token_ids: the token of each row, [N].
        num_top: how many alternatives each row wants, [N].
    """
    found: dict[int, TokenLogprobs] = {}
    if logits.amax().isposinf():
        logits = logits.clamp(max=_HIGHEST)
    rows = (~is_truncated).nonzero()[:, 0]
    for part in parts(rows, logits, logits.shape[1]):
        picked = (rows[part] if isinstance(part, slice) else part).tolist()
        whole = logits[part]
        temperature = params.temperature[part]
        # Greedy rows have no temperature.
        divisor = torch.where(temperature > 0, temperature, 1.0).clamp(1e-30, 1e30).to(torch.float32)
        logprobs = torch.sub(whole, row_argmax(whole)[1][:, None]).div_(divisor[:, None]).log_softmax(dim=-1)
        looked_up = full_logprobs(logprobs, [token_ids[row] for row in picked], [num_top[row] for row in picked])
        found.update(zip(picked, looked_up, strict=True))
    rows = is_truncated.nonzero()[:, 0]
    if len(rows):
        some = logits[rows]
        for indices, kept in iterate_kept(some, row_argmax(some)[1], params.subset(rows)):
            totals = kept.weights.cumsum(dim=1)[:, -1].log().tolist()
            for at, row in enumerate(rows[indices].tolist()):
                present = kept.weights[at] > 0
                values = (kept.log_weights[at][present] - totals[at]).tolist()
                pairs = list(zip(kept.ids[at][present].tolist(), values, strict=True))
                value = dict(pairs).get(token_ids[row], -math.inf)
                rank = sum(other > value for other in values) + 1
                found[row] = token_logprobs(token_ids[row], value, rank, pairs[: num_top[row]])
    return [found[row] for row in range(len(token_ids))]


def token_logprobs(token_id: int, value: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
    """Make the result finite and let `top` include the token itself."""
    value = value if value > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN too
    top = [(other, number) for other, number in top if number > -math.inf]
    if all(other != token_id for other, _ in top):
        top.append((token_id, value))
    return TokenLogprobs(token_id, value, rank, tuple(top))
