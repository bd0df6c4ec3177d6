"""What the simulator's clients ask for, and the caches that they ask it of."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from aiocb.engine.prepare import StreamSpec
from aiocb.sampling_params import SamplingParams

__all__ = ["EOS_TOKEN_ID", "LAYOUTS", "MAX_MODEL_LEN", "VOCAB_SIZE", "Layout", "random_spec", "random_tokens"]

VOCAB_SIZE = 61
MAX_MODEL_LEN = 160
EOS_TOKEN_ID = 3


class Layout(NamedTuple):
    """A cache to run on; `windows` has one entry for each group of layers, None for full attention.

    With `num_slots`, the model has states, and a snapshot of a long prompt every `interval` tokens. `swap_places` of
    each group are there for what is preempted.
    """

    name: str
    num_blocks: int | tuple[int, ...]
    page_size: int
    windows: tuple[int | None, ...]
    num_slots: int = 0
    interval: int | None = None
    swap_places: int = 0


LAYOUTS = (
    Layout("roomy", 200, 4, (None,)),
    Layout("tiny", 26, 4, (None,)),
    Layout("hybrid", (90, 60), 4, (None, 9)),
    Layout("tiny hybrid", (24, 18), 4, (None, 6)),
    Layout("sliding", 30, 4, (7,)),
    Layout("large pages", 12, 16, (None,)),
    Layout("tiny, swapped", 26, 4, (None,), swap_places=60),
    Layout("tiny hybrid, swapped", (24, 18), 4, (None, 6), swap_places=9),
    Layout("states", 90, 4, (None,), 20, 12),
    Layout("tiny states", (26, 20), 4, (None, 9), 4, 8),
    Layout("tiny states, swapped", 24, 4, (None,), 5, 8, 20),
)


def random_tokens(chance: random.Random, count: int) -> list[int]:
    """So many random token ids."""
    return [chance.randrange(VOCAB_SIZE) for _ in range(count)]


def random_spec(chance: random.Random, name: str, prefixes: list[list[int]]) -> StreamSpec:
    """A request of any kind; half of the prompts begin like others. Some can never fit and have to be refused."""
    length = chance.choice((1, 3, 8, 20, 40))
    if chance.random() < 0.5:
        prompt = chance.choice(prefixes)[:length] + random_tokens(chance, chance.randrange(4))
    else:
        prompt = random_tokens(chance, length)
    maximum = chance.choice((None, 0, 1, 2, 8, 30, 30, 60, 1000))
    values: dict[str, Any] = {
        "max_new_tokens": maximum,
        "min_new_tokens": min(chance.choice((0, 0, 3)), 60 if maximum is None else maximum),
        "temperature": chance.choice((0.0, 1.0)),
        "seed": chance.randrange(1 << 40),
        "ignore_eos": chance.random() < 0.4,
        "n": chance.choice((1, 1, 1, 1, 1, 1, 2, 3)),
    }
    if chance.random() < 0.2:
        values["stop_token_ids"] = chance.sample(range(VOCAB_SIZE), 2)
    if chance.random() < 0.25:
        values["stop"] = ["".join(chance.choice("abcdefg") for _ in range(chance.choice((1, 2, 3))))]
        values["include_stop_str_in_output"] = chance.random() < 0.3
    if chance.random() < 0.1:
        values["logprobs"] = 0
    if chance.random() < 0.05:
        values["prompt_logprobs"] = 0
    return StreamSpec(
        prompt,
        SamplingParams(**values),
        name,
        priority=chance.randrange(3),
        timeout=chance.choice((None, None, None, 0.1, 0.5, 3.0)),
        queue_timeout=chance.choice((None, None, None, 0.1)),
        cache_salt=chance.choice((None, None, "tenant a", "tenant b")),
        stream_interval=chance.choice((1, 1, 1, 4, None)),
        max_unread_tokens=chance.choice((None, None, 1, 6)),
        on_unread="cancel" if chance.random() < 0.2 else "pause",
    )
