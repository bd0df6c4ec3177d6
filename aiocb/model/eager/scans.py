"""Scans that a model of transformers begins at zero, whatever came before: the state of a prompt's next chunk is added.

The recurrence of Mamba 1 is linear in its state:

    h[t] = a[t] * h[t - 1] + b[t],  y[t] = c[t] . h[t]        a[t] = exp(A * dt[t])

so what a scan from zero lacks is the old state, decayed: c[t] . (a[1] ... a[t] * h[0]), and for the state itself
a[1] ... a[L] * h[0]. (All four users of the scan, and its CUDA kernel, take no initial state.)

Legend: B rows, C channels, L tokens, N size of the state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.passes import current

__all__ = ["continue_scan", "continued", "is_untouched", "plain_forward"]

_LIBRARY = os.path.dirname(transformers.__file__)
_SCAN = "mamba_selective_scan"
_MAX_VALUES = 1 << 24
"""Of decayed states that are held at once."""


def plain_forward(own: Any) -> FunctionType | None:
    """Return what the decorators of transformers are around; None where somebody else's are, too."""
    function: Any = own.__func__ if isinstance(own, MethodType) else None
    while hasattr(function, "__wrapped__"):
        if not function.__code__.co_filename.startswith(_LIBRARY):
            return None
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def is_untouched(own: Any) -> bool:
    """True for a forward as transformers has it: nobody has wrapped or replaced it, on the module or on its class."""
    plain = plain_forward(own)
    return plain is not None and plain.__code__.co_filename.startswith(_LIBRARY)


def continued(module: nn.Module) -> Callable[..., Any]:
    """Return a mixer's forward that goes on from the state of its requests, where its scan would forget it.

    Raises:
        NotPlainError: somebody has wrapped a forward that may be such a one: what it calls cannot be changed.
    """
    own = module.forward
    plain = plain_forward(own)
    if plain is None and _SCAN in vars(sys.modules[type(module).__module__]):
        raise NotPlainError(f"the forward of {type(module).__name__} is wrapped, and its scan forgets earlier chunks")
    if plain is None or not isinstance(own, MethodType) or _SCAN not in plain.__code__.co_names:
        return own
    scan, receiver = plain.__globals__[_SCAN], own.__self__
    # Without the state's users knowing: the function's own copy looks up our scan under the same name.
    heads: list[Iterator[Tensor | None]] = [repeat(None)]

    def scan_on(*args: Any, **kwargs: Any) -> Any:
        return continue_scan(scan, next(heads[0]), *args, **kwargs)

    own_copy = FunctionType(
        plain.__code__, {**plain.__globals__, _SCAN: scan_on}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    own_copy.__kwdefaults__ = plain.__kwdefaults__

    def forward(*args: Any, **kwargs: Any) -> Any:
        heads[0] = _initial_states()
        return own_copy(receiver, *args, **kwargs)

    return forward


def _initial_states() -> Iterator[Tensor | None]:
    """Yield the state from which each of a mixer's scans goes on: one, or one for each head in turn."""
    handler = current().handler
    number = 0
    while True:
        state = handler.initial_state
        yield state if state is None or state.dim() == 3 else state[:, number]
        number += 1


def continue_scan(
    scan: Callable[..., Any],
    before: Tensor | None,
    inputs: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803, as in the papers
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Any:
    """Run a scan from zero, and add what a state from before adds.

    Args:
        scan: of transformers.
        before: [B, C, N], or None for a scan from zero.
        inputs, dt, z: [B, C, L]
        A: [C, N]
        B, C: [B, N, L]
    """
    options |= {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
    if before is None:
        return scan(inputs, dt, A, B, C, z=z, return_last_state=return_last_state, **options)
    output, last = scan(inputs, dt, A, B, C, z=z, return_last_state=True, **options)
    steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[..., None]
    if delta_softplus:
        steps = F.softplus(steps)
    since = steps.cumsum(-1)  # [B, C, L]
    added = torch.empty_like(since)
    length = max(_MAX_VALUES // (before.numel() or 1), 1)
    for start in range(0, since.shape[-1], length):
        part = slice(start, start + length)
        decayed = torch.exp(since[..., part, None] * A.float()[:, None]) * before.float()[:, :, None]  # [B, C, l, N]
        added[..., part] = torch.einsum("bcln,bnl->bcl", decayed, C[..., part].float())
    if z is not None:
        added = added * F.silu(z.float())
    last = last + (torch.exp(since[..., -1:] * A.float()) * before.float()).to(last.dtype)
    output = output + added.to(output.dtype)
    return (output, last) if return_last_state else output
