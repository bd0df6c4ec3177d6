"""What runners without a model share: `CheckedRecords`, the shape of a cache, and answers with log-probabilities."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from aiocb.outputs import TokenLogprobs
from aiocb.records import Record, Records
from aiocb.step import CacheGroup, CacheLayout, StateLayout, StepPlan, StepResult

__all__ = ["CheckedRecords", "KVMismatch", "fake_result", "simple_layout"]

_MAX_ENDED = 1024


class KVMismatch(AssertionError):
    """A plan says what cannot be, or reads or writes a slot of the cache that it must not."""


class CheckedRecords(Records):
    """`Records` that are stricter than a model: one thread, no id twice, nothing about requests that are not open."""

    __slots__ = ("_ended", "_last_id", "_thread")

    verifies_drafts = True

    def __init__(self, num_groups: int = 0) -> None:
        super().__init__(num_groups)
        self._ended: dict[int, list[int]] = {}  # tokens of the latest that were closed: they may be opened again
        self._last_id = 0  # of the lives before this one
        self._thread: int | None = None

    def __getitem__(self, request_id: int) -> Record:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_id.values())

    def begin(self, plan: StepPlan) -> list[Record]:
        """As for any runner.

        Raises:
            KVMismatch: the plan cannot be meant for this runner.
        """
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            raise KVMismatch("two threads use one runner")
        self._thread = thread
        try:
            for request_id in plan.closed:
                self._ended[request_id] = self._by_id[request_id].tokens
            for opened in plan.opened:
                before = self._ended.pop(opened.request_id, None)
                if before is None and (opened.request_id in self._by_id or opened.request_id <= self._last_id):
                    raise KVMismatch(f"the id {opened.request_id} is used a second time")
                # What came while its request was preempted was dropped, and is sampled again.
                if any(told != known for told, known in zip(opened.token_ids, before or ())):
                    raise KVMismatch(f"request {opened.request_id} is opened again with other tokens than it had")
            while len(self._ended) > _MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            return super().begin(plan)
        except KeyError as error:
            raise KVMismatch(f"a plan names request {error}, which is not open") from None

    def clear(self) -> None:
        """Forget everything, apart from which ids have been used."""
        self._last_id = max(self._last_id, *self._by_id, *self._ended, 0)
        self._ended.clear()
        self._thread = None
        super().clear()


def simple_layout(
    num_blocks: int | Sequence[int] = 64,
    *,
    page_size: int = 4,
    windows: Sequence[int | None] = (None,),
    is_chunked: bool = False,
    num_slots: int = 0,
    interval: int | None = None,
    swap_places: int | Sequence[int] = 0,
) -> CacheLayout:
    """A cache layout with one layer per group.

    Args:
        num_blocks: blocks per group, the null block included; one number for all groups, or one each.
        page_size: tokens per block.
        windows: one group for each: its sliding window, or None for full attention.
        is_chunked: the windows are chunks.
        num_slots: of states, the null slot included; 0 for a model without states.
        interval: tokens from one snapshot of a state to the next; None: 8 pages.
        swap_places: of the swap space, per group, and as many for states; 0 for none.
    """
    counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
    groups = (
        CacheGroup(None if is_chunked else window, (layer,), count, page_size, window if is_chunked else None)
        for layer, (window, count) in enumerate(zip(windows, counts, strict=True))
    )
    states = StateLayout(num_slots, page_size, interval or 8 * page_size) if num_slots else None
    num_kinds = len(windows) + (states is not None)
    places = [swap_places] * num_kinds if isinstance(swap_places, int) else swap_places
    return CacheLayout(page_size, tuple(groups), states, swap_places=tuple(places) if any(places) else ())


def fake_result(
    plan: StepPlan,
    records: Sequence[Record],
    token_ids: Sequence[tuple[int, ...]],
    errors: Mapping[int, Exception] | None,
) -> StepResult:
    """What a runner returns for these tokens, with log-probabilities for those who ask."""
    logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    prompts: dict[int, Sequence[TokenLogprobs]] = {}
    for entry, record, sampled in zip(plan.entries, records, token_ids, strict=True):
        wants = sampled and record.sampling.logprobs is not None
        logprobs.append(tuple(map(_logprobs, sampled)) if wants else None)
        if record.sampling.prompt_logprobs is not None:
            end = entry.num_computed_tokens + entry.num_new_tokens
            targets = range(end - entry.num_logits + 1, min(end + 1, record.num_prompt_tokens))
            prompts[entry.request_id] = [_logprobs(record.tokens[at]) for at in targets]
    return StepResult(token_ids, logprobs if any(logprobs) else None, prompts or None, errors or None)


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, ((token, -0.5),))
