"""Models with recurrent and convolution states: tokens equal `generate`, whatever the batch, the chunks, the slots."""

from __future__ import annotations

import functools
import math
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from aiocb.attention.base import KVFormat, LayerSpec
from aiocb.config import Choice, EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager import slots
from aiocb.model.eager.own_states import keep_states
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.eager.scans import continue_scan
from aiocb.model.eager.slots import choose_states, layout_without_keys
from aiocb.model.eager.states import StateKey, StateRows, StateSpec, StateStorage
from aiocb.model.eager.view import View
from aiocb.step import OpenedRequest, StateCopy, StepEntry, StepPlan
from tests.steps import described

from .helpers import GREEDY, ManualScheduler, argmax_sampler, generate, prompt, tiny
from .state_models import STATES

pytestmark = pytest.mark.slow

NUM_NEW = 8
LENGTHS = (5, 19, 30, 1)
CPU = torch.device("cpu")
KEY = StateKey("recurrent", 0)


NEVER_SCANNED = {"zaya", "minimax", "recurrent_gemma", "rwkv", "xlstm"}
WAYS = ("split", "torch", "native")
"""In which mixers are called: in parts, or once for all, with the scans of torch or of the kernels."""


def build(model: Any, way: str = "split", **config: Any) -> TorchRunner:
    values = {"num_blocks": 96, "page_size": 4, "native": False, **config}
    if way == "native":
        values |= {"page_size": 16, "native": None}
    runner = TorchRunner(model, EngineConfig(**values), argmax_sampler, max_model_len=512)
    if way == "split":
        runner._adapter.scans = None
    else:
        assert f"scanned by {way} code" in described(runner)["mixers"]
        assert " split" not in described(runner)["mixers"]
    return runner


def tensors_of(runner: TorchRunner) -> dict[StateKey, torch.Tensor]:
    assert runner._states is not None
    return runner._states.tensors


def recomputed(model: Any, tokens: list[int], num_new: int) -> list[int]:
    whole = list(tokens)
    for _ in range(num_new):
        whole.append(int(model(torch.tensor([whole]), use_cache=False).logits[0, -1].argmax()))
    return whole[len(tokens) :]


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in STATES for way in (WAYS if name not in NEVER_SCANNED else ("split",))]
)
def test_tokens_equal_generate(name: str, way: str) -> None:
    model = tiny(name, **STATES[name])
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    # generate() of xLSTM is not what the module says of the whole text.
    truth = recomputed if name == "xlstm" else generate
    expected = [truth(model, tokens, NUM_NEW) for tokens in prompts]
    runner = build(model, way)
    for tensor in tensors_of(runner).values():
        tensor.fill_(math.nan)  # of whoever had the slots before

    scheduler = ManualScheduler(runner)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, NUM_NEW, start_step=2 * index)
    assert scheduler.run() == expected, "in a mixed batch"

    scheduler = ManualScheduler(runner, chunk=6, budget=13)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, NUM_NEW, start_step=index)
    for _ in range(7):
        scheduler.step()
    # Two are preempted: computed anew from the first token, in the slots that hold their own old states.
    for sequence in scheduler.sequences[:2]:
        scheduler.release(sequence)
        sequence.num_computed = 0
    assert scheduler.run() == expected, "chunked and preempted"
    runner.close()


