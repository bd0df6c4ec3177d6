from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from transformers.generation.continuous_batching import RequestStatus as TheirStatus
from transformers.generation.continuous_batching.requests import GenerationOutput as TheirOutput

from aiocb.compat.transformers import GenerationOutput, RequestStatus
from aiocb.compat.transformers.results import Prefix


def test_statuses_equal_those_of_the_reference() -> None:
    for status in TheirStatus:
        mine: int = RequestStatus[status.name]
        assert mine == status and status == mine


def test_outputs_have_the_fields_of_the_reference() -> None:
    mine = [field.name for field in dataclasses.fields(GenerationOutput)]
    theirs = [field.name for field in dataclasses.fields(TheirOutput)]
    assert mine[: len(theirs)] == theirs
    assert mine[len(theirs) :] == ["exception"]
    assert not GenerationOutput("a").is_finished()
    assert GenerationOutput("a", status=RequestStatus.FINISHED).is_finished()
    assert GenerationOutput("a", status=RequestStatus.FAILED).is_finished()


class TestPrefix:
    def make(self) -> Prefix[int]:
        items = list(range(10))
        prefix = Prefix(items, 4)
        items.append(99)
        return prefix

    def test_reads_like_the_list_it_stands_for(self) -> None:
        prefix, plain = self.make(), [0, 1, 2, 3]
        assert len(prefix) == 4
        assert list(prefix) == plain
        assert prefix == plain and plain == prefix and prefix == (0, 1, 2, 3) and prefix == self.make()
        assert prefix != [0, 1, 2] and prefix != [0, 1, 2, 4] and prefix != "0123"
        assert prefix[0] == 0 and prefix[-1] == 3 and prefix[-4] == 0
        assert 3 in prefix and 4 not in prefix
        assert prefix.index(2) == 2 and prefix.count(9) == 0
        assert repr(prefix) == repr(plain)
        assert prefix + [5] == [0, 1, 2, 3, 5] and [5] + prefix == [5, 0, 1, 2, 3]
        assert list(reversed(prefix)) == plain[::-1]

    @pytest.mark.parametrize("start", [None, -9, -4, -1, 0, 2, 4, 9])
    @pytest.mark.parametrize("stop", [None, -9, -1, 0, 3, 9])
    @pytest.mark.parametrize("step", [None, -3, -1, 1, 2])
    def test_slices_are_lists(self, start: int | None, stop: int | None, step: int | None) -> None:
        part = self.make()[start:stop:step]
        assert part == [0, 1, 2, 3][start:stop:step] and type(part) is list

    @pytest.mark.parametrize("index", [4, -5, 9])
    def test_does_not_look_beyond_its_end(self, index: int) -> None:
        with pytest.raises(IndexError):
            self.make()[index]

    def test_copies_are_lists(self) -> None:
        for copied in (pickle.loads(pickle.dumps(self.make())), copy.deepcopy(self.make())):
            assert copied == [0, 1, 2, 3] and type(copied) is list
        assert json.dumps(dataclasses.asdict(GenerationOutput("a", generated_tokens=self.make()))["generated_tokens"])

    def test_is_taken_by_torch(self) -> None:
        assert torch.tensor(self.make()).tolist() == [0, 1, 2, 3]

    def test_is_unhashable(self) -> None:
        with pytest.raises(TypeError):
            hash(self.make())
