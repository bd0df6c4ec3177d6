"""Models with states: every kind of fault that hybrid models have met elsewhere, over the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from aiocb.scheduler import Request
from aiocb.step import StepPlan
from tests.scheduler.helpers import VOCAB, Harness, chunks


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7 + i * i * (seed + 3) + i) % VOCAB for i in range(length)]


def make(num_slots: int = 12, **options: Any) -> Harness:
    options.setdefault("num_blocks", 200)
    return Harness(num_slots=num_slots, interval=options.pop("interval", 400), **options)


def cached(h: Harness, tokens: list[int], num_output: int = 2, **options: Any) -> int:
    """Run one request to its end; how many tokens it did not compute."""
    request = h.add(tokens, num_output, **options)
    h.run()
    return request.num_cached_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_one_slot_serves_one_after_the_other(depth: int) -> None:
    """Nobody starts from what the one before has left there."""
    h = make(2, depth=depth)
    for seed in range(4):
        h.add(prompt(seed, 9), 6)
    h.run()
    assert max(len(plan.entries) for plan in h.plans) == 1
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_preempted_starts_afresh(depth: int) -> None:
    h = make(8, num_blocks=14, depth=depth, sharing=False)
    for seed in range(4):
        h.add(prompt(seed, 12), 20)
    h.run()
    assert h.scheduler.num_preemptions > 0
    h.assert_quiescent()


@pytest.mark.parametrize("length", [8, 9, 10, 11, 12])
def test_the_same_prompt_hits(length: int) -> None:
    """At every place within a block; the last token is always computed, and one alone is no trouble."""
    h = make(page_size=4)
    assert cached(h, prompt(1, length)) == 0
    assert cached(h, prompt(1, length)) == (length - 1) // 4 * 4
    h.assert_quiescent()


@pytest.mark.parametrize("chunk", [1, 3, 5, 7])
def test_odd_chunks_end_where_snapshots_belong(chunk: int) -> None:
    h = make(chunk=chunk, interval=12)
    h.add(prompt(9, 3), 40)
    h.step()
    h.add(prompt(1, 31), 2)
    h.run()
    assert cached(h, prompt(1, 31)) == 28
    assert cached(h, [*prompt(1, 14), *prompt(5, 9)]) == 12
    h.assert_quiescent()


def test_a_budget_below_a_block_still_advances() -> None:
    h = make(max_batch_tokens=3, page_size=8)
    h.add(prompt(2, 5), 40)
    h.add(prompt(1, 30), 2)
    h.run()  # every step has entries: see `Harness.schedule`
    h.assert_quiescent()


def test_two_equal_prompts_in_one_step() -> None:
    """The second waits until the state is there, and goes on from it."""
    h = make()
    first, second = h.add(prompt(1, 30)), h.add(prompt(1, 30))
    h.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)
    h.assert_quiescent()


def test_a_shared_prefix_with_private_tails_hits_from_the_third_on() -> None:
    h = make()
    hits = [cached(h, prompt(1, 40) + prompt(seed, 20)) for seed in range(2, 9)]
    assert hits == [0, 0, 40, 40, 40, 40, 40]
    h.assert_quiescent()


def test_private_tails_at_once_compute_the_prefix_twice_and_not_more() -> None:
    h = make(24, num_blocks=400, max_batch_tokens=400, max_requests=16)
    requests = [h.add(prompt(1, 40) + prompt(seed, 21)) for seed in range(2, 12)]
    h.run()
    assert sorted(request.num_cached_tokens for request in requests) == [0, 0, *[40] * 8]
    h.assert_quiescent()


def test_an_owner_under_way_puts_aside_what_others_wait_for() -> None:
    """Its chunks end where the prompt of a latecomer parts from it."""
    h = make(chunk=8, page_size=4)
    h.add(prompt(9, 3), 40)
    h.step()
    h.add(prompt(1, 60))
    h.step()
    late = h.add([*prompt(1, 28), *prompt(3, 9)])
    h.run()
    assert late.num_cached_tokens == 28
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_of_a_chat_hits(depth: int) -> None:
    h = make(depth=depth)
    conversation, reply = prompt(1, 21), list[int]()
    for turn in range(5):
        request = h.add(conversation, 17)
        h.run()
        known = len(conversation)
        if turn:
            # All of the turn before, up to its last full block whose KV was computed.
            assert request.num_cached_tokens == (known - len(reply) - 1) // 4 * 4, turn
        reply = prompt(turn, 5)
        conversation = [*request.tokens, *reply]
    h.assert_quiescent()


def test_a_chat_takes_one_snapshot_for_a_prompt_and_one_for_an_answer() -> None:
    h = make(40, num_blocks=400)
    h.add(prompt(1, 21), 60)
    h.run()
    assert h.cache.states is not None and h.cache.states.num_snapshots == 2
    h.assert_quiescent()


def test_many_turns_do_not_crowd_out_what_all_have_in_common() -> None:
    """A hit is a use: the common prefix stays, however many prompts pass by."""
    h = make(5, num_blocks=400, interval=400)
    hits = [cached(h, prompt(1, 40) + prompt(seed % 8 + 2, 20 + seed % 3)) for seed in range(40)]
    assert all(hit >= 40 for hit in hits[2:])
    assert h.cache.states is not None and h.cache.states.num_snapshots <= 4
    h.assert_quiescent()


def test_an_edit_goes_back_to_the_point_before() -> None:
    h = make(interval=16)
    tokens = prompt(1, 60)
    cached(h, tokens)
    assert cached(h, [*tokens[:37], *prompt(4, 12)]) == 32
    h.assert_quiescent()


@pytest.mark.parametrize("gone", ["state", "blocks"])
def test_a_hit_is_what_all_groups_have(gone: str) -> None:
    h = make(interval=8)
    tokens = prompt(1, 30)
    cached(h, tokens)
    assert h.cache.states is not None
    index = h.cache.states.index if gone == "state" else h.cache.indices[0]
    last = index.peek(h.requests[0].block_hashes[6])
    assert last is not None
    index.withdraw(last)
    assert cached(h, tokens) == 24
    assert cached(h, tokens) == 28, "what had gone was made again"
    h.assert_quiescent()


def test_a_row_that_ran_ahead_leaves_no_snapshot() -> None:
    """Two plans in flight: the end is seen when the next token is on its way already."""
    h = make(depth=2, page_size=4)
    alone = make(depth=2)
    probe = alone.add(prompt(1, 5), 12)
    alone.run()
    eos = next(token for token in probe.tokens[7:] if token not in probe.tokens[5:7])
    request = h.add(prompt(1, 5), 30, eos_token_id=(eos,))
    h.run()
    end = request.num_tokens
    assert request.finish_reason == "stop"
    h.oracle.check_records([])
    follow = [*request.tokens, *prompt(2, 6)]
    assert cached(h, follow) == (end - 1) // 4 * 4
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_a_request_publishes_nothing_of_it(depth: int) -> None:
    fail: list[int] = []
    h = make(depth=depth, errors=lambda plan: {e.request_id: RuntimeError("planned") for e in plan.entries if fail})
    fail.append(1)
    h.add(prompt(1, 9))
    h.run()
    fail.clear()
    assert h.cache.states is not None and h.cache.states.num_snapshots == 0
    assert cached(h, prompt(1, 9)) == 0
    h.assert_quiescent()


def test_the_slot_of_a_snapshot_comes_back_when_its_request_has_ended() -> None:
    h = make(depth=2)
    request = h.add(prompt(1, 20))
    plan = h.schedule()
    assert plan.states_after
    h.execute(plan)
    h.finish(request)
    h.scheduler.check_invariants()
    assert h.cache.states is not None and h.cache.states.pool.num_used == 2, "the plan in flight names both"
    h.run()
    assert h.cache.states.pool.num_used == 0 and h.cache.states.num_snapshots == 0
    h.assert_quiescent()


def test_a_snapshot_stays_pinned_while_a_plan_reads_it() -> None:
    h = make(4, depth=2)
    cached(h, prompt(1, 9))
    first = h.add(prompt(1, 9), 3)
    plan = h.schedule()
    (copy,) = plan.states_before
    h.execute(plan)
    h.finish(first)
    for seed in (5, 6):
        h.add(prompt(seed, 9))
    later = h.schedule()
    assert copy.source not in {opened.state_slot for opened in later.opened}
    assert copy.source not in {each.target for each in later.states_after}
    h.execute(later)
    h.assert_quiescent()


def test_nobody_is_admitted_without_a_slot_and_all_are_used() -> None:
    h = make(4)
    requests = [h.add(prompt(seed, 5), 9) for seed in range(6)]
    plan = h.step()
    assert chunks(plan) == [(requests[0].id, 4), (requests[1].id, 4), (requests[2].id, 5)]
    h.run()
    assert max(len(plan.entries) for plan in h.plans) == 3
    h.assert_quiescent()


def test_no_chunk_is_cut_where_no_snapshot_can_be_taken() -> None:
    h = make(3)
    requests = [h.add(prompt(seed, 9), 9) for seed in range(2)]
    # A slot was free when the first one's chunk was cut; the second one lives in it now.
    plan = h.step()
    assert chunks(plan) == [(requests[0].id, 8), (requests[1].id, 9)] and not plan.states_after
    h.run()
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_slots_of_paused_requests_are_taken_for_those_who_run(depth: int) -> None:
    h = make(2, depth=depth)
    slow = h.add(prompt(1, 9), 6)
    h.step()
    h.scheduler.pause(slow)
    fast = h.add(prompt(2, 9), 6)
    h.run()
    assert fast.is_finished and slow.num_preemptions == 1
    h.scheduler.resume(slow)
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_more_important_request_gets_a_slot(depth: int) -> None:
    h = make(3, depth=depth, policy="priority")
    low = [h.add(prompt(seed, 9), 20, priority=2) for seed in (1, 2)]
    for _ in range(4):
        h.step()  # in the end a plan in flight names both: no slot comes back at once
    high = h.add(prompt(3, 9), 2, priority=0)
    while not high.is_finished:
        h.step()
    assert [request.num_preemptions for request in low] == [0, 1]
    h.assert_quiescent()


def test_a_fork_copies_the_state_of_a_leader_that_stands_there() -> None:
    """The prompt is one token longer than its last full block, where the leader stops for a snapshot anyway."""
    h = make(page_size=4)
    requests = h.add_group(3, prompt(1, 9))
    h.step()
    plan = h.step()
    assert len(plan.entries) == 3 and len(plan.states_before) == 2
    assert [request.num_cached_tokens for request in requests] == [0, 8, 8]
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [3, 8, 9, 10, 23])
def test_samples_of_one_prompt_share_what_they_can(length: int, depth: int) -> None:
    h = make(page_size=4, depth=depth)
    requests = h.add_group(4, prompt(1, length), 9)
    h.run()
    assert [request.num_cached_tokens for request in requests] == [0, *[(length - 1) // 4 * 4] * 3]
    h.assert_quiescent()


def test_samples_without_sharing() -> None:
    h = make(page_size=4, sharing=False)
    h.add_group(4, prompt(1, 10), 9)
    h.run()
    assert not any(plan.states_after for plan in h.plans)
    h.assert_quiescent()


def test_new_weights_forget_all_snapshots() -> None:
    h = make()
    tokens = prompt(1, 30)
    cached(h, tokens)
    running = h.add(prompt(2, 30), 20)
    h.step()
    h.scheduler.reset_prefix_cache()
    h.scheduler.preempt_all()
    h.oracle.reload_weights()
    h.step()
    assert running.num_computed_tokens <= 28
    assert cached(h, tokens) == 0
    h.assert_quiescent()


def test_tenants_share_no_states() -> None:
    h = make()
    assert cached(h, prompt(1, 30), salt="one") == 0
    assert cached(h, prompt(1, 30), salt="two") == 0
    assert cached(h, prompt(1, 30), salt="one") == 28
    h.assert_quiescent()


def test_no_drafts_where_a_state_would_have_to_be_taken_back() -> None:
    h = make(draft_len=3)
    h.add(prompt(1, 9), 12)
    h.run()
    assert not any(entry.draft_token_ids for plan in h.plans for entry in plan.entries)
    h.assert_quiescent()


def test_prompt_logprobs_with_a_tiny_cache_come_to_an_end() -> None:
    h = make(5, num_blocks=14)
    for seed in range(4):
        h.add(prompt(seed, 12), 20, prompt_logprobs=0)
    h.run()
    h.assert_quiescent()


def test_admission_that_fails_after_a_match_loses_no_slot() -> None:
    h = make(6, num_blocks=10, margin=0.5)
    tokens = prompt(1, 9)
    cached(h, tokens)
    running = [h.add(prompt(seed, 20), 8) for seed in (2, 3)]
    waiting: list[Request] = [h.add(tokens, 8) for _ in range(3)]
    h.step()
    for request in waiting[:2]:
        h.finish(request)
    assert not running[0].is_finished
    h.assert_quiescent()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_thousand_ends_lose_no_slot(depth: int) -> None:
    h = make(4, depth=depth, page_size=2)
    for number in range(300):
        request = h.add(prompt(number % 7, 3 + number % 5), 4)
        for _ in range(number % 4):
            if h.scheduler.has_work:
                h.step()
        if not request.is_finished:
            h.finish(request)
    h.assert_quiescent()


def last_hit(plans: list[StepPlan]) -> int:
    return sum(len(plan.states_before) for plan in plans)


def test_a_hit_in_the_middle_of_a_prompt_replaces_the_state() -> None:
    """What another has put aside meanwhile is gone on from, between two chunks."""
    h = make(chunk=4, page_size=4, interval=8)
    h.add(prompt(9, 3), 60)
    h.step()
    slow = h.request([*prompt(1, 32), 1])
    h.scheduler.add(slow)
    h.step()
    h.scheduler.pause(slow)
    h.add([*prompt(1, 32), 2])
    while h.cache.states is not None and h.cache.states.num_snapshots < 3:
        h.step()
    before = last_hit(h.plans)
    h.scheduler.resume(slow)
    h.step()
    assert last_hit(h.plans) > before and slow.num_computed_tokens > 8
    h.assert_quiescent()
