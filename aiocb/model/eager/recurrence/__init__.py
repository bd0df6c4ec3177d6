"""The arithmetic of recurrent layers over packed rows: natively on the CPU, else in plain torch.

Legend: T packed tokens, S slots, C channels, H heads, K heads of keys (or groups), D and V their sizes, P head dim,
N size of a state.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from aiocb.model.eager.recurrence.plain import ConvolutionWeights, TorchScans
from aiocb.model.eager.recurrence.rows import PackedRows

__all__ = ["ConvolutionWeights", "PackedRows", "Scans", "TorchScans"]


class Scans(Protocol):
    """Takes the packed tokens of a step through the states in its rows' slots, which are new afterwards.

    A row goes on from its slot, or from zeros where it begins; nobody else's slot is read or written.

    Attributes:
        name: of the implementation.
    """

    name: str

    def convolve(
        self, inputs: Tensor, weights: ConvolutionWeights, activation: str | None, state: Tensor, rows: PackedRows
    ) -> Tensor:
        """Convolve each channel with its last inputs: [T, C] -> [T, C].

        Args:
            activation: of the result, as transformers names it.
            state: the last inputs of each row. [S, C, width]
        """

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        is_normed: bool,
    ) -> Tensor:
        """Run the gated delta rule: [T, H, V], in the type of the values.

        Args:
            query, key: each serves H / K consecutive heads. [T, K, D]
            value: [T, H, V]
            decay: logarithms. [T, H], or [T, H, D] for one by channel of the keys
            beta: how much of a prediction is replaced. [T, H]
            state: [S, H, D, V]
            is_normed: queries and keys are made unit vectors first.
        """

    def selective_heads(
        self,
        inputs: Tensor,
        steps: Tensor,
        rates: Tensor,
        write: Tensor,
        read: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        skip: Tensor | None,
        bias: Tensor | None,
        is_softplus: bool,
        limits: tuple[float, float],
    ) -> Tensor:
        """Run the scan of Mamba 2: [T, H, P] in float32.

        Args:
            inputs: x. [T, H, P]
            steps: dt, before bias and softplus. [T, H]
            rates: A, negative. [H]
            write, read: B and C, each for H / K consecutive heads. [T, K, N]
            state: [S, H, P, N]
            skip: D. [H]
            bias: of the steps. [H]
            limits: of the steps, but for rows that go on with one token: so do the models that have limits.
        """

    def selective_channels(
        self,
        inputs: Tensor,
        steps: Tensor,
        rates: Tensor,
        write: Tensor,
        read: Tensor,
        state: Tensor,
        rows: PackedRows,
        *,
        skip: Tensor | None,
        bias: Tensor | None,
        is_softplus: bool,
    ) -> Tensor:
        """Run the scan of Mamba 1: [T, C] in float32.

        Args:
            inputs, steps: x and dt. [T, C]
            rates: A, negative. [C, N]
            write, read: B and C. [T, N]
            state: [S, C, N]
            skip, bias: [C]
        """
