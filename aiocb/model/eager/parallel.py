"""One model in several processes: rank 0 decides and samples, the others run the same steps. Worker thread only.

    rank 0   plan ─► message ─┬─► TorchRunner ─► logits ─► sampler ─► result, whose tokens go with the next message
                              │     ▲ ▼ collectives within the layers (transformers' tensor parallelism)
    rank 1   ◄────────────────┴─► TorchRunner ─► logits ─► nothing

Sharding is transformers' own: each process holds some heads of every layer, and a cache for those. Whatever could
differ between processes is decided on rank 0 and sent (plans, tokens), or agreed on at start (sizes). What can go wrong
with processes is the business of `ranks` and `watch`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiocb.config import Choice
from aiocb.errors import ConfigError, EngineError
from aiocb.model.eager.messages import Outgoing, decode, encode
from aiocb.model.eager.ranks import Ranks, join_world
from aiocb.model.eager.sharding import check_heads, for_several, spread_over, tensor_parallel_group
from aiocb.model.request import ModelRequest, Opened
from aiocb.model.sizes import GPU_BATCH_TOKENS
from aiocb.records import Record
from aiocb.step import CacheLayout, ImmediateRunner, Runner, StepEntry, StepPlan, StepResult

__all__ = ["FollowingRunner", "LeadingRunner", "ParallelRunner", "open_parallel"]

logger = logging.getLogger("aiocb")

STEP, PAUSE, RELOAD, RELEASE = "step", "pause", "reload", "release"


def open_parallel(request: ModelRequest, open_here: Callable[[ModelRequest], Opened]) -> Opened:
    """Load this process's share of a model, and build its runner; every process of the group does the same.

    Args:
        request: names several processes, or has a model that is spread over them already.
        open_here: opens a model as one process does.

    Raises:
        ConfigError: a setting cannot work with several processes, or the model cannot be spread over so many.
        EngineError: another process is lost.
    """
    wanted = None if request.distributed is None else spread_over(request.distributed)
    members = [] if request.model is None else tensor_parallel_group(request.model)
    if len(members) < 2 and (wanted is None or wanted.tp_size == 1):
        return open_here(dataclasses.replace(request, distributed=None))
    request = _checked(request)
    if wanted is not None:
        check_heads(request, wanted.tp_size, wanted.tp_plan)
        accelerator = torch.accelerator.current_accelerator()
        device_type = "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type
        join_world(device_type)
        if dist.get_world_size() != wanted.tp_size:
            raise ConfigError(
                f"tp_size={wanted.tp_size} and {dist.get_world_size()} processes: start as many as share each layer "
                f"(torchrun --nproc-per-node {wanted.tp_size})"
            )
        members = list(range(wanted.tp_size))
        request = dataclasses.replace(request, options={**request.options, "distributed_config": wanted})
    else:
        assert request.model is not None
        device_type = request.model.device.type
        check_heads(request, len(members), None)
    ranks = Ranks(members, request.config.cpu_group_timeout)
    try:
        return ranks.call(partial(_open, request, ranks, device_type, open_here), ranks.load_limit)
    except BaseException:
        ranks.close()
        raise


def _checked(request: ModelRequest) -> ModelRequest:
    """Refuse what only one process can do."""
    if request.quantization is not None:
        raise ConfigError(
            f"quantization={request.quantization!r}: works in one process only; leave it out, or do not spread the "
            "model over several"
        )
    if request.device is not None and request.model is None:
        raise ConfigError(f"device={request.device!r}: each of several processes takes its own device; leave it out")
    return dataclasses.replace(request, config=for_several(request.config))


def _open(request: ModelRequest, ranks: Ranks, device_type: str, open_here: Callable[[ModelRequest], Opened]) -> Opened:
    """Open this process's share (rank thread)."""
    if request.model is not None and request.model.device.type == "cuda":
        torch.cuda.set_device(request.model.device)  # of this thread
    own: list[CacheLayout] = []

    def agree(layout: CacheLayout) -> CacheLayout:
        own.append(layout)
        return _agree(ranks, layout)

    # The host's memory is shared by as many as run on it.
    share = request.config.cpu_offload_space_safety_threshold / int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    config = dataclasses.replace(request.config, cpu_offload_space_safety_threshold=share)
    if config.max_batch_tokens is None and device_type != "cpu":
        # Steps are measured there, this one only: to try smaller ones, all would have to know who is out of memory.
        config = dataclasses.replace(config, max_batch_tokens=GPU_BATCH_TOKENS)
    sampler: Any = request.sampler if ranks.rank == 0 else _NoSampler()
    opened = open_here(dataclasses.replace(request, config=config, sampler=sampler, agree=agree))
    kind = LeadingRunner if ranks.rank == 0 else FollowingRunner
    runner = kind(opened.runner, ranks)
    limit = "for ever" if ranks.limit is None else f"at most {ranks.limit:g} s"
    choices = [
        *opened.choices,
        Choice("processes", f"{ranks.size}, this is rank {ranks.rank}", f"tensor parallel; they wait {limit}"),
    ]
    if runner.cache_layout not in own:
        counts = " + ".join(str(group.num_blocks - 1) for group in runner.cache_layout.groups)
        choices.append(Choice("num_blocks", counts, "what all processes have room for"))
    return opened._replace(runner=runner, choices=tuple(choices), parallel=runner)


