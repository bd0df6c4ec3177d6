"""Drafts from what a request has said before: `PromptLookup`. Owned by the worker thread, torch-free.

Text that is edited, quoted or summarised repeats itself: where the last tokens have stood before, what followed them
there is proposed once more. A step verifies the proposal like a short piece of a prompt, and accepts a token only if it
is the one that would have been sampled anyway, so that the output is the same without (Saxena's prompt lookup; the
acceptance rule is that of a deterministic draft).

Whether it pays is measured for each request: proposals grow while they are accepted and shrink while they are not, and
a request whose proposals fail is left alone for a while, longer each time. With many requests in a step its linears no
longer wait for memory, and a row more costs as much as it brings: nothing is proposed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiocb.scheduler.request import Request

__all__ = ["PromptLookup"]

NGRAM: Final = 3
"""Tokens that have to have stood together before: two are met too often by chance."""
MAX_ROWS: Final = 8
"""Of a step, those that decode and their drafts: so many cost little more than one."""
_MOST_PLACES: Final = 1 << 14
"""That are remembered of a request: a few megabytes."""
FIRST_DRAFTS: Final = 3
_FIRST_REST: Final = 16
_LAST_REST: Final = 256
_MISSES: Final = 2


class _History:
    """What is known of one request.

    Attributes:
        places: where the tokens that follow an n-gram begin, by the n-gram; the last place counts.
        num_indexed: tokens whose n-grams are in it.
        num_drafts: of the proposal that is being verified.
        num_tokens: of the request when it was made.
        size: tokens of the next proposal.
        misses: proposals in a row of which nothing was accepted.
        rest: tokens that it is left alone for after the next failure.
        resumes_at: its length when it is proposed to again.
    """

    __slots__ = ("misses", "num_drafts", "num_indexed", "num_tokens", "places", "rest", "resumes_at", "size")

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], int] = {}
        self.num_indexed = self.num_drafts = self.num_tokens = self.misses = self.resumes_at = 0
        self.size, self.rest = FIRST_DRAFTS, _FIRST_REST


class PromptLookup:
    """A `Drafter`: proposes what followed the last tokens when they stood there before.

    Args:
        max_drafts: most tokens of a proposal.

    Attributes:
        max_rows: of a step in which anything is proposed.
    """

    max_rows = MAX_ROWS

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def __call__(self, request: Request) -> Sequence[int]:
        """Propose how a request goes on; nothing where that has not paid, or cannot be verified row by row."""
        history: _History | None = request.history
        if history is None:
            history = request.history = _History()
        tokens = request.tokens
        num_tokens = len(tokens)
        _judge(history, num_tokens, self.max_drafts)
        if num_tokens < history.resumes_at or not can_speculate(request):
            return ()
        places, ngram = history.places, NGRAM
        # The last n-gram is what is looked up: it gets its place when something follows it.
        for end in range(max(history.num_indexed, ngram), num_tokens):
            places[tuple(tokens[end - ngram : end])] = end
            if len(places) > _MOST_PLACES:  # the one that was met first
                del places[next(iter(places))]
        history.num_indexed = max(num_tokens, ngram)
        place = places.get(tuple(tokens[-ngram:]))
        if place is None:
            return ()
        drafts = tokens[place : place + history.size]
        for at in range(history.size - len(drafts)):  # beyond its end the text goes on as it is proposed to
            drafts.append(drafts[at])
        history.num_drafts, history.num_tokens = len(drafts), num_tokens
        return drafts


def _judge(history: _History, num_tokens: int, max_drafts: int) -> None:
    """See what became of the last proposal: one token has come in any case."""
    proposed, history.num_drafts = history.num_drafts, 0
    if not proposed:
        return
    accepted = min(num_tokens - history.num_tokens - 1, proposed)
    if accepted == proposed:
        history.size = min(2 * history.size, max_drafts)
    elif 2 * accepted < proposed:
        history.size = max(history.size // 2, 1)
    if accepted > 0:
        history.misses, history.rest = 0, _FIRST_REST
        return
    history.misses += 1
    if history.misses >= _MISSES:
        history.misses, history.resumes_at = 0, num_tokens + history.rest
        history.rest, history.size = min(2 * history.rest, _LAST_REST), FIRST_DRAFTS


def can_speculate(request: Request) -> bool:
    """Whether several tokens of a request can be verified at once: not where Python code or a structure sees each."""
    sampling = request.sampling
    return not (sampling.logits_processors or sampling.is_structured or request.skips_prefix)
