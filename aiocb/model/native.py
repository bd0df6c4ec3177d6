"""Thread: the worker's only. The native runner: a whole step of a decoder in one call, with the GIL released.

`create_native_runner` reads the transformers module (families.py), packs its weights, compares one prompt with the
module's own forward, and returns a runner, or the reason why the generic path has to be taken.

Shape legend: T tokens of the step, R requests, N rows with logits, V vocabulary, K depth of a weight.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiocb.errors import RequestFailed
from aiocb.kernels import KernelError, KernelUnavailable, Library, NativeModel, load
from aiocb.kernels.library import ACTIVATIONS, FORMATS, ModelConfig, StepArguments
from aiocb.kernels.threads import default_num_threads
from aiocb.model.families import LayerDescription, ModelDescription, Projection, describe
from aiocb.step import CacheGroup, CacheLayout, StepPlan, StepResult

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

__all__ = ["NativeRunner", "create_native_runner"]

PAGE_SIZE = 16
_PROBE_TOKENS = 40
# Structural mistakes give errors near 1; bf16 noise of a deep model reaches a few per cent.
_PROBE_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.12}

Sampler = Callable[["Tensor", StepPlan], StepResult]


class NativeRunner:
    """Runs plans in native code; implements `aiocb.step.Runner`.

    Args:
        native: the packed model with its cache.
        description: what it was made from.
        layout: the cache, as the cache manager obeys it.
        sampler: called with logits [N, V] and the plan when a plan is not plain greedy.
        notes: lines for `describe()`.
    """

    def __init__(
        self,
        native: NativeModel,
        description: ModelDescription,
        layout: CacheLayout,
        sampler: Sampler | None,
        notes: dict[str, str],
    ) -> None:
        self.native = native
        self._layout = layout
        self._vocab_size = description.vocab_size
        self._max_model_len = description.max_position_embeddings
        self._sampler = sampler
        self._notes = notes
        self._is_plain: dict[int, bool] = {}
        self._logits: Tensor | None = None

    @property
    def cache_layout(self) -> CacheLayout:
        """The paged cache in native memory."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """The model's own number of positions."""
        return self._max_model_len

    def describe(self) -> dict[str, str]:
        """What was chosen and why."""
        return dict(self._notes)

    def __repr__(self) -> str:
        groups = "+".join(str(group.num_blocks) for group in self._layout.groups)
        return f"<NativeRunner {self._notes['kernels']} [{groups} blocks]>"

    def close(self) -> None:
        """Free weights and cache, join the threads. Idempotent."""
        self.native.close()
        self._logits = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the copies, run the step, and sample: in native code when the plan is plain greedy.

        Raises:
            KernelError: the plan names an id, a row or a block that does not exist.
        """
        for copy in plan.block_copies:
            self.native.copy_block(copy.group, copy.source, copy.target)
        for request_id in plan.released_ids:
            self._is_plain.pop(request_id, None)
        if not plan.entries:
            return StepResult(token_ids=())
        is_plain = self._plan_is_plain(plan)
        step = _Step(plan, len(self._layout.groups))
        if is_plain:
            self.native.step(step.arguments(None))
            return self._greedy_result(plan, step)
        logits = self._logits_for(step.num_outputs)
        self.native.step(step.arguments(logits.data_ptr()))
        if self._sampler is None:
            raise KernelError("this runner has no sampler, and the plan is not plain greedy")
        return self._sampler(logits, plan)

    def _plan_is_plain(self, plan: StepPlan) -> bool:
        known = self._is_plain
        for entry in plan.entries:
            if entry.num_logits > 1:
                return False
            if entry.is_sampled:
                # The property looks at a dozen parameters; at 256 requests a step that is worth a dictionary.
                is_plain = known.get(entry.request_id)
                if is_plain is None:
                    is_plain = known[entry.request_id] = entry.sampling.is_plain
                if not is_plain:
                    return False
        return True

    def _greedy_result(self, plan: StepPlan, step: _Step) -> StepResult:
        chosen = iter(step.argmax)
        token_ids: list[int | None] = []
        errors: dict[int, Exception] = {}
        for entry in plan.entries:
            token = next(chosen) if entry.num_logits else None
            if not entry.is_sampled:
                token = None
            elif token is not None and token < 0:
                errors[entry.request_id] = RequestFailed("the model returned NaN logits for this request")
                token = None
            token_ids.append(token)
        return StepResult(token_ids=token_ids, errors=errors or None)

    def _logits_for(self, rows: int) -> Tensor:
        import torch

        if self._logits is None or self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self._vocab_size, dtype=torch.float32)
        return self._logits[:rows]  # [N, V]


class _Step:
    """A plan as the flat arrays of the C interface; alive as long as the call."""

    def __init__(self, plan: StepPlan, num_groups: int) -> None:
        ids, starts, lengths, rows = array("i"), array("i"), array("i"), array("i")
        tables = [array("i") for _ in range(num_groups)]
        offsets = [array("i", (0,)) for _ in range(num_groups)]
        row = 0
        for entry in plan.entries:
            start, count, wanted = entry.num_computed_tokens, entry.num_new_tokens, entry.num_logits
            if count == 1:
                ids.append(entry.tokens[start])
            else:
                ids.extend(entry.tokens[start : start + count])
            starts.append(start)
            lengths.append(count)
            row += count
            if wanted == 1:
                rows.append(row - 1)
            elif wanted:
                rows.extend(range(row - wanted, row))
            for table, offset, blocks in zip(tables, offsets, entry.block_tables, strict=True):
                table.extend(blocks)
                offset.append(len(table))
        self.num_outputs = len(rows)
        self.argmax = array("i", bytes(4 * len(rows)))
        self._arrays = (ids, starts, lengths, rows)
        self._tables = tables
        self._offsets = offsets
        self._slots = array("i")

    def arguments(self, logits: int | None) -> StepArguments:
        """Return the C structure; `logits` is the address of [N, V] floats, or None for the argmax only."""
        ids, starts, lengths, rows = self._arrays
        if logits is not None:
            self._slots = array("i", range(self.num_outputs))
        pointers = ctypes.c_void_p * max(1, len(self._tables))
        return StepArguments(
            num_tokens=len(ids),
            num_sequences=len(starts),
            num_outputs=self.num_outputs,
            token_ids=_address(ids),
            starts=_address(starts),
            lengths=_address(lengths),
            tables=pointers(*map(_address, self._tables)),
            table_offsets=pointers(*map(_address, self._offsets)),
            output_rows=_address(rows),
            logit_slots=_address(self._slots) if logits is not None else None,
            logits=logits,
            argmax=_address(self.argmax),
        )


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def create_native_runner(
    model: nn.Module,
    *,
    sampler: Sampler | None,
    num_blocks: int | None = None,
    cache_bytes: int | None = None,
    num_threads: int | None = None,
    cores: Sequence[int] | None = None,
    level: str | None = None,
    own_model: bool = False,
    probe: bool = True,
    library: Library | None = None,
) -> NativeRunner | str:
    """Build the native runner of a causal LM; return the reason when the generic path has to be taken.

    Must be called in the thread that will execute plans.

    Args:
        model: a loaded transformers causal LM on the CPU, in bf16 or fp32.
        sampler: for whatever is not plain greedy.
        num_blocks: physical blocks of each cache group, the null block included.
        cache_bytes: budget that decides `num_blocks` when that is None; default 1 GiB. Pages become resident when used.
        num_threads: None is one per physical core.
        cores: one core per thread to bind to.
        level: instruction-set level, None for the best.
        own_model: free the module's parameters after packing (the module cannot be used afterwards).
        probe: compare one prompt with the module's own forward first.
        library: an already loaded library.
    """
    description = describe(model)
    if isinstance(description, str):
        return description
    loaded = library or load()
    if isinstance(loaded, KernelUnavailable):
        return loaded.reason
    threads = num_threads or default_num_threads()
    layout = _layout(description, num_blocks, cache_bytes)
    try:
        native = _build(loaded, description, layout, threads, cores, level)
    except KernelError as error:
        return str(error)
    dtype = str(description.embedding.dtype).removeprefix("torch.")
    notes = {
        "runner": f"native whole step ({description.family})",
        "kernels": f"{native.level}, {dtype}, {threads} threads",
    }
    runner = NativeRunner(native, description, layout, sampler, notes)
    if probe:
        error, tolerance = _probe(model, runner), _PROBE_TOLERANCE[dtype]
        if not error <= tolerance:
            runner.close()
            return f"the native step differs from the module's forward (relative error {error:.2g} > {tolerance:g})"
        notes["parity"] = f"relative error {error:.1e} against the module's own forward on {_PROBE_TOKENS} tokens"
    if own_model:
        _free(model, description.embedding)
    return runner


def _layout(description: ModelDescription, num_blocks: int | None, cache_bytes: int | None) -> CacheLayout:
    size = description.embedding.element_size()
    page = 2 * PAGE_SIZE * description.num_kv_heads * description.head_dim * size  # K and V of one layer
    windows = sorted({layer.window for layer in description.layers}, key=lambda w: (w is not None, w or 0))
    groups = [
        tuple(index for index, layer in enumerate(description.layers) if layer.window == window) for window in windows
    ]
    if num_blocks is None:
        num_blocks = max(2, (cache_bytes or 1 << 30) // (page * len(description.layers)))
    return CacheLayout(
        page_size=PAGE_SIZE,
        groups=tuple(
            CacheGroup(window=window, layers=layers, num_blocks=num_blocks, block_bytes=page * len(layers))
            for window, layers in zip(windows, groups, strict=True)
        ),
    )


def _build(
    library: Library,
    description: ModelDescription,
    layout: CacheLayout,
    num_threads: int,
    cores: Sequence[int] | None,
    level: str | None,
) -> NativeModel:
    d = description
    weight_format = FORMATS[str(d.embedding.dtype).removeprefix("torch.")]
    config = ModelConfig(
        num_layers=len(d.layers), hidden_size=d.hidden_size, num_heads=d.num_heads, num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim, intermediate_size=d.intermediate_size, vocab_size=d.vocab_size, format=weight_format,
        activation=ACTIVATIONS[d.activation], is_gated=d.layers[0].gate is not None, is_layer_norm=d.is_layer_norm,
        qk_norm=d.qk_norm, is_parallel=d.is_parallel, rotary_dim=d.rotary_dim, is_interleaved=0,
        num_groups=len(layout.groups), num_ropes=len(d.ropes), embedding_format=weight_format, norm_eps=d.norm_eps,
        embedding_scale=d.embedding_scale, residual_scale=d.residual_scale, logit_scale=d.logit_scale,
        attention_softcap=d.attention_softcap, logit_softcap=d.logit_softcap,
    )  # fmt: skip
    native = NativeModel(library, config, num_threads=num_threads, cores=cores, level=level)
    for group, cache in enumerate(layout.groups):
        native.set_group(group, cache.num_blocks, len(cache.layers))
        for position, index in enumerate(cache.layers):
            layer = d.layers[index]
            native.set_layer(
                index,
                window=layer.window or 0,
                rope=layer.rope,
                group=group,
                group_layer=position,
                scale=layer.scale,
            )
    for index, (frequencies, scaling) in enumerate(d.ropes):
        native.set_rope(index, _floats(frequencies), scaling)
    for index, layer in enumerate(d.layers):
        _pack_layer(native, index, layer, weight_format)
    for name, values in d.final_vectors.items():
        native.set_vector(-1, name, _floats(values))
    _pack(native, -1, "head", d.head, weight_format)
    embedding = d.embedding.detach().contiguous()
    native.set_embedding(embedding.data_ptr(), embedding)
    return native


def _pack_layer(native: NativeModel, index: int, layer: LayerDescription, weight_format: int) -> None:
    import numpy as np

    for name, values in layer.vectors.items():
        native.set_vector(index, name, _floats(values))
    _pack(native, index, "qkv", layer.qkv, weight_format)
    _pack(native, index, "out", layer.out, weight_format)
    _pack(native, index, "down", layer.down, weight_format)
    if layer.gate is None:
        _pack(native, index, "gate_up", layer.up, weight_format)
        return
    # A panel is 32 gate and 32 up columns: the product of a pair is formed where both were computed.
    columns = layer.up.weight.shape[0]
    panels = -(-columns // 32)
    gate, up = _Rows(layer.gate), _Rows(layer.up)
    rows = np.zeros((panels, 2, 32), np.uint64)
    biases = np.zeros((panels, 2, 32), np.float32)
    for side, source in enumerate((gate, up)):
        padded = np.zeros(panels * 32, np.uint64)
        padded[:columns] = source.addresses
        rows[:, side] = padded.reshape(panels, 32)
        if source.bias is not None:
            bias = np.zeros(panels * 32, np.float32)
            bias[:columns] = source.bias
            biases[:, side] = bias.reshape(panels, 32)
    has_bias = gate.bias is not None or up.bias is not None
    native.set_linear(
        index,
        "gate_up",
        rows.reshape(-1),
        gate.depth,
        source_format=weight_format,
        weight_format=weight_format,
        bias=biases.reshape(-1) if has_bias else None,
    )


class _Rows:
    """The address of every row of a weight; keeps the memory alive while it is packed."""

    def __init__(self, projection: Projection) -> None:
        import numpy as np

        weight = projection.weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        self.weight = weight
        self.depth = weight.shape[1]
        stride = weight.stride(0) * weight.element_size()
        self.addresses = np.uint64(weight.data_ptr()) + np.arange(weight.shape[0], dtype=np.uint64) * np.uint64(stride)
        self.bias = None if projection.bias is None else _floats(projection.bias)


def _pack(native: NativeModel, layer: int, name: str, projection: Projection, weight_format: int) -> None:
    rows = _Rows(projection)
    native.set_linear(
        layer,
        name,
        rows.addresses,
        rows.depth,
        source_format=weight_format,
        weight_format=weight_format,
        bias=rows.bias,
    )


def _floats(values: Tensor) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = values.detach().float().contiguous().numpy()
    return result


def _probe(model: Any, runner: NativeRunner) -> float:
    """Compare logits of one prompt, computed in uneven chunks, with the module's own forward (relative, Frobenius)."""
    import torch

    limit = min(_PROBE_TOKENS, runner.max_model_len, (runner.cache_layout.groups[0].num_blocks - 1) * PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(runner.vocab_size, model.config.vocab_size), (limit,), generator=generator)
    expected = _module_logits(model, ids)
    actual = torch.empty(limit, runner.vocab_size)
    chunks = [c for c in (limit - limit // 2 - 1, limit // 2, 1) if c]
    done = 0
    for count in chunks:
        runner.native.step(_probe_arguments(ids.tolist(), done, count, runner, actual[done:]))
        done += count
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def _probe_arguments(
    ids: list[int], start: int, count: int, runner: NativeRunner, logits: Tensor
) -> StepArguments:
    from aiocb.sampling_params import SamplingParams
    from aiocb.step import StepEntry

    blocks = list(range(1, -(-len(ids) // PAGE_SIZE) + 1))
    entry = StepEntry(
        request_id=0, tokens=ids, num_prompt_tokens=len(ids), num_computed_tokens=start, num_new_tokens=count,
        block_tables=tuple(blocks for _ in runner.cache_layout.groups), num_logits=count, is_sampled=False,
        sampling=SamplingParams(), seed=0,
    )  # fmt: skip
    step = _Step(StepPlan(entries=(entry,), num_tokens=count), len(runner.cache_layout.groups))
    arguments = step.arguments(logits.data_ptr())
    arguments._owner = step  # the arrays must outlive the call
    return arguments


def _module_logits(model: Any, ids: Tensor) -> Tensor:
    """The module's own logits [T, V]; eager attention where a soft cap would be dropped by others."""
    import torch

    config = model.config
    previous = config._attn_implementation
    was_training = model.training
    try:
        if getattr(config, "attn_logit_softcapping", None):
            config._attn_implementation = "eager"
        model.eval()
        with torch.inference_mode():
            logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
        return logits
    finally:
        config._attn_implementation = previous
        model.train(was_training)


def _free(model: nn.Module, keep: Tensor) -> None:
    """Drop the module's weights; only the embedding is still read."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.data_ptr() != keep.data_ptr():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
