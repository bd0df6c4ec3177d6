"""What may be a prompt, and that it is taken when it is given."""

from __future__ import annotations

import array
import dataclasses
import enum
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aiocb.errors import InvalidRequest
from aiocb.text.prompts import Messages, Refused, TakenPrompt, take_prompt, take_values, text_length

EMPTY: list[Any] = ["", [], (), range(0), np.array([], dtype=np.int64), torch.tensor([], dtype=torch.long)]
EMPTY += [{"input_ids": []}, {"input_ids": [1, 2], "attention_mask": [0, 0]}, array.array("i")]


@pytest.mark.parametrize("prompt", EMPTY, ids=[type(prompt).__name__ for prompt in EMPTY])
def test_empty_prompts_are_refused_with_what_to_pass(prompt: Any) -> None:
    taken = take_prompt(prompt)
    assert isinstance(taken, Refused) and "give a text, at least one token id" in taken.reason


class Broken:
    """A user's class that raises whatever is asked of it."""

    shape = (2,)
    dtype = "broken"

    def tolist(self) -> list[int]:
        raise RuntimeError("no")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def cyclic() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


NONE_AT_ALL: list[Any] = [
    None,
    7,
    1.5,
    True,
    b"bytes",
    bytearray(b"x"),
    memoryview(b"x"),
    {1, 2},
    frozenset({1}),
    {},
    {"x": 1},
    (token for token in [1, 2]),
    iter([1]),
    object(),
    Broken(),
    Unprintable(),
    ["a", "b"],
    [[1, 2]],
    [[{"role": "user", "content": "x"}]],
    torch.tensor([[1], [2]]),
    torch.tensor(1),
    np.float64(3),
    [{"content": "x"}],
    [{"role": 1, "content": "x"}],
    [{"role": "", "content": "x"}],
    [{"role": "user", "content": "x"}, "y"],
    [{"role": "user", "content": cyclic()}],
    [{"role": "user", "content": deep(5000)}],
    [{"role": "user", "content": deep(sys.getrecursionlimit() * 20)}],
    [{"role": "user", "content": [0] * 300_000}],
]


@pytest.mark.parametrize("prompt", NONE_AT_ALL, ids=[str(at) for at in range(len(NONE_AT_ALL))])
def test_what_is_no_prompt_is_refused_and_raises_nothing_yet(prompt: Any) -> None:
    taken = take_prompt(prompt)
    assert isinstance(taken, Refused) and taken.reason
    assert take_prompt(taken) == taken


def test_every_kind_of_ids() -> None:
    for prompt in ([1, 2], (1, 2), range(1, 3), array.array("i", [1, 2]), np.array([[1, 2]]), torch.tensor([1, 2])):
        assert take_prompt(prompt) == (1, 2)
    assert take_prompt({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}) == (1, 2)
    assert take_prompt({"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1]}) == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "change"),
    [
        ([1, 2], lambda prompt: prompt.append(3)),
        (array.array("i", [1, 2]), lambda prompt: prompt.append(3)),
        (np.array([1, 2]), lambda prompt: prompt.fill(9)),
        (torch.tensor([1, 2]), lambda prompt: prompt.fill_(9)),
        ({"input_ids": [1, 2]}, lambda prompt: prompt["input_ids"].append(3)),
        ([{"role": "user", "content": "x"}], lambda prompt: prompt.append({"role": "user", "content": "y"})),
        ([{"role": "user", "content": "x"}], lambda prompt: prompt[0].update(content="y")),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], lambda p: p[0]["content"][0].update(text="y")),
        ([SimpleNamespace(role="user", content="x")], lambda prompt: setattr(prompt[0], "content", "y")),
    ],
)
def test_what_is_changed_afterwards_does_not_matter(prompt: Any, change: Any) -> None:
    taken = take_prompt(prompt)
    assert not isinstance(taken, Refused)
    before = repr(taken)
    change(prompt)
    assert repr(taken) == before
    assert take_prompt(taken) is taken or take_prompt(taken) == taken


class Pydantic:
    """As much of a model of pydantic as the OpenAI client's messages show."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self.role = fields["role"]

    def model_dump(self) -> dict[str, Any]:
        return dict(self._fields)


@dataclasses.dataclass
class Message:
    role: str
    content: str | None = None
    tool_calls: list[Any] | None = None


class Role(str, enum.Enum):  # noqa: UP042 (a StrEnum prints itself as its value)
    USER = "user"


def messages(taken: TakenPrompt) -> list[dict[str, Any]]:
    assert isinstance(taken, Messages)
    return list(taken.messages)


def test_messages_are_mappings_or_objects_with_their_fields() -> None:
    wanted = [{"role": "user", "content": "x"}]
    for message in (
        {"role": "user", "content": "x"},
        Pydantic(role="user", content="x", refusal=None, tool_calls=None),
        SimpleNamespace(role="user", content="x", audio=None),
        Message("user", "x"),
        {"role": Role.USER, "content": "x"},
    ):
        assert messages(take_prompt([message])) == wanted
        assert messages(take_prompt(message)) == wanted
        assert messages(take_prompt((message,))) == wanted
    assert type(messages(take_prompt({"role": Role.USER, "content": "x"}))[0]["role"]) is str


def test_calls_of_tools_pass_through() -> None:
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    call = {"id": "1", "type": "function", "function": function}
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        Pydantic(role="assistant", content=None, tool_calls=[call], refusal=None),
        Message("assistant", None, [SimpleNamespace(id="1", type="function", function=SimpleNamespace(**function))]),
    ):
        assert messages(take_prompt([message])) == [{"role": "assistant", "tool_calls": [call]}]


def test_nested_values_are_copied_and_functions_kept() -> None:
    def tool() -> None: ...

    tools = [tool, {"type": "function", "function": {"parameters": {"required": ["a"]}}}]
    taken = take_values("tools", tools)
    assert taken == tools and taken[0] is tool
    tools[1]["function"]["parameters"]["required"].append("b")  # type: ignore[index]
    assert taken != tools
    with pytest.raises(InvalidRequest, match="tools is nested"):
        take_values("tools", cyclic())


def test_length_of_text() -> None:
    taken = take_prompt([{"role": "user", "content": [{"type": "text", "text": "abc"}]}])
    assert text_length(taken) == sum(map(len, ("role", "user", "content", "type", "text", "text", "abc")))
    assert text_length("abc") == 3 and text_length(None) == 0
    assert text_length({"a": ["bc", 1]}) == 3, "keys come to stand in the prompt, too"
