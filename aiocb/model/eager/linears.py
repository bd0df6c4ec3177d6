"""The linears of a view in native code.

Weights are packed once at load, beside the module's own, and the packed modules of the view (never the owner's) get a
`forward` of their own; hooks run around it as around any other. A packed linear takes any number of rows: which kernel
computes a row must not depend on how many others are there.

Legend: M rows, N columns (out_features), K depth (in_features).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from aiocb.kernels import KernelError
from aiocb.kernels.formats import WeightFormat
from aiocb.kernels.generic import GenericKernels

__all__ = ["PackedLinears", "packed_bytes", "packed_share"]


class PackedLinears:
    """Packs what can be packed of a view's modules.

    Must be made, used and repacked in one thread.

    Args:
        view: the root of modules that nobody else calls.
        kernels: threads and memory.
    """

    def __init__(self, view: nn.Module, kernels: GenericKernels) -> None:
        self.kernels = kernels
        self.has_own_threads = kernels.threads == "own"
        self._packed: list[nn.Module] = []
        self.num_bytes = 0
        self.num_linears = 0
        self.repack(view)

    @property
    def count(self) -> int:
        """How many modules are packed."""
        return len(self._packed)

    def repack(self, view: nn.Module) -> None:
        """Pack all weights of a view, in place of those that were packed before."""
        self._unpack()
        self.kernels.clear()
        self.num_bytes = self.num_linears = 0
        for module in view.modules():
            source = _source(module)
            if source is None:
                continue
            self.num_linears += 1
            weight, bias = source
            forward = self._pack(module, weight, bias)
            if forward is not None:
                module.__dict__["forward"] = forward
                self._packed.append(module)
                self.num_bytes += _packed_bytes(weight)

    def _unpack(self) -> None:
        for module in self._packed:
            module.__dict__.pop("forward", None)
        self._packed.clear()

    def _pack(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        weight_format = WeightFormat.of(weight.dtype)
        if weight_format is None or weight.device.type != "cpu" or (bias is not None and bias.dtype != weight.dtype):
            return None
        rows = weight.detach().contiguous()
        biases = None if bias is None else bias.detach().float().contiguous()
        columns, depth = rows.shape
        try:
            index = self.kernels.pack(
                rows.data_ptr(),
                depth * rows.element_size(),
                columns,
                depth,
                weight_format,
                None if biases is None else biases.data_ptr(),
            )
        except KernelError:
            return None  # an odd depth in bf16: torch computes it
        return _forward(module, self.kernels, index, columns, depth, weight.dtype)

    def close(self) -> None:
        """Free the packed weights. Idempotent."""
        self._unpack()
        self.kernels.close()


def packed_bytes(model: nn.Module) -> int:
    """Bytes that the packed weights of a model will take."""
    return sum(_packed_bytes(source[0]) for module in model.modules() if (source := _source(module)) is not None)


def _packed_bytes(weight: Tensor) -> int:
    weight_format = WeightFormat.of(weight.dtype)
    return 0 if weight_format is None else weight_format.packed_bytes(*weight.shape)


def packed_share(model: nn.Module) -> float:
    """Share of the model's matrices, embeddings aside, that are weights of packed modules."""
    packed = {id(module.weight) for module in model.modules() if _source(module) is not None}
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes = [
        (id(weight) in packed, weight.numel())
        for weight in model.parameters()
        if weight.dim() >= 2 and (id(weight) in packed or id(weight) not in embedded)
    ]
    return sum(size for is_packed, size in sizes if is_packed) / max(1, sum(size for _, size in sizes))


def _source(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight [N, K] and bias of a module that computes a plain linear and nothing else, else None."""
    if "forward" in module.__dict__:  # wrapped by somebody: whatever that does has to go on
        return None
    if module._forward_pre_hooks or "weight" not in module._parameters:  # a weight that is made anew for every call
        return None
    if type(module).forward is nn.Linear.forward or type(module).__name__ == "FalconLinear":  # the same, written out
        weight, bias = module.weight, module.bias
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' linear with a transposed weight
        weight, bias = module.weight.T, module.bias
    else:
        return None
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor or weight.dim() != 2:
        return None  # quantised or sharded weights are subclasses
    return weight, bias if isinstance(bias, Tensor) else None


def _forward(
    module: nn.Module, kernels: GenericKernels, index: int, columns: int, depth: int, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    own = type(module).forward
    call, handle, row_bytes = kernels.call_linear, kernels.handle, depth * dtype.itemsize
    empty = torch.empty

    def forward(x: Tensor) -> Tensor:  # x [..., K] -> [..., N]
        if x.dtype is not dtype:
            result: Tensor = own(module, x)
            return result
        if not x.is_contiguous():
            x = x.contiguous()
        out = empty((*x.shape[:-1], columns), dtype=dtype)
        if x.shape[-1] != depth:
            raise KernelError(f"a linear of {depth} inputs got {tuple(x.shape)}")
        if code := call(handle, index, x.data_ptr(), row_bytes, x.numel() // depth, out.data_ptr()):
            kernels.check(code)
        return out

    return forward
