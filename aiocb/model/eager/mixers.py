"""Which modules compute all tokens of a step at once, and which are called in parts.

What mixes tokens are the modules that take the cache. Those that only hand it keys and values and call the attention
function run *packed*. Those that keep a state of their own run *split*: all requests with one new token as one call on
[B, 1, ...], every other request as a call of its own on [1, L, ...], each with the cache of these requests alone.

    packed [1, T]  ─► part [B, 1] ─► mixer ─►┐
                   ─► part [1, L] ─► mixer ─►┴─► packed [1, T]

Everything is learned by watching two dry runs of different length: who asks for states, and which dimensions of what
goes in and comes out are the tokens.

Legend: T packed tokens, B requests of a part, L tokens of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from aiocb.config import Choice
from aiocb.model.eager.handlers import Recorder
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.packed import packed_forward
from aiocb.model.eager.passes import Part, current, entered
from aiocb.model.eager.scans import continued
from aiocb.model.eager.states import StateKey

__all__ = ["Mixer", "Watch", "explain", "learn_mixers", "split"]

_Dims = Any
"""Of a tensor: its dimensions that are tokens; of a list or a dictionary: those of its elements; None: no tokens."""


class Mixer(NamedTuple):
    """A module that is called in parts.

    Attributes:
        module: of the view.
        arguments: dimensions of what it is given: positional, by keyword.
        result: of what it returns.
        packed: a forward that computes all tokens in one call, or why there is none.
    """

    module: nn.Module
    arguments: tuple[_Dims, _Dims]
    result: _Dims
    packed: Callable[..., Any] | str

    @property
    def is_packed(self) -> bool:
        """True when all tokens can be computed in one call."""
        return not isinstance(self.packed, str)


class _Call(NamedTuple):
    """Shapes of what a module was given, and returned."""

    args: Any
    kwargs: Any
    result: Any


class Watch:
    """Writes down how the modules that take the cache are called in one dry run of `num_tokens` tokens."""

    def __init__(self, model: nn.Module, recorder: Recorder, num_tokens: int) -> None:
        self._model = model
        self._stack = recorder.stack
        self.recorder = recorder
        self.num_tokens = num_tokens
        self.calls: dict[nn.Module, _Call] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block ends."""
        handles: list[Any] = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _takes_cache(args, kwargs):
            self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._stack and self._stack[-1] is module and _takes_cache(args, kwargs):
            self._stack.pop()
            self.calls[module] = _Call(_shapes(list(args)), _shapes(kwargs), _shapes(result))


def _takes_cache(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, Cache) for value in (*args, *kwargs.values()))


