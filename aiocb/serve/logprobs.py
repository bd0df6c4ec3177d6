"""Log-probabilities as OpenAI's interfaces write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from aiocb.outputs import TokenLogprobs
from aiocb.text.processor import TextProcessor

__all__ = ["chat_logprobs", "legacy_logprobs"]

_FLOOR = -9999.0
"""Instead of minus infinity, which JSON does not have."""


def _finite(logprob: float) -> float:
    return logprob if logprob > _FLOOR else _FLOOR


def _piece(text: TextProcessor, token_id: int) -> bytes:
    return text.token_text.piece(token_id)


def _shown(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _entry(text: TextProcessor, token_id: int, logprob: float) -> dict[str, Any]:
    piece = _piece(text, token_id)
    return {"token": _shown(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def chat_logprobs(text: TextProcessor, found: Iterable[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`logprobs` of a choice of a chat: every token with its bytes, and the likeliest at its place."""
    content = []
    for each in found:
        top = [_entry(text, token_id, logprob) for token_id, logprob in each.top[:num_top]] if num_top else []
        content.append({**_entry(text, each.token_id, each.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def legacy_logprobs(
    text: TextProcessor, found: Sequence[TokenLogprobs | None], token_ids: Sequence[int], num_top: int, offset: int
) -> dict[str, Any]:
    """`logprobs` of a choice of a completion; None for a first token, which nothing predicts.

    Args:
        offset: characters of the text before.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, each in zip(token_ids, found, strict=True):
        token = _shown(_piece(text, token_id))
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        logprobs.append(None if each is None else _finite(each.logprob))
        if each is None or not num_top:
            tops.append(None if each is None else {})
            continue
        top: dict[str, float] = {}
        for other, logprob in each.top:
            top.setdefault(_shown(_piece(text, other)), _finite(logprob))
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
