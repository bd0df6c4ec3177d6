"""Whether the layers that were seen in a dry run are all that the configuration names, and what it says of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from aiocb.attention.base import LayerSpec
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.view import text_config

__all__ = ["check_layers"]

_HIDDEN = {"full_attention": (False, False), "sliding_attention": (True, False), "chunked_attention": (False, True)}
"""By type of a layer: whether there is a window, and a chunk."""


def check_layers(
    model: nn.Module,
    attending: Collection[tuple[int, int]],
    mixers: Iterable[nn.Module],
    specs: Mapping[int, LayerSpec],
) -> None:
    """Every decoder layer must have attended or keep a state, and see what its configuration says.

    Args:
        model: whose layers they are.
        attending: ids of the modules that have attended, and the layers that they attended to.
        mixers: modules that are called in parts.
        specs: of the layers that cache keys, in their order.

    Raises:
        NotPlainError: some layer does something else.
    """
    config = text_config(model)
    num_found = len(attending) + _num_stateful(model, {module for module, _ in attending}, mixers)
    # In the bart family num_hidden_layers counts the encoder's.
    num_layers = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
    types = getattr(config, "layer_types", None) or ()
    if isinstance(num_layers, int):
        # Those attend to pictures, of which there are none; and those mix no tokens.
        num_layers -= len(getattr(config, "cross_attention_layers", None) or ())
        num_layers -= sum(kind in ("mlp", "moe") for kind in types)
        if num_found < num_layers:
            raise NotPlainError(f"only {num_found} of its {num_layers} layers use the attention interface")
    if len(types) != len(specs):
        return
    for kind, spec in zip(types, specs.values(), strict=True):
        if kind in _HIDDEN and (spec.window is not None, spec.chunk is not None) != _HIDDEN[kind]:
            raise NotPlainError(
                f"layer {spec.layer} is {kind} in its configuration but asks its attention for a window of "
                f"{spec.window} and chunks of {spec.chunk}"
            )


def _num_stateful(model: nn.Module, attending: set[int], mixers: Iterable[nn.Module]) -> int:
    """Count the layers that keep a state and do not attend."""
    stateful = {id(module) for module in mixers}
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    within = [{id(part) for part in layer.modules()} for layers in lists for layer in layers]
    return sum(bool(parts & stateful) and not parts & attending for parts in within)
