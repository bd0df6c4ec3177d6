"""Which replica has the beginning of a prompt in its cache: what a router remembers, and how it decides. Pure; no Ray.

A prompt's text is cut into blocks of `BLOCK` characters, and each block is known by the hash of everything up to its
end. A replica that was given a prompt has all of its blocks; the replica with the most blocks of a new prompt takes it,
as long as it has not much more to do than the least loaded one. So a prefix that everybody uses spreads over replicas.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["BLOCK", "Decision", "PrefixTable", "chain_of", "chain_of_body", "decide"]

R = TypeVar("R", bound=Hashable)

BLOCK = 256
"""Characters: about 64 tokens. What is shorter is not worth a detour."""
_MAX_BLOCKS = 128
_MAX_OWNERS = 8
_TEXTS = ("cache_salt", "tools", "instructions", "system", "messages", "prompt", "input")


def chain_of_body(body: bytes) -> tuple[int, ...]:
    """The blocks of the prompt in the body of an OpenAI request; none where there is no prompt. Raises nothing."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(values, dict):
        return ()
    return chain_of(*(values.get(name) for name in _TEXTS))


def chain_of(*prompts: Any) -> tuple[int, ...]:
    """The blocks of texts, messages or token ids, one after the other; of anything else, none."""
    length, pieces = 0, []
    for prompt in prompts:
        for piece in _pieces(prompt):
            pieces.append(piece)
            length += len(piece)
            if length >= BLOCK * _MAX_BLOCKS:
                break
    text = "".join(pieces)[: BLOCK * _MAX_BLOCKS].encode("utf-8", "surrogatepass")
    chain, digest = [], hashlib.blake2b(digest_size=8)
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        digest.update(text[start : start + BLOCK])
        chain.append(int.from_bytes(digest.digest(), "little"))
    return tuple(chain)


def _pieces(value: Any) -> Iterable[str]:
    """Text that begins as the prompt begins, whatever comes later: of a list, item by item."""
    if isinstance(value, str):
        yield value
        yield "\n"
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, Mapping):
        for name in sorted(map(str, value)):
            yield name
            yield from _pieces(value.get(name))
    elif isinstance(value, (int, float)):
        yield f"{value},"


class PrefixTable(Generic[R]):
    """Which replicas were given which blocks; the blocks that were met longest ago are forgotten.

    Args:
        max_blocks: remembered in all.
    """

    def __init__(self, max_blocks: int = 200_000) -> None:
        self._owners: OrderedDict[int, OrderedDict[R, None]] = OrderedDict()
        self._max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, chain: Sequence[int], replica: R) -> None:
        """Remember that a replica was given a prompt."""
        for block in chain:
            owners = self._owners.setdefault(block, OrderedDict())
            self._owners.move_to_end(block)
            owners[replica] = None
            owners.move_to_end(replica)
            if len(owners) > _MAX_OWNERS:
                owners.popitem(last=False)
        while len(self._owners) > self._max_blocks:
            self._owners.popitem(last=False)

    def depths(self, chain: Sequence[int]) -> dict[R, int]:
        """How many of a prompt's first blocks each replica has."""
        found: dict[R, int] = {}
        for depth, block in enumerate(chain, 1):
            owners = self._owners.get(block, ())
            reached = [replica for replica in owners if found.get(replica, 0) == depth - 1]
            if not reached:
                break
            found.update(dict.fromkeys(reached, depth))
        return found

    def forget(self, replicas: Iterable[R]) -> None:
        """Forget replicas that are no more."""
        gone = set(replicas)
        for block in [block for block, owners in self._owners.items() if not gone.isdisjoint(owners)]:
            owners = self._owners[block]
            for replica in gone & owners.keys():
                del owners[replica]
            if not owners:
                del self._owners[block]


class Decision(NamedTuple, Generic[R]):
    """Where a request should go.

    Attributes:
        order: all replicas, the most wanted first.
        reason: `affinity`, `balance` (who has the prefix has too much to do), `new` (nobody has it), or `no_prompt`
            (there is none, or it is short).
    """

    order: list[R]
    reason: str


def decide(loads: Mapping[R, int], chain: Sequence[int], depths: Mapping[R, int], max_imbalance: int) -> Decision[R]:
    """Choose among replicas; of equals the first.

    Args:
        loads: requests that each has, of all that may be chosen.
        chain: the prompt's blocks.
        depths: see `PrefixTable.depths`.
        max_imbalance: how many more requests than the least loaded one a replica may have and still be preferred.
    """
    order = sorted(loads, key=lambda each: loads[each])
    most = loads[order[0]] + max_imbalance
    owners = [each for each in order if depths.get(each)]
    if not owners:
        return Decision(order, "new" if chain else "no_prompt")
    best = max((each for each in owners if loads[each] <= most), key=lambda each: depths[each], default=None)
    if best is None:
        return Decision(order, "balance")
    return Decision([best, *(each for each in order if each != best)], "affinity")
