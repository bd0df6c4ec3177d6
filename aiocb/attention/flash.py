"""flash-attn, versions 2 and 3: from the package, or from the `kernels` hub package where it was asked for by name.

Version 2 reads pages in place where they have a multiple of 256 tokens, version 3 pages of any size. Neither splits the
keys of a row over blocks, so a row's result does not depend on what else is in the batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from aiocb.attention.base import Capabilities
from aiocb.attention.packed import KernelCall, PackedBackend

__all__ = ["FlashAttention2", "FlashAttention3", "FlashKernels"]

_CAPABILITIES = Capabilities(devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256)


class FlashKernels(NamedTuple):
    """The two functions of a flash-attn release that are used; tests put plain torch in their place.

    Attributes:
        varlen: `flash_attn_varlen_func`.
        with_kvcache: `flash_attn_with_kvcache`.
    """

    varlen: Callable[..., Any]
    with_kvcache: Callable[..., Any]

    @classmethod
    def load(cls, package: str, hub: str) -> FlashKernels:
        """Take them from an installed package, else through the `kernels` package.

        Raises:
            ImportError: there is neither.
        """
        try:
            module: Any = importlib.import_module(package)
        except ImportError as error:
            try:
                get_kernel = importlib.import_module("kernels").get_kernel
            except (ImportError, AttributeError):  # nothing of that name, or something else
                raise ImportError(
                    f"{package} is not installed ({error}), nor is the package kernels; pip install "
                    "aiocb[flash], or aiocb[kernels]"
                ) from error
            try:
                module = get_kernel(hub)
            except Exception as reason:  # of a package that fetches and loads binaries
                raise ImportError(f"{package} is not installed, and {hub} cannot be had: {reason}") from reason
        return cls(module.flash_attn_varlen_func, module.flash_attn_with_kvcache)


class FlashAttention2(PackedBackend):
    """flash-attn 2.

    Raises:
        ImportError: it is not installed.
    """

    name = "flash_attention_2"
    capabilities = _CAPABILITIES._replace(preferred_page_size=256)
    page_multiple = 256

    def __init__(self, kernels: FlashKernels | None = None) -> None:
        self._kernels = kernels or FlashKernels.load("flash_attn", "kernels-community/flash-attn2")

    def call(self, call: KernelCall) -> tuple[Tensor, Tensor | None]:
        """Run the kernel; single tokens over pages take the one that is made for them."""
        shared = {
            "softmax_scale": call.scale,
            "causal": True,
            "window_size": call.window_size,
            "softcap": call.softcap,
            "block_table": call.table,
        }
        if call.table is not None and call.max_queries == 1:
            result = self._kernels.with_kvcache(
                call.query.unsqueeze(1),
                call.key,
                call.value,
                cache_seqlens=call.lengths,
                num_splits=1,
                return_softmax_lse=call.needs_lse,
                **shared,
            )
            out, lse = (result[0], result[1].squeeze(-1).transpose(0, 1)) if call.needs_lse else (result, None)
            return out.squeeze(1), lse
        result = self._kernels.varlen(
            call.query,
            call.key,
            call.value,
            call.starts,
            call.key_starts,
            call.max_queries,
            call.max_keys,
            return_attn_probs=call.needs_lse,
            **shared,
        )
        return (result[0], result[1]) if call.needs_lse else (result, None)


class FlashAttention3(PackedBackend):
    """flash-attn 3, for Hopper.

    Raises:
        ImportError: it is not installed.
    """

    name = "flash_attention_3"
    capabilities = _CAPABILITIES
    page_multiple = 1

    def __init__(self, kernels: FlashKernels | None = None) -> None:
        self._kernels = kernels or FlashKernels.load("flash_attn_interface", "kernels-community/flash-attn3")

    def call(self, call: KernelCall) -> tuple[Tensor, Tensor | None]:
        """Run the kernel; with pages it takes rows of any length."""
        shared = {
            "softmax_scale": call.scale,
            "causal": True,
            "window_size": call.window_size,
            "softcap": call.softcap,
            "num_splits": 1,
        }
        if call.table is not None:
            result = self._kernels.with_kvcache(
                call.query,
                call.key,
                call.value,
                cache_seqlens=call.lengths,
                page_table=call.table,
                cu_seqlens_q=call.starts,
                max_seqlen_q=call.max_queries,
                return_softmax_lse=call.needs_lse,
                **shared,
            )
        else:
            result = self._kernels.varlen(
                call.query,
                call.key,
                call.value,
                call.starts,
                call.key_starts,
                call.max_queries,
                call.max_keys,
                return_attn_probs=call.needs_lse,
                **shared,
            )
        return (result[0], result[1]) if call.needs_lse else (result, None)
