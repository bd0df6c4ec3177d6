"""Auto classes whose models come with this package's methods."""

from __future__ import annotations

import copy
import logging
from typing import Any

import transformers

from aiocb.compat.transformers.entry import enable

__all__ = ["AutoModelForCausalLM"]

logger = logging.getLogger("aiocb")


class AutoModelForCausalLM(transformers.AutoModelForCausalLM):
    """transformers' class of that name; its models have `generate_batch` and the like from `aiocb`.

    An `attn_implementation` that cannot be had (flash-attn is not installed, the architecture does not know it) is left
    out with a warning instead of refused, and `"paged|eager"` is `"eager"`: the engine brings its own attention, this
    one serves the model's other uses.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, then `enable` it."""
        return enable(_with_attention(super().from_pretrained, args, kwargs))

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a model as transformers does, then `enable` it."""
        build: Any = super().from_config
        # A refused attention stays in the config: try with a copy, so that the second attempt is a clean one.
        return enable(_with_attention(lambda config, **options: build(copy.deepcopy(config), **options), args, kwargs))


def _with_attention(load: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    implementation = kwargs.pop("attn_implementation", None)
    if implementation is None:
        return load(*args, **kwargs)
    if implementation == "paged|eager":
        implementation = "eager"
    try:
        return load(*args, attn_implementation=implementation, **kwargs)
    except (ImportError, ValueError) as error:
        try:
            model = load(*args, **kwargs)
        except Exception:
            raise error from None  # something else was wrong
        logger.warning(
            "attn_implementation=%r cannot be had, the model's own default is used: %s", implementation, error
        )
        return model