@pytest.mark.parametrize("way", ["split", "torch"])
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba", "falcon_h1"])
def test_requests_go_on_from_copied_states(name: str, way: str) -> None:
    model = tiny(name, **STATES[name])
    runner = build(model, way)
    shared, ends = prompt(16), (prompt(7, 1), prompt(1, 2))
    blocks = ((1, 2, 3, 4),) * len(runner.cache_layout.groups)
    first = StepPlan(
        (StepEntry(0, 0, 16, 0, False, new_blocks=blocks),),
        16,
        (OpenedRequest(0, tuple(shared), 16, GREEDY, 0, state_slot=1),),
        states_after=(StateCopy(1, 9),),
    )
    runner.collect(runner.submit(first))
    expected = [generate(model, shared + end, 1) for end in ends]
    for attempt in range(2):  # the snapshot is not written to
        opened = tuple(
            OpenedRequest(2 * attempt + number, (*shared, *end), 16 + len(end), GREEDY, 0, state_slot=2 + number)
            for number, end in enumerate(ends, 1)
        )
        entries = tuple(
            StepEntry(
                one.request_id,
                16,
                len(end),
                1,
                True,
                new_blocks=tuple((*table, 10 + 4 * one.request_id, 11 + 4 * one.request_id) for table in blocks),
            )
            for one, end in zip(opened, ends, strict=True)
        )
        copies = tuple(StateCopy(9, one.state_slot) for one in opened)
        plan = StepPlan(entries, 8, opened, states_before=copies)
        result = runner.collect(runner.submit(plan))
        assert [list(tokens) for tokens in result.token_ids] == expected
    runner.close()


def test_one_slot_is_enough() -> None:
    model = tiny("lfm2", **STATES["lfm2"])
    runner = build(model, max_requests_per_batch=1, state_interval=0)
    assert runner.cache_layout.states is not None and runner.cache_layout.states.num_slots == 2
    scheduler = ManualScheduler(runner, chunk=6)
    scheduler.add(prompt(19), NUM_NEW)
    assert scheduler.run() == [generate(model, prompt(19), NUM_NEW)]


def test_weights_that_the_owner_divides_are_followed() -> None:
    model: Any = tiny("rwkv", **STATES["rwkv"])
    weight = model.rwkv.blocks[6].attention.output.weight
    before = weight.clone()
    runner = build(model)
    outputs = []
    for _ in range(2):
        scheduler = ManualScheduler(runner)
        scheduler.add(prompt(9), NUM_NEW)
        outputs += scheduler.run()
        if len(outputs) == 1:
            assert torch.equal(weight, before)
            assert outputs == [generate(model, prompt(9), NUM_NEW)]
            assert torch.equal(weight * 2, before)
    assert outputs[0] == outputs[1]
    runner.close()


def test_how_mixers_are_called_is_explained() -> None:
    runner = build(tiny("qwen3_next", **STATES["qwen3_next"]), "torch")
    told = described(runner)
    assert told["mixers"].startswith("Qwen3NextGatedDeltaNet scanned by torch code, Qwen3NextAttention packed (what")
    assert "requests" in told["state_slots"]
    adapter = runner._adapter
    adapter.scans, adapter.why_split = None, "because"
    assert adapter.choices[0].value == "Qwen3NextGatedDeltaNet split, Qwen3NextAttention packed"
    assert adapter.choices[0].reason.endswith("once for each request); because")
    assert "mixers" not in described(build(tiny("llama")))


def test_all_that_decode_are_one_call() -> None:
    model = tiny("qwen3_next", **STATES["qwen3_next"])
    runner = build(model)
    shapes: list[torch.Size] = []
    module: Any = runner._adapter.mixers[0].module.in_proj_ba
    module.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    scheduler = ManualScheduler(runner)
    for number in range(3):
        scheduler.add(prompt(5, number), 4)
    scheduler.step()
    assert shapes == [(1, 5, 64)] * 3
    scheduler.add(prompt(1), 3, start_step=1)
    scheduler.add(prompt(9), 3, start_step=1)
    scheduler.step()
    assert shapes[3:] == [(3, 1, 64), (1, 1, 64), (1, 9, 64)]
    runner.close()


