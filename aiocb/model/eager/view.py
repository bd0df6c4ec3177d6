"""A view of a user's module: a second tree of modules over the same weights, which the engine may change.

    the owner's   Model ─► Layer ─► Linear ──► parameters ◄── Linear ◄─ Layer ◄─ Model   the view's
                   │                  └──────► hooks      ◄────┘                  │
                  config (sdpa)                                     config (aiocb), eval mode, own buffers

Every module of the tree has a twin of its own: another object of the same class. What the twin shares by reference is
seen live (the dictionary of parameters, so also weights that are assigned anew; hooks, also those that come later);
what the engine or a forward pass changes is the twin's own (children, buffers, training mode, attributes, hooks that
the engine adds). Configurations are copied. Attributes that lead to a module or to a configuration in any other way
(lists, bound methods, partial functions, closures, objects: a forward that somebody patched) are copied as far as they
do, so that a twin never calls into the owner's tree. Where that is impossible, a patched forward is refused, and any
other attribute left out: a forward pass that asks for it fails at load. A hook gets the twin. Modules, attributes of
modules, buffers and configurations are what they were when the view was made; a new view sees new ones.
"""

from __future__ import annotations

import copy
import dis
import functools
import gc
import inspect
import logging
import sys
import weakref
from collections import ChainMap
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from aiocb.errors import ConfigError

__all__ = ["View", "text_config"]

MAX_OWN_BUFFER = 16 << 20
"""Bytes. Rotary tables are written to in a forward pass; larger buffers are weights, which are only read."""

_CHAINED = {
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
_ATOMS = (
    str, bytes, int, float, complex, type(None), type(...), type, ModuleType, BuiltinFunctionType, CodeType, Tensor,
    torch.dtype, torch.device, logging.Logger,
)  # fmt: skip
"""What leads nowhere."""

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "transformers", "accelerate"}
"""Whose functions name no user's module by a global name."""


def text_config(model: Any) -> Any:
    """The config of the decoder: nested in composite models."""
    return model.config.get_text_config(decoder=True)


class View:
    """The second tree over a model's weights.

    Args:
        model: is not changed, now or later, whatever is done with the view.

    Attributes:
        model: the twin of the model, in eval mode.

    Raises:
        ConfigError: a patched forward leads to the model's modules in a way that cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        copier = _Copier(model)
        self.model: Any = copier.twin_of(model)
        _follow_scaling(model, copier)
        self._configs = [config for config in copier.copies.values() if isinstance(config, PreTrainedConfig)]

    def name_attention(self, name: str) -> None:
        """Let every module of the view call the attention function of this name."""
        for config in self._configs:
            config._attn_implementation_internal = name


def _follow_scaling(model: nn.Module, copier: _Copier) -> None:
    """Leave it to the owner's module to divide its weights in place (RWKV does, before it is evaluated), and follow."""
    for owner in model.modules():
        if "layers_are_rescaled" in owner.__dict__:
            twin = copier.twin_of(owner)
            twin.__dict__["_rescale_layers"] = lambda: None
            twin.register_forward_pre_hook(functools.partial(_follow, owner))


def _follow(owner: Any, twin: Any, _: Any) -> None:
    twin.layers_are_rescaled = owner.layers_are_rescaled


class _Globals(dict[str, Any]):
    """Global names of a copied function: those that lead to the model are replaced, the others are looked up live."""

    def __init__(self, names: dict[str, Any]) -> None:
        # The interpreter reads these without asking for missing names.
        super().__init__({name: names[name] for name in ("__builtins__", "__name__", "__package__") if name in names})
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


