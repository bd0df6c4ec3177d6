"""A tiny random model of any causal type of transformers: the numbers of its configuration shrunk by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

__all__ = ["EXCLUDED", "TYPES", "tiny_config", "tiny_model"]

_DATA = json.loads((Path(__file__).parent / "sizes.json").read_text(encoding="utf-8"))
SIZES: dict[str, int] = _DATA["names"]
"""What a number becomes, by the name of the field; a field that is not here keeps its default."""
SPECIAL: dict[str, dict[str, Any]] = _DATA["types"]
"""Fields of certain types, in place of these."""
EXCLUDED: dict[str, str] = _DATA["excluded"]
"""Types that cannot be built here, or are no causal models, and why."""
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_config(model_type: str) -> Any:
    """Make the configuration of a tiny model of this type."""
    return _shrunk(CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {}))


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a tiny model with random weights, the same ones each time."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            # Weights as drawn by default are so small that no layer matters beside the embedding of the last token.
            if isinstance(module, (nn.Linear, Conv1D)):
                module.weight.normal_(0.0, module.weight.shape[-1] ** -0.5, generator=generator)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, 1.0, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    exact = {name: value.data for name, value in model.named_parameters() if any(part in name for part in kept)}
    rounded: PreTrainedModel = model.to(dtype)
    for name, value in exact.items():  # as from_pretrained loads them
        rounded.get_parameter(name).data = value
    return rounded


def _shrunk(kind: Any, special: dict[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {name: size for name, size in SIZES.items() if name in fields}
    for name, sub in (kind.sub_configs or {}).items():
        if name in fields and name not in special and isinstance(sub, type) and dataclasses.is_dataclass(sub):
            values[name] = _shrunk(sub, {}).to_dict()
    for name, value in special.items():
        if isinstance(value, dict) and value.get("sub"):
            sub_kind = CONFIG_MAPPING[value["sub"]]
            values[name] = _shrunk(sub_kind, {k: v for k, v in value.items() if k != "sub"})
        elif value == "default":
            values.pop(name, None)
        else:
            values[name] = value
    values["eos_token_id"] = None
    return kind(**values)
