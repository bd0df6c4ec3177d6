"""The functions that take a model, and `enable`, which puts them on one. Any thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm.auto import tqdm

from aiocb.compat.transformers.hosting import engine_config, kept_manager
from aiocb.compat.transformers.manager import ContinuousBatchingManager
from aiocb.compat.transformers.results import GenerationOutput
from aiocb.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from aiocb.config import EngineConfig

__all__ = [
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "enable",
    "generate_batch",
    "init_continuous_batching",
]

logger = logging.getLogger("aiocb")

ModelT = TypeVar("ModelT")


def init_continuous_batching(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | EngineConfig | None = None,
    workload_hints: Any = None,
) -> ContinuousBatchingManager:
    """Return a manager over a model, not started; the one that was kept on the model if there is one.

    A kept manager takes the new generation config. It is replaced when the settings are others than its own. While it
    is running it is returned as it is, with a warning of what does not count.

    Raises:
        ConfigError: a setting cannot work.
    """
    kept = kept_manager(model)
    if kept is not None and kept.is_running():
        ignored = {"generation_config": generation_config, "continuous_batching_config": continuous_batching_config}
        names = " and ".join(name for name, value in ignored.items() if value is not None)
        if names:
            logger.warning("the manager kept on the model is running and is returned as it is, without %s", names)
        return kept
    if kept is not None:
        config = engine_config(model, generation_config, continuous_batching_config)
        if continuous_batching_config is None or config == kept.config:
            kept.generation_config = generation_config
            return kept
        logger.info("the manager kept on the model has other settings: it is replaced")
        kept.destroy()
    return ContinuousBatchingManager(model, generation_config, continuous_batching_config, workload_hints)


def destroy_cached_continuous_batching_manager(model: Any) -> None:
    """Destroy the manager that was kept on a model, if there is one."""
    kept = kept_manager(model)
    if kept is not None:
        kept.destroy()


@contextlib.contextmanager
def continuous_batching_context_manager(
    model: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | EngineConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
) -> Iterator[ContinuousBatchingManager]:
    """Start a manager; stop it on the way out, and destroy it unless it is persistent.

    Args:
        model: the model.
        generation_config: what requests start from; None takes the model's.
        block, timeout: as for `ContinuousBatchingManager.stop`. With `block=False` or when the time is over, the
            requests still finish in the background.
        continuous_batching_config: settings.
        persistent_manager: keep the manager on the model for the next session.
        warmup: accepted for compatibility; starting builds and warms up everything.
        workload_hints: what memory and seats are planned for where the settings leave that open; a kept manager has
            been planned already.

    When the block raises, what has not finished is failed instead of waited for.

    Raises:
        ConfigError: a setting cannot work.
    """
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
    if manager.is_running():
        yield manager  # somebody else's session of a kept manager: it is theirs to stop
        return
    is_hard = True
    try:
        manager.start()
        yield manager
        is_hard = False
    finally:
        if manager.is_running():
            manager.stop(block, timeout, persistent_manager, is_hard)
        if not persistent_manager and not manager.is_running():
            manager.destroy()


def generate_batch(
    model: Any,
    inputs: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | EngineConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generate for a batch of prompts and return when all are done.

    Args:
        model: the model.
        inputs: prompts of token ids, or what a tokenizer returns for several texts (padding is dropped).
        generation_config: sampling and stopping; None takes the model's.
        continuous_batching_config: settings.
        record_timestamps: note the time of every token.
        progress_bar: show one.
        persistent_manager: keep the manager on the model for the next call.
        warmup: accepted for compatibility.
        kwargs: `max_new_tokens`, `attention_mask`, and the sampling parameters of `add_request`, for all prompts.

    Returns:
        Results by request id, in the order of `inputs`, the further samples of a prompt right after its first. Every
        request is there; one that failed has the status `FAILED` and an `error`. Of a model in several processes rank
        0 returns all results, and the others, when it has them, none.

    Raises:
        ConfigError: a setting cannot work.
        InvalidRequest: an unknown sampling parameter.
        RuntimeError: another thread has stopped the manager that is kept on the model.
    """
    prompts = _prompts(inputs, kwargs.pop("attention_mask", None))
    if not prompts:
        return {}
    kept = kept_manager(model)
    done: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
    results: dict[str, GenerationOutput] = {}
    with continuous_batching_context_manager(
        model,
        # Somebody else's session has a config of its own; this one is for these requests alone.
        None if kept is not None and kept.is_running() else generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
        warmup=warmup,
    ) as manager:
        if manager.follows:
            return {}
        tickets = manager.tickets(prompts, False, record_timestamps, kwargs, config=generation_config, sink=done.put)
        names = [reply.request_id for ticket in tickets for reply in ticket.replies]
        if not manager.submit(tickets, None):
            raise RuntimeError("the manager kept on the model was being stopped; call again")
        total, is_silent = len(names), not progress_bar
        with tqdm(total=total, desc=f"Solving {total} requests", unit="request", disable=is_silent) as bar:
            while len(results) < total:
                output = done.get()
                results[output.request_id] = output
                bar.update()
    failed = [name for name in names if results[name].error is not None]
    if failed:
        logger.error("%d of %d requests failed: %s", len(failed), len(names), results[failed[0]].error)
    return {name: results[name] for name in names}


def enable(model: ModelT) -> ModelT:
    """Give a loaded model the methods of this module in the place of transformers' own; returns the model."""
    for function in (
        generate_batch,
        init_continuous_batching,
        continuous_batching_context_manager,
        destroy_cached_continuous_batching_manager,
    ):
        setattr(model, function.__name__, types.MethodType(function, model))
    return model


def _prompts(inputs: Any, mask: Any) -> list[Any]:
    """One prompt per row; padding goes where a mask says so."""
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask") if mask is None else mask
        inputs = inputs["input_ids"]
    rows = inputs.tolist() if hasattr(inputs, "tolist") else inputs
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise InvalidRequest("inputs must be a list of prompts, each a list of token ids")
    if len(rows) and isinstance(rows[0], int):
        raise InvalidRequest("inputs is one prompt: put it into a list")
    if mask is None:
        return list(rows)
    masks = mask.tolist() if hasattr(mask, "tolist") else mask
    if len(masks) != len(rows):
        raise InvalidRequest(f"attention_mask has {len(masks)} rows for {len(rows)} prompts")
    return [[token for token, keep in zip(row, one) if keep] for row, one in zip(rows, masks)]
