"""Whether a model can be run operator by operator, and how its runner is made."""

from __future__ import annotations

import functools

from aiocb.model.eager.device_runner import Accelerator, DeviceRunner
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.request import Candidate, Material, ModelRequest, Refusal
from aiocb.sampling.sampler import Sampler

__all__ = ["plan"]


def plan(request: ModelRequest, material: Material) -> Candidate | Refusal:
    """Take any model, unless what was asked for is only to be had of the native kernels."""
    config, module = request.config, material.module
    if request.quantization is not None:
        return Refusal(
            f"quantization={request.quantization!r} needs the native CPU kernels (leave quantization out to run the "
            "weights as they are)"
        )
    if config.native and config.attention is None:
        return Refusal("native=True was asked for")
    sampler = request.sampler or Sampler(material.defaults.vocab_size, device=str(module.device))
    make = functools.partial(TorchRunner, module, config, sampler, max_model_len=material.max_model_len)
    if request.agree is not None:  # steps of several processes are not recorded, nor overlapped
        return Candidate(functools.partial(make, agree=request.agree))
    accelerator = Accelerator.of(module.device)
    if accelerator is not None:
        return Candidate(functools.partial(DeviceRunner, *make.args, **make.keywords, accelerator=accelerator))
    return Candidate(make)
