"""Recurrent mixers that compute the rows of all requests in one call: which ones, and what happens to the others."""

from __future__ import annotations

import functools
import math
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aiocb.config import EngineConfig
from aiocb.model.eager import scans
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.packed import PackedStates, scan_packed
from aiocb.model.eager.recurrence import PackedRows, TorchScans
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.eager.states import StateKey, StateSpec, StateStorage
from tests.models.tiny import tiny_model
from tests.steps import described

from .helpers import ManualScheduler, argmax_sampler, generate, prompt, tiny
from .state_models import STATES

CPU = torch.device("cpu")
LENGTHS = (5, 19, 30, 1)


def build(model: Any, **config: Any) -> TorchRunner:
    return TorchRunner(model, EngineConfig(num_blocks=96, **config), argmax_sampler, max_model_len=512)


@pytest.mark.parametrize("name", ["qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "lara_mini", "lfm3"])
def test_relatives_are_scanned_natively(name: str) -> None:
    model = tiny_model(name)
    vocab = model.config.get_text_config().vocab_size
    runner = build(model)
    assert "scanned by native code" in described(runner)["mixers"]
    assert float(described(runner)["parity"].split()[0]) < 1e-4
    for tensor in runner._states.tensors.values():  # type: ignore[union-attr]
        tensor.fill_(math.nan)
    prompts = [prompt(length, seed, vocab) for seed, length in enumerate(LENGTHS)]
    scheduler = ManualScheduler(runner, chunk=6, budget=13)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, 6, start_step=index)
    for sequence, out in zip(prompts, scheduler.run(), strict=True):
        with torch.inference_mode():  # what the model says without a cache
            logits = model(input_ids=torch.tensor([sequence + out])).logits[0]
        assert logits[len(sequence) - 1 : -1].argmax(-1).tolist() == out
    runner.close()


def test_the_tokens_of_all_requests_are_one_call() -> None:
    runner = build(tiny("qwen3_next", **STATES["qwen3_next"]))
    shapes: list[torch.Size] = []
    module: Any = runner._adapter.mixers[0].module.in_proj_ba
    module.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    scheduler = ManualScheduler(runner)
    for number in range(3):
        scheduler.add(prompt(5, number), 4)
    scheduler.step()
    scheduler.add(prompt(1), 3, start_step=1)
    scheduler.add(prompt(9), 3, start_step=1)
    scheduler.step()
    assert shapes == [(1, 15, 64), (1, 13, 64)]
    runner.close()


def test_a_native_request_is_the_same_alone_and_in_a_batch() -> None:
    model = tiny("qwen3_next", **STATES["qwen3_next"]).bfloat16()
    runner = build(model)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    together = ManualScheduler(runner)
    for tokens in prompts:
        together.add(tokens, 12)
    alone = []
    expected = together.run()
    for tokens in prompts:
        scheduler = ManualScheduler(runner, chunk=7)
        scheduler.add(tokens, 12)
        alone += scheduler.run()
    assert alone == expected
    runner.close()


def test_the_owner_of_the_model_sees_nothing() -> None:
    model = tiny("mamba2", **STATES["mamba2"])
    module = model.get_submodule("backbone.layers.0.mixer")
    before = dict(type(module).forward.__globals__)
    expected = generate(model, prompt(9), 4)
    runner = build(model)
    scheduler = ManualScheduler(runner)
    scheduler.add(prompt(9), 4)
    assert scheduler.run() == [expected]
    assert "forward" not in module.__dict__ and dict(type(module).forward.__globals__) == before
    assert generate(model, prompt(9), 4) == expected
    runner.close()


def test_scans_that_fail_the_self_check_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: TorchScans, inputs: Tensor, *_: Any) -> Tensor:
        return torch.zeros_like(inputs)

    monkeypatch.setattr(TorchScans, "convolve", wrong)
    model = tiny("lfm2", **STATES["lfm2"])
    runner = build(model, native=False)
    told = described(runner)["mixers"]
    assert told.startswith("Lfm2ShortConv split") and "differ from the model's own forward" in told
    scheduler = ManualScheduler(runner)
    scheduler.add(prompt(9), 4)
    assert scheduler.run() == [generate(model, prompt(9), 4)]
    runner.close()