def _agree(ranks: Ranks, layout: CacheLayout) -> CacheLayout:
    """Return the layout of which every process has room: the smallest of all."""
    layouts = ranks.gather(layout)
    if len({_shape(each) for each in layouts}) > 1:
        raise ConfigError(f"the processes see different models or settings: {', '.join(map(str, layouts))}")
    groups = tuple(
        group._replace(num_blocks=min(each.groups[number].num_blocks for each in layouts))
        for number, group in enumerate(layout.groups)
    )
    states = layout.states
    if states is not None:
        states = states._replace(num_slots=min(each.states.num_slots for each in layouts if each.states is not None))
    # Where one has no swap space, none has.
    places = tuple(map(min, zip(*(each.swap_places for each in layouts))))
    return layout._replace(groups=groups, states=states, swap_places=places)


def _shape(layout: CacheLayout) -> CacheLayout:
    """What has to be the same everywhere."""
    states = layout.states
    return layout._replace(
        groups=tuple(group._replace(num_blocks=0, block_bytes=0) for group in layout.groups),
        states=None if states is None else states._replace(num_slots=0, slot_bytes=0),
        swap_places=(),
    )


class _NoSampler:
    """In place of a `Sampler` where another process samples."""

    def __call__(self, logits: Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
        return StepResult(((),) * len(entries))

    def forget(self) -> None:
        """Forget nothing."""


class ParallelRunner(ImmediateRunner):
    """This process's part of a model that several run together.

    Args:
        inner: runs this process's share.
        ranks: the processes.
    """

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        self._inner = inner
        self._ranks = ranks
        self.choices = inner.choices
        self.max_batch_tokens = inner.max_batch_tokens

    @property
    def rank(self) -> int:
        """Of this process; 0 decides."""
        return self._ranks.rank

    @property
    def cache_layout(self) -> CacheLayout:
        """Of this process's share; the same number of blocks everywhere."""
        return self._inner.cache_layout

    @property
    def vocab_size(self) -> int:
        """Rows of the logits."""
        return self._inner.vocab_size

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request."""
        return self._inner.max_model_len

    @property
    def device_type(self) -> str:
        """Where this process computes."""
        return self._inner.device_type

    def begin(self, on_end: Callable[[BaseException | None], None]) -> None:
        """Wait until the engine is entered everywhere, and be at work from then on.

        Args:
            on_end: called in another thread when the life has to end: with None where rank 0 has closed, else with
                what is wrong.

        Raises:
            EngineError: another process is lost.
        """
        self._ranks.call(self._ranks.meet, self._ranks.load_limit)
        self._ranks.work()

    def hold(self, acknowledge: Callable[[], None]) -> None:
        """Acknowledge when the model may be used and changed here, until `reload_weights`."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group, and free this process's share. Idempotent."""
        self._ranks.close()
        if self._ranks.lost is None:  # else its thread may be inside the model for ever
            self._inner.close()


class LeadingRunner(ParallelRunner):
    """Rank 0: sends each plan to the others, runs it, and samples."""

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        super().__init__(inner, ranks)
        self._outgoing = Outgoing()
        self._is_held = False

    def begin(self, on_end: Callable[[BaseException | None], None]) -> None:
        """Wait for all; `on_end` is called when one of them is lost."""
        super().begin(on_end)
        self._ranks.on_lost(on_end)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step on all; see `step.Runner`.

        Raises:
            EngineError: it has failed somewhere, or has not ended in time.
        """
        message = self._outgoing.message(STEP, plan)
        result = self._ranks.call(partial(self._step, message, plan), self._ranks.limit)
        self._outgoing.take(plan, result)
        if result.follows:  # the other processes hear of tokens only when they were sampled
            ends = {request_id: None for request_id, follows in result.follows.items() if follows is None}
            result = result._replace(follows=ends or None)
        return result

    def _step(self, message: bytes, plan: StepPlan) -> StepResult:
        self._ranks.send(message)
        return _run_step(self._inner, plan, 0)

    def hold(self, acknowledge: Callable[[], None]) -> None:
        """Let all know that no step comes; see `ParallelRunner`."""
        if not self._is_held:
            self._is_held = True
            self._send(PAUSE)
        acknowledge()

    def reload_weights(self) -> None:
        """Wait until nobody uses the model any more, and take its weights as they are now on all.

        Raises:
            EngineError: another process is lost, or has not left its `pause()` in time.
        """
        self._is_held = False
        self._send(RELOAD, self._inner.reload_weights)

    def release(self) -> None:
        """Forget every request on all, and let the others end this life. Where one is lost, all know it already."""
        if self._ranks.lost is not None:
            return
        self._ranks.rest()
        self._outgoing.clear()
        self._is_held = False
        try:
            self._send(RELEASE, self._inner.release)
        except EngineError as error:  # of no harm to what was served
            logger.warning("the other processes have not ended this life in order: %s", error)

    def _send(self, kind: str, work: Callable[[], None] | None = None) -> None:
        """Let all do something other than a step; where it is work, wait until all have done it."""

        def run() -> None:
            self._ranks.send(encode(kind))
            if work is not None:
                work()
                self._ranks.meet()

        self._ranks.call(run, self._ranks.limit)


class FollowingRunner(ParallelRunner):
    """Another rank: runs what rank 0 sends, from `begin` on, until it closes."""

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        super().__init__(inner, ranks)
        self._lock = threading.Lock()  # over what follows: the rank thread and the worker meet here
        self._is_held = False
        self._waiting: list[Callable[[], None]] = []
        self._left = threading.Semaphore(0)
        self._is_following = False

    def begin(self, on_end: Callable[[BaseException | None], None]) -> None:
        """Wait for all, and follow in the rank thread from then on."""
        super().begin(on_end)
        self._is_following = True
        self._ranks.on_lost(on_end)
        self._ranks.start(self._follow, on_end)

    def execute(self, plan: StepPlan) -> StepResult:
        """Refuse: plans come from rank 0.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"rank {self._ranks.rank} follows rank 0 and makes no plans")

    def hold(self, acknowledge: Callable[[], None]) -> None:
        """Acknowledge when rank 0 has been paused, too."""
        with self._lock:
            if not self._is_held:
                self._waiting.append(acknowledge)
                return
        acknowledge()

    def reload_weights(self) -> None:
        """Tell the rank thread that the model is not used here any more; it takes the weights when rank 0 does."""
        with self._lock:
            self._waiting.clear()
            if self._is_held:
                self._left.release()

    def release(self) -> None:
        """End this life: rank 0 has ended it, or this process leaves all others alone with it."""
        if self._is_following and self._ranks.lost is None:
            self._ranks.fail(EngineError(f"rank {self._ranks.rank} has left while the others were at work"))
        self._acknowledge()

    def close(self) -> None:
        """See `ParallelRunner`."""
        self._acknowledge()
        super().close()

    def _acknowledge(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for acknowledge in waiting:
            acknowledge()

    # ── rank thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self) -> None:
        """Do what rank 0 says.

        Raises:
            Exception: it cannot be done, or rank 0 is lost; the others have been told.
        """
        ranks = self._ranks
        try:
            while True:
                kind, plan = decode(ranks.receive())
                if kind == RELEASE:
                    break
                if plan is not None:
                    _run_step(self._inner, plan, ranks.rank)
                elif kind == PAUSE:
                    with self._lock:
                        self._is_held = True
                    self._acknowledge()
                else:
                    self._left.acquire()
                    with self._lock:
                        self._is_held = False
                    self._inner.reload_weights()
                    ranks.meet()
            ranks.rest()
            self._inner.release()
            self._is_following = False
            ranks.meet()
        except BaseException as error:
            raise ranks.explained(error) from error


def _run_step(inner: Runner, plan: StepPlan, rank: int) -> StepResult:
    """Run a step; what it raises, lack of memory too, is no reason to try again: the others have taken this one."""
    try:
        return inner.collect(inner.submit(plan))
    except Exception as error:
        raise EngineError(f"rank {rank} has failed in a step ({type(error).__name__}: {error})") from error