def _shapes(value: Any) -> Any:
    """What is compared of two calls: shapes as tuples, numbers as they are."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return [_shapes(item) for item in value]
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return value if isinstance(value, int) else None


def learn_mixers(first: Watch, second: Watch) -> list[Mixer]:
    """Find the modules that keep states.

    Raises:
        NotPlainError: one of them cannot be called in parts.
    """
    owners = first.recorder.owners
    if set(first.recorder.states) - {key for keys in owners.values() for key in keys}:
        raise NotPlainError("it works on its states outside of the modules that take its cache")
    mixers = []
    for module in owners:
        name = type(module).__name__
        if module in first.recorder.attentive:
            raise NotPlainError(f"{name} keeps a state and attends")
        lengths = first.num_tokens, second.num_tokens
        one, other = first.calls[module], second.calls[module]
        args, kwargs, result = (_dims(*pair, lengths, name) for pair in zip(one, other, strict=True))
        mixers.append(Mixer(module, (args, kwargs), result, _packed(module, owners[module])))
    return mixers


def _packed(module: nn.Module, states: set[StateKey]) -> Callable[..., Any] | str:
    try:
        return packed_forward(module, {key.kind for key in states})
    except NotPlainError as error:
        return str(error)


def _dims(first: Any, second: Any, lengths: tuple[int, int], name: str) -> _Dims:
    """Return the dimensions that changed with the number of tokens."""
    if type(first) is not type(second):
        raise NotPlainError(f"{name} is not called alike for every number of tokens")
    if isinstance(first, tuple):
        changed = tuple(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
        if len(first) != len(second) or any((first[index], second[index]) != lengths for index in changed):
            raise NotPlainError(f"{name} works on tensors of {first} and {second} for {lengths} tokens")
        if len(changed) > 1 or changed == (0,):
            raise NotPlainError(f"{name} works on tensors of {first} for {lengths[0]} tokens")
        return changed or None
    if isinstance(first, list):
        if len(first) != len(second):
            raise NotPlainError(f"{name} is not called alike for every number of tokens")
        return _or_none([_dims(*pair, lengths, name) for pair in zip(first, second, strict=True)])
    if isinstance(first, dict):
        if first.keys() != second.keys():
            raise NotPlainError(f"{name} is not called alike for every number of tokens")
        found = {key: _dims(first[key], second[key], lengths, name) for key in first}
        return {key: dims for key, dims in found.items() if dims is not None} or None
    if first != second:
        raise NotPlainError(f"{name} is told the number of tokens")
    return None


def _or_none(found: list[_Dims]) -> _Dims:
    return found if any(dims is not None for dims in found) else None


def split(mixer: Mixer) -> None:
    """Call the mixer packed or in the parts of a step, from now on; hooks run around the whole of it as before."""
    own, packed = continued(mixer.module.forward), mixer.packed
    (args_dims, kwargs_dims), result_dims = mixer.arguments, mixer.result

    def forward(*args: Any, **kwargs: Any) -> Any:
        answering = current(None)
        if answering is not None and answering.packed is not None and not isinstance(packed, str):
            with entered(answering.packed):
                return packed(*args, **kwargs)
        if answering is None or answering.parts is None:
            return own(*args, **kwargs)
        results = []
        for part in answering.parts:
            own_args, own_kwargs = _taken(args, args_dims, part), _taken(kwargs, kwargs_dims, part)
            with entered(part.inner):
                results.append(own(*own_args, **own_kwargs))
            part.inner.handler.finish_part()
        return _joined(results, result_dims, answering.parts)

    mixer.module.__dict__["forward"] = forward


def _taken(value: Any, dims: _Dims, part: Part) -> Any:
    """Take the tokens of a part."""
    if dims is None or value is None:
        return value
    if isinstance(dims, tuple):
        taken = value.narrow(dims[0], part.start, part.stop - part.start)
        return taken.transpose(0, dims[0]) if part.is_batch else taken
    if isinstance(dims, dict):
        return {key: _taken(item, dims.get(key), part) for key, item in value.items()}
    items = [_taken(item, each, part) for item, each in zip(value, dims, strict=True)]
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def _joined(results: list[Any], dims: _Dims, parts: Sequence[Part]) -> Any:
    """Put what came of the parts side by side; what holds no tokens is that of the first one."""
    first = results[0]
    if dims is None or first is None:
        return first
    if isinstance(dims, tuple):
        tokens = [
            result.transpose(0, dims[0]) if part.is_batch else result
            for result, part in zip(results, parts, strict=True)
        ]
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens, dims[0])
    if isinstance(dims, dict):
        first_items = {key: _joined([result[key] for result in results], dims.get(key), parts) for key in first}
        return type(first)(**first_items) if type(first) is not dict else first_items
    items = [_joined(list(column), each, parts) for column, each in zip(zip(*results, strict=True), dims, strict=True)]
    return type(first)._make(items) if hasattr(first, "_make") else type(first)(items)


def explain(mixers: Sequence[Mixer], attending: Iterable[str], scans: str | None, why_not: str) -> Choice:
    """Say of each kind of mixer how it is called, and why.

    Args:
        attending: names of the modules that attend.
        scans: what scans packed rows; None where nothing does, for the reason `why_not`.
    """
    reasons = {
        type(mixer.module).__name__: why_not if scans is None else mixer.packed if isinstance(mixer.packed, str) else ""
        for mixer in mixers
    }
    told = [f"{name} {'split' if reason else f'scanned by {scans} code'}" for name, reason in reasons.items()]
    told += [f"{name} packed" for name in sorted(set(attending) - set(reasons))]
    split_why = "; ".join(sorted({reason for reason in reasons.values() if reason}))
    why = "what only caches keys and calls the attention function is called once for all"
    if split_why:
        why += f"; what keeps a state is called once for all that decode, and once for each prompt: {split_why}"
    return Choice("mixers", ", ".join(told), why)
