"""A request: what it prepares, and its table of states."""

from __future__ import annotations

import pytest

from aiocb.sampling_params import SamplingParams
from aiocb.scheduler import ParallelGroup, Request, RequestStatus
from aiocb.scheduler.request import TRANSITIONS


def test_bounds_and_ends_come_from_the_sampling_parameters() -> None:
    prompt = [1, 2, 3]
    sampling = SamplingParams(min_new_tokens=2, eos_token_id=(7, 8), stop_token_ids=(9,))
    request = Request(prompt, id=1, sampling=sampling, max_tokens=7)
    assert request.tokens == [1, 2, 3] and request.num_tokens == request.num_prompt_tokens == 3
    assert (request.max_tokens, request.min_tokens) == (7, 5)
    assert request.end_ids == {7, 8, 9} and request.eos_ids == {7, 8}
    assert not request.is_finished and request.num_output_tokens == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 3), ([1, 2], 2)])
def test_nothing_to_generate_is_refused(prompt: list[int], max_tokens: int) -> None:
    with pytest.raises(ValueError, match="nothing to generate"):
        Request(prompt, id=1, sampling=SamplingParams(), max_tokens=max_tokens)


@pytest.mark.parametrize("status", RequestStatus)
@pytest.mark.parametrize("event", ["admit", "pause", "resume", "requeue", "preempt", "finish"])
def test_only_the_table_changes_a_status(status: RequestStatus, event: str) -> None:
    request = Request([1], id=1, sampling=SamplingParams(), max_tokens=2)
    request.status = status
    if event in TRANSITIONS[status]:
        request.transition(event)
        assert request.status is TRANSITIONS[status][event]
    else:
        with pytest.raises(RuntimeError, match=f"cannot {event}"):
            request.transition(event)


def test_reprs_tell_where_it_is() -> None:
    group = ParallelGroup()
    request = Request([1, 2], id=4, sampling=SamplingParams(eos_token_id=3), max_tokens=5, group=group, index=1)
    assert repr(request) == "<Request 4#1 waiting [0/2 computed | 0 output]>"
    request.transition("finish")
    request.finish_reason = "length"
    assert "finished (length)" in repr(request)
    assert request.eos_ids == {3}
