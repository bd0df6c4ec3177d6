"""Thread: the worker's only. What int8 has to know about a model's activations before its weights are packed for good.

A few channels of a decoder are up to a hundred times larger than the others, always the same ones. A model that is
packed plainly runs over some tokens, and the size of every channel is recorded. Then two things are done with it, both
without cost at run time. Large channels of a normed input are made smaller by the norm and larger by the weight, by a
power of two, so that nothing is rounded anew. And the scale of each group of weights is chosen for the channels that
matter.

Shape legend: T tokens, K depth of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aiocb.kernels import NativeModel
from aiocb.model.native.step import NativeStep
from aiocb.records import Records
from aiocb.sampling_params import SamplingParams
from aiocb.step import CacheLayout, OpenedRequest, StepEntry, StepPlan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["FEEDING_NORM", "InputTuning", "record_inputs", "tune", "widths_of"]

FEEDING_NORM = {"qkv": "input", "gate_up": "mlp", "head": "final"}
"""The norm whose output is the input of a linear, and so can be scaled for it."""

_TOKENS = 128
_SMOOTHING = 0.4  # 0 leaves channels as they are; measured in docs/int8.md


class InputTuning(NamedTuple):
    """How one linear is packed: factors of its weight along K (None: ones), and the importance of each channel."""

    scales: npt.NDArray[np.float32] | None
    importance: npt.NDArray[np.float32] | None


def record_inputs(
    native: NativeModel, depths: dict[tuple[int, str], int], layout: CacheLayout, vocab_size: int, max_model_len: int
) -> dict[tuple[int, str], npt.NDArray[np.float32]]:
    """Run arbitrary tokens and return the sum of squares of every channel of every linear's input.

    Random tokens serve as well as text (docs/int8.md), and need no tokenizer. The first token of the sequence counts:
    it alone drives some channels a hundred times higher, which every later token then attends to.
    """
    import numpy as np

    limit = min(_TOKENS, max_model_len, (min(group.num_blocks for group in layout.groups) - 1) * layout.page_size)
    tokens: list[int] = np.random.default_rng(0).integers(0, vocab_size, limit).tolist()
    squares = {key: np.zeros(depth, np.float32) for key, depth in depths.items()}
    for (layer, name), values in squares.items():
        native.record_inputs(layer, name, values)
    _run(native, tokens, layout)
    for layer, name in squares:
        native.record_inputs(layer, name, None)
    return squares


def tune(squares: npt.NDArray[np.float32], widths: npt.NDArray[np.float32], *, is_scaled: bool) -> InputTuning:
    """Choose factors and importance of the channels.

    Args:
        squares: the recorded sum of squares of each channel [K].
        widths: the norm of each channel's weights [K].
        is_scaled: a norm makes the input, which can be divided by factors.
    """
    import numpy as np

    middle, width = np.median(squares), np.median(widths)
    if not (np.isfinite(squares).all() and middle > 0 and width > 0):
        return InputTuning(None, None)
    sizes = np.maximum(np.sqrt(squares / middle), 1e-3)
    if not is_scaled:
        return InputTuning(None, sizes.astype(np.float32))
    # Importance is the size, not its square, which would be exact for these tokens and reckless for others (measured).
    # Factors: both sides of the product lose least where a large channel meets a large weight on equal terms.
    ratios = sizes / np.maximum(widths / width, 1e-2)
    scales = np.exp2(np.round(np.log2(ratios) * _SMOOTHING)).astype(np.float32)
    return InputTuning(scales, (sizes / scales).astype(np.float32))


def widths_of(*weights: Tensor) -> npt.NDArray[np.float32]:
    """Return the norm of each column [K] of weights [N, K] stacked."""
    import torch

    squares = torch.stack([weight.detach().float().square().sum(0) for weight in weights])
    result: npt.NDArray[np.float32] = squares.sum(0).sqrt().numpy()
    return result


def _run(native: NativeModel, tokens: list[int], layout: CacheLayout) -> None:
    count = len(tokens)
    blocks = tuple(range(1, 1 - (-count // layout.page_size)))  # behind the null block
    entry = StepEntry(0, 0, count, count, False, new_blocks=(blocks,) * len(layout.groups))
    plan = StepPlan((entry,), count, (OpenedRequest(0, tuple(tokens), count, SamplingParams(), 0),))
    step = NativeStep(plan.entries, Records().begin(plan), len(layout.groups), layout.page_size, frozenset())
    native.step(step.arguments(None))
