"""What both sides of the C interface write down: numbers, structures field by field, and the calls.

`Library` compares numbers, sizes and offsets with the library's own (csrc/layout.cpp) before it calls anything else.

Shape legend: T tokens of the step, R requests, O outputs, B new blocks, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p

from aiocb.kernels.formats import FORMATS, PANEL, SOURCES
from aiocb.kernels.scans import ConvolveCall, DeltaCall, ScanRows, SelectiveChannelsCall, SelectiveHeadsCall
from aiocb.kernels.selection import CONSTANTS, SelectArguments

__all__ = [
    "ACTIVATIONS",
    "ALIBI",
    "ERRORS",
    "ERROR_BYTES",
    "INSTRUCTION_SETS",
    "LINEARS",
    "NO_MEMORY",
    "OPERANDS",
    "PAGE_SIZE",
    "QK_NORMS",
    "SIGNATURES",
    "TYPES",
    "VECTORS",
    "ModelConfig",
    "PagedCall",
    "StepArguments",
    "Team",
    "expected_layout",
]  # fmt: skip

PAGE_SIZE = 16
OPERANDS = {"float32": 0, "bfloat16": 1, "int8": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}
ALIBI: dict[str | None, int] = {None: 0, "exact": 1, "rounded": 2}
QK_NORMS = {"none": 0, "per_head": 1, "full_width": 2}
_LINEAR_NAMES = ("qkv", "out", "gate_up", "down", "head", "value", "router", "expert_gate_up", "expert_down")
LINEARS = {name: number for number, name in enumerate(_LINEAR_NAMES)}
_VECTOR_NAMES = (
    "input", "input_bias", "post_attention", "post_attention_bias", "mlp", "mlp_bias", "post_mlp", "post_mlp_bias",
    "q", "k", "sinks", "final", "final_bias",
)  # fmt: skip
VECTORS = {name: number for number, name in enumerate(_VECTOR_NAMES)}
INSTRUCTION_SETS = ("avx512bf16", "avx512", "avx2", "portable")
ERROR_BYTES = 256
NO_MEMORY = 5
ERRORS = {
    8: "another thread is in a call on the same native kernels; each set belongs to one thread at a time",
    9: "this process was forked while the native kernels ran: load the model again in the child",
}


class ModelConfig(ctypes.Structure):
    """`Config` of model.h, field by field."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
            "format", "activation", "is_gated", "is_layer_norm", "qk_norm", "is_parallel", "rotary_dim", "num_groups",
            "num_ropes", "num_experts", "num_chosen", "expert_size", "is_renormalised",
        )),
        *((name, c_float) for name in (
            "norm_eps", "embedding_scale", "residual_scale", "logit_scale", "attention_softcap", "logit_softcap",
        )),
    ]  # fmt: skip


class StepArguments(ctypes.Structure):
    """`StepArgs` of model.h, field by field; pointers are addresses of arrays that live as long as the call.

    A sequence is a row, whose block tables (one per group) stay in native memory until they are replaced or forgotten.

    Attributes:
        num_new_blocks: of each group, the sum of `block_counts`.
        token_ids: [T].
        rows: which row each sequence is, each once, [R].
        starts, lengths: position of each sequence's first new token, and how many are new, [R].
        block_starts, block_counts: the row's tables become `table[:block_start]` and that many new blocks, [R].
        new_blocks: of all sequences one after another, for each group, [groups, B].
        output_rows: rows of the packed tokens that the output matrix is applied to, [O].
        logit_targets: row of `logits` that each of them is written to, or -1, [O]; null: none.
        logits: [targets, V] float32.
        argmax: the largest logit's id of each output, or a failure, [O]; out.
    """

    _fields_ = [
        *((name, c_int32) for name in ("num_tokens", "num_sequences", "num_outputs", "num_new_blocks")),
        *((name, c_void_p) for name in (
            "token_ids", "rows", "starts", "lengths", "block_starts", "block_counts", "new_blocks", "output_rows",
            "logit_targets", "logits", "argmax",
        )),
    ]  # fmt: skip


