"""How many slots of states there are, and how far apart snapshots of a long prompt lie.

A snapshot lets a later request go on from its tokens without computing them. One state of Qwen3-Next takes as much as
the keys and values of three thousand tokens, one of LFM2 as much as those of ten: so the distance follows the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from aiocb.attention.base import KVFormat, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.states import StateSpec
from aiocb.model.kv import LENDING, format_size, free_memory
from aiocb.model.sizes import CPU_REQUESTS
from aiocb.step import CacheGroup, CacheLayout, StateLayout

__all__ = ["choose_states", "layout_without_keys"]

GPU_REQUESTS = 256
# Of states; keys and values have shares of their own (`model/kv.py`).
STATES_CPU_MAX_BYTES = 1 << 30
STATES_CPU_SHARE = 0.125
STATES_GPU_SHARE = 0.25
SNAPSHOTS_PER_REQUEST = 16
"""At most, where states are small: more would hardly be found again before they are reused."""
MIN_INTERVAL = 256
INTERVAL_WITHOUT_KEYS = 1024
TOKENS_WITHOUT_KEYS = 1 << 20


def layout_without_keys(page_size: int, config: EngineConfig, max_model_len: int) -> tuple[CacheLayout, Choice]:
    """The layout of a model that caches no keys: its blocks cost nothing, and say which prefixes are known."""
    num_blocks = config.num_blocks or -(-max(TOKENS_WITHOUT_KEYS, max_model_len) // page_size)
    why = "configured" if config.num_blocks else "they take no memory: the model caches no keys and values"
    layout = CacheLayout(page_size, (CacheGroup(None, (), num_blocks + 1, 0),))
    return layout, Choice("num_blocks", str(num_blocks), why)


def choose_states(
    states: Iterable[StateSpec],
    specs: Iterable[LayerSpec],
    kv_format: KVFormat,
    page_size: int,
    scan_chunk: int,
    config: EngineConfig,
    device: torch.device,
) -> tuple[StateLayout, list[Choice]]:
    """Decide how many requests can have a state at once, and how many snapshots there may be besides.

    Args:
        scan_chunk: tokens that the model scans at once: snapshots lie between two of them.

    Raises:
        ConfigError: what is configured holds too few states, or does not fit to the pages.
    """
    slot_bytes = sum(spec.num_bytes for spec in states)
    interval, why = _interval(slot_bytes, specs, kv_format, page_size, scan_chunk, config)
    budget, bound = _budget(config, device)
    room = budget // slot_bytes
    most = CPU_REQUESTS if device.type == "cpu" else GPU_REQUESTS
    num_requests = config.max_requests_per_batch or min(most, max(room // 2, 1))
    if config.max_state_memory is not None and room < num_requests:
        raise ConfigError(
            f"max_state_memory={config.max_state_memory:g} GiB holds {room} states of {format_size(slot_bytes)}, for "
            f"{num_requests} requests at once; raise it, or lower max_requests_per_batch"
        )
    if room < num_requests:
        free, needed = free_memory(device), num_requests * slot_bytes
        if needed > free:
            raise ConfigError(
                f"the states of {num_requests} requests take {format_size(needed)}, {format_size(slot_bytes)} each, "
                f"and {format_size(free)} of memory are free; lower max_requests_per_batch"
            )
        bound = "what so many requests need"
    num_snapshots = 0
    if interval:
        num_snapshots = min(max(room - num_requests, 0), SNAPSHOTS_PER_REQUEST * num_requests)
    num_slots = 1 + num_requests + num_snapshots
    size = f"{format_size(slot_bytes)} each, {format_size(num_slots * slot_bytes)}, {bound}"
    return StateLayout(num_slots, slot_bytes, interval), [
        Choice("state_slots", f"{num_requests} requests + {num_snapshots} snapshots", size),
        Choice("state_interval", str(interval), why),
    ]


def _interval(
    slot_bytes: int,
    specs: Iterable[LayerSpec],
    kv_format: KVFormat,
    page_size: int,
    scan_chunk: int,
    config: EngineConfig,
) -> tuple[int, str]:
    """Return the tokens between snapshots, 0 for none, and the reason."""
    if not config.allow_block_sharing:
        return 0, "allow_block_sharing=False"
    if config.state_interval is not None:
        if config.state_interval % page_size:
            raise ConfigError(
                f"state_interval must be a multiple of the page of {page_size} tokens, not {config.state_interval}"
            )
        return config.state_interval, "configured"
    token_bytes = sum(kv_format.page_bytes(spec, 1) for spec in specs)
    step = math.lcm(page_size, scan_chunk)
    if not token_bytes:
        return -(-INTERVAL_WITHOUT_KEYS // step) * step, "the model caches no keys and values"
    as_large = slot_bytes // token_bytes
    interval = -(-max(MIN_INTERVAL, as_large) // step) * step
    return interval, f"a state takes as much as {as_large} cached tokens; the model scans {scan_chunk} at once"


def _budget(config: EngineConfig, device: torch.device) -> tuple[int, str]:
    """Return the bytes that states may take, and the reason."""
    if config.max_state_memory is not None:
        return int(config.max_state_memory * (1 << 30)), f"max_state_memory={config.max_state_memory:g}"
    free, is_lent = free_memory(device), device.type in LENDING
    share = STATES_GPU_SHARE if is_lent else STATES_CPU_SHARE
    if not is_lent and int(free * share) > STATES_CPU_MAX_BYTES:
        return STATES_CPU_MAX_BYTES, f"bounded by {format_size(STATES_CPU_MAX_BYTES)}"
    return int(free * share), f"bounded by {share:.0%} of {format_size(free)} free memory"
