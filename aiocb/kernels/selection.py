"""Native selection of tokens and log-probabilities: the arguments of `NativeModel.select`, as selection.h has them.

Every pointer is an address of contiguous memory that its owner keeps alive during the call; 0 or None is a null
pointer. Shape legend: N rows of work, V vocabulary, W width of the tables of most likely tokens.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from typing import Final

__all__ = ["ARGMAX", "CHOOSE", "CONSTANTS", "LOG_PROBABILITIES", "SKIP", "TRUNCATED", "WHOLE", "SelectArguments"]

CHOOSE: Final = 0
LOG_PROBABILITIES: Final = 1

SKIP: Final = -1
ARGMAX: Final = 0
WHOLE: Final = 1
TRUNCATED: Final = 2

CONSTANTS: Final = {
    "mode": {"choose": CHOOSE, "log_probabilities": LOG_PROBABILITIES},
    "select": {"skip": SKIP, "argmax": ARGMAX, "whole": WHOLE, "truncated": TRUNCATED},
    "failure": {"invalid_row": -1, "empty_row": -2},
}
"""All of them as the library has them; the failures stand in place of a token's id."""


class SelectArguments(ctypes.Structure):
    """`SelectArgs` of selection.h, field by field.

    Attributes:
        mode: `CHOOSE` writes `ids`; `LOG_PROBABILITIES` reads `tokens` and writes `chosen` and the tables.
        rows: which row of `logits` each row of work is about, [N] int64; null: the same.
        kinds: `SKIP`, `ARGMAX`, `WHOLE` or `TRUNCATED`, [N] int32.
        temperature, top_p, log_min_p, uniforms: [N] float64. Null where no row reads them.
        top_k: [N] int64.
        ids: token ids, or -1 for a row with NaN and -2 for one of nothing but -inf, [N] int64.
        tokens, num_top: [N] int64.
        chosen: the tokens' log-probabilities, [N] float64.
        ranks: from 1; 0 for a row with NaN, [N] int64.
        top_values, top_ids: most likely first, filled up with -inf, [N, W] float64 and int64.
    """

    _fields_ = [
        ("mode", c_int32),
        ("num_rows", c_int32),
        ("vocab", c_int64),
        ("stride", c_int64),
        *((name, c_void_p) for name in (
            "logits", "rows", "kinds", "temperature", "top_k", "top_p", "log_min_p", "uniforms", "ids", "tokens",
            "num_top",
        )),
        ("width", c_int64),
        *((name, c_void_p) for name in ("chosen", "ranks", "top_values", "top_ids")),
    ]  # fmt: skip