class PagedCall(ctypes.Structure):
    """`PagedCall` of model.h, field by field; strides are in bytes."""

    _fields_ = [
        *((name, c_int32) for name in (
            "num_tokens", "num_sequences", "num_heads", "num_kv_heads", "head_dim", "format", "num_blocks", "window",
            "chunk", "alibi",
        )),
        ("scale", c_float),
        ("softcap", c_float),
        *((name, c_void_p) for name in ("pool", "query", "key", "value")),
        *((name, c_int64) for name in (
            "query_stride", "query_head_stride", "key_stride", "key_head_stride", "value_stride", "value_head_stride",
        )),
        *((name, c_void_p) for name in (
            "slots", "starts", "lengths", "pages", "offsets", "num_pages", "sinks", "slopes", "out",
        )),
    ]  # fmt: skip


class Team(ctypes.Structure):
    """`Team` of pool.h."""

    _fields_ = [("parallel", c_void_p), ("thread", c_void_p), ("size", c_void_p)]


TYPES = {"p": c_void_p, "s": c_char_p, "i": c_int32, "l": c_int64, "f": c_float}
# The result, then the arguments. Most calls take a handle and return an error code.
SIGNATURES = {
    "aiocb_instruction_set": "s s",
    "aiocb_create": "p psip",
    "aiocb_destroy": "i p",
    "aiocb_error": "s p",
    "aiocb_handle_instruction_set": "s p",
    "aiocb_set_layer": "i piiiiif",
    "aiocb_set_rope": "i pipif",
    "aiocb_set_vector": "i piipi",
    "aiocb_set_linear": "i piipiipippp",
    "aiocb_record_inputs": "i piip",
    "aiocb_set_embedding": "i ppi",
    "aiocb_set_group": "i piii",
    "aiocb_copy_block": "i piii",
    "aiocb_move_block": "i piipi",
    "aiocb_step": "i pp",
    "aiocb_reset_rows": "i p",
    "aiocb_select": "i pp",
    "aiocb_attention": "i ppipp",
    "aiocb_linear": "i piiplipl",
    "aiocb_unpack": "i piip",
    "aiocb_norm": "i pppifpiiip",
    "aiocb_activation": "i pippip",
    "aiocb_generic_create": "p sipp",
    "aiocb_generic_clear": "i p",
    "aiocb_generic_pack": "i ppliiipp",
    "aiocb_generic_linear": "i piplip",
    "aiocb_attention_write": "i pp",
    "aiocb_attention_run": "i pp",
    "aiocb_convolve": "i ppp",
    "aiocb_delta_rule": "i ppp",
    "aiocb_selective_heads": "i ppp",
    "aiocb_selective_channels": "i ppp",
    "aiocb_bandwidth": "i plp",
    "aiocb_arithmetic": "i pip",
}


def expected_layout() -> dict[str, int]:
    """All that is written down on both sides: constants, and the size and offsets of every structure."""
    structures: dict[str, type[ctypes.Structure]] = {
        "Config": ModelConfig, "StepArgs": StepArguments, "SelectArgs": SelectArguments, "PagedCall": PagedCall,
        "Team": Team, "ScanRows": ScanRows, "ConvolveCall": ConvolveCall, "DeltaCall": DeltaCall,
        "SelectiveHeadsCall": SelectiveHeadsCall, "SelectiveChannelsCall": SelectiveChannelsCall,
    }  # fmt: skip
    names: dict[str, Mapping[str, int]] = {
        "operand": OPERANDS, "activation": ACTIVATIONS, "qk_norm": QK_NORMS,
        "alibi": {name or "none": number for name, number in ALIBI.items()}, "linear": LINEARS, "vector": VECTORS,
        **CONSTANTS,
    }  # fmt: skip
    layout = {
        "page_size": PAGE_SIZE,
        "panel": PANEL,
        "error_bytes": ERROR_BYTES,
        "error.no_memory": NO_MEMORY,
        **dict(zip(("error.busy", "error.forked"), ERRORS)),
    }
    for name, (_, code, bits, group, scale_bytes, activations) in FORMATS.items():
        fields = {"bits": bits, "group": group, "scale_bytes": scale_bytes, "operand": OPERANDS[activations]}
        layout |= {f"format.{name}": code, **{f"format.{name}.{field}": value for field, value in fields.items()}}
    for source, code, weights, num_bytes in SOURCES.values():
        layout |= {f"source.{source}": code, f"source.{source}.weights": weights, f"source.{source}.bytes": num_bytes}
    for kind, values in names.items():
        layout |= {f"{kind}.{name}": value for name, value in values.items()}
    for name, structure in structures.items():
        layout[name] = ctypes.sizeof(structure)
        layout |= {f"{name}.{field[0]}": getattr(structure, field[0]).offset for field in structure._fields_}
    return layout
