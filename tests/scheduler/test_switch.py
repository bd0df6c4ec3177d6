"""Keys of another kind beyond a length: they are not shared; who gets longer computes all anew where that is asked."""

from __future__ import annotations

from typing import Any

import pytest

from aiocb.cache import CacheManager
from aiocb.cache.sequence import CachedSequence
from aiocb.step import LengthSwitch
from aiocb.testing.records import simple_layout

from .helpers import Harness

RESTART = LengthSwitch(10, is_recomputed=True)


def harness(switch: LengthSwitch, **options: Any) -> Harness:
    return Harness(layout=simple_layout(64, page_size=4)._replace(switch=switch), **options)


def published(cache: CacheManager, num_tokens: int, num_prompt_tokens: int) -> CachedSequence:
    """A request whose full blocks are in the prefix cache."""
    sequence = CachedSequence(list(range(num_tokens)))
    sequence.num_prompt_tokens = num_prompt_tokens
    cache.match(sequence)
    assert cache.allocate(sequence, num_tokens)
    sequence.num_computed_tokens = num_tokens
    cache.publish(sequence)
    return sequence


@pytest.mark.parametrize(
    ("switch", "hits"),
    [
        (None, [2, 2, 4]),
        (LengthSwitch(10), [2, 0, 4]),
        (LengthSwitch(10, is_by_length=True), [2, 0, 0]),
        (RESTART, [0, 2, 4]),
    ],
)
def test_prefixes_of_another_kind_are_not_found(switch: LengthSwitch | None, hits: list[int]) -> None:
    """What was a prompt of 9 tokens is cached, for prompts of 9 and 12; then one of 18, for one of 19."""
    cache = CacheManager(simple_layout(64, page_size=4)._replace(switch=switch))
    published(cache, 14, 9)
    found = [cache.match(CachedSequence(list(range(length)))) for length in (9, 12)]
    published(cache, 18, 18)
    found.append(cache.match(CachedSequence([*range(17), 99, 98])))
    assert found == hits


class TestRestart:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("draft_len", [0, 3])
    def test_once_and_right(self, depth: int, draft_len: int) -> None:
        one = harness(RESTART, depth=depth, draft_len=draft_len)
        for length in (3, 8, 10, 11, 15):
            one.add([at % 7 for at in range(length)], 12)
        one.run()
        assert [request.num_preemptions for request in one.requests] == [1, 1, 1, 0, 0]
        assert all(len(tokens) == 12 for tokens in one.outputs.values())

    def test_what_it_computes_anew_is_of_the_other_kind(self) -> None:
        one = harness(RESTART)
        request = one.add(list(range(8)), 6)
        kinds = []
        while one.requests[0].finish_reason is None:
            one.step()
            kinds.append((len(request.tokens), request.cache_kind))
        # The token behind the last one that the first kind is good for is computed with all others.
        assert kinds == [(9, 0), (10, 0), (11, 0), (12, 1), (13, 1), (14, 1)]
        assert [entry.num_new_tokens for plan in one.plans for entry in plan.entries] == [8, 1, 1, 11, 1, 1]

    def test_samples_are_not_forked_from_one_that_has_got_longer(self) -> None:
        cache = CacheManager(simple_layout(64, page_size=4)._replace(switch=RESTART))
        source = published(cache, 9, 9)
        assert cache.can_fork(source, 8)
        source.cache_kind = 1
        assert not cache.can_fork(source, 8)


def test_keys_that_were_swapped_out_before_the_switch_are_worth_nothing_behind_it() -> None:
    cache = CacheManager(simple_layout(64, page_size=4, swap_places=64)._replace(switch=RESTART))
    sequence = published(cache, 9, 9)
    assert cache.swap is not None
    assert cache.swap.put_out(sequence, moves_on=False)
    cache.free(cache.detach(sequence))
    assert cache.swap.is_worth_it(sequence, 0)
    sequence.tokens += [1, 2]
    assert not cache.swap.is_worth_it(sequence, 0)
