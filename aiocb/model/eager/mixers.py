"""Which modules compute all tokens of a step at once, and which are called in parts.

What mixes tokens are the modules that take the cache. Those that only hand it keys and values and call the attention
function run *packed*. Those that keep a state, or attend in a way of their own (see `survey`), run *split*: all
requests with one new token as one call on [B, 1, ...], every other request as a call of its own on [1, L, ...], each
with the cache of these requests alone.

    packed [1, T]  ─► part [B, 1] ─► mixer ─►┐
                   ─► part [1, L] ─► mixer ─►┴─► packed [1, T]

Everything is learned by watching two dry runs of different length: who asks for states, and which dimensions of what
goes in and comes out are the tokens.

Legend: T packed tokens, B requests of a part, L tokens of one request.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from aiocb.config import Choice
from aiocb.model.eager.handlers import Recorder
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.passes import Part, current, entered
from aiocb.model.eager.scans import continued
from aiocb.model.eager.survey import Outside, Surveyor

__all__ = ["Mixer", "Watch", "attend_outside", "explain", "learn_mixers", "split"]

_Dims = Any
"""Of a tensor: its dimensions that are tokens; of a list or a dictionary: those of its elements; None: no tokens."""

_MASK, _DISTANCES = "mask", "distances"
"""In place of dimensions: a mask that the pass has made; how far each query is from each key."""

_RAGGED = "ragged"
"""Likewise: what is as long as the keys are, of a result that stays in parts until it is an argument again."""


class _Ragged(list[Any]):
    """What came of each part."""


class Mixer(NamedTuple):
    """A module that is called in parts.

    Attributes:
        module: of the view.
        arguments: dimensions of what it is given: positional, by keyword.
        result: of what it returns.
        attends: why it attends in parts; empty where it only keeps a state.
        is_single: no two requests in one call.
    """

    module: nn.Module
    arguments: tuple[_Dims, _Dims]
    result: _Dims
    attends: str = ""
    is_single: bool = False


class _Call(NamedTuple):
    """Shapes of what a module was given, and returned."""

    args: Any
    kwargs: Any
    result: Any


class Watch:
    """Writes down how the modules that take the cache, or are known to keep a state, are called in one dry run."""

    def __init__(self, model: nn.Module, num_tokens: int, known: Set[nn.Module]) -> None:
        self._model = model
        self._known = known
        self.num_tokens = num_tokens
        self.recorder = Recorder()
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        self.surveyor = Surveyor(self.recorder, {layer for layers in lists for layer in layers})
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
        self.surveyor.finish()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in self._known or any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            self.recorder.stack.append(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self.recorder.stack and self.recorder.stack[-1] is module:
            self.recorder.stack.pop()
            self.calls[module] = _Call(self._shapes(list(args)), self._shapes(kwargs), self._shapes(result))

    def _shapes(self, value: Any) -> Any:
        """What is compared of two calls: shapes as tuples, numbers as they are, what is known by its name."""
        if isinstance(value, Tensor):
            if self.surveyor.made(value):
                return _MASK
            positions = torch.arange(self.num_tokens, device=value.device)
            if torch.equal(value, positions[:, None] - positions):
                return _DISTANCES
            return tuple(value.shape)
        if isinstance(value, (list, tuple)):
            return [self._shapes(item) for item in value]
        if isinstance(value, dict):
            return {key: self._shapes(item) for key, item in value.items()}
        return value if isinstance(value, int) else None


def learn_mixers(first: Watch, second: Watch) -> list[Mixer]:
    """Find the modules that keep states, and those that attend in a way of their own.

    Raises:
        NotPlainError: one of them cannot be called in parts.
    """
    recorder, surveyor = first.recorder, first.surveyor
    if set(recorder.states) - {key for keys in recorder.owners.values() for key in keys}:
        raise NotPlainError("it works on its states outside of the modules that take its cache")
    mixers = []
    for module in [*recorder.owners, *(module for module in surveyor.reasons if module not in recorder.owners)]:
        name, why = type(module).__name__, surveyor.reasons.get(module, "")
        lengths = first.num_tokens, second.num_tokens
        one, other = first.calls[module], second.calls[module]
        args, kwargs, result = (_dims(*pair, lengths, name, is_own=bool(why)) for pair in zip(one, other, strict=True))
        is_single = module in surveyor.alone or _DISTANCES in (args or ()) or _DISTANCES in (kwargs or {}).values()
        mixers.append(Mixer(module, (args, kwargs), result, why, is_single))
    return mixers


def _dims(first: Any, second: Any, lengths: tuple[int, int], name: str, *, is_own: bool = False) -> _Dims:
    """Return the dimensions that changed with the number of tokens."""
    if type(first) is not type(second):
        raise NotPlainError(f"{name} is not called alike for every number of tokens")
    if isinstance(first, str):
        return first
    if isinstance(first, tuple):
        changed = tuple(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
        if len(first) != len(second) or any((first[index], second[index]) != lengths for index in changed):
            raise NotPlainError(f"{name} works on tensors of {first} and {second} for {lengths} tokens")
        if len(changed) > 1 and is_own:
            return _RAGGED
        if len(changed) > 1 or changed == (0,):
            raise NotPlainError(f"{name} works on tensors of {first} for {lengths[0]} tokens")
        return changed or None
    if isinstance(first, list):
        if len(first) != len(second):
            raise NotPlainError(f"{name} is not called alike for every number of tokens")
        return _or_none([_dims(*pair, lengths, name, is_own=is_own) for pair in zip(first, second, strict=True)])
    if isinstance(first, dict):
        if first.keys() != second.keys():
            raise NotPlainError(f"{name} is not called alike for every number of tokens")
        found = {key: _dims(first[key], second[key], lengths, name, is_own=is_own) for key in first}
        return {key: dims for key, dims in found.items() if dims is not None} or None
    if first != second:
        raise NotPlainError(f"{name} is told the number of tokens")
    return None


def _or_none(found: list[_Dims]) -> _Dims:
    return found if any(dims is not None for dims in found) else None


def split(mixer: Mixer) -> None:
    """Call the mixer in the parts of a step, from now on; hooks run around the whole of it as before.

    Raises:
        NotPlainError: it cannot be called so.
    """
    module, own = mixer.module, continued(mixer.module)
    (args_dims, kwargs_dims), result_dims = mixer.arguments, mixer.result
    # Some modules look at the name of their attention before they hide anything.
    attends = functools.partial(_named, module.config, "eager") if mixer.attends else nullcontext

    def forward(*args: Any, **kwargs: Any) -> Any:
        answering = current(None)
        if answering is None:
            return own(*args, **kwargs)
        parts = answering.single_parts if mixer.is_single else answering.parts
        if parts is None:
            if not mixer.attends or not isinstance(answering.handler, Recorder):
                return own(*args, **kwargs)
            answering.handler.attending[id(module), -1] = type(module).__name__
            with entered(answering._replace(handler=Surveyor(answering.handler, set()))):
                return own(*args, **kwargs)
        results = []
        for index, part in enumerate(parts):
            take = functools.partial(_taken, part=part, index=index, handler=answering.handler)
            own_args, own_kwargs = take(args, args_dims), take(kwargs, kwargs_dims)
            with entered(part.inner), attends():
                results.append(own(*own_args, **own_kwargs))
            part.inner.handler.finish_part()
        return _joined(results, result_dims, parts)

    module.__dict__["forward"] = forward


@contextmanager
def _named(config: Any, name: str) -> Iterator[None]:
    """Let the modules of this configuration of the view attend by another function, until the block ends."""
    before = config._attn_implementation_internal
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def attend_outside(module: nn.Module) -> None:
    """Let a module that caches nothing attend as its own model does, from now on."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        answering = current(None)
        if answering is None:
            return own(*args, **kwargs)
        with entered(answering._replace(handler=Outside())):
            return own(*args, **kwargs)

    module.__dict__["forward"] = forward


