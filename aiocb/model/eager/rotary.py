"""Rotary embeddings that change with the length of a sequence: per request, not with the longest one of a batch.

Two types of transformers do that: `longrope` has two sets of factors, the second for sequences beyond the length that
the model was first trained with; `dynamic` stretches its base with every token beyond. Both look at the largest
position of a forward pass. What follows for a request is what `generate` makes of it with its cache, a prompt of P
tokens in one pass and then a token at a time: a token at position p is rotated for the length max(P, p + 1), and the
keys that are cached stay as they are. Computing all anew without a cache gives something else there: which is better
nobody has promised, and `generate` is what the models are used with.

The Phi family of longrope is the exception: its `generate` throws the cache away when a sequence gets longer than the
first length, and computes all anew with the second factors. So its requests start over there, once (the scheduler does
that, see `step.LengthSwitch`), and equal both `generate` and computing all anew.

Keys of another kind are not shared: a prompt of more tokens than the length finds no prefix of a shorter one's.

Legend: T packed tokens, D rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from aiocb.step import LengthSwitch

__all__ = ["Lengths", "follow_lengths", "learn_switch"]

_RECOMPUTING = ("phi3", "phimoe", "phi4_multimodal")
"""Types whose `generate` starts over, where their configuration says at which length."""


class Lengths(NamedTuple):
    """For which length each token of a pass is rotated.

    Attributes:
        of_tokens: [T], on the host.
        longest: of them.
    """

    of_tokens: npt.NDArray[np.int64]
    longest: int


def _switching(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield the rotary modules that look at the length, with a type of theirs and the layers that it is for."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield module, kind, layers


def learn_switch(model: nn.Module, config: Any) -> LengthSwitch | tuple[int, str] | None:
    """Find out at which length the rotation changes.

    Args:
        model: whose modules are looked at.
        config: of its decoder.

    Returns:
        None where it never does; where modules disagree, a length that may not be exceeded, and why.
    """
    switches = set()
    for module, kind, layers in _switching(model):
        own: Any = module
        if "dynamic" in kind:
            switches.add(LengthSwitch(int(own.original_max_seq_len), is_by_length=True))
            continue
        parameters = own.config.rope_parameters
        length = int((parameters[layers] if layers else parameters)["original_max_position_embeddings"])
        restart = getattr(config, "original_max_position_embeddings", None)
        is_recomputed = config.model_type in _RECOMPUTING and restart is not None
        if is_recomputed and restart != length:
            return length, f"beyond it the rotation changes, but generate() starts over beyond {restart} only"
        switches.add(LengthSwitch(length, is_recomputed=is_recomputed))
    if len(switches) > 1:
        return min(switch.length for switch in switches), "beyond it the rotation changes in some layers only"
    return switches.pop() if switches else None


def follow_lengths(model: nn.Module, switch: LengthSwitch, lengths: Callable[[], Lengths | None]) -> None:
    """Let the rotary modules of a view rotate each token for its own length from now on.

    Args:
        model: its modules are changed.
        switch: what `learn_switch` returned.
        lengths: returns those of the pass that is under way; None: all are below the switch.
    """
    for module in {module for module, *_ in _switching(model)}:
        module.__dict__["forward"] = _by_length(module.forward, switch, lengths)


def _by_length(
    own: Callable[..., Any], switch: LengthSwitch, lengths: Callable[[], Lengths | None]
) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted = lengths()
        if wanted is None or wanted.longest < switch.length:
            return own(x, position_ids, *args, **kwargs)
        if switch.is_by_length:
            # One that has grown (the owner's had, or for other tokens) goes back to where it began at position 0 alone.
            own(x, torch.zeros_like(position_ids[..., :1]), *args, **kwargs)
        if wanted.longest == switch.length:
            return own(x, position_ids, *args, **kwargs)
        kinds = switch.kinds_of(wanted.of_tokens)
        if position_ids.shape[-1] != len(kinds):
            raise ValueError(f"{position_ids.shape[-1]} positions are rotated in a pass of {len(kinds)} tokens")
        rotations: list[Tensor] = []
        # In ascending order: a dynamic one grows only.
        for kind in np.unique(kinds).tolist():
            places = torch.from_numpy(np.flatnonzero(kinds == kind)).to(position_ids.device)
            positions = position_ids.index_select(-1, places)
            if kind:  # one more position, which makes the pass look as long as it should, and is dropped again
                last = kind - 1 if switch.is_by_length else switch.length
                positions = torch.cat((positions, torch.full_like(positions[..., :1], last)), -1)
            for number, part in enumerate(own(x, positions, *args, **kwargs)):
                part = part[..., : len(places), :]
                if number == len(rotations):
                    rotations.append(part.new_empty(*part.shape[:-2], len(kinds), part.shape[-1]))
                rotations[number].index_copy_(-2, places, part)
        return tuple(rotations)

    return forward
