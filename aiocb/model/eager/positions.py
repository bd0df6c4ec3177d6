"""Where a model takes positions from, and how far they may go.

Most models take `position_ids` and pass them on. Two kinds of tables do not get them: one whose module computes
positions when it is not given any (bart and its family), and one that is indexed with an offset which the model adds
only to positions that it made itself (roberta and its family). Both are learned by watching the tables in the model's
own forward, and told the packed positions from then on; so are those that would get them anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["PositionTable", "learn_tables", "sequence_bound"]

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length",
                 "max_target_positions")  # fmt: skip
_UNBOUNDED = 1 << 20


def sequence_bound(config: Any) -> tuple[int, str]:
    """The most tokens of a sequence that a decoder's configuration allows, and why."""
    length, reason = _UNBOUNDED, "the configuration names no bound"
    for name in _LENGTH_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            length, reason = value, f"{name} of the model"
            break
    factors = [
        float(rope.get("factor") or 1.0)
        for rope in _rotations(config)
        if str(rope.get("rope_type", rope.get("type"))) == "dynamic" and not rope.get("alpha")
    ]
    if factors and min(factors) > 1.0 and length < _UNBOUNDED:
        return int(length * min(factors)), f"{reason}, stretched by the factor of its dynamic rotation"
    return length, reason


def _rotations(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters: one dictionary, or one for each type of layers."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, dict):
        return []
    return [found, *(nested for nested in found.values() if isinstance(nested, dict))]


class PositionTable(NamedTuple):
    """A module that has to be told positions.

    Attributes:
        module: the table.
        takes_positions: they go to its `position_ids` keyword; else its first argument is replaced.
        is_flat: positions are passed as [T] instead of [1, T].
        offset: added to the positions.
    """

    module: nn.Module
    takes_positions: bool
    is_flat: bool = False
    offset: int = 0

    def tell(self, positions: Callable[[], Tensor]) -> None:
        """Give the table these positions [1, T] at every call from now on."""

        def inject(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            told = (positions()[0] if self.is_flat else positions()) + self.offset
            if self.takes_positions:
                return args, {**kwargs, "position_ids": told}
            return (told, *args[1:]), kwargs

        self.module.register_forward_pre_hook(inject, with_kwargs=True)


def learn_tables(model: nn.Module, run: Callable[[], Any]) -> tuple[list[PositionTable], int]:
    """Watch how what may be a table of positions, by its name, is called in the model's own forward.

    Args:
        model: is searched.
        run: runs a few tokens from position 0, without a cache.

    Returns:
        the tables that can be told positions; and how many positions there are in the smallest of them.
    """
    tables = []
    for name, module in model.named_modules():
        label = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        if "pos" in label and "embed" in label and not any(True for _ in module.children()):
            tables.append(module)
    if not tables:
        return [], _UNBOUNDED
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module] = args, dict(kwargs), output

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in tables]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    learned: list[PositionTable] = []
    bound = _UNBOUNDED
    for module, (args, kwargs, output) in calls.items():
        rows = getattr(module, "num_embeddings", _UNBOUNDED)
        parameters = list(inspect.signature(module.forward).parameters)
        if "position_ids" in parameters:
            bound = min(bound, rows)
            if len(args) <= parameters.index("position_ids"):
                learned += _try_shapes(module, args, kwargs, output)
        elif args and isinstance(args[0], Tensor) and args[0].numel() and not args[0].is_floating_point():
            made = args[0]
            offset = int(made.flatten()[0])
            if torch.equal(made.flatten() - offset, torch.arange(made.numel(), device=made.device)):
                bound = min(bound, rows - offset)
                learned.append(PositionTable(module, False, is_flat=made.dim() == 1, offset=offset))
    return learned, bound


def _try_shapes(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Iterator[PositionTable]:
    """Yield the table if explicit positions give what it gave by itself; some want [T], some [1, T]."""
    if not isinstance(output, Tensor):
        return
    positions = torch.arange(output.shape[-2], device=output.device)
    for is_flat in (False, True):
        try:
            tried = module(*args, **{**kwargs, "position_ids": positions if is_flat else positions.unsqueeze(0)})
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue
        if tried.shape == output.shape and torch.equal(tried, output):
            yield PositionTable(module, True, is_flat)
            return
