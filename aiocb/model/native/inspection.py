"""What is looked at before a module is believed to do what its class does: hooks, patches, classes, activations.

The native step calls no module, so whatever would only be seen by calling one has to be a reason here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Unsupported", "activation_of", "require", "require_untouched"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CAPTURE = "transformers.utils.output_capturing"
"""Whose hooks stay on a model that was once asked for its hidden states, and do nothing unless it is again."""
_OURS = "aiocb.compat."
"""Whose methods an enabled model has in the place of transformers' own: they are beside its forward."""


class Unsupported(Exception):
    """The native step cannot run this model; `families.describe` turns it into its reason."""


def require(condition: bool, reason: str) -> None:
    """Raise `Unsupported` unless the condition holds."""
    if not condition:
        raise Unsupported(reason)


def require_untouched(model: Any) -> None:
    """Require that every module does what its class in transformers or torch does."""
    from torch.nn.modules import module as torch_modules

    own = type(model).__module__
    require(not any(getattr(torch_modules, f"_global{kind}") for kind in _HOOKS), "there are global module hooks")
    for name, module in model.named_modules():
        kind, label = type(module), name or "the model"
        hooks = [hook for kind_of_hook in _HOOKS for hook in getattr(module, kind_of_hook).values()]
        require(all(getattr(hook, "__module__", "") == _CAPTURE for hook in hooks), f"{label} has hooks")
        require("parametrizations" not in module._modules, f"{label} is parametrized")
        patched = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(getattr(kind, key, None))
            and not str(getattr(value, "__module__", "")).startswith(_OURS)
        ]
        require(not patched, f"{', '.join(patched)} of {label} is patched")
        require(
            kind.__module__ in (own, "transformers.activations") or kind.__module__.startswith("torch.nn.modules."),
            f"{label} is a {kind.__name__} of {kind.__module__}",
        )
        source = str(inspect.unwrap(kind.forward).__globals__["__name__"])
        direct = str(kind.forward.__globals__["__name__"])
        is_own = all(each.partition(".")[0] in ("torch", "transformers") for each in (source, direct))
        require(is_own, f"forward of {kind.__name__} is patched")


def activation_of(function: Callable[[Tensor], Tensor]) -> str:
    """Recognise the function by its values: transformers has several names and classes for each.

    Far from 0 too, because many a function is another one with its ends cut off.
    """
    import torch

    require(
        str(getattr(function, "__module__", None)).partition(".")[0] in ("torch", "transformers", "None"),
        f"activation {function!r} is neither torch's nor transformers'",
    )
    ends = torch.logspace(-30.0, 18.0, 97, dtype=torch.float64)
    x = torch.cat([torch.linspace(-12.0, 12.0, 385, dtype=torch.float64), ends, -ends])
    cubic = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    candidates = {
        "silu": x * torch.sigmoid(x),
        "gelu_tanh": 0.5 * x * (1.0 + torch.tanh(cubic)),
        "gelu": 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
        "relu": torch.relu(x),
        "relu2": torch.relu(x) ** 2,
    }
    with torch.no_grad():
        actual = function(x.float()).double()
    for name, expected in candidates.items():
        if torch.allclose(actual, expected, rtol=2e-6, atol=2e-6):
            return name
    raise Unsupported(f"activation {type(function).__name__}")