class _Overlay(ChainMap[Any, Any]):
    """A dictionary of which some values are replaced; all else is read and written where it is."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.maps[0].pop(key, None)
        self.maps[1][key] = value

    def __delitem__(self, key: Any) -> None:
        self.maps[0].pop(key, None)
        del self.maps[1][key]


def _live(original: Any, replaced: dict[str, Any]) -> Any:
    """Make an object of which some attributes are replaced; all else is read and written at the original.

    Raises:
        TypeError: its class does not allow that.
    """
    kind: Any = type(original)
    if any(vars(base).get("__slots__") for base in kind.__mro__) or hasattr(kind, "__del__"):
        raise TypeError("it has slots, or a finaliser that would run twice")
    state = vars(original)

    def read(self: Any, name: str) -> Any:
        if name in replaced:
            return replaced[name]
        return state[name] if name in state else kind.__getattribute__(self, name)

    def write(_: Any, name: str, value: Any) -> None:
        replaced.pop(name, None)
        setattr(original, name, value)

    live: Any = type(kind)(kind.__name__, (kind,), {"__getattribute__": read, "__setattr__": write})
    return object.__new__(live)


class _Copier:
    """Copies what leads to the modules of one tree.

    Attributes:
        copies: by id of the original; also what `copy.deepcopy` has copied of configurations.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copies: dict[int, Any] = {}
        self._held: list[Any] = []  # no id may be used again
        self._leads: dict[int, bool] = {}
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}

    def twin_of(self, module: Any) -> Any:
        """Return the module's twin, made on the first call."""
        if id(module) in self.copies:
            return self.copies[id(module)]
        if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
            if module._forward_hooks or module._forward_pre_hooks:
                raise ConfigError("the compiled module has hooks of its own; register them on the module within")
            return self._remember(module, self.twin_of(module._modules["_orig_mod"]))
        twin: nn.Module = self._remember(module, object.__new__(type(module)))
        name = self._names.get(id(module), type(module).__name__)
        for key, value in list(module.__dict__.items()):
            mark = len(self._held)
            try:
                twin.__dict__[key] = self._attribute(key, value)
            except ConfigError:
                raise
            except Exception as error:  # of classes that nobody here knows
                if inspect.isfunction(getattr(type(module), key, None)):
                    raise ConfigError(
                        f"{name}.{key} is patched with something that leads to the model's modules through {error}; an "
                        "engine cannot copy that to run the model beside its owner"
                    ) from error
                for original in self._held[mark:]:
                    if not isinstance(original, nn.Module):
                        self.copies.pop(id(original), None)
        twin.__dict__ |= {"training": False, "_compiled_call_impl": None}
        return twin

    def _attribute(self, key: str, value: Any) -> Any:
        if key in _CHAINED:
            return ChainMap({}, value)
        if key.endswith("_hooks"):
            return value
        if key == "_modules":
            return {name: child if child is None else self.twin_of(child) for name, child in value.items()}
        if key == "_buffers":
            return {name: self._buffer(buffer) for name, buffer in value.items()}
        return self.copied(value)

    def _buffer(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or buffer.numel() * buffer.element_size() > MAX_OWN_BUFFER:
            return buffer
        if id(buffer) not in self.copies:
            self._remember(buffer, buffer.detach().clone())
        own: Tensor = self.copies[id(buffer)]
        return own

    def _remember(self, original: Any, made: Any) -> Any:
        self.copies[id(original)] = made
        self._held.append(original)
        return made

    def copied(self, value: Any) -> Any:
        """Return what stands for a value in the view: itself, unless it leads to a module of the tree."""
        if isinstance(value, _ATOMS):
            return value
        if id(value) in self.copies:
            return self.copies[id(value)]
        if not self._leads_to_model(value):
            return value
        if isinstance(value, nn.Module):
            return self.twin_of(value)
        if isinstance(value, PreTrainedConfig):
            self._held.append(value)
            return copy.deepcopy(value, self.copies)
        return self._copied_object(value)

    def _copied_object(self, value: Any) -> Any:
        kind = type(value)
        made: Any
        if isinstance(value, MethodType):
            return self._remember(value, MethodType(self.copied(value.__func__), self.copied(value.__self__)))
        if isinstance(value, FunctionType):
            return self._copied_function(value)
        if isinstance(value, functools.partial):
            arguments = [self.copied(argument) for argument in value.args]
            keywords = {name: self.copied(argument) for name, argument in value.keywords.items()}
            made = self._remember(value, kind(self.copied(value.func), *arguments, **keywords))
            made.__dict__.update({name: self.copied(attribute) for name, attribute in vars(value).items()})
            return made
        if isinstance(value, weakref.ref):
            return self._remember(value, weakref.ref(self.copied(value())))
        if type(value) is dict and not any(map(self._leads_to_model, value)):
            made = self._remember(value, _Overlay({}, value))
            made.maps[0].update({key: self.copied(item) for key, item in value.items() if self._leads_to_model(item)})
            return made
        if isinstance(value, dict):
            made = self._remember(value, copy.copy(value))
            made.clear()
            made.update({self.copied(key): self.copied(item) for key, item in value.items()})
            return made
        if isinstance(value, list):
            made = self._remember(value, copy.copy(value))
            made[:] = [self.copied(item) for item in value]
            return made
        if isinstance(value, (tuple, set, frozenset)):
            items = [self.copied(item) for item in value]
            return self._remember(value, kind._make(items) if hasattr(kind, "_make") else kind(items))
        replaced: dict[str, Any] = {}
        try:
            made = self._remember(value, _live(value, replaced))
        except Exception as error:
            raise TypeError(f"a {kind.__module__}.{kind.__qualname__}") from error
        replaced |= {name: self.copied(item) for name, item in vars(value).items() if self._leads_to_model(item)}
        return made

    def _copied_function(self, function: FunctionType) -> Any:
        names = [(name, value) for name, value in _named_globals(function) if self._leads_to_model(value)]
        if names and _assigns_globals(function.__code__):
            raise TypeError(f"the function {function.__name__}, which assigns global names")
        namespace = _Globals(function.__globals__) if names else function.__globals__
        cells = function.__closure__ or ()
        own_cells = tuple(CellType() if self._cell_leads(cell) else cell for cell in cells)
        made = self._remember(function, FunctionType(function.__code__, namespace, function.__name__, None, own_cells))
        for cell, own in zip(cells, own_cells, strict=True):
            if own is not cell:
                own.cell_contents = self.copied(cell.cell_contents)
        for name, value in names:
            namespace[name] = self.copied(value)
        made.__defaults__ = self.copied(function.__defaults__)
        made.__kwdefaults__ = {name: self.copied(value) for name, value in (function.__kwdefaults__ or {}).items()}
        made.__dict__.update({name: self.copied(value) for name, value in vars(function).items()})
        return made

    def _cell_leads(self, cell: CellType) -> bool:
        return any(self._leads_to_model(value) for value in _contents(cell))

    def _leads_to_model(self, value: Any) -> bool:
        """True when a module of the tree or a configuration can be reached from the value."""
        if isinstance(value, _ATOMS):
            return False
        known = self._leads.get(id(value))
        if known is not None:
            return known
        seen, pending = {id(value): value}, [value]
        while pending:
            current = pending.pop()
            if id(current) in self._names or isinstance(current, PreTrainedConfig) or self._leads.get(id(current)):
                self._held.append(value)
                self._leads[id(value)] = True
                return True
            for child in _children(current):
                if id(child) not in seen and self._leads.get(id(child)) is not False:
                    seen[id(child)] = child
                    pending.append(child)
        self._held += seen.values()
        self._leads |= dict.fromkeys(seen, False)
        return False


def _children(value: Any) -> Iterator[Any]:
    """Yield what an object refers to, as far as calling it could use it."""
    found: Iterable[Any]
    if isinstance(value, FunctionType):
        cells = [content for cell in value.__closure__ or () for content in _contents(cell)]
        found = [*cells, value.__defaults__, value.__kwdefaults__, vars(value), *(x for _, x in _named_globals(value))]
    elif isinstance(value, weakref.ref):
        found = [value()]
    else:
        found = gc.get_referents(value)
    return (child for child in found if not isinstance(child, _ATOMS))


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # assigned later
        return []


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _named_globals(function: FunctionType) -> list[tuple[str, Any]]:
    """The global names that a user's function may look up, with their values."""
    names = function.__globals__
    if str(names.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        return []
    used = {name for code in _codes(function.__code__) for name in code.co_names}
    return [(name, names[name]) for name in sorted(used) if name in names]


def _assigns_globals(code: CodeType) -> bool:
    return any(step.opname == "STORE_GLOBAL" for each in _codes(code) for step in dis.get_instructions(each))
