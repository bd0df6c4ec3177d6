"""GGUF files as they are: packed from their blocks, compared with transformers' own forward of the dequantised file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import aiocb.model.kv as kv
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels.interface import LINEARS
from aiocb.model.load import gguf as gguf_module
from aiocb.model.load import gguf_stored, hub
from aiocb.model.native.runner import NativeRunner
from aiocb.model.open import open_model
from aiocb.model.parity import _plans, relative_error
from aiocb.model.request import ModelRequest
from aiocb.records import Records

from .gguf_files import HIDDEN, KV_HEADS, TOKENS, write_gguf

CONFIG = EngineConfig(num_blocks=16)
PROMPT = [3, 17, 40, 41, 90, 7, 8, 60, 61, 62, 5, 33, 34, 35, 36, 99, 100, 101, 4, 50, 51]


@pytest.fixture
def folder(own_cache: Path) -> Path:
    return own_cache.parent


@pytest.fixture
def unconverted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files that may not be converted."""

    def refuse(*_: Any) -> None:
        raise AssertionError("converted")

    monkeypatch.setattr(gguf_module, "_convert", refuse)
    return folder


def _open(path: Path, config: EngineConfig = CONFIG, **others: Any) -> Any:
    return open_model(ModelRequest(config, name=str(path), device="cpu", **others))


def _logits(runner: Any, tokens: list[int] = PROMPT) -> torch.Tensor:
    """Of a prompt in chunks and single tokens."""
    rows, records = [], Records(len(runner.cache_layout.groups))
    for plan in _plans([tokens], runner.cache_layout):
        rows.append(runner.logits(plan.entries, records.begin(plan)).float().clone())
    return torch.cat(rows)


