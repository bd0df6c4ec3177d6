"""How a model that is run operator by operator gets its attention and its linears: native where that can be had."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from aiocb.attention import create_backend
from aiocb.attention.base import AttentionBackend, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import KernelUnavailable, load
from aiocb.kernels.generic import GenericKernels
from aiocb.model.eager.recurrence import Scans, TorchScans
from aiocb.model.kv import format_size, free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aiocb.model.eager.linears import PackedLinears

__all__ = ["choose_backend", "choose_scans", "pack_linears"]

ALL_PACKED = 0.9
"""Share of the weights of products that must be packed for torch to be held to one thread."""


_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
"""What has to be installed for flash attention to be taken unasked: nothing is fetched without being asked for."""

Makers = Mapping[str, Callable[[], AttentionBackend]]


def choose_backend(
    specs: Iterable[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    failed: Mapping[str, str] = MappingProxyType({}),
    makers: Makers | None = None,
) -> tuple[AttentionBackend, Choice]:
    """Take the configured backend, else the first that can run every layer: native on the CPU, flash on a GPU, sdpa.

    Args:
        specs: of all layers.
        dtype, device: of keys and values.
        config: names a backend, or none, and what keys and values are stored in.
        failed: backends that have been tried, and what was wrong.
        makers: by name, in place of the registry.

    Raises:
        ConfigError: the configured backend cannot run this model, or none can store keys and values as configured.
    """
    layers, format_name = tuple(specs), str(dtype).removeprefix("torch.")
    stored = config.kv_cache_dtype
    if stored is not None and not layers:
        raise ConfigError(f"kv_cache_dtype={stored!r} has no effect: the model caches no keys and values; leave it out")
    if config.attention is not None:
        backend = _made(config.attention, makers)
        reason = backend.capabilities.refusal(layers, device.type, format_name, config.page_size, stored)
        if reason is not None:
            raise ConfigError(f"attention {config.attention!r} cannot run this model: {reason}")
        return backend, Choice("attention", backend.name, "configured")
    passed: list[str] = []
    for name, why_not in _candidates(device, config, makers):
        reason = why_not or failed.get(name)
        if reason is None:
            try:
                backend = _made(name, makers)
                reason = backend.capabilities.refusal(layers, device.type, format_name, config.page_size, stored)
            except ConfigError as error:
                reason = str(error)
            if reason is None:
                why = "native paged attention" if name == "cpu" else f"the first that works on {device.type}"
                return backend, Choice("attention", name, "; ".join([why, *passed]))
        passed.append(f"not {name}: {reason}")
    if stored is not None:
        if config.native is False:
            passed.append("native=False")
        raise ConfigError(
            f"kv_cache_dtype={stored!r} needs the native attention of the CPU, which cannot be had here "
            f"({'; '.join(passed)}); leave it out"
        )
    why = "; ".join([f"plain torch on {device.type}", *passed])
    return _made("sdpa", makers), Choice("attention", "sdpa", why)


def _made(name: str, makers: Makers | None) -> AttentionBackend:
    return makers[name]() if makers is not None and name in makers else create_backend(name)


def _candidates(device: torch.device, config: EngineConfig, makers: Makers | None) -> Iterator[tuple[str, str | None]]:
    """Yield what is tried before sdpa, the best first, and why it is not to be."""
    if device.type == "cpu" and makers is None:
        if config.native is not False:
            yield "cpu", None
        return
    for name, package in _PACKAGES.items():
        if not config.auto_switch_to_flash:
            yield name, "auto_switch_to_flash=False"
        elif (makers is None or name not in makers) and importlib.util.find_spec(package) is None:
            yield name, f"{package} is not installed"
        else:
            yield name, None
    yield "varlen", None


def pack_linears(
    model: PreTrainedModel, backend: AttentionBackend, config: EngineConfig, *, has_mixers: bool = False
) -> tuple[PackedLinears | None, Choice]:
    """Pack the model's linears for the native kernels, or say why they stay torch's.

    Args:
        has_mixers: some modules mix tokens in torch: scans of states, attention of their own.
    """
    if config.native is False:
        return None, Choice("linears", "torch", "native=False")
    if model.device.type != "cpu":
        return None, Choice("linears", "torch", f"the model is on {model.device.type}")
    from aiocb.model.eager.linears import PackedLinears, packed_bytes, packed_share

    size, free = packed_bytes(model), free_memory()
    if size == 0:
        return None, Choice("linears", "torch", "none of them can be packed")
    if size > free // 2:
        return None, Choice("linears", "torch", f"packing takes {format_size(size)}, {format_size(free)} are free")
    library = load()
    if isinstance(library, KernelUnavailable):
        return None, Choice("linears", "torch", library.reason)
    # Experts, say, are torch's: it needs its threads, and native code uses the same ones. Else torch has little to do.
    is_shared = backend.name != "cpu" or has_mixers or packed_share(model) < ALL_PACKED
    threads = config.num_threads or torch.get_num_threads()
    kernels = GenericKernels(library, num_threads=threads, shares_threads=is_shared)
    if backend.name == "cpu":
        backend.kernels = kernels  # type: ignore[attr-defined]
    linears = PackedLinears(model, kernels)
    packed = f"{linears.count} of {linears.num_linears}, {format_size(linears.num_bytes)}"
    return linears, Choice("linears", "native", f"{packed}, {kernels.instruction_set}, {kernels.threads} threads")


def choose_scans(
    device: torch.device, backend: AttentionBackend, linears: PackedLinears | None, config: EngineConfig
) -> Scans:
    """Scan the states of recurrent layers natively where that can be had, on the threads that are there."""
    if config.native is False or device.type != "cpu":
        return TorchScans()
    library = load()
    if isinstance(library, KernelUnavailable):
        return TorchScans()
    from aiocb.attention.cpu import CpuBackend
    from aiocb.model.eager.recurrence.native import NativeScans

    if linears is not None:
        kernels = linears.kernels
    elif isinstance(backend, CpuBackend):
        kernels = backend.kernels
    else:
        kernels = GenericKernels(library, num_threads=torch.get_num_threads(), shares_threads=True)
    return NativeScans(kernels)