def test_weights_that_have_changed_are_taken_anew() -> None:
    model = tiny("lfm2", **STATES["lfm2"])
    runner = build(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    runner.reload_weights()
    scheduler = ManualScheduler(runner)
    scheduler.add(prompt(9), 4)
    assert scheduler.run() == [generate(model, prompt(9), 4)]
    runner.close()


class TestWhichMixers:
    def mixer(self) -> Any:
        return tiny("lfm2", **STATES["lfm2"]).get_submodule("model.layers.0.conv")

    def test_known_ones(self) -> None:
        module = self.mixer()
        assert scan_packed(module, module.forward, {"conv"}) == ""
        assert "forward" in module.__dict__

    @pytest.mark.parametrize("kinds", [{"conv", "recurrent"}, {"conv", "own"}])
    def test_none_with_other_states(self, kinds: set[str]) -> None:
        module = self.mixer()
        assert "Lfm2ShortConv is none of the mixers" in scan_packed(module, module.forward, kinds)
        assert "forward" not in module.__dict__

    def test_none_that_somebody_has_wrapped(self) -> None:
        module = self.mixer()
        own = type(module).forward

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) * 2

        assert "is wrapped" in scan_packed(module, MethodType(wrapped, module), {"conv"})
        assert "is wrapped" in scan_packed(module, functools.partial(module.forward), {"conv"})

    def test_no_other_module(self) -> None:
        module = nn.Linear(2, 2)
        assert "none of the mixers" in scan_packed(module, module.forward, {"conv"})


class TestStates:
    KEYS = (StateKey("conv", 0), StateKey("recurrent", 0))

    def states(self) -> PackedStates:
        specs = {self.KEYS[0]: StateSpec((6, 4), torch.float32), self.KEYS[1]: StateSpec((2, 3, 5), torch.float32)}
        rows = PackedRows(np.array([0, 1]), np.array([2]), np.array([True]), CPU)
        return PackedStates(StateStorage(specs, 3, CPU), rows, TorchScans())

    def test_what_the_cache_does_not_know_is_refused(self) -> None:
        states = self.states()
        for ask in (states.convolution, lambda: states.recurrence(4)):
            with pytest.raises(NotPlainError, match="does not know"):
                ask()
        states.convolve(self.KEYS[0], torch.zeros(1, 6, 1), 4)
        assert states.convolution().shape == (3, 6, 4)
        with pytest.raises(NotPlainError, match="does not know"):
            states.convolution()  # the second one of a mixer whose cache was asked once

    def test_heads_take_their_parts_in_turn(self) -> None:
        states = self.states()
        states.get_state(self.KEYS[1])
        storage = states.recurrence(4)
        states.get_state(self.KEYS[1])
        for head in range(2):
            assert states.recurrence(3).data_ptr() == storage[:, head].data_ptr()

    def test_keys_and_attention_are_refused(self) -> None:
        with pytest.raises(NotPlainError, match="caches keys"):
            self.states().update(torch.zeros(1), torch.zeros(1), 0)

    def test_the_channels_of_a_convolution_lie_side_by_side(self) -> None:
        specs = {self.KEYS[0]: StateSpec((6, 4), torch.float32), StateKey("conv", 1, 2): StateSpec((6,), torch.float32)}
        tensors = StateStorage(specs, 3, CPU).tensors
        assert tensors[self.KEYS[0]].shape == (3, 6, 4) and tensors[self.KEYS[0]].stride() == (24, 1, 6)
        assert tensors[StateKey("conv", 1, 2)].shape == (3, 6)


def test_the_library_is_where_its_decorators_are() -> None:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    assert hasattr(Lfm2ShortConv.forward, "__wrapped__")
    assert Lfm2ShortConv.forward.__code__.co_filename.startswith(scans._LIBRARY)
