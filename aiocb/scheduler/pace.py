"""How many tokens a step may have so that it lasts as long as it should: `Pace`. Owned by the worker thread.

A step's time is learned while steps run: a constant, so much for each token, and so much for each key that a token is
compared with. Tokens of prompts are then what is left of `target_itl` after those who decode. Only while the oldest
prompt has waited for longer than `target_ttft` may a step last up to twice as long as the target, or as decoding alone
takes; and where nobody decodes, several times as long. A fixed share for prompts would stretch steps when nobody waits.

Least squares with exponential forgetting; coefficients are never negative, because more work takes no less time. The
idea of a budget in time is that of many schedulers of batches; the three terms are those of a decoder on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from aiocb.scheduler.roster import Roster
from aiocb.step import StepPlan

__all__ = ["Pace", "StepCost"]

LADDER: Final = 16
"""Tokens of prompts come in multiples of it: as many as a tile of a matrix product has rows, or a page has tokens."""

_KEYS: Final = 1e-3  # keys are counted in thousands: coefficients of like size are solved for more exactly
_FORGETS: Final = 0.98
_WARM_UP: Final = 2
"""Steps that are not looked at: memory is touched for the first time."""
_FIRST: Final = 4
"""Steps that are looked at before the target counts; until then, budgets are small."""
_FIRST_TOKENS: Final = 128
_REFIT: Final = 8
_GROWTH: Final = 2
"""How many times the largest step that was seen the next one may be: nothing is known of what is larger."""
_OUTLIER: Final = 4.0
_QUICKNESS: Final = 0.3
_PRIOR: Final = 1e-3
"""Of one observation, that a step without tokens takes no time: all of it is laid to the tokens until they vary."""
_ALONE: Final = 4.0
"""How many times the target a step may last when nobody decodes."""


class _Sums:
    """What least squares need of the steps of one kind."""

    __slots__ = ("moments", "products")

    def __init__(self) -> None:
        self.products = [[0.0] * 3 for _ in range(3)]
        self.moments = [0.0] * 3

    def add(self, row: tuple[float, float, float], seconds: float) -> None:
        """Take in a step, and forget a little of those before."""
        # Relative errors count: a long step is not to be met at the price of all short ones.
        weight = 1.0 / max(seconds, 1e-4) ** 2
        for i, value in enumerate(row):
            self.moments[i] = _FORGETS * self.moments[i] + weight * value * seconds
            products = self.products[i]
            for j, other in enumerate(row):
                products[j] = _FORGETS * products[j] + weight * value * other


class StepCost:
    """Seconds of a step: `constant + per_token * tokens + per_key * keys`, fitted to what steps have taken.

    Steps with prompts and those without are kept apart and forgotten apart: a stream that decodes alone for a minute
    says nothing of what a token more would take, and must not replace what does.

    Attributes:
        num_steps: that were taken in.
        most_tokens: of any of them.
        coefficients: seconds, per token, and per thousand keys.
        slowness: how much longer the last steps took than was expected, on average; 1 where they did not.
    """

    __slots__ = ("_kinds", "_num_strange", "_num_warm", "coefficients", "most_tokens", "num_steps", "slowness")

    def __init__(self) -> None:
        self._num_warm = self._num_strange = 0
        self._forget()

    def _forget(self) -> None:
        self.num_steps = self.most_tokens = 0
        self.coefficients = (0.0, 0.0, 0.0)
        self.slowness = 1.0
        self._kinds = [_Sums(), _Sums()]

    @property
    def figures(self) -> tuple[float, float, float]:
        """Seconds, per token, and per key."""
        constant, per_token, per_key = self.coefficients
        return constant, per_token, per_key * _KEYS

    def seconds(self, tokens: float, keys: float) -> float:
        """What a step of so many tokens takes, which are compared with so many keys in all."""
        constant, per_token, per_key = self.coefficients
        return constant + per_token * tokens + per_key * keys * _KEYS

    def observe(self, tokens: int, keys: float, seconds: float, *, has_prompts: bool) -> None:
        """Take in a step.

        One that lasted far too long is not believed, unless it goes on like that: then all is learned anew.
        """
        if self._num_warm < _WARM_UP:
            self._num_warm += 1
            return
        is_known = self.num_steps >= _FIRST and tokens <= self.most_tokens
        if is_known and self.seconds(tokens, keys) > 0.0:
            # A machine that others use too is slower at once, long before that is learned.
            ratio = min(seconds / self.seconds(tokens, keys), _OUTLIER)
            self.slowness = max(self.slowness + _QUICKNESS * (ratio - self.slowness), 1.0)
        if is_known and seconds > _OUTLIER * self.seconds(tokens, keys) + 1e-3:
            self._num_strange += 1
            if self._num_strange < _FIRST:
                return
            self._forget()  # the machine has become another one
        self._num_strange = 0
        self.most_tokens = max(self.most_tokens, tokens)
        self._kinds[has_prompts].add((1.0, float(tokens), keys * _KEYS), seconds)
        self.num_steps += 1
        # Steps without prompts come by the hundred, and say little that is new.
        if has_prompts or self.num_steps <= _FIRST or self.num_steps % _REFIT == 0:
            self.coefficients = self._fit()

    def _fit(self) -> tuple[float, float, float]:
        """The best coefficients that are not negative: those that would be are left out, one by one."""
        active = [0, 1, 2]
        one, two = self._kinds
        products = [[one.products[i][j] + two.products[i][j] for j in active] for i in active]
        moments = [one.moments[i] + two.moments[i] for i in active]
        products[0][0] *= 1.0 + _PRIOR
        while active:
            solved = _solve([[products[i][j] for j in active] for i in active], [moments[i] for i in active])
            if solved is None:
                active.pop()
                continue
            lowest = min(range(len(active)), key=solved.__getitem__)
            if solved[lowest] >= 0:
                values = [0.0, 0.0, 0.0]
                for i, value in zip(active, solved, strict=True):
                    values[i] = value
                return values[0], values[1], values[2]
            del active[lowest]
        return 0.0, 0.0, 0.0


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small symmetric system; None where it has no certain solution."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) <= 1e-9 * abs(matrix[column][column]):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for at in range(column, size + 1):
                rows[row][at] -= factor * rows[column][at]
    values = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][at] * values[at] for at in range(row + 1, size))
        values[row] = (rows[row][size] - known) / rows[row][row]
    return values


class Pace:
    """The token budgets of steps that have prompts.

    Args:
        target_itl: seconds that a step may last.
        target_ttft: seconds after which a prompt that waits may make steps longer.

    Attributes:
        cost: what steps take.
        last_budget: of the last step that had prompts; None before, and where the tokens alone bound it.
    """

    __slots__ = ("cost", "last_budget", "target_itl", "target_ttft")

    def __init__(self, target_itl: float, target_ttft: float) -> None:
        self.target_itl = target_itl
        self.target_ttft = target_ttft
        self.cost = StepCost()
        self.last_budget: int | None = None

    def budget_of(self, roster: Roster, most: int, now: float) -> int:
        """The tokens of the next step; `most` where there is no prompt."""
        oldest = min(roster.prefilling.values(), key=lambda request: request.rank, default=None)
        start = 0 if oldest is None else oldest.num_scheduled_tokens
        oldest = oldest or roster.queue.peek()
        self.last_budget = None
        if oldest is not None:
            # One that was preempted has had its first token: nobody waits for that.
            since = now if oldest.first_token_at is not None or oldest.submitted_at is None else oldest.submitted_at
            lengths = [request.num_scheduled_tokens for request in roster.decoding.values()]
            self.last_budget = self.budget(lengths, start, now - since, most)
        return most if self.last_budget is None else self.last_budget

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that has taken so long."""
        entries = plan.entries
        has_prompts = plan.num_tokens > len(entries)
        if has_prompts:
            keys = 0.0
            for entry in entries:
                keys += entry.num_new_tokens * (entry.num_computed_tokens + 0.5 * entry.num_new_tokens)
        else:  # most steps: a third of the time
            keys = sum([entry.num_computed_tokens for entry in entries]) + 0.5 * len(entries)
        self.cost.observe(plan.num_tokens, keys, seconds, has_prompts=has_prompts)

    def budget(self, decoding: Sequence[int], start: int, waited: float, most: int) -> int:
        """The tokens of the next step.

        Args:
            decoding: the lengths of the requests that decode in it.
            start: where the first prompt goes on.
            waited: seconds since the oldest prompt came.
            most: tokens that no step may exceed.
        """
        num_decoding = len(decoding)
        if self.cost.num_steps < _FIRST:
            return min(most, max(_FIRST_TOKENS, num_decoding + LADDER))
        target = self.target_itl
        alone = self.cost.slowness * self.cost.seconds(num_decoding, sum(decoding))
        if not num_decoding:
            room = _ALONE * target - alone
        elif waited > self.target_ttft:
            room = max(target - alone, 2.0 * max(target, alone) - alone)
        else:
            room = target - alone
        chunk = self._tokens_within(room / self.cost.slowness, start)
        most = min(most, max(_GROWTH * self.cost.most_tokens, num_decoding + LADDER))
        return min(most, num_decoding + max(LADDER, chunk // LADDER * LADDER))

    def _tokens_within(self, room: float, start: int) -> int:
        """The most tokens of a prompt, from `start` on, that take no longer: each has all before it as keys."""
        _, per_token, per_key = self.cost.coefficients
        per_key *= _KEYS
        linear = per_token + per_key * start
        if room <= 0:
            return 0
        if per_key <= 0:
            return int(min(room / linear, 1e9)) if linear > 0 else 1 << 30
        return int(min((math.sqrt(linear * linear + 2.0 * per_key * room) - linear) / per_key, 1e9))
