from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from aiocb.model.eager.messages import Outgoing, decode, encode
from aiocb.records import Records
from aiocb.sampling_params import SamplingParams
from aiocb.step import BlockCopy, BlockSwap, OpenedRequest, StateCopy, StepEntry, StepPlan, StepResult
from aiocb.testing.oracle import KVOracle
from aiocb.testing.simulator import LAYOUTS, Layout, Simulation

FULL = StepPlan(
    (StepEntry(1, 0, 3, 1, True, (5, 6), 1, ((2, 3), (4, 5)), (8,)), StepEntry(2, 7, 1, 1, True)),
    4,
    (OpenedRequest(1, (1, 2, 3), 2, SamplingParams(), 9, "adapter", "grammar", 4),),
    (7, 8),
    (BlockCopy(0, 1, 2),),
    (BlockCopy(1, 2, 3), BlockCopy(0, 3, 4)),
    (BlockSwap(0, 5, 1),),
    (BlockSwap(1, 6, 2),),
    (StateCopy(1, 2),),
    (StateCopy(3, 4),),
)


def sent(outgoing: Outgoing, plan: StepPlan) -> StepPlan:
    kind, received = decode(outgoing.message("step", plan))
    assert kind == "step" and received is not None
    return received


def test_every_field_of_a_plan_arrives() -> None:
    assert all(FULL), "a field of the plan is not tried here"
    received = sent(Outgoing(), FULL)
    assert received == FULL
    # Tuples with names stay such, all the way down.
    assert [type(value) for value in received] == [type(value) for value in FULL]
    fields: Any = zip(received, FULL, strict=True)
    for theirs, ours in fields:
        if isinstance(ours, tuple):
            assert [type(item) for item in theirs] == [type(item) for item in ours]


def test_what_is_no_plan_arrives() -> None:
    assert decode(encode("pause")) == ("pause", None)


def test_what_was_sampled_comes_with_the_next_plan_that_names_the_request() -> None:
    outgoing = Outgoing()
    both = StepPlan((StepEntry(1, 0, 3, 1, True), StepEntry(2, 0, 3, 1, True)), 6)
    outgoing.take(both, StepResult([(10,), (20, 21)]))
    only = sent(outgoing, StepPlan((StepEntry(2, 3, 1, 1, True, (22,)),), 1))
    assert only.entries[0].new_token_ids == (20, 21, 22)
    later = sent(outgoing, StepPlan((StepEntry(1, 3, 1, 1, True), StepEntry(2, 6, 1, 1, True)), 2))
    assert [entry.new_token_ids for entry in later.entries] == [(10,), ()]


def test_a_request_that_is_opened_again_brings_all_its_tokens() -> None:
    outgoing = Outgoing()
    outgoing.take(StepPlan((StepEntry(1, 0, 3, 1, True),), 3), StepResult([(10,)]))
    opened = OpenedRequest(1, (1, 2, 3, 10), 3, SamplingParams(), 0)
    again = sent(outgoing, StepPlan((StepEntry(1, 0, 4, 1, True),), 4, (opened,), (1,)))
    assert again.entries[0].new_token_ids == () and again.opened[0].token_ids == (1, 2, 3, 10)


def test_parameters_stay_behind() -> None:
    sampling = SamplingParams(logits_processors=[lambda token_ids, logits: logits])  # which could not be sent
    plan = StepPlan((StepEntry(1, 0, 1, 1, True),), 1, (OpenedRequest(1, (5,), 1, sampling, 3),))
    assert sent(Outgoing(), plan).opened[0].sampling == SamplingParams()


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: layout.name)
def test_records_that_follow_are_those_of_rank_0(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole core, at random: preempted, resumed, forked, with drafts and in several lives."""
    follower = _Follower(Outgoing(), _Followed(len(layout.windows)))
    submit, collect, release = KVOracle.submit, KVOracle.collect, KVOracle.release
    num_compared = 0

    def submit_to_both(oracle: KVOracle, plan: StepPlan) -> StepPlan:
        nonlocal num_compared
        records = follower.records.begin(sent(follower.outgoing, plan))
        handle = submit(oracle, plan)
        for record in records:
            own: Any = oracle._records[record.request_id]
            assert (record.tokens, record.tables, record.state_slot) == (own.tokens, own.tables, own.state_slot)
            num_compared += 1
        return handle

    def collect_for_both(oracle: KVOracle, handle: StepPlan) -> StepResult:
        result = collect(oracle, handle)
        follower.outgoing.take(handle, result)
        return result

    def release_both(oracle: KVOracle) -> None:
        release(oracle)
        follower.outgoing.clear()
        follower.records.clear()

    monkeypatch.setattr(KVOracle, "submit", submit_to_both)
    monkeypatch.setattr(KVOracle, "collect", collect_for_both)
    monkeypatch.setattr(KVOracle, "release", release_both)
    report = Simulation(3, layout=layout, depth=1, faults=False).run(1500)
    assert num_compared > 500 and report.events["lives ended"] > 0


class _Followed(Records):
    """What has come of drafts is told with the next plan."""

    verifies_drafts = True


class _Follower(NamedTuple):
    outgoing: Outgoing
    records: Records
