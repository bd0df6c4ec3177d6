"""Runs plans on any causal LM through the transformers seam, in plain torch. Worker thread only.

The data path of a step:

    plan ─► copy blocks, states ─► pack ─► model (keys to pages, attention by the backend, states in their slots)
         ─► logits ─► sampler ─► copy states ─► result

Everything before the sampler is `ModelAdapter.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiocb.attention.base import AttentionBackend, KVFormat
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels.interface import PAGE_SIZE
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.choose import choose_backend, choose_scans, pack_linears
from aiocb.model.eager.dry_step import dry_step
from aiocb.model.eager.lora import Adapters
from aiocb.model.eager.slots import choose_states, layout_without_keys
from aiocb.model.eager.states import StateStorage
from aiocb.model.kv import PagedCache, choose_cache_dtype, choose_layout, choose_page_size
from aiocb.model.measure import Meter, StepMemory, measure_step, meter_of
from aiocb.model.memory import run_in_memory
from aiocb.model.parity import check_parity
from aiocb.model.sizes import MAX_REQUESTS, expected_length
from aiocb.model.swap import SwapBuffer, choose_swap
from aiocb.records import Record, Records
from aiocb.sampling.sampler import Sampler
from aiocb.step import CacheLayout, ImmediateRunner, StateCopy, StateLayout, StepEntry, StepPlan, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aiocb.model.eager.linears import PackedLinears
    from aiocb.model.load.peft import LoraWeights

__all__ = ["TorchRunner"]


class TorchRunner(ImmediateRunner):
    """A `step.Runner` for any causal LM that transformers runs.

    Args:
        model: is never changed; a view of it runs.
        config: page size, blocks, memory and attention are taken from it.
        sampler: called once per step.
        max_model_len: most tokens of a request.
        meter: measures steps; None takes that of the model's device, where there is one.
        agree: makes of the layout that there is room for the one that is used.

    Attributes:
        max_batch_tokens: that the cache has left memory for; None where steps are not measured.

    Raises:
        ConfigError: the model, the attention backend or the cache cannot work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        sampler: Sampler,
        *,
        max_model_len: int,
        meter: Meter | None = None,
        agree: Callable[[CacheLayout], CacheLayout] | None = None,
    ) -> None:
        self._model = model
        self._agree = agree
        self._adapter = ModelAdapter(model)
        self._linears: PackedLinears | None = None
        self._num_threads = config.num_threads
        self._sampler = sampler
        self._meter = meter or meter_of(self._adapter.device)
        self.vocab_size = self._adapter.vocab_size
        bound, reason = self._adapter.length_bound
        self._max_model_len = min(max_model_len, bound)
        length = (Choice("max_model_len", str(bound), reason),) if bound < max_model_len else ()
        try:
            choices = self._assemble(config)
        except ConfigError as error:
            # Without native code there is no other cache.
            if config.native is not None or not self._uses_native or config.kv_cache_dtype is not None:
                raise
            self._close_linears()
            choices = self._assemble(dataclasses.replace(config, native=False))
            length = (Choice("generic kernels", "off", str(error)), *length)
        self.choices: Sequence[Choice] = (*length, *choices)

    def _assemble(self, config: EngineConfig) -> list[Choice]:
        """Choose attention and linears, size the cache, and compare with the model's own forward."""
        adapter = self._adapter
        self._uses_native = False
        self._backend, attention_choice = self._choose(config)
        self._uses_native = self._backend.name == "cpu"
        self._linears, linears_choice = pack_linears(
            adapter.view.model, self._backend, config, has_mixers=adapter.is_split
        )
        self._uses_native |= self._linears is not None
        self._cache_dtype, cache_choice = choose_cache_dtype(config, adapter.dtype)
        kv_format = KVFormat.of(self._cache_dtype)
        if adapter.states:
            adapter.scans = choose_scans(adapter.device, self._backend, self._linears, config)
        preferred = self._backend.capabilities.preferred_page_size or PAGE_SIZE
        page_size, page_choice = choose_page_size(config, preferred, f"attention {self._backend.name!r}")
        states, state_choices = self._make_states(config, kv_format, page_size)
        step = self._measure_step(config, page_size, states)
        reserved = {} if step is None else {f"a step of {step.max_tokens} tokens": step.num_bytes}
        layout, layout_choice = self._layout(config, page_size, states, reserved)
        layout, swap_choice = choose_swap(layout, config, is_on_host=adapter.device.type == "cpu")
        if self._agree is not None:
            layout = self._agree(layout)
        self._cache = PagedCache(self._backend, adapter.specs, layout, self._cache_dtype, adapter.device)
        self._swap: SwapBuffer | None = None
        if layout.swap_places:
            rows = self._cache.block_rows()
            if self._states is not None:
                rows.append(list(self._states.tensors.values()))
            self._swap = SwapBuffer(rows, layout.swap_places)
        self._adapters = Adapters(adapter)
        self._records = Records(len(layout.groups), self._adapters)
        try:
            parity = check_parity(self._model, self, kv_format.name)
        except ConfigError as error:
            if adapter.scans is None:
                raise
            adapter.scans, adapter.why_split = None, str(error)
            parity = check_parity(self._model, self, kv_format.name)
        chosen = [*adapter.choices, attention_choice, linears_choice, page_choice, *state_choices]
        return [*chosen, *(() if step is None else (step.choice,)), cache_choice, layout_choice, swap_choice, parity]

    def _layout(
        self, config: EngineConfig, page_size: int, states: StateLayout | None, reserved: Mapping[str, int]
    ) -> tuple[CacheLayout, Choice]:
        """The layout of the cache, from the memory that is free now but for what is reserved."""
        adapter = self._adapter
        if adapter.specs:
            layout, choice = choose_layout(
                KVFormat.of(self._cache_dtype),
                adapter.specs.values(),
                page_size,
                config,
                self._max_model_len,
                adapter.device,
                reserved,
                None if self._meter is None else self._meter.free(),
            )
        else:
            layout, choice = layout_without_keys(page_size, config, self._max_model_len)
        return layout._replace(states=states, switch=adapter.switch), choice

    def _make_states(
        self, config: EngineConfig, kv_format: KVFormat, page_size: int
    ) -> tuple[StateLayout | None, list[Choice]]:
        """Make the slots of states, before the cache takes what is left of the memory."""
        adapter = self._adapter
        self._states: StateStorage | None = None
        if not adapter.states:
            return None, []
        layout, choices = choose_states(
            adapter.states.values(),
            adapter.specs.values(),
            kv_format,
            page_size,
            adapter.scan_chunk,
            config,
            adapter.device,
        )
        self._states = StateStorage(adapter.states, layout.num_slots, adapter.device)
        return layout, choices

    def _choose(self, config: EngineConfig) -> tuple[AttentionBackend, Choice]:
        adapter = self._adapter
        return choose_backend(adapter.specs.values(), adapter.dtype, adapter.device, config)

    def _measure_step(self, config: EngineConfig, page_size: int, states: StateLayout | None) -> StepMemory | None:
        """What a step takes beside weights, states and cache; None where that is not measured."""
        if self._meter is None:
            return None
        adapter, length = self._adapter, self._max_model_len
        layout, _ = self._layout(dataclasses.replace(config, num_blocks=1), page_size, states, {})

        def run(num_tokens: int) -> None:
            cache = PagedCache(self._backend, adapter.specs, layout, self._cache_dtype, adapter.device)
            with torch.inference_mode(), self._threads():
                dry_step(
                    lambda entries, records: adapter.run(entries, records, self._backend, cache, self._states),
                    self._sampler,
                    layout,
                    num_tokens=num_tokens,
                    num_requests=config.max_requests_per_batch or MAX_REQUESTS,
                    longest=expected_length(config, length) or length,
                    vocab_size=adapter.vocab_size,
                )

        step = measure_step(self._meter, config, run)
        self.max_batch_tokens = step.max_tokens
        return step

    @property
    def cache_layout(self) -> CacheLayout:
        """The paged cache that this runner holds."""
        return self._cache.layout

    @property
    def max_model_len(self) -> int:
        """The most tokens (prompt and output) of a request."""
        return self._max_model_len

    @property
    def device_type(self) -> str:
        """Where the model is."""
        return self._adapter.device.type

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the model once over the plan and sample; see `step.Runner`.

        Raises:
            StepOutOfMemory: there is no memory for the forward pass or for sampling.
        """
        records = self._records.begin(plan)
        if plan.closed:
            self._sampler.forget()
        if self._swap is not None:  # what is moved out is relied on, whatever becomes of the step
            self._swap.swap_out(plan.swaps_out)
        if not plan.entries:
            return self._compute(plan, records)
        result = run_in_memory(self._adapter.device, self._compute, plan, records)
        self._records.finish(records, result)
        return result

    def _compute(self, plan: StepPlan, records: Sequence[Record]) -> StepResult:
        if self._swap is not None:
            self._swap.swap_in(plan.swaps_in)
        self._cache.copy_blocks(plan.copies_before)
        self._copy_states(plan.states_before)
        result = StepResult(())
        if plan.entries:
            with torch.inference_mode(), self._threads():
                result = self._sampler(self.logits(plan.entries, records), plan.entries, records)
        self._cache.copy_blocks(plan.copies_after)
        self._copy_states(plan.states_after)
        return result

    def _copy_states(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            if self._states is None:
                raise ValueError("the model has no states to copy")
            with torch.inference_mode():
                self._states.copy(copies)

    def release(self) -> None:
        """Forget every request; see `step.Runner`."""
        self._records.clear()
        self._adapters.clear()
        self._sampler.forget()

    @torch.inference_mode()
    def logits(self, entries: Sequence[StepEntry], records: Sequence[Record]) -> Tensor:
        """Run the model once: writes keys and values; returns logits [N, V]."""
        return self._adapter.run(
            entries, records, self._backend, self._cache, self._states, has_adapters=self._adapters.is_any
        )

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Hold torch to its share of threads: as configured; one beside native threads, which would wait for it."""
        before = torch.get_num_threads()
        wanted = self._num_threads or before
        if self._linears is not None and self._linears.has_own_threads:
            wanted = 1
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def reload_weights(self) -> None:
        """Look at the model anew: at weights, buffers, hooks and forwards, which may have changed meanwhile.

        Raises:
            ConfigError: it has become one that cannot be run, or not over the cache that this runner holds.
        """
        adapter, before = ModelAdapter(self._model), self._adapter
        fixed = "specs", "states", "switch", "dtype", "vocab_size"
        if any(getattr(adapter, name) != getattr(before, name) for name in fixed):
            raise ConfigError("the model's layers are not what they were; build a new engine for it")
        if adapter.length_bound[0] < before.length_bound[0]:
            (bound, reason), (was, _) = adapter.length_bound, before.length_bound
            raise ConfigError(f"the model takes {bound} tokens now ({reason}), not {was}: build a new engine for it")
        adapter.scans, adapter.why_split = before.scans, before.why_split
        self._adapter = adapter
        if self._linears is not None:
            self._linears.repack(adapter.view.model)
        self._adapters.move_to(adapter)

    def load_adapter(self, key: str, adapter: LoraWeights) -> None:
        """Add an adapter beside the linears of the view.

        Raises:
            ConfigError: a module of it cannot be adapted.
        """
        self._adapters.load(key, adapter)

    def drop_adapter(self, key: str) -> None:
        """Forget an adapter."""
        self._adapters.drop(key)

    def close(self) -> None:
        """Free the cache, the packed weights and the view. Idempotent."""
        self._cache.close()
        if self._swap is not None:
            self._swap.close()
        if self._states is not None:
            self._states.close()
        self._close_linears()
        self.__dict__.pop("_adapter", None)

    def _close_linears(self) -> None:
        if self._linears is not None:
            self._linears.close()
            self._linears = None
