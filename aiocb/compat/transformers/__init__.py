"""The continuous-batching interface of transformers, over this package's engine.

A program written for that interface runs after a change of its imports: put `aiocb.compat.transformers` in the place
of `transformers`, in any import line and whatever module it names. Every name that is not ours is transformers' own.

    from aiocb.compat.transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B")
    outputs = model.generate_batch(inputs=inputs, generation_config=GenerationConfig(max_new_tokens=64))

For a model that is loaded already there are `enable(model)` and functions that take the model. Importing this package
is cheap: torch and transformers are imported when a name of theirs is used. The names are in `mirror`, their types in
the stubs beside this file.
"""

from __future__ import annotations

import importlib
from typing import Any

from aiocb.compat.transformers import mirror

mirror.install()


def __getattr__(name: str) -> Any:
    if name in mirror.ADDED:
        return getattr(importlib.import_module(f"{mirror.PACKAGE}.{mirror.ADDED[name]}"), name)
    value = mirror.look_up(mirror.REFERENCE, name)
    return sorted({*value, *mirror.ADDED}) if name == "__all__" else value


def __dir__() -> list[str]:
    return sorted({*mirror.names(mirror.REFERENCE), *mirror.ADDED})