def _taken(value: Any, dims: _Dims, part: Part, index: int, handler: Any) -> Any:
    """Take the tokens of a part."""
    if isinstance(value, _Ragged):
        return value[index]
    if dims == _RAGGED:
        raise NotPlainError("a tensor as long as all keys is made outside of the modules that attend in parts")
    if dims is None or value is None:
        return value
    inner: Any = part.inner.handler
    if dims == _MASK:
        return inner.mask_of(handler.mask_function(value))
    if dims == _DISTANCES:
        return inner.distances
    if isinstance(dims, tuple):
        taken = value.narrow(dims[0], part.start, part.stop - part.start)
        return taken.transpose(0, dims[0]) if part.is_batch else taken
    take = functools.partial(_taken, part=part, index=index, handler=handler)
    if isinstance(dims, dict):
        return {key: take(item, dims.get(key)) for key, item in value.items()}
    items = [take(item, each) for item, each in zip(value, dims, strict=True)]
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def _joined(results: list[Any], dims: _Dims, parts: Sequence[Part]) -> Any:
    """Put what came of the parts side by side; what holds no tokens is that of the first one."""
    first = results[0]
    if dims == _RAGGED:
        return _Ragged(results)
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


def explain(
    mixers: Sequence[Mixer], attending: Iterable[str], scanned: Mapping[nn.Module, str], why_split: Set[str]
) -> Choice:
    """Say of each kind of mixer how it is called, and why.

    Args:
        attending: names of the modules that attend.
        scanned: mixers that scan the rows of all requests at once, and by what.
        why_split: why others that keep a state do not.
    """
    how = {type(mixer.module).__name__: _called(mixer, scanned.get(mixer.module)) for mixer in mixers}
    names = [f"{name} {called}" for name, called in how.items()]
    names += [f"{name} packed" for name in sorted(set(attending) - set(how))]
    parts = {mixer.attends or "keeps a state": None for mixer in mixers if mixer.module not in scanned}
    why = "what only caches keys and calls the attention function, or is scanned, is called once for all"
    if parts:
        why += (
            f"; what {', '.join(parts)} is called once for all that decode, and once for each prompt (one by one: once "
            f"for each request){''.join(f'; {reason}' for reason in sorted(why_split))}"
        )
    return Choice("mixers", ", ".join(names), why)


def _called(mixer: Mixer, scanned: str | None) -> str:
    if scanned is not None:
        return f"scanned by {scanned} code"
    return "one by one" if mixer.is_single else "split"
