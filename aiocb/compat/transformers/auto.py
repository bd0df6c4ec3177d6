"""Auto classes whose models come with this package's methods."""

from __future__ import annotations

import logging
from typing import Any

import transformers
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from aiocb.compat.transformers.entry import enable

__all__ = ["AutoModelForCausalLM"]

logger = logging.getLogger("aiocb")

_FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


class AutoModelForCausalLM(transformers.AutoModelForCausalLM):
    """transformers' class of that name; its models have `generate_batch` and the like from `aiocb`.

    An `attn_implementation` of flash-attn that is not installed is left out with a warning instead of refused: the
    engine brings its own attention, this one only serves the model's other uses.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, then `enable` it."""
        is_available = _FLASH.get(str(kwargs.get("attn_implementation")))
        if is_available is not None and not is_available():
            logger.warning("%s is not installed: the model's own default is used", kwargs.pop("attn_implementation"))
        return enable(super().from_pretrained(*args, **kwargs))

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a model as transformers does, then `enable` it."""
        return enable(super().from_config(*args, **kwargs))  # type: ignore[no-untyped-call]
