"""Position tables that a model would index by itself, from the length of its cache: told the packed positions instead.

Most models take `position_ids` and pass them on. Two kinds do not: a table whose module computes positions when it is
not given any (bart and its family), and a table that is indexed with an offset which the model adds only to positions
that it made itself (roberta and its family). Both are learned by watching the tables in the model's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

__all__ = ["PositionTable", "find_tables", "injected", "learn_tables"]


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


def find_tables(model: nn.Module) -> list[nn.Module]:
    """Find the modules that may be tables of positions, by name."""
    found = []
    for name, module in model.named_modules():
        label = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        if "pos" in label and "embed" in label and not any(True for _ in module.children()):
            found.append(module)
    return found


def learn_tables(
    tables: list[nn.Module], positions: Tensor, run_own: Callable[[], Any], run_packed: Callable[[], Any]
) -> list[PositionTable]:
    """Compare how the tables are called in the model's own forward and in a packed one.

    Args:
        tables: candidates.
        positions: what `run_packed` passes, and not what a model would make: [T] with gaps.
        run_own: runs as many tokens from position 0, without a cache.
        run_packed: runs a packed step.

    Returns:
        the tables that the passed positions do not reach, or reach without their offset.
    """
    own, packed = _watch(tables, run_own), _watch(tables, run_packed)
    learned: list[PositionTable] = []
    for module in tables:
        own_call, packed_call = own.get(id(module)), packed.get(id(module))
        if own_call is None or packed_call is None:
            continue
        parameters = list(inspect.signature(module.forward).parameters)
        if "position_ids" in parameters:
            index = parameters.index("position_ids")
            is_by_place = len(packed_call.args) > index
            given = packed_call.args[index] if is_by_place else packed_call.kwargs.get("position_ids")
            is_told = _is_index(given) and torch.equal(given.flatten(), positions)
            if not is_by_place and not is_told:
                learned += _try_shapes(module, own_call)
        elif own_call.args and packed_call.args and _is_index(own_call.args[0]) and _is_index(packed_call.args[0]):
            made, used = own_call.args[0], packed_call.args[0]
            offset = int(made.flatten()[0])
            is_counting = torch.equal(made.flatten() - offset, torch.arange(made.numel(), device=made.device))
            if is_counting and not torch.equal(used.flatten(), positions + offset):
                learned.append(PositionTable(module, False, is_flat=made.dim() == 1, offset=offset))
    return learned


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def _watch(tables: list[nn.Module], run: Callable[[], Any]) -> dict[int, _Call]:
    """Run and note the last call of each table."""
    calls: dict[int, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[id(module)] = _Call(args, dict(kwargs), output)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in tables]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _is_index(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.numel() > 0


def _try_shapes(module: nn.Module, own_call: _Call) -> Iterator[PositionTable]:
    """Yield the table if explicit positions give what it gave by itself; some want [T], some [1, T]."""
    args, kwargs, output = own_call
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


@contextmanager
def injected(tables: list[PositionTable], positions: Tensor) -> Iterator[None]:
    """Tell the tables the packed positions [1, T] while inside."""
    with ExitStack() as stack:
        for table in tables:
            handle = table.module.register_forward_pre_hook(_hook(table, positions), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _hook(table: PositionTable, positions: Tensor) -> Callable[..., Any]:
    def inject(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        told = (positions[0] if table.is_flat else positions) + table.offset
        if table.takes_positions:
            return args, {**kwargs, "position_ids": told}
        return (told, *args[1:]), kwargs

    return inject