def test_a_scan_goes_on_from_any_state() -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    torch.manual_seed(0)
    channels, length, size = 6, 23, 4
    values: dict[str, Any] = {
        "inputs": torch.randn(2, channels, length),
        "dt": torch.randn(2, channels, length),
        "B": torch.randn(2, size, length),
        "C": torch.randn(2, size, length),
        "z": torch.randn(2, channels, length),
    }
    fixed: dict[str, Any] = {"D": torch.randn(channels), "delta_bias": torch.randn(channels), "delta_softplus": True}
    decay = -torch.rand(channels, size)

    def scan(start: int, stop: int, before: torch.Tensor | None) -> Any:
        part = {name: value[..., start:stop] for name, value in values.items()}
        inputs, dt = part.pop("inputs"), part.pop("dt")
        ordered = inputs, dt, decay, part["B"], part["C"]
        return continue_scan(mamba_selective_scan, before, *ordered, z=part["z"], **fixed, return_last_state=True)

    whole, last = scan(0, length, None)
    outputs, state = [], None
    for start, stop in ((0, 5), (5, 6), (6, length)):
        output, state = scan(start, stop, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, -1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_wrapped_scan_that_could_not_go_on_is_refused(name: str, is_bound: bool) -> None:
    model = tiny(name, **STATES[name])
    runner = build(model)
    module: Any = next(m for m in model.modules() if type(m).__name__ in ("MambaMixer", "JambaMambaMixer"))
    own = module.forward

    @functools.wraps(own.__func__)
    def doubled(_: Any, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) * 2

    module.forward = MethodType(doubled, module) if is_bound else functools.partial(doubled, module)
    # The self-check, which would see it, is over.
    with pytest.raises(ConfigError, match=f"forward of {type(module).__name__} is wrapped"):
        runner.reload_weights()
    runner.close()


def test_modules_whose_class_was_patched_keep_their_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("rwkv", **STATES["rwkv"])
    kind = type(model.get_submodule("rwkv.blocks.0.attention"))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: own(*args, **kwargs))
    replaced, _ = keep_states(View(model).model)
    assert {type(module).__name__ for module in replaced} == {"RwkvFeedForward"}


class TestRows:
    SPECS = {KEY: StateSpec((2,), torch.float32), StateKey("conv", 0): StateSpec((1, 3), torch.float32)}

    def storage(self) -> StateStorage:
        storage = StateStorage(self.SPECS, 6, CPU)
        storage.tensors[KEY].copy_(torch.arange(12.0).view(6, 2))
        return storage

    @pytest.mark.parametrize("slots", [(2, 3), (4, 2)])
    def test_what_is_written_in_place_or_given_back_is_stored(self, slots: tuple[int, ...]) -> None:
        storage = self.storage()
        before = storage.tensors[KEY].clone()
        rows = StateRows(storage, slots, is_fresh=False)
        state = rows.get(KEY)
        assert state is not None and state.tolist() == before[list(slots)].tolist()
        state += 100
        rows.finish()
        assert storage.tensors[KEY][list(slots)].tolist() == (before[list(slots)] + 100).tolist()
        assert rows.get(KEY) is not None
        rows.put(KEY, torch.ones(2, 2))
        rows.finish()
        assert storage.tensors[KEY][list(slots)].tolist() == torch.ones(2, 2).tolist()
        others = [slot for slot in range(6) if slot not in slots]
        assert storage.tensors[KEY][others].tolist() == before[others].tolist()

    @pytest.mark.parametrize("slots", [(2, 3), (4, 2)])
    def test_who_begins_has_no_state(self, slots: tuple[int, ...]) -> None:
        storage = self.storage()
        rows = StateRows(storage, slots, is_fresh=True)
        assert rows.get(KEY) is None
        key = StateKey("conv", 0)
        storage.tensors[key].fill_(math.nan)
        assert rows.convolve(key, torch.ones(2, 1, 2)).tolist() == [[[0, 1, 1]]] * 2
        assert storage.tensors[key][list(slots)].tolist() == [[[0, 1, 1]]] * 2
        rows = StateRows(storage, slots, is_fresh=False)
        assert rows.convolve(key, torch.full((2, 1, 1), 5.0)).tolist() == [[[0, 1, 1, 5]]] * 2
        rows.finish()
        assert storage.tensors[key][list(slots)].tolist() == [[[1, 1, 5]]] * 2

    def test_copies_are_made_in_order(self) -> None:
        storage = self.storage()
        storage.copy([StateCopy(1, 2), StateCopy(2, 3)])
        assert storage.tensors[KEY][3].tolist() == storage.tensors[KEY][1].tolist() == [2, 3]


