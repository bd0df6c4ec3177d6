"""Making a native runner of a GGUF file as it is. Worker thread only.

Before anything is packed for good, the first layers are packed for themselves and compared with a module of
transformers that has their numbers as the authors of the format read them: names, orders, norms, rotation and blocks
are right, or the file is converted the long way. That a file passed is remembered.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from aiocb import files
from aiocb.config import Choice, EngineConfig
from aiocb.kernels import Library
from aiocb.model.load import snapshot
from aiocb.model.native.build import build
from aiocb.model.native.families import ModelDescription, Projection
from aiocb.model.native.runner import NativeRunner
from aiocb.model.native.weights import stored_bytes
from aiocb.model.request import Refusal

if TYPE_CHECKING:
    from aiocb.model.load.gguf_stored import StoredModel
    from aiocb.model.request import Material, ModelRequest

__all__ = ["build_stored"]

logger = logging.getLogger("aiocb.model")

_MAKER = "parity 1"
_ROWS = 512
"""Of the vocabulary, which is most of a small model, in the comparison."""
_MOST_LAYERS = 8


def build_stored(
    request: ModelRequest, material: Material, stored: StoredModel, description: ModelDescription, library: Library
) -> NativeRunner | Refusal:
    """Compare, pack, and give the file's pages back.

    Raises:
        ConfigError: there is no memory for the weights and the least cache; the message has the arithmetic.
    """
    # Activations and cache in bf16, as of any model; the module's vectors are as exact as the file has them.
    description = description._replace(dtype=torch.bfloat16)
    parity = _parity(stored, description, library, request)
    if isinstance(parity, Refusal):
        return parity
    try:
        num_bytes = stored_bytes(description, stored.find_rows)
    except LookupError as error:
        return Refusal(str(error))
    runner = build(
        description,
        library,
        request.config,
        max_model_len=material.max_model_len,
        sampler=request.sampler,
        is_owned=True,
        find_rows=stored.find_rows,
        weights_label=", ".join(stored.kinds),
        reserved={"the weights": num_bytes},
    )
    stored.forget_pages()
    if isinstance(runner, NativeRunner):
        runner.choices += (parity,)
    return runner


def _parity(
    stored: StoredModel, description: ModelDescription, library: Library, request: ModelRequest
) -> Choice | Refusal:
    """What the comparison gives, or gave when this file was started first."""
    folder = snapshot.parity_folder(stored.folder, library)
    note = folder / "parity.txt"
    if files.flaw(folder, _MAKER) is None:
        return Choice(
            "parity", note.read_text(encoding="utf-8"), "of the first layers, when this file was started first"
        )
    module, first = _beginning(stored, description)
    runner = build(
        first,
        library,
        EngineConfig(num_blocks=8, num_threads=request.config.num_threads),
        max_model_len=64,
        module=module,
        is_owned=True,
        find_rows=stored.find_rows,
        # What is multiplied with weights of few bits has eight.
        weights_label="int8" if stored.is_quantized else "bfloat16",
    )
    if isinstance(runner, Refusal):
        return runner
    parity = next(choice for choice in runner.choices if choice.name == "parity")
    runner.close()
    try:
        with files.locked(folder), files.make_folder(folder, _MAKER) as scratch:
            (scratch / note.name).write_text(parity.value, encoding="utf-8")
    except OSError:  # the next start compares again
        logger.debug("%s cannot be written", folder, exc_info=True)
    return parity._replace(reason=f"{parity.reason}: of the first {len(first.layers)} layers")


def _beginning(stored: StoredModel, description: ModelDescription) -> tuple[Any, ModelDescription]:
    """A module of the first layers with their numbers, and its description, whose weights lie in the file."""
    kinds = [(layer.window, layer.rope) for layer in description.layers]
    count = min(1 + max(kinds.index(kind) for kind in kinds), _MOST_LAYERS)
    rows = min(_ROWS, description.vocab_size)
    config = copy.deepcopy(stored.module.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = count, rows, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    with torch.device("meta"):
        module: Any = type(stored.module)._from_config(config, dtype=torch.float32)
    for name, wanted in list(module.named_parameters()):
        values = stored.values(stored.module.get_parameter(name)[: len(wanted)])
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, torch.nn.Parameter(values, requires_grad=False))
    for name, buffer in list(module.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, stored.module.get_buffer(name).to(buffer.dtype))
    module.tie_weights()
    module.eval()
    head = description.head
    first = description._replace(
        layers=description.layers[:count],
        vocab_size=rows,
        embedding=description.embedding[:rows],
        head=Projection(head.weight[:rows], None if head.bias is None else head.bias[:rows]),
    )
    return module, first
