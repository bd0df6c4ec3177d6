"""Thread: the worker's only. The native runner: a whole step of a decoder in one call, with the GIL released.

`create_native_runner` reads the transformers module (families.py), packs its weights, compares one prompt with the
module's own forward, and returns a runner, or the reason why the generic path has to be taken.

Shape legend: T tokens of the step, R requests, N rows with logits, V vocabulary, K depth of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import KernelError, KernelUnavailable, Library, NativeModel, load
from aiocb.kernels.interface import StepArguments
from aiocb.kernels.threads import default_num_threads
from aiocb.model.native.families import ModelDescription, describe
from aiocb.model.native.step import NativeStep
from aiocb.model.native.weights import build_native_model, pack_again
from aiocb.outputs import TokenLogprobs
from aiocb.records import Record, Records
from aiocb.sampling.sampler import Sampler, failure_of
from aiocb.step import CacheGroup, CacheLayout, ImmediateRunner, OpenedRequest, StepEntry, StepPlan, StepResult

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from aiocb.attention.base import AttentionBackend, LayerSpec
    from aiocb.model.kv import CacheSize

__all__ = ["NativeRunner", "build_described", "create_native_runner", "try_build"]

PAGE_SIZE = 16
_PROBE_TOKENS = 40
# Structural mistakes give errors near 1; noise of a deep model reaches a few per cent in bf16, twice as much in int8.
_PROBE_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.12, "int8": 0.25}


class NativeRunner(ImmediateRunner):
    """Runs plans in native code; implements `aiocb.step.Runner`.

    Args:
        native: the packed model with its cache.
        description: what it was made from.
        layout: the cache, as the cache manager obeys it.
        sampler: called with logits [N, V] and the entries that are not plain greedy; None where all are.
        notes: what was decided.
        module: where `reload_weights` finds the weights; None when it has none any more.
    """

    def __init__(
        self,
        native: NativeModel,
        description: ModelDescription,
        layout: CacheLayout,
        sampler: Sampler | None,
        notes: dict[str, str],
        module: nn.Module | None = None,
    ) -> None:
        self.native = native
        self._layout = layout
        self._vocab_size = description.vocab_size
        self._max_model_len = description.max_position_embeddings
        self._sampler = sampler
        self._notes = notes
        self.choices: tuple[Choice, ...] = ()
        self._module = module
        self._records = Records(len(layout.groups))
        self._logits: Tensor | None = None

    device_type = "cpu"

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

    @property
    def notes(self) -> dict[str, str]:
        """What was decided, by name."""
        return self._notes

    @property
    def has_module(self) -> bool:
        """False when the module's weights were freed after packing."""
        return self._module is not None

    def __repr__(self) -> str:
        groups = "+".join(str(group.num_blocks) for group in self._layout.groups)
        return f"<NativeRunner {self._notes['kernels']} [{groups} blocks]>"

    def close(self) -> None:
        """Free weights and cache, join the threads. Idempotent."""
        self.native.close()
        self._logits = self._module = None

    def release(self) -> None:
        """Forget every request; see `step.Runner`."""
        self._records.clear()
        if self._sampler is not None:
            self._sampler.forget()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step, and sample: plain greedy entries in the step itself, the rest by the sampler.

        Raises:
            KernelError: the plan names an id, a row or a block that does not exist.
        """
        for copy in plan.copies_before:
            self.native.copy_block(copy.group, copy.source, copy.target)
        records = self._records.begin(plan)
        if plan.closed and self._sampler is not None:
            self._sampler.forget()
        entries = plan.entries
        if not entries:
            return StepResult(())
        picked = [at for at, (entry, record) in enumerate(zip(entries, records)) if not _is_plain(entry, record)]
        step = NativeStep(entries, records, len(self._layout.groups), frozenset(picked))
        if not picked:
            self.native.step(step.arguments(None))
            result = _greedy_result(entries, step)
        else:
            logits = self._logits_for(step.num_logits)
            self.native.step(step.arguments(logits.data_ptr()))
            if self._sampler is None:
                raise KernelError("this runner has no sampler, and the plan is not plain greedy")
            sampled = self._sampler(logits, [entries[at] for at in picked], [records[at] for at in picked])
            result = sampled if len(picked) == len(entries) else _join(_greedy_result(entries, step), sampled, picked)
        self._records.finish(records, result)
        return result

    def reload_weights(self) -> None:
        """Read the weights of the module again, because they may have changed; nothing where they were freed.

        Raises:
            ConfigError: the module has become one that the native step does not run.
        """
        if self._module is None:
            return
        description = describe(self._module)
        if isinstance(description, str):
            raise ConfigError(f"the model was changed into one that the native step cannot run: {description}")
        try:
            pack_again(self.native, description, self._layout)
        except KernelError as error:
            raise ConfigError(str(error)) from error

    def _logits_for(self, rows: int) -> Tensor:
        import torch

        if self._logits is None or self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self._vocab_size, dtype=torch.float32)
        return self._logits[:rows]  # [N, V]


def _is_plain(entry: StepEntry, record: Record) -> bool:
    """True when an entry needs nothing, or the argmax of its one row of logits."""
    if not entry.is_sampled:
        return not entry.num_logits
    return record.is_plain and entry.num_logits == 1


def _greedy_result(entries: Sequence[StepEntry], step: NativeStep) -> StepResult:
    """What the argmax says of every entry; meaningless for those that have a sampler."""
    argmax = step.argmax
    token_ids: list[tuple[int, ...]] = []
    errors: dict[int, Exception] = {}
    row = -1
    for entry in entries:
        row += entry.num_logits
        if not entry.is_sampled:
            token_ids.append(())
        elif argmax[row] >= 0:
            token_ids.append((argmax[row],))
        else:
            token_ids.append(())
            errors[entry.request_id] = failure_of(argmax[row])
    return StepResult(token_ids, errors=errors or None)


def _join(result: StepResult, sampled: StepResult, positions: Sequence[int]) -> StepResult:
    """Put what the sampler returned in place of what the argmax said of the same entries."""
    token_ids = list(result.token_ids)
    logprobs: list[tuple[TokenLogprobs, ...] | None] | None
    logprobs = None if sampled.logprobs is None else [None] * len(token_ids)
    for at, position in enumerate(positions):
        token_ids[position] = sampled.token_ids[at]
        if logprobs is not None and sampled.logprobs is not None:
            logprobs[position] = sampled.logprobs[at]
    return StepResult(
        token_ids, logprobs, sampled.prompt_logprobs, {**(result.errors or {}), **(sampled.errors or {})} or None
    )


def _nativized(sampler: Sampler, vocab_size: int, native: NativeModel) -> Sampler:
    """Let the project's own sampler select in native code; any other is left as it is."""
    from aiocb.model.native.sampling import NativeSampler

    return NativeSampler(vocab_size, native) if type(sampler) is Sampler else sampler