class TestSizes:
    MIB = StateSpec((1 << 18,), torch.float32)
    SPEC = LayerSpec(0, 4, 2, 64, 64, 1.0)
    """512 bytes of keys and values a token in bf16."""

    def choose(self, **config: Any) -> tuple[int, int, dict[str, Choice]]:
        settings = EngineConfig(**config)
        layout, choices = choose_states([self.MIB], [self.SPEC], KVFormat.of(torch.bfloat16), 16, 64, settings, CPU)
        assert layout.slot_bytes == 1 << 20
        return layout.num_slots, layout.interval, {choice.name: choice for choice in choices}

    def test_the_interval_follows_the_size(self) -> None:
        assert self.choose()[1] == 2048
        small = [StateSpec((64,), torch.float32)]
        layout, _ = choose_states(small, [self.SPEC], KVFormat.of(torch.bfloat16), 48, 64, EngineConfig(), CPU)
        assert layout.interval == 384  # at least 256, pages of 48, scans of 64
        assert self.choose(state_interval=32)[1] == 32
        with pytest.raises(ConfigError, match="multiple of the page"):
            self.choose(state_interval=40)

    def test_slots_for_requests_and_for_snapshots(self) -> None:
        num_slots, _, told = self.choose(max_state_memory=0.0625)
        assert num_slots == 1 + 64 and told["state_slots"].value == "32 requests + 32 snapshots"
        assert self.choose(max_state_memory=0.0625, max_requests_per_batch=4)[0] == 1 + 64
        assert self.choose(max_state_memory=0.0625, max_requests_per_batch=2)[0] == 1 + 2 + 32
        for off in ({"allow_block_sharing": False}, {"state_interval": 0}):
            assert self.choose(max_state_memory=0.0625, max_requests_per_batch=4, **off)[:2] == (1 + 4, 0)
        with pytest.raises(ConfigError, match="holds 64 states of 1.0 MiB, for 65 requests"):
            self.choose(max_state_memory=0.0625, max_requests_per_batch=65)

    def test_more_requests_than_there_is_memory_for_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slots, "free_memory", lambda *_: 80 << 20)
        num_slots, _, told = self.choose(max_requests_per_batch=70)
        assert num_slots == 1 + 70 and told["state_slots"].reason.endswith("what so many requests need")
        with pytest.raises(ConfigError, match="states of 81 requests take 81.0 MiB, 1.0 MiB each, and 80.0 MiB"):
            self.choose(max_requests_per_batch=81)

    def test_blocks_without_keys_are_free(self) -> None:
        layout, choice = layout_without_keys(16, EngineConfig(), 512)
        assert layout.groups[0].block_bytes == 0 and layout.groups[0].num_blocks == 65537
        assert "no memory" in choice.reason
        assert layout_without_keys(16, EngineConfig(num_blocks=7), 512)[0].groups[0].num_blocks == 8


def test_a_mixer_that_counts_its_tokens_is_refused() -> None:
    model = tiny("lfm2", **STATES["lfm2"])
    layer: Any = model.get_submodule("model.layers.0.conv")

    class Told(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = self.inner(hidden_states, number=hidden_states.shape[1], **kwargs)
            return out

    model.get_submodule("model.layers.0").conv = Told(layer)
    with pytest.raises(ConfigError, match="Lfm2ShortConv is told the number of tokens"):
        build(model)


def test_copies_of_a_model_without_states_are_refused() -> None:
    runner = build(tiny("llama"))
    with pytest.raises(ValueError, match="no states"):
        runner.submit(StepPlan((), 0, states_before=(StateCopy(1, 2),)))
