"""Runs plans on any causal LM through the transformers seam, in plain torch. Worker thread only.

The data path of a step:

    plan ─► copy blocks ─► pack ─► model (keys to pages, attention by the backend) ─► logits ─► sampler ─► result

Everything before the sampler is `ModelAdapter.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.choose import choose_backend, pack_linears
from aiocb.model.kv import PagedCache, choose_cache_size
from aiocb.model.parity import check_parity as check_parity_of
from aiocb.records import Records
from aiocb.sampling.sampler import Sampler
from aiocb.step import CacheLayout, ImmediateRunner, StepPlan, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TorchRunner"]


class TorchRunner(ImmediateRunner):
    """A `step.Runner` for any causal LM that transformers runs.

    Args:
        model: in eval mode; left as it was found whenever no step runs.
        config: page size, blocks, memory and attention are taken from it.
        sampler: called once per step.
        max_model_len: most tokens of a request.
        check_parity: compare one prompt with the model's own forward.

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
        check_parity: bool = True,
    ) -> None:
        self._adapter = ModelAdapter(model)
        self._num_threads = config.num_threads
        self._sampler = sampler
        bound = self._adapter.length_bound
        self._max_model_len = max_model_len if bound is None else min(max_model_len, bound)
        self._uses_native = False
        self.choices: Sequence[Choice] = ()
        try:
            self._assemble(config, check_parity)
        except ConfigError as error:
            if config.native is not None or not self._uses_native:
                raise
            self._adapter.linears = None
            self._assemble(dataclasses.replace(config, native=False), check_parity)
            self.choices = (Choice("generic kernels", "off", str(error)), *self.choices)

    def _assemble(self, config: EngineConfig, check_parity: bool) -> None:
        """Choose attention and linears, size the cache, and compare with the model's own forward."""
        adapter = self._adapter
        self._backend, attention_choice = choose_backend(adapter.specs.values(), adapter.dtype, adapter.device, config)
        adapter.linears, linears_choice = pack_linears(adapter.model, self._backend, config)
        self._uses_native = adapter.linears is not None or self._backend.name == "cpu"
        specs = tuple(adapter.specs.values())
        size = choose_cache_size(self._backend, specs, config, self._max_model_len, adapter.dtype, adapter.device)
        parity = (check_parity_of(adapter, self._backend, size.page_size),) if check_parity else ()
        self._records = Records(len({spec.window for spec in specs}))
        self._cache = PagedCache(self._backend, specs, size.page_size, size.num_blocks, adapter.dtype, adapter.device)
        self.choices = (attention_choice, linears_choice, *size.choices, *parity)

    @property
    def cache_layout(self) -> CacheLayout:
        """The paged cache that this runner holds."""
        return self._cache.layout

    @property
    def vocab_size(self) -> int:
        """Rows of the logits."""
        return self._adapter.vocab_size

    @property
    def max_model_len(self) -> int:
        """The most tokens (prompt and output) of a request."""
        return self._max_model_len

    @property
    def device_type(self) -> str:
        """Where the model is."""
        return self._adapter.device.type

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the model once over the plan and sample; see `step.Runner`."""
        if plan.copies_before:
            self._cache.copy_blocks(plan.copies_before)
        records = self._records.begin(plan)
        if plan.closed:
            self._sampler.forget()
        if not plan.entries:
            return StepResult(())
        with torch.inference_mode(), self._threads():
            logits = self._adapter.run(plan.entries, records, self._backend, self._cache)
            result = self._sampler(logits, plan.entries, records)
        self._records.finish(records, result)
        return result

    def release(self) -> None:
        """Forget every request; see `step.Runner`."""
        self._records.clear()
        self._sampler.forget()

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Hold torch to its share of threads: as configured; one beside native threads, which would wait for it."""
        before = torch.get_num_threads()
        linears = self._adapter.linears
        wanted = self._num_threads or before
        if linears is not None and linears.has_own_threads:
            wanted = 1
        if wanted == before:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def reload_weights(self) -> None:
        """Pack the weights again: they may have changed while the engine was paused."""
        if self._adapter.linears is not None:
            self._adapter.linears.repack()

    def close(self) -> None:
        """Free the cache. Idempotent; the model is as it was found."""
        self._cache.close()
        if self._adapter.linears is not None:
            self._adapter.linears.close()
            self._adapter.linears = None
