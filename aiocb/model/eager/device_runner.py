"""The eager runner on an accelerator: what is chosen beyond it is tried at start, and switched off where it is wrong.

    attention (flash, varlen, sdpa)  ─►  parity with the model's own forward, else the next one
    decode path, compiled, graphs, async  ─►  each compared with steps on the host, else off with its reason

Worker thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from aiocb.attention.base import AttentionBackend, KVFormat
from aiocb.attention.packed import PackedBackend
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.choose import choose_backend
from aiocb.model.eager.compilation import compile_options, compiled
from aiocb.model.eager.device import CudaDevice, Device
from aiocb.model.eager.graphs import Graphs, Padding
from aiocb.model.eager.pipeline import Flight, Forwards, Pipeline
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.eager.selfcheck import check_steps
from aiocb.model.eager.tables import DeviceTables
from aiocb.model.memory import run_in_memory
from aiocb.model.sizes import MAX_REQUESTS, expected_length
from aiocb.sampling.sampler import Sampler
from aiocb.step import StepPlan, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Accelerator", "DeviceRunner"]

logger = logging.getLogger("aiocb")

TABLE_TOKENS = 8192
"""Tokens of a request that a table has room for, where nothing is configured or hinted at; longer requests go by the
host."""


class Accelerator:
    """What a runner asks of the machine; tests put other things in place of each.

    Args:
        device: runs steps.
        backends: attention by name, in place of those of the registry.
        compiler: in place of `torch.compile`.
    """

    def __init__(
        self,
        device: Device,
        backends: Mapping[str, Callable[[], AttentionBackend]] | None = None,
        compiler: Callable[..., Any] = torch.compile,
    ) -> None:
        self.device = device
        self.backends = backends
        self.compiler = compiler

    @classmethod
    def of(cls, kind: torch.device) -> Accelerator | None:
        """That of a torch device; None where there are no streams and graphs."""
        return cls(CudaDevice(kind)) if kind.type == "cuda" else None


class DeviceRunner(TorchRunner):
    """A `step.Runner` for any causal LM on an accelerator.

    Args:
        model, config, sampler, max_model_len: as in `TorchRunner`.
        accelerator: of the model's device.

    Raises:
        ConfigError: the model, the configured attention or the cache cannot work. Nothing else keeps it from starting.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        sampler: Sampler,
        *,
        max_model_len: int,
        accelerator: Accelerator,
    ) -> None:
        self._accelerator = accelerator
        self._pipeline: Pipeline | None = None
        self._failed: dict[str, str] = {}
        self._tried = ""
        self._recompile: list[tuple[str, dict[str, Any]]] = []
        super().__init__(model, config, sampler, max_model_len=max_model_len)
        self.choices = [*self.choices, *self._accelerate(config)]

    # ── choices ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _choose(self, config: EngineConfig) -> tuple[AttentionBackend, Choice]:
        adapter = self._adapter
        backend, choice = choose_backend(
            adapter.specs.values(), adapter.dtype, adapter.device, config, self._failed, self._accelerator.backends
        )
        self._tried = backend.name
        return backend, choice

    def _assemble(self, config: EngineConfig) -> list[Choice]:
        """Take the first attention whose steps are those of the model's own forward."""
        while True:
            self._tried = ""
            try:
                return super()._assemble(config)
            except ConfigError as error:
                if config.attention is not None or self._tried in ("", "sdpa"):
                    raise
                self._failed[self._tried] = str(error)
            self._close_linears()
            if "_cache" in self.__dict__:  # the next one is to have this memory
                self._cache.close()
                if self._swap is not None:
                    self._swap.close()

    def _accelerate(self, config: EngineConfig) -> list[Choice]:
        """Decide on each of the faster ways, and try it."""
        varlen, decode = compile_options(config)
        reason = self._refusal(config)
        if reason is None:
            reason = self._start_pipeline(config)
        if reason is not None:
            self._drop()
            for name in config.accelerator_settings():
                logger.warning("%s has no effect: %s", name, reason)
            return [Choice("decode_path", "off", reason)]
        pipeline, tables = self._pipeline, self._tables
        assert pipeline is not None
        room = f"tables of {tables.max_blocks} blocks for {tables.num_rows} requests"
        choices = [Choice("decode_path", "on", f"prepared on the device; {room}")]
        choices.append(self._compile(varlen, decode))
        choices.append(self._record(config))
        choices.append(self._overlap(config))
        return choices

    def _refusal(self, config: EngineConfig) -> str | None:
        """Why steps cannot be prepared on the device."""
        if config.max_blocks_per_request == 0:
            return "max_blocks_per_request=0"
        if not isinstance(self._backend, PackedBackend):
            return f"attention {self._backend.name!r} prepares its steps on the host"
        if self._adapter.mixers or self.cache_layout.states is not None:
            return "some mixers of the model are called in parts"
        if self.cache_layout.switch is not None:
            return "the model's rotations change with the length of a request"
        if type(self._sampler) is not Sampler:
            return "the sampler is not the engine's own"
        return None

    def _start_pipeline(self, config: EngineConfig) -> str | None:
        """Build the pipeline and try it; returns what is wrong with it."""
        backend, adapter, layout = self._backend, self._adapter, self.cache_layout
        assert isinstance(backend, PackedBackend)
        longest = expected_length(config, self._max_model_len) or min(self._max_model_len, TABLE_TOKENS)
        max_blocks = config.max_blocks_per_request or -(-longest // layout.page_size)
        smallest = min(group.num_blocks for group in layout.groups) - 1
        self._batch_rows = config.max_requests_per_batch or min(MAX_REQUESTS, smallest)
        num_rows = 2 * self._batch_rows  # those that end are open until no step is under way that names them
        device = self._accelerator.device
        self._gathers = any(
            spec.is_gathered or not backend.reads_in_place(spec, layout.page_size) for spec in adapter.specs.values()
        )
        try:
            self._tables = DeviceTables(layout, num_rows, max_blocks, device.kind)
        except RuntimeError as error:
            return f"there is no room for its tables: {error}"
        self._forwards = Forwards(adapter, backend, self._cache, self._tables)
        self._pipeline = Pipeline(
            self._forwards,
            self._cache,
            self._records,
            self._tables,
            device,
            gathers=self._gathers,
            run_on_host=super().execute,
        )
        return self._check()

    def _check(self) -> str | None:
        assert self._pipeline is not None
        name = KVFormat.of(self._adapter.dtype).name
        with self._threads():
            return check_steps(
                self._pipeline,
                self._model,
                self.cache_layout,
                self.logits,
                name,
                vocab_size=self.vocab_size,
                max_model_len=self._max_model_len,
            )

    def _compile(self, varlen: dict[str, Any] | None, decode: dict[str, Any] | None) -> Choice:
        """Compile the paths that are asked for, one by one."""
        forwards, model, compiler = self._forwards, self._adapter.view.model, self._accelerator.compiler
        done, failed = [], []
        for path, options in (("varlen", varlen), ("decode", decode)):
            if options is None:
                continue
            try:
                setattr(forwards, path, compiled(model, options, compiler))
                reason = self._check()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if reason is None:
                self._recompile.append((path, options))
                done.append(f"{path} with {options}")
            else:
                setattr(forwards, path, None)
                failed.append(f"not {path}: {reason}")
        if not done and not failed:
            return Choice("compile", "off", "not asked for")
        return Choice("compile", ", ".join(done) or "off", "; ".join(failed) or "configured")

    def _record(self, config: EngineConfig) -> Choice:
        """Record graphs before traffic, and try them."""
        has_varlen, has_decode = config.graph_booleans
        if not has_varlen and not has_decode:
            return Choice("cuda_graph", "off", "configured")
        tables, pipeline, layout = self._tables, self._pipeline, self.cache_layout
        assert pipeline is not None
        num_keys = max(group.num_blocks for group in layout.groups) * layout.page_size
        padding = Padding(
            config.q_padding_interval_size,
            config.kv_padding_interval_size,
            max_rows=self._batch_rows,
            max_tokens=config.max_batch_tokens or self.max_batch_tokens or TABLE_TOKENS,
            max_keys=min(num_keys, self._batch_rows * tables.max_blocks * layout.page_size),
            max_len=tables.max_blocks * layout.page_size,
            num_groups=len(layout.groups) if self._gathers else 0,
            has_varlen=has_varlen,
            has_decode=has_decode,
        )
        graphs = Graphs(self._accelerator.device, self._forwards, padding, tables.num_rows)
        try:
            with torch.inference_mode(), self._threads():
                graphs.warm_up(padding.shapes())
        except Exception as error:  # of a device, or of a model that asks it for numbers in between
            return Choice("cuda_graph", "off", f"recording failed with {type(error).__name__}: {error}")
        pipeline.graphs = graphs
        reason = self._check()
        if reason is not None:
            pipeline.graphs = None
            return Choice("cuda_graph", "off", reason)
        paths = " and ".join(name for name, is_on in (("varlen", has_varlen), ("decode", has_decode)) if is_on)
        return Choice("cuda_graph", f"{len(graphs)} graphs", f"of {paths}, recorded before traffic")

    def _overlap(self, config: EngineConfig) -> Choice:
        """Let two steps be under way, and try it."""
        if config.use_async_batching is False:
            return Choice("async_batching", "off", "configured")
        pipeline = self._pipeline
        assert pipeline is not None
        pipeline.depth = 2
        reason = self._check()
        if reason is not None:
            pipeline.depth = 1
            return Choice("async_batching", "off", reason)
        return Choice(
            "async_batching",
            "on",
            "a step is launched before the last one's tokens are known; steps that need a request's history wait",
        )

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def depth(self) -> int:  # type: ignore[override]
        """How many plans may be under way."""
        return 1 if self._pipeline is None else self._pipeline.depth

    def submit(self, plan: StepPlan) -> Any:
        """Launch a step; see `step.Runner`.

        Raises:
            StepOutOfMemory: there is no memory for it: what it takes is taken when it is launched.
        """
        if self._pipeline is None:
            return super().submit(plan)
        with self._threads():
            if not plan.entries:
                return self._pipeline.submit(plan)
            return run_in_memory(self._adapter.device, self._pipeline.submit, plan)

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step; see `step.Runner`."""
        if isinstance(handle, Flight):
            assert self._pipeline is not None
            return self._pipeline.collect(handle)
        return super().collect(handle)

    def release(self) -> None:
        """Forget every request; see `step.Runner`."""
        if self._pipeline is not None:
            self._pipeline.release()
        super().release()

    def load_adapter(self, key: str, adapter: Any) -> None:
        """Refuse: a step that was recorded calls no module.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("adapters are applied on the CPU only: device='cpu' with EngineConfig(attention='cpu')")

    def reload_weights(self) -> None:
        """Look at the model anew; what was recorded and compiled is made again.

        Raises:
            ConfigError: as in `TorchRunner`.
            RuntimeError: a graph cannot be recorded any more.
        """
        super().reload_weights()
        pipeline = self._pipeline
        if pipeline is None:
            return
        forwards = self._forwards
        forwards.adapter = self._adapter
        for path, options in self._recompile:
            setattr(forwards, path, compiled(self._adapter.view.model, options, self._accelerator.compiler))
        graphs, pipeline.graphs = pipeline.graphs, None
        if graphs is not None:  # they name weights by their address; padding is all that this writes
            again = Graphs(self._accelerator.device, forwards, graphs.padding, self._tables.num_rows)
            with torch.inference_mode(), self._threads():
                again.warm_up(graphs.padding.shapes())
            pipeline.graphs = again

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._pipeline is not None:
            self._pipeline.release()
        self._drop()
        super().close()

    def _drop(self) -> None:
        self._pipeline = None
        for name in ("_forwards", "_tables"):
            self.__dict__.pop(name, None)
