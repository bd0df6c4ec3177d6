"""Plans on their way to other processes: bytes of plain data. Torch-free.

The other processes run the model and nothing else: they sample nothing, so what they would need for it (parameters,
seeds, drafts' fate) stays behind, and the tokens that were sampled come with the next plan, as tokens to append.
`marshal` writes nothing but plain values, and reading it runs nothing; all processes have the same Python.
"""

from __future__ import annotations

import marshal
from typing import Any

from aiocb.sampling_params import SamplingParams
from aiocb.step import (
    BlockCopy,
    BlockSwap,
    OpenedRequest,
    StateCopy,
    StepEntry,
    StepPlan,
    StepResult,
)

__all__ = ["Outgoing", "decode", "encode"]

_ITEMS: dict[str, Any] = {
    "entries": StepEntry,
    "opened": OpenedRequest,
    "copies_before": BlockCopy,
    "copies_after": BlockCopy,
    "swaps_out": BlockSwap,
    "swaps_in": BlockSwap,
    "states_before": StateCopy,
    "states_after": StateCopy,
}
"""Fields of a plan whose items are tuples with names; `marshal` takes tuples without."""

_NO_SAMPLING = SamplingParams()
_SAMPLING = OpenedRequest._fields.index("sampling")
_TOKENS = StepEntry._fields.index("new_token_ids")
_DEFAULTS = tuple(StepEntry._field_defaults.values())[1:]
"""Of what comes behind the tokens: most entries have nothing else, and leave it out."""


def encode(kind: str, *fields: Any) -> bytes:
    """Write a message of a kind, with the fields of a plan where it has one (see `Outgoing.message`)."""
    return marshal.dumps((kind, *fields))


def decode(message: bytes) -> tuple[str, StepPlan | None]:
    """Read what `encode` has written."""
    kind, *values = marshal.loads(message)
    if not values:
        return kind, None
    fields = []
    for name, value in zip(StepPlan._fields, values, strict=True):
        make = _ITEMS.get(name)
        if name == "opened":
            value = [(*item[:_SAMPLING], _NO_SAMPLING, *item[_SAMPLING + 1 :]) for item in value]
        fields.append(value if make is None else tuple([make(*item) for item in value]))
    return kind, StepPlan._make(fields)


class Outgoing:
    """Makes messages of the plans of a process that samples, for those that do not."""

    def __init__(self) -> None:
        self._sampled: dict[int, tuple[int, ...]] = {}

    def message(self, kind: str, plan: StepPlan) -> bytes:
        """Write a plan, with the tokens that the others have not seen yet."""
        sampled = self._sampled
        for request_id in plan.closed:
            sampled.pop(request_id, None)
        fields: list[Any] = []
        values: tuple[Any, ...] = plan
        for name, value in zip(StepPlan._fields, values):
            if not value or name not in _ITEMS:
                fields.append(value)
            elif name == "entries":
                fields.append([self._entry(entry) for entry in value])
            elif name == "opened":
                fields.append([(*opened[:_SAMPLING], None, *opened[_SAMPLING + 1 :]) for opened in value])
            else:
                fields.append([tuple(item) for item in value])
        return encode(kind, *fields)

    def _entry(self, entry: StepEntry) -> tuple[Any, ...]:
        token_ids = self._sampled.pop(entry.request_id, ()) + entry.new_token_ids
        rest = entry[_TOKENS + 1 :]
        return (*entry[:_TOKENS], token_ids) if rest == _DEFAULTS else (*entry[:_TOKENS], token_ids, *rest)

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """Remember what was sampled for a plan."""
        for entry, token_ids in zip(plan.entries, result.token_ids):
            if token_ids:
                self._sampled[entry.request_id] = tuple(token_ids)

    def clear(self) -> None:
        """Forget everything."""
        self._sampled.clear()
