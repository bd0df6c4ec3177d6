"""Thread: the worker's only. The native runner: a whole step of a decoder in one call, with the GIL released.

`create_native_runner` reads the transformers module (families.py), packs its weights, compares one prompt with the
module's own forward, and returns a runner, or the reason why the generic path has to be taken.

Shape legend: T tokens of the step, R requests, N rows with logits, V vocabulary, K depth of a weight.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from aiocb.config import Choice, EngineConfig
from aiocb.errors import RequestFailed
from aiocb.kernels import KernelError, KernelUnavailable, Library, NativeModel, load
from aiocb.kernels.library import StepArguments
from aiocb.kernels.threads import default_num_threads
from aiocb.model.families import ModelDescription, describe
from aiocb.model.native_weights import build_native_model
from aiocb.step import CacheGroup, CacheLayout, StepPlan, StepResult

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from aiocb.attention.base import AttentionBackend, LayerSpec
    from aiocb.model.kv import CacheSize

__all__ = ["NativeRunner", "create_native_runner", "try_build"]

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
        self.choices: tuple[Choice, ...] = ()
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


def try_build(
    model: Any, config: EngineConfig, sampler: Sampler | None, *, max_model_len: int, owns_model: bool
) -> tuple[NativeRunner | None, str]:
    """Build the native runner as the engine's settings ask; the string says why, either way.

    Raises:
        ConfigError: not even one short request would fit into the cache that is configured.
    """
    if config.page_size not in (None, PAGE_SIZE):
        return None, f"native kernels work on pages of {PAGE_SIZE} tokens, not {config.page_size}"
    description = describe(model)
    if isinstance(description, str):
        return None, description
    library = load()
    if isinstance(library, KernelUnavailable):
        return None, library.reason
    size = _cache_size(description, config, max_model_len)
    runner = create_native_runner(
        model,
        sampler=sampler,
        num_blocks=size.num_blocks,
        num_threads=config.num_threads,
        own_model=owns_model,
        library=library,
    )
    if isinstance(runner, str):
        return None, runner
    notes = (Choice(name, value, "native runner") for name, value in runner.describe().items() if name != "runner")
    runner.choices = (*size.choices, *notes)
    return runner, runner.describe()["runner"]


def create_native_runner(
    model: nn.Module,
    *,
    sampler: Sampler | None,
    num_blocks: int | Sequence[int] | None = None,
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
        num_blocks: physical blocks of every cache group (or of each), the null block included.
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
        native = build_native_model(loaded, description, layout, threads, cores, level, copy_embedding=own_model)
    except KernelError as error:
        return str(error)
    dtype = str(description.embedding.dtype).removeprefix("torch.")
    notes = {
        "runner": f"native whole step ({description.family})",
        "kernels": f"{native.level}, {dtype}, {threads} threads",
    }
    runner = NativeRunner(native, description, layout, sampler, notes)
    if probe:
        distance, tolerance = _probe(model, runner), _PROBE_TOLERANCE[dtype]
        if not distance <= tolerance:  # NaN too
            runner.close()
            return f"the native step differs from the module's forward (relative error {distance:.2g} > {tolerance:g})"
        notes["parity"] = f"relative error {distance:.1e} against the module's own forward on {_PROBE_TOKENS} tokens"
    if own_model:
        _free(model)
    return runner


class _PageShape:
    """What the choice of a cache size asks of a backend."""

    name = "native"

    def __init__(self) -> None:
        from aiocb.attention.base import Capabilities

        self.capabilities = Capabilities(page_sizes=(PAGE_SIZE,), default_page_size=PAGE_SIZE)

    def block_bytes(self, spec: LayerSpec, page_size: int, dtype: torch.dtype) -> int:
        """K and V of one page of one layer."""
        return 2 * page_size * spec.num_kv_heads * spec.key_dim * dtype.itemsize


def _cache_size(description: ModelDescription, config: EngineConfig, max_model_len: int) -> CacheSize:
    from aiocb.attention.base import LayerSpec
    from aiocb.model.kv import choose_cache_size

    d = description
    specs = [
        LayerSpec(index, d.num_heads, d.num_kv_heads, d.head_dim, d.head_dim, layer.scale, layer.window)
        for index, layer in enumerate(d.layers)
    ]
    backend = cast("AttentionBackend", _PageShape())
    return choose_cache_size(backend, specs, config, max_model_len, d.embedding.dtype, d.embedding.device)


def _layout(
    description: ModelDescription, num_blocks: int | Sequence[int] | None, cache_bytes: int | None
) -> CacheLayout:
    size = description.embedding.element_size()
    page = 2 * PAGE_SIZE * description.num_kv_heads * description.head_dim * size  # K and V of one layer
    windows = sorted({layer.window for layer in description.layers}, key=lambda w: (w is not None, w or 0))
    groups = [
        tuple(index for index, layer in enumerate(description.layers) if layer.window == window) for window in windows
    ]
    if num_blocks is None:
        num_blocks = max(2, (cache_bytes or 1 << 30) // (page * len(description.layers)))
    counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
    return CacheLayout(
        page_size=PAGE_SIZE,
        groups=tuple(
            CacheGroup(window=window, layers=layers, num_blocks=count, block_bytes=page * len(layers))
            for window, layers, count in zip(windows, groups, counts, strict=True)
        ),
    )


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


def _probe_arguments(ids: list[int], start: int, count: int, runner: NativeRunner, logits: Tensor) -> StepArguments:
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


def _free(model: nn.Module) -> None:
    """Drop the module's weights."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