def _expected(path: Path) -> torch.Tensor:
    """Of the file dequantised by transformers, in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def _choice(opened: Any, name: str) -> Any:
    return next(choice for choice in opened.choices if choice.name == name)


@pytest.mark.parametrize(
    "kinds",
    [{"": kind} for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
    + [{"token_embd": "Q5_0", "attn_v": "Q8_0", "attn_q": "Q4_0", "ffn_up": "Q5_1", "": "Q4_1"}],
    ids=lambda kinds: "-".join(kinds.values()),
)
def test_a_file_is_run_as_it_is(unconverted: Path, kinds: Mapping[str, str]) -> None:
    path = write_gguf(unconverted / "tiny.gguf", kinds=kinds)
    opened = _open(path)
    assert isinstance(opened.runner, NativeRunner) and opened.model is None
    # What is left is the rounding of activations, to bf16 and to eight bits.
    tolerance = 0.012 if set(kinds.values()) <= {"F32", "F16", "BF16"} else 0.05
    assert relative_error(_expected(path), _logits(opened.runner)) < tolerance
    assert _choice(opened, "weights").reason.startswith("a GGUF file as it is: ")
    assert all(kind in _choice(opened, "kernels").value for kind in kinds.values())
    assert float(_choice(opened, "parity").value) < tolerance
    assert not list((unconverted / "cache").rglob("*.safetensors"))  # nothing large was made
    assert opened.tokenizer.decode(opened.tokenizer.encode("afbg")) == "afbg"
    opened.runner.close()


@pytest.mark.parametrize(("kv_heads", "name"), [(4, "value"), (KV_HEADS, "qkv")])
def test_values_of_another_type_are_packed_by_themselves(unconverted: Path, kv_heads: int, name: str) -> None:
    """Where queries and keys fill whole panels; else all three take the wider format."""
    path = write_gguf(
        unconverted / "tiny.gguf", {"llama.attention.head_count_kv": kv_heads}, kinds={"attn_v": "Q8_0", "": "Q4_0"}
    )
    opened = _open(path)
    native = opened.runner.native
    width = HIDDEN * kv_heads // 4
    columns = width if name == "value" else HIDDEN + 2 * width
    out = np.empty((columns, HIDDEN), np.float32)
    native.check(native.library.calls.aiocb_unpack(native.handle, 0, LINEARS[name], out.ctypes.data))
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    stored = reader["blk.0.attn_v.weight"]
    expected = gguf.dequantize(stored.data, stored.tensor_type)
    assert np.abs(out[-width:] - expected).max() < 0.01
    assert relative_error(_expected(path), _logits(opened.runner)) < 0.05
    opened.runner.close()


def test_an_output_matrix_of_its_own(unconverted: Path) -> None:
    output = np.random.default_rng(9).normal(0, 0.3, (len(TOKENS), HIDDEN)).astype(np.float32)
    path = write_gguf(unconverted / "tiny.gguf", tensors={"output.weight": output}, kinds={"": "Q8_0"})
    opened = _open(path)
    assert relative_error(_expected(path), _logits(opened.runner)) < 0.05
    opened.runner.close()


def test_frequencies_are_divided_by_the_files_factors(folder: Path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 8, HIDDEN // 8, dtype=np.float32)}
    path = write_gguf(folder / "tiny.gguf", tensors=factors, kinds={"": "Q8_0"})
    opened = _open(path)
    converted = hub.load(str(path), dtype="float32", device="cpu").model
    with torch.inference_mode():
        expected = converted(torch.tensor([PROMPT])).logits[0]
    actual = _logits(opened.runner)
    assert relative_error(expected, actual) < 0.05
    assert relative_error(_expected(path), actual) > 0.05  # as transformers reads it, without them
    opened.runner.close()


def test_what_was_made_of_a_file_before_is_not_taken_for_it(folder: Path) -> None:
    path = write_gguf(folder / "tiny.gguf", kinds={"": "Q8_0"})
    for _ in range(2):
        _open(path, dtype="bfloat16").runner.close()
    opened = _open(path)
    assert _choice(opened, "dtype").value == "as stored"
    opened.runner.close()


def test_options_that_say_where_to_look_change_nothing(unconverted: Path) -> None:
    path = write_gguf(unconverted / "tiny.gguf", kinds={"": "Q8_0"})
    opened = _open(path, options={"trust_remote_code": True, "local_files_only": True})
    assert _choice(opened, "dtype").value == "as stored"
    opened.runner.close()


def test_a_comparison_that_cannot_be_noted_is_made_again(unconverted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(unconverted / "tiny.gguf", kinds={"": "Q8_0"})
    (unconverted / "cache" / "native").write_text("in the way")
    for _ in range(2):
        opened = _open(path)
        assert "of the first 1 layers" in _choice(opened, "parity").reason
        opened.runner.close()


@pytest.mark.parametrize("kind", ["TQ2_0", "Q4_K"])
def test_types_of_256(unconverted: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the kernels read themselves, and one that they are given as floats."""
    path = unconverted / "tiny.gguf"
    if kind == "TQ2_0":
        write_gguf(path, kinds={"ffn_down": kind, "": "Q8_0"}, mlp=256)
    else:
        quantize = gguf.quantize

        def random_blocks(values: Any, wanted: gguf.GGMLQuantizationType) -> Any:
            if wanted is not gguf.GGMLQuantizationType.Q4_K:
                return quantize(values, wanted)
            raw = np.random.default_rng(1).integers(0, 256, (len(values), values.shape[1] // 256, 144), np.uint8)
            raw[:, :, :4] = np.array([0.001, 0.008], np.float16).view(np.uint8)
            return raw.reshape(len(values), -1)

        monkeypatch.setattr(gguf, "quantize", random_blocks)
        write_gguf(path, kinds={"ffn_down": kind, "": "Q8_0"}, mlp=256)
    opened = _open(path)
    assert relative_error(_expected(path), _logits(opened.runner)) < 0.05
    assert kind in _choice(opened, "kernels").value
    opened.runner.close()


def test_a_later_start_makes_nothing_again(unconverted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(unconverted / "tiny.gguf", kinds={"": "Q4_0"})
    first = _open(path)
    expected = _logits(first.runner)
    first.runner.close()

    def refuse(*_: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(gguf_stored, "_make_small", refuse)
    monkeypatch.setattr("aiocb.model.native.stored._beginning", refuse)
    second = _open(path)
    assert torch.equal(_logits(second.runner), expected)
    assert _choice(second, "parity").reason == "of the first layers, when this file was started first"
    second.runner.close()


def test_a_row_does_not_depend_on_its_batch(unconverted: Path) -> None:
    opened = _open(write_gguf(unconverted / "tiny.gguf", kinds={"attn_v": "Q8_0", "": "Q4_1"}))
    alone = _logits(opened.runner)
    layout, records, rows = opened.runner.cache_layout, Records(1), []
    for plan in _plans([PROMPT, PROMPT[7:14]], layout):
        logits, start = opened.runner.logits(plan.entries, records.begin(plan)).clone(), 0
        for entry in plan.entries:
            if entry.request_id == 0:
                rows.append(logits[start : start + entry.num_logits])
            start += entry.num_logits
    assert torch.equal(torch.cat(rows), alone)
    opened.runner.close()


class TestConversion:
    """What the short way cannot do, or does wrong, is done the long way, and says so."""

    def _converted(self, path: Path, reason: str) -> None:
        opened = _open(path)
        assert reason in _choice(opened, "gguf").reason
        assert _choice(opened, "dtype").value == "bfloat16"
        opened.runner.close()

    def test_numbers_that_differ_are_noticed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as those of a tensor that was taken for another."""
        real = gguf_stored.StoredModel.values

        def wrong(self: Any, weight: Any) -> Any:
            values = real(self, weight)
            return values.flip(0) if values.dim() > 1 else values

        monkeypatch.setattr(gguf_stored.StoredModel, "values", wrong)
        path = write_gguf(folder / "tiny.gguf", kinds={"": "Q8_0"})
        self._converted(path, "its logits differ from the model's own forward")

    def test_an_unknown_way_of_transformers(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers import modeling_gguf_pytorch_utils

        processors: Any = modeling_gguf_pytorch_utils

        class Changed(processors.LlamaTensorProcessor):  # type: ignore[misc]
            def process(self, weights: Any, name: str, **kwargs: Any) -> Any:
                result = super().process(weights, name, **kwargs)
                return result._replace(weights=result.weights * 2) if "attn_output" in name else result

        monkeypatch.setitem(processors.TENSOR_PROCESSORS, "llama", Changed)
        path = write_gguf(folder / "tiny.gguf", kinds={"": "Q8_0"})
        self._converted(path, "blk.0.attn_output.weight is changed on the way")

    @pytest.mark.parametrize("asked", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
    def test_what_is_asked_for_is_done(self, folder: Path, asked: Any) -> None:
        opened = _open(write_gguf(folder / "tiny.gguf", kinds={"": "Q8_0"}), **asked)
        assert "dequantised once" in _choice(opened, "weights").reason
        opened.runner.close()

    def test_torch_takes_the_converted_file(self, folder: Path) -> None:
        opened = _open(write_gguf(folder / "tiny.gguf"), dataclasses.replace(CONFIG, native=False))
        assert _choice(opened, "runner").value == "torch"
        opened.runner.close()


def test_what_does_not_fit_is_refused_before_it_is_read(unconverted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(unconverted / "tiny.gguf", kinds={"": "Q8_0"})
    _open(path).runner.close()
    monkeypatch.setattr(kv, "free_memory", lambda device: 100_000)
    with pytest.raises(ConfigError, match=r"no room for one token of one request: .*the weights"):
        _open(path, EngineConfig())


def test_a_matrix_of_nowhere(unconverted: Path) -> None:
    file = hub.find_file(str(write_gguf(unconverted / "tiny.gguf")), "auto", "cpu")
    assert file is not None
    stored = gguf_stored.open_stored(file, lambda stage, fraction: None)
    with pytest.raises(LookupError, match="no tensor of the file"):
        stored.find_rows(torch.empty(4, 4, device="meta"))
    slices = stored.values(stored.module.model.layers[0].mlp.up_proj.weight[3:5])
    assert torch.equal(slices, stored.values(stored.module.model.layers[0].mlp.up_proj.weight)[3:5])