def try_build(
    model: Any,
    config: EngineConfig,
    sampler: Sampler | None,
    *,
    max_model_len: int,
    owns_model: bool,
    quantization: str | None = None,
) -> tuple[NativeRunner | None, str]:
    """Build the native runner as the engine's settings ask; the string says why, either way.

    Raises:
        ConfigError: not even one short request would fit into the cache that is configured.
    """
    description = describe(model)
    if isinstance(description, str):
        return None, description
    library = load()
    if isinstance(library, KernelUnavailable):
        return None, library.reason
    return build_described(
        description,
        config,
        sampler,
        library,
        max_model_len=max_model_len,
        model=model,
        owns_model=owns_model,
        quantization=quantization,
    )


def build_described(
    description: ModelDescription,
    config: EngineConfig,
    sampler: Sampler | None,
    library: Library,
    *,
    max_model_len: int,
    model: Any = None,
    owns_model: bool = True,
    quantization: str | None = None,
    parity: str = "",
) -> tuple[NativeRunner | None, str]:
    """Build the native runner of a described model, as `try_build`.

    Without a model, nothing is compared: `parity` says what the comparison gave when there was one.

    Raises:
        ConfigError: not even one short request would fit into the cache that is configured.
    """
    if config.page_size not in (None, PAGE_SIZE):
        return None, f"native kernels work on pages of {PAGE_SIZE} tokens, not {config.page_size}"
    size = _cache_size(description, config, max_model_len)
    runner = create_native_runner(
        model,
        sampler=sampler,
        num_blocks=size.num_blocks,
        num_threads=config.num_threads,
        own_model=owns_model,
        probe=model is not None,
        library=library,
        quantization=quantization,
        description=description,
        parity=parity,
    )
    if isinstance(runner, str):
        return None, runner
    notes = (Choice(name, value, "native runner") for name, value in runner.notes.items() if name != "runner")
    runner.choices = (*size.choices, *notes)
    return runner, runner.notes["runner"]


def create_native_runner(
    model: nn.Module | None,
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
    quantization: str | None = None,
    description: ModelDescription | None = None,
    parity: str = "",
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
        quantization: "int8" or None.
        description: of the model, when it has been made already.
        parity: what an earlier comparison gave, where none is made.

    Either a model or its description has to be given.
    """
    if description is None:
        assert model is not None
        described = describe(model)
        if isinstance(described, str):
            return described
        description = described
    loaded = library or load()
    if isinstance(loaded, KernelUnavailable):
        return loaded.reason
    threads = num_threads or default_num_threads()
    layout = _layout(description, num_blocks, cache_bytes)
    try:
        native = build_native_model(
            loaded, description, layout, threads, cores, level, copy_embedding=own_model, quantization=quantization
        )
    except KernelError as error:
        return str(error)
    dtype = str(description.embedding.dtype).removeprefix("torch.")
    notes = {
        "runner": f"native whole step ({description.family})",
        "kernels": f"{native.level}, {quantization or dtype}, {threads} threads",
    }
    if sampler is not None:
        sampler = _nativized(sampler, description.vocab_size, native)
    # Quantised weights are not read again: the cache would be overwritten by the run that looks at activations.
    module = None if own_model or quantization is not None else model
    runner = NativeRunner(native, description, layout, sampler, notes, module)
    if probe:
        distance, tolerance = _probe(model, runner), _PROBE_TOLERANCE[quantization or dtype]
        if not distance <= tolerance:  # NaN too
            runner.close()
            return f"the native step differs from the module's forward (relative error {distance:.2g} > {tolerance:g})"
        notes["parity"] = f"relative error {distance:.1e} against the module's own forward on {_PROBE_TOKENS} tokens"
    elif parity:
        notes["parity"] = f"{parity}, when this model was started first"
    if own_model and model is not None:
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

    num_groups = len(runner.cache_layout.groups)
    record = Record(OpenedRequest(0, tuple(ids), len(ids), SamplingParams(), 0), 0, num_groups)
    for table in record.tables:
        table.extend(range(1, -(-len(ids) // PAGE_SIZE) + 1))
    step = NativeStep((StepEntry(0, start, count, count, False),), [record], num_groups, frozenset({0}))
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
