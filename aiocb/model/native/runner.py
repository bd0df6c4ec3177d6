"""Thread: the worker's only. The native runner: a whole step of a decoder in one call, with the GIL released.

It is made in build.py.

Shape legend: T tokens of the step, R requests, N rows with logits, V vocabulary, K depth of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.kernels import KernelError, NativeModel
from aiocb.kernels.interface import PAGE_SIZE
from aiocb.model.memory import run_in_memory
from aiocb.model.native.families import ModelDescription, describe
from aiocb.model.native.step import NativeStep
from aiocb.model.native.swap import NativeSwap
from aiocb.model.native.verify import accepted, sample_verified
from aiocb.model.native.weights import pack_again
from aiocb.outputs import TokenLogprobs
from aiocb.records import Record, Records
from aiocb.sampling.sampler import Sampler, failure_of
from aiocb.step import BlockCopy, CacheLayout, ImmediateRunner, StepEntry, StepPlan, StepResult

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NativeRunner"]

_CPU = torch.device("cpu")


class NativeRunner(ImmediateRunner):
    """Runs plans in native code; implements `aiocb.step.Runner`.

    Args:
        native: the packed model with its cache.
        description: what it was made from.
        layout: the cache, as the cache manager obeys it.
        sampler: called with logits [N, V] and the entries that are not plain greedy.
        module: where `reload_weights` finds the weights; None when it has none any more.
    """

    def __init__(
        self,
        native: NativeModel,
        description: ModelDescription,
        layout: CacheLayout,
        sampler: Sampler,
        module: nn.Module | None = None,
    ) -> None:
        self.native = native
        self.choices: tuple[Choice, ...] = ()
        self.cache_layout = layout
        self.vocab_size = description.vocab_size
        self.max_model_len = description.max_position_embeddings
        self._sampler = sampler
        self._module = module
        self._swap = NativeSwap(native, layout) if layout.swap_places else None
        self._records = Records(takes_guesses=True)  # block tables lie in native memory, by row
        self._logits: Tensor | None = None

    device_type = "cpu"

    def __repr__(self) -> str:
        groups = "+".join(str(group.num_blocks) for group in self.cache_layout.groups)
        return f"<NativeRunner {self.native.instruction_set} [{groups} blocks]>"

    def close(self) -> None:
        """Free weights and cache, join the threads. Idempotent."""
        self.native.close()
        self._logits = self._module = self._swap = None

    def release(self) -> None:
        """Forget every request; see `step.Runner`."""
        self._records.clear()
        self.native.reset_rows()
        self._sampler.forget()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step, and sample: plain greedy entries in the step itself, the rest by the sampler.

        Raises:
            StepOutOfMemory: there is no memory for the step's buffers, its logits or for sampling.
            KernelError: the plan names an id, a row or a block that does not exist.
        """
        if self._swap is not None:
            self._swap.swap_out(plan.swaps_out)
            self._swap.swap_in(plan.swaps_in)
        self._copy_blocks(plan.copies_before)
        records = self._records.begin(plan)
        if plan.closed:
            self._sampler.forget()
        result = StepResult(())
        if plan.entries:
            result = run_in_memory(_CPU, self._compute, plan.entries, records)
            self._records.finish(records, result)
        self._copy_blocks(plan.copies_after)
        return result

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for group, source, target in copies:
            for page in range(pages := self.cache_layout.page_size // PAGE_SIZE):
                self.native.copy_block(group, source * pages + page, target * pages + page)

    def _compute(self, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        picked = [at for at, (entry, record) in enumerate(zip(entries, records)) if not _is_plain(entry, record)]
        step = self._step(entries, records, frozenset(picked))
        if not picked:
            self.native.step(step.arguments(None))
            return _greedy_result(entries, records, step)
        logits = self._logits_for(step.num_logits)
        self.native.step(step.arguments(logits.data_ptr()))
        some = [entries[at] for at in picked], [records[at] for at in picked]
        sampled = sample_verified(self._sampler, logits, *some)
        return (
            sampled if len(picked) == len(entries) else _join(_greedy_result(entries, records, step), sampled, picked)
        )

    def logits(self, entries: Sequence[StepEntry], records: Sequence[Record]) -> Tensor:
        """Run the step without sampling: writes keys and values; returns logits [N, V]."""
        step = self._step(entries, records, frozenset(range(len(entries))))
        logits = torch.empty(step.num_logits, self.vocab_size, dtype=torch.float32)
        self.native.step(step.arguments(logits.data_ptr()))
        return logits

    def load_adapter(self, key: str, adapter: Any) -> None:
        """Refuse: the whole step calls no linear from here.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "the native whole step applies no adapters: set EngineConfig(attention='cpu'), which runs the model module "
            "by module over native attention and linears"
        )

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
            pack_again(self.native, description, self.cache_layout)
        except KernelError as error:
            raise ConfigError(str(error)) from error

    def _step(self, entries: Sequence[StepEntry], records: Sequence[Record], with_logits: Set[int]) -> NativeStep:
        layout = self.cache_layout
        return NativeStep(entries, records, len(layout.groups), layout.page_size, with_logits)

    def _logits_for(self, rows: int) -> Tensor:
        if self._logits is None or self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self.vocab_size, dtype=torch.float32)
        return self._logits[:rows]  # [N, V]


def _is_plain(entry: StepEntry, record: Record) -> bool:
    """True when an entry needs nothing, or the argmax of its one row of logits, and of one for each guess."""
    if not entry.is_sampled:
        return not entry.num_logits
    return record.is_plain and entry.num_logits == 1 + len(record.guesses)


def _greedy_result(entries: Sequence[StepEntry], records: Sequence[Record], step: NativeStep) -> StepResult:
    """What the argmax says of every entry; meaningless for those that have a sampler."""
    argmax = step.argmax
    token_ids: list[tuple[int, ...]] = []
    errors: dict[int, Exception] = {}
    row = -1
    for entry, record in zip(entries, records):
        row += entry.num_logits
        if not entry.is_sampled:
            token_ids.append(())
        elif record.guesses and record.is_plain:
            guesses, record.guesses = record.guesses, ()
            del record.tokens[-len(guesses) :]
            chosen = argmax[row - len(guesses) : row + 1]
            chosen = chosen[: accepted(guesses, chosen)]
            if chosen[0] < 0:
                errors[entry.request_id] = failure_of(chosen[0])
            # A row that failed behind others is left to the next step: one of these may be the last.
            token_ids.append(tuple(token for token in chosen if token >= 0))
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
    errors = {**(result.errors or {}), **(sampled.errors or {})} or None
    return StepResult(token_ids, logprobs, sampled.prompt_logprobs, errors, sampled.follows)
