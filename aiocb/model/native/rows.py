"""Where the rows of a weight lie: in a tensor, or in a file as it was stored. Worker thread only.

Shape legend: N rows (outputs), K depth (inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from aiocb.kernels.formats import WeightSource

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["FindRows", "WeightRows", "rows_at", "tensor_rows"]


class WeightRows(NamedTuple):
    """The rows of a weight [N, K], as they are handed over for packing.

    Attributes:
        addresses: of each row, [N].
        source: what they are stored as.
        owner: keeps the memory.
    """

    addresses: npt.NDArray[np.uint64]
    source: WeightSource
    owner: object


FindRows = Callable[["Tensor"], WeightRows]
"""Finds the rows of a weight of a description. Raises `LookupError` where there are none of that weight."""


def rows_at(address: int, count: int, stride: int) -> npt.NDArray[np.uint64]:
    """Addresses of rows `stride` bytes apart."""
    import numpy as np

    return np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(stride)


def tensor_rows(weight: Tensor) -> WeightRows:
    """The rows of a tensor in memory; of a copy where its rows are not contiguous."""
    weight = weight.detach()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    addresses = rows_at(weight.data_ptr(), len(weight), weight.stride(0) * weight.element_size())
    return WeightRows(addresses, WeightSource.of(weight.dtype), weight)
