"""A few steps of tiny models, in numpy and ctypes alone: what `scripts/sanitize --smoke` runs.

Odd sizes on purpose: a vector that reads past the end of its row is what a sanitizer is to find here.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from typing import Any

import numpy as np

from aiocb.kernels import KernelError, KernelUnavailable, Library, NativeModel, load
from aiocb.kernels.formats import FORMATS, WeightSource
from aiocb.kernels.generic import GenericKernels
from aiocb.kernels.interface import ACTIVATIONS, PAGE_SIZE, ModelConfig, PagedCall, StepArguments
from aiocb.kernels.scans import ConvolveCall, DeltaCall, ScanRows, SelectiveChannelsCall, SelectiveHeadsCall
from aiocb.kernels.selection import CHOOSE, LOG_PROBABILITIES, TRUNCATED, WHOLE, SelectArguments

HIDDEN, HEADS, KV, DIM, INNER, VOCAB, EXPERTS, EXPERT = 40, 6, 2, 16, 50, 77, 5, 24
RANDOM = np.random.default_rng(0)


def weights(rows: int, depth: int, dtype: str) -> Any:
    values = (RANDOM.standard_normal((rows, depth)) * 0.2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values


def addresses(weight: Any) -> Any:
    return np.uint64(weight.ctypes.data) + np.arange(len(weight), dtype=np.uint64) * np.uint64(weight.strides[0])


def gated(weight: Any) -> Any:
    """Rows of gate and up, 32 of each in turn."""
    half = addresses(weight).reshape(2, -1)
    padded = np.zeros((2, -(-half.shape[1] // 32) * 32), np.uint64)
    padded[:, : half.shape[1]] = half
    return padded.reshape(2, -1, 32).transpose(1, 0, 2).reshape(-1).copy()


def model_of(library: Library, dtype: str, packed: str, *, has_experts: bool) -> NativeModel:
    config = ModelConfig(
        num_layers=2, hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=KV, head_dim=DIM, intermediate_size=INNER,
        vocab_size=VOCAB, format=FORMATS[dtype].code, activation=ACTIVATIONS["gelu_tanh"], is_gated=1, qk_norm=1,
        rotary_dim=10, num_groups=2, num_ropes=1, num_experts=EXPERTS * has_experts, num_chosen=2 * has_experts,
        expert_size=EXPERT * has_experts, norm_eps=1e-5, embedding_scale=1.0, residual_scale=1.0, logit_scale=1.0,
        attention_softcap=20.0,
    )  # fmt: skip
    model = NativeModel(library, config, num_threads=2)
    plain: dict[str, Any] = {"source": WeightSource.of(dtype), "weight_format": FORMATS[packed]}
    model.set_rope(0, RANDOM.random(5).astype(np.float32), 1.0)
    for layer in range(2):
        model.set_group(layer, 12, 1)
        model.set_layer(layer, window=20 * layer, rope=-layer, group=layer, group_layer=0, scale=0.25)
        for name, size in (("input", HIDDEN), ("mlp", HIDDEN), ("q", DIM), ("k", DIM), ("sinks", HEADS)):
            model.set_vector(layer, name, np.ones(size, np.float32))
        for name, rows, depth in (("qkv", (HEADS + 2 * KV) * DIM, HIDDEN), ("out", HIDDEN, HEADS * DIM)):
            weight = weights(rows, depth, dtype)
            model.set_linear(layer, name, addresses(weight), depth, bias=np.ones(rows, np.float32), **plain)
        if has_experts:
            router = weights(EXPERTS, HIDDEN, dtype)
            model.set_linear(layer, "router", addresses(router), HIDDEN, **(plain | {"weight_format": FORMATS[dtype]}))
            for expert in range(EXPERTS):
                up, down = weights(2 * EXPERT, HIDDEN, dtype), weights(HIDDEN, EXPERT, dtype)
                model.set_linear(layer, "expert_gate_up", gated(up), HIDDEN, expert=expert, **plain)
                model.set_linear(layer, "expert_down", addresses(down), EXPERT, expert=expert, **plain)
        else:
            up, down = weights(2 * INNER, HIDDEN, dtype), weights(HIDDEN, INNER, dtype)
            model.set_linear(layer, "gate_up", gated(up), HIDDEN, **plain)
            model.set_linear(layer, "down", addresses(down), INNER, **plain)
    head, embedding = weights(VOCAB, HIDDEN, dtype), weights(VOCAB, HIDDEN, dtype)
    model.set_vector(-1, "final", np.ones(HIDDEN, np.float32))
    model.set_linear(-1, "head", addresses(head), HIDDEN, **plain)
    model.set_embedding(embedding.ctypes.data, WeightSource.of(dtype), embedding)
    return model


def step(model: NativeModel, sequences: list[tuple[int, int, int, list[int]]]) -> Any:
    """Sequences are (row, start, count, new blocks); returns the logits of every token."""
    total = sum(count for _, _, count, _ in sequences)
    blocks = [block for sequence in sequences for block in sequence[3]]
    logits = np.full((total, VOCAB), np.nan, np.float32)
    arrays: dict[str, array[int]] = {
        "token_ids": array("i", RANDOM.integers(0, VOCAB, total).tolist()),
        "rows": array("i", [row for row, *_ in sequences]),
        "starts": array("i", [start for _, start, *_ in sequences]),
        "lengths": array("i", [count for _, _, count, _ in sequences]),
        "block_starts": array("i", [-(-start // PAGE_SIZE) for _, start, _, _ in sequences]),
        "block_counts": array("i", [len(new) for *_, new in sequences]), "new_blocks": array("i", blocks * 2),
        "output_rows": array("i", range(total)), "logit_targets": array("i", range(total)),
        "argmax": array("i", bytes(4 * total)),
    }  # fmt: skip
    model.step(
        StepArguments(
            num_tokens=total, num_sequences=len(sequences), num_outputs=total, num_new_blocks=len(blocks),
            logits=logits.ctypes.data, **{name: values.buffer_info()[0] for name, values in arrays.items()},
        )
    )  # fmt: skip
    assert (logits.argmax(1) == np.array(arrays["argmax"])).all()
    return logits


def select(model: NativeModel, logits: Any) -> None:
    count = len(logits)
    columns = {
        "temperature": np.full(count, 0.8), "top_k": np.full(count, 9), "top_p": np.full(count, 0.9),
        "log_min_p": np.full(count, -9.0), "uniforms": RANDOM.random(count), "ids": np.zeros(count, np.int64),
        "tokens": np.arange(count), "num_top": np.full(count, 5), "chosen": np.zeros(count),
        "ranks": np.zeros(count, np.int64), "top_values": np.zeros((count, 5)),
        "top_ids": np.zeros((count, 5), np.int64),
        "kinds": np.where(np.arange(count) % 2, WHOLE, TRUNCATED).astype(np.int32), "logits": logits,
    }  # fmt: skip
    for mode in (CHOOSE, LOG_PROBABILITIES):
        pointers = {name: values.ctypes.data for name, values in columns.items()}
        model.select(SelectArguments(mode=mode, num_rows=count, vocab=VOCAB, stride=VOCAB, width=5, **pointers))
    assert (columns["ids"] >= 0).all() and np.isfinite(columns["chosen"]).any()


def operators(library: Library, dtype: str) -> None:
    kernels = GenericKernels(library, num_threads=2)
    weight, a = weights(70, 34, dtype), weights(9, 34, dtype)
    out = np.zeros((9, 70), a.dtype)
    bias = np.ones(70, np.float32)
    index = kernels.pack(weight.ctypes.data, weight.strides[0], 70, 34, FORMATS[dtype], bias.ctypes.data)
    kernels.check(kernels.call_linear(kernels.handle, index, a.ctypes.data, a.strides[0], 9, out.ctypes.data))
    assert out.any()
    length, size = 37, a.itemsize
    q, k, v = (weights(length, heads * DIM, dtype) for heads in (HEADS, KV, KV))
    pages = np.full((8, KV, 2, PAGE_SIZE * DIM), 0xFF, np.uint8).repeat(size, axis=-1)  # NaN
    attended = np.zeros_like(q)
    table, at = np.array([3, 6, 2], np.int32), np.arange(length)
    slots = table.astype(np.int64)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
    zero, lengths, num_pages = np.zeros(1, np.int32), np.array([length], np.int32), np.array([3], np.int32)
    call = PagedCall(
        num_tokens=length, num_sequences=1, num_heads=HEADS, num_kv_heads=KV, head_dim=DIM, format=FORMATS[dtype].code,
        num_blocks=8, scale=0.25, pool=pages.ctypes.data, query=q.ctypes.data, key=k.ctypes.data,
        value=v.ctypes.data, query_stride=q.strides[0], query_head_stride=DIM * size, key_stride=k.strides[0],
        key_head_stride=DIM * size, value_stride=v.strides[0], value_head_stride=DIM * size, slots=slots.ctypes.data,
        starts=zero.ctypes.data, lengths=lengths.ctypes.data, pages=table.ctypes.data, offsets=zero.ctypes.data,
        num_pages=num_pages.ctypes.data, out=attended.ctypes.data,
    )  # fmt: skip
    kernels.write(call)
    slopes = np.full(HEADS, 0.3, np.float32)
    for window, chunk, alibi in ((21, 0, 0), (0, 9, 0), (0, 0, 1), (0, 0, 2)):
        call.window, call.chunk, call.alibi, call.slopes = window, chunk, alibi, slopes.ctypes.data if alibi else None
        kernels.attend(call)
        numbers = attended if dtype == "float32" else (attended.astype(np.uint32) << 16).view(np.float32)
        assert not np.isnan(numbers).any()
    kernels.close()


def recurrences(library: Library, dtype: str) -> None:
    kernels = GenericKernels(library, num_threads=2)
    starts, slots, fresh = (np.array(x, np.int32) for x in ([0, 1, 2, 21], [2, 1, 3], [0, 1, 0]))
    rows = ScanRows(3, 4, starts.ctypes.data, slots.ctypes.data, fresh.ctypes.data)
    heads, groups, dim, size, channels, width = 6, 2, 7, 19, 37, 4
    kept: list[Any] = []

    def at(shape: tuple[int, ...], kind: str = "float32") -> tuple[int, int]:
        """Address of random values, and the bytes of one token or slot."""
        values = weights(shape[0], int(np.prod(shape[1:])), kind)
        kept.append(values)
        return values.ctypes.data, values.strides[0]

    x, x_stride = at((21, channels), dtype)
    state, slot_stride = at((4, width, channels), dtype)
    kernels.convolve(
        rows,
        ConvolveCall(
            num_channels=channels, width=width, format=FORMATS[dtype].code, activation=ACTIVATIONS["silu"], input=x,
            input_stride=x_stride, weight=at((width, channels))[0], state=state, slot_stride=slot_stride,
            out=at((21, channels), dtype)[0],
        ),
    )  # fmt: skip
    for by_channel in (0, 1):
        (q, q_stride), (k, k_stride), (v, v_stride) = (
            at((21, count), dtype) for count in (groups * dim, groups * dim, heads * size)
        )
        state, slot_stride = at((4, heads * dim * size))
        kernels.delta_rule(
            rows,
            DeltaCall(
                num_key_heads=groups, num_heads=heads, key_dim=dim, value_dim=size, format=FORMATS[dtype].code,
                is_by_channel=by_channel, is_normed=1, scale=0.4, query=q, key=k, value=v, query_stride=q_stride,
                key_stride=k_stride, value_stride=v_stride, decay=at((21, heads * (dim if by_channel else 1)))[0],
                beta=at((21, heads))[0], state=state, slot_stride=slot_stride, out=at((21, heads * size), dtype)[0],
            ),
        )  # fmt: skip
    for count, inner in ((heads, dim), (channels, 1)):
        state, slot_stride = at((4, count * inner * size))
        shapes = {"input": count * inner, "steps": count, "write": size, "read": size}
        tokens = {name: at((21, columns), dtype) for name, columns in shapes.items()}
        fields = {
            **{name: address for name, (address, _) in tokens.items()},
            **{f"{name}_stride": stride for name, (_, stride) in tokens.items()},
            "rates": at((count, size))[0], "bias": at((count, 1))[0], "is_softplus": 1, "state_size": size,
            "state": state, "slot_stride": slot_stride, "out": at((21, count * inner))[0],
            "format": FORMATS[dtype].code,
        }  # fmt: skip
        if inner == 1:
            kernels.selective_channels(rows, SelectiveChannelsCall(num_channels=count, **fields))
        else:
            kernels.selective_heads(
                rows, SelectiveHeadsCall(num_heads=count, num_groups=1, head_dim=inner, max_step=9.0, **fields)
            )
    kernels.close()


def main() -> int:
    library = load()
    if isinstance(library, KernelUnavailable):
        print(library.reason)
        return 1
    for dtype, packed, has_experts in (
        ("float32", "float32", False), ("bfloat16", "bfloat16", True), ("bfloat16", "int8", True),
        ("float32", "int8", False),
    ):  # fmt: skip
        model = model_of(library, dtype, packed, has_experts=has_experts)
        stale = np.full(2 * PAGE_SIZE * KV * DIM * (4 if dtype == "float32" else 2), 0xFF, np.uint8)
        for group in range(2):
            for block in range(1, 12):
                model.write_block(group, block, stale)
        results = [
            step(model, [(3, 0, 33, [5, 2, 7]), (900, 0, 1, [1])]),
            step(model, [(900, 1, 1, []), (3, 33, 1, [])]),
            step(model, [(3, 34, 15, [8]), (900, 2, 20, [9])]),
        ]
        assert all(np.isfinite(logits).all() for logits in results)
        select(model, results[0])
        model.copy_block(1, 5, 11)
        try:
            step(model, [(3, 49, 1, [99])])
        except KernelError as error:
            assert "outside the pool" in str(error), error
        model.close()
    for dtype in ("float32", "bfloat16"):
        operators(library, dtype)
        recurrences(library, dtype)
    print("smoke", library.instruction_set(), ctypes.sizeof(StepArguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
