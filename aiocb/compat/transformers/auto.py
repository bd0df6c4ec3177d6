"""Classes whose models come with this package's methods: the auto classes, and the mixin itself."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

from transformers.generation.continuous_batching import ContinuousMixin as _Reference

from aiocb.compat.transformers import entry

__all__ = ["AutoClass", "ContinuousMixin", "served"]

logger = logging.getLogger("aiocb")


class _Serves(type):
    """What can generate is an instance of the mixin, as it is of the reference's."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Reference) if cls is ContinuousMixin else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Reference) if cls is ContinuousMixin else super().__subclasscheck__(subclass)


class ContinuousMixin(_Reference, metaclass=_Serves):
    """The four methods, for model classes of one's own; they win over transformers' in any order of the bases."""

    generate_batch = entry.generate_batch  # type: ignore[assignment]  # more arguments, and our own results
    init_continuous_batching = entry.init_continuous_batching  # type: ignore[assignment]
    continuous_batching_context_manager = entry.continuous_batching_context_manager  # type: ignore[assignment]
    destroy_cached_continuous_batching_manager = entry.destroy_cached_continuous_batching_manager


class AutoClass:
    """In front of an auto class of transformers: models that can generate come enabled (see `enable`).

    For those an `attn_implementation` that cannot be had (flash-attn is not installed, the architecture does not know
    it) is left out with a warning instead of refused, and `"paged|eager"` is `"eager"`: the engine brings its own
    attention, this one serves the model's other uses.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does."""
        parent: Any = super()
        return _load(parent.from_pretrained, args, kwargs)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a model as transformers does."""
        build: Any = super()
        # A refused attention stays in the config: try with a copy, so that the second attempt is a clean one.
        return _load(lambda config, **options: build.from_config(copy.deepcopy(config), **options), args, kwargs)


@functools.cache
def served(reference: type) -> type:
    """Return the class that stands for an auto class of transformers; always the same one, as pickles need it."""
    names = {"__module__": __package__, "__doc__": AutoClass.__doc__}
    return type(reference.__name__, (AutoClass, reference), names)


def _load(load: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wanted = kwargs.pop("attn_implementation", None)
    options = {} if wanted is None else {"attn_implementation": "eager" if wanted == "paged|eager" else wanted}
    try:
        return _enabled(load(*args, **options, **kwargs))
    except (ImportError, ValueError) as error:
        if not options:
            raise
        try:
            model = load(*args, **kwargs)
        except Exception:
            raise error from None  # something else was wrong
        if not isinstance(model, _Reference):
            raise
        logger.warning("attn_implementation=%r cannot be had, the model's own default is used: %s", wanted, error)
        return _enabled(model)


def _enabled(model: Any) -> Any:
    # With output_loading_info=True there is more than the model.
    generating = model[0] if isinstance(model, tuple) else model
    if isinstance(generating, _Reference):
        entry.enable(generating)
    return model
