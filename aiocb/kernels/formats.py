"""The formats of weights: what Python has to know of them. `Library` compares it with csrc/formats.h when it is loaded.

Legend: N columns (outputs), K depth (inputs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["BFLOAT16", "FLOAT32", "FORMATS", "INT4", "INT8", "PANEL", "SOURCES", "WeightFormat", "WeightSource"]

PANEL: Final = 64
"""Columns that are packed together."""


class WeightFormat(NamedTuple):
    """How weights are packed, and what they are multiplied with.

    Attributes:
        name: of the torch dtype, or of the quantization.
        code: its number in the C interface.
        bits: of one weight.
        group: weights along K that lie together; one scale each, where there are scales.
        scale_bytes: of a group's scale.
        activations: what rows of activations are made into; the format's own name where they are taken as they come.
    """

    name: str
    code: int
    bits: int
    group: int
    scale_bytes: int
    activations: str

    @staticmethod
    def of(dtype: torch.dtype) -> WeightFormat | None:
        """The format that holds a dtype's numbers as they are, None when there is none."""
        found = FORMATS.get(str(dtype).removeprefix("torch."))
        return None if found is None or found.is_quantized else found

    @property
    def is_quantized(self) -> bool:
        """Whether weights and activations are rounded to steps of a scale."""
        return self.scale_bytes > 0

    def packed_bytes(self, columns: int, depth: int) -> int:
        """Bytes of a packed weight [N, K], its last panel and group filled up."""
        groups = -(-depth // self.group)
        return -(-columns // PANEL) * PANEL * groups * (self.group * self.bits // 8 + self.scale_bytes)


FLOAT32 = WeightFormat("float32", code=0, bits=32, group=1, scale_bytes=0, activations="float32")
BFLOAT16 = WeightFormat("bfloat16", code=1, bits=16, group=2, scale_bytes=0, activations="bfloat16")
INT8 = WeightFormat("int8", code=2, bits=8, group=32, scale_bytes=2, activations="int8")
INT4 = WeightFormat("int4", code=3, bits=4, group=32, scale_bytes=4, activations="int8")
FORMATS = {each.name: each for each in (FLOAT32, BFLOAT16, INT8, INT4)}


class WeightSource(NamedTuple):
    """What weights are packed from: numbers as models are stored, or the blocks of a GGUF file.

    Attributes:
        name: in ggml's words.
        code: its number in the C interface.
        weights: of a block, which are neighbours in a row.
        bytes: of a block.
    """

    name: str
    code: int
    weights: int
    bytes: int

    @staticmethod
    def of(dtype: torch.dtype | str) -> WeightSource:
        """The source that holds a dtype's numbers as they are.

        Raises:
            KeyError: there is none.
        """
        return SOURCES[_NAMES[str(dtype).removeprefix("torch.")]]

    def row_bytes(self, depth: int) -> int:
        """Bytes of a row of that many weights, whole blocks of them."""
        return depth // self.weights * self.bytes


_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BLOCKS = {
    "F32": (1, 4), "BF16": (1, 2), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "IQ4_NL": (32, 18), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}  # fmt: skip
SOURCES = {name: WeightSource(name, code, *block) for code, (name, block) in enumerate(_BLOCKS.items())}
