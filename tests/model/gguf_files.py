"""Tiny GGUF files for tests: a llama with random weights and a toy byte-level vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, LAYERS, MLP = 64, 4, 2, 2, 96
TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *[chr(33 + index) for index in range(90)],
    *[f"{a}{b}" for a in "abcde" for b in "fghij"],
    "<turn>",
]
TURN = len(TOKENS) - 1
KEYS: dict[str, Any] = {
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 4), 3],
    "tokenizer.ggml.merges": [f"{a} {b}" for a in "abcde" for b in "fghij"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def write_gguf(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    without: Collection[str] = (),
    kinds: Mapping[str, str] | None = None,
    mlp: int = MLP,
) -> Path:
    """Write the tiny llama with further keys and tensors, or without some.

    `kinds` are types of ggml's for the matrices whose names end with a key (`attn_q`; `""`: all others), the first that
    fits; float32 without.
    """
    keys = {**KEYS, "llama.feed_forward_length": mlp, **(keys or {})}
    width = HIDDEN * keys["llama.attention.head_count_kv"] // HEADS
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in keys.items():
        if key not in without:
            add_key(writer, key, value)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (width, HIDDEN),
            f"blk.{layer}.attn_v.weight": (width, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (mlp, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (mlp, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, mlp),
        }
    for name, shape in shapes.items():
        if name not in without:
            values = (random.standard_normal(shape) * 0.3).astype(np.float32)
            kind = _kind(name, kinds or {}) if len(shape) > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(name: str, kinds: Mapping[str, str]) -> gguf.GGMLQuantizationType:
    stem = name.removesuffix(".weight")
    return gguf.GGMLQuantizationType[next((kind for end, kind in kinds.items() if stem.endswith(end)), "F32")]


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
