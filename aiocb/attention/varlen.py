"""torch's own `varlen_attn`, for machines without flash-attn.

Its paged form exists only where FA3 or FA4 was activated (`torch.nn.attention.activate_flash_attention_impl`): the FA2
inside torch refuses a block table, and so gets gathered keys. So does `num_splits`, which is then not needed either:
without a table FA2 does not split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from aiocb.attention.base import Capabilities
from aiocb.attention.packed import KernelCall, PackedBackend

__all__ = ["VarlenBackend"]


class VarlenBackend(PackedBackend):
    """`torch.nn.attention.varlen.varlen_attn`, which knows no soft cap.

    Args:
        kernel: a function with its signature; None is torch's.
        flash: what stands behind it (`"FA3"`, `"FA4"`); None is the FA2 inside torch.

    Raises:
        ImportError: this torch has none.
    """

    name = "varlen"
    capabilities = Capabilities(devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256, has_softcap=False)

    def __init__(self, kernel: Callable[..., Any] | None = None, flash: str | None = None) -> None:
        if kernel is None:
            from torch.nn.attention import current_flash_attention_impl
            from torch.nn.attention.varlen import varlen_attn

            kernel, flash = varlen_attn, current_flash_attention_impl()
        from torch.nn.attention.varlen import AuxRequest

        self._kernel = kernel
        self._wants_lse = AuxRequest(lse=True)
        self.page_multiple = 1 if flash in ("FA3", "FA4") else None
        self._options: dict[str, Any] = {} if self.page_multiple is None else {"num_splits": 1}

    def call(self, call: KernelCall) -> tuple[Tensor, Tensor | None]:
        """Run the kernel.

        Raises:
            NotImplementedError: a soft cap is asked for.
            ValueError: the log-sum-exp has another shape than [H, T].
        """
        if call.softcap:
            raise NotImplementedError("varlen_attn knows no soft cap")
        options = dict(self._options)
        if call.table is not None:
            options |= {"seqused_k": call.lengths, "block_table": call.table}
        result: Any = self._kernel(
            call.query,
            call.key,
            call.value,
            call.starts,
            # A bound of every page pool: rows are as long as `seqused_k` says.
            call.key_starts if call.table is None else None,
            call.max_queries,
            call.max_keys,
            return_aux=self._wants_lse if call.needs_lse else None,
            scale=call.scale,
            window_size=call.window_size,
            enable_gqa=call.query.shape[1] != call.key.shape[-2],
            **options,
        )
        if not call.needs_lse:
            return result, None
        out, lse = result
        if lse.shape != (call.query.shape[1], call.query.shape[0]):  # the documentation says [T, H]
            raise ValueError(f"varlen_attn gives a log-sum-exp of shape {tuple(lse.shape)}")
        return out, lse
