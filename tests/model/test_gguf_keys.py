"""What a GGUF file says: every key and tensor is honoured, known to be harmless, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from aiocb.errors import ConfigError
from aiocb.model.defaults import model_defaults
from aiocb.model.load.gguf_file import GgufFile, read_gguf
from aiocb.model.load.gguf_keys import amend_config, check_keys, generation_values
from aiocb.model.load.hub import LoadedModel, load

from .gguf_files import HEADS, HIDDEN, KEYS, TURN, write_gguf

FACTORS = np.linspace(1, 8, HIDDEN // HEADS // 2).astype(np.float32)
IDS = torch.tensor([[5, 7, 9, 11, 13, 17, 19]])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIOCB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def loaded(folder: Path, name: str, **content: Any) -> LoadedModel:
    return load(str(write_gguf(folder / f"{name}.gguf", **content)), device="cpu", dtype="float32")


def said(architecture: str, **values: Any) -> GgufFile:
    keys = {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    return GgufFile(Path("file.gguf"), {"general.architecture": architecture, **keys}, {})


def amended(architecture: str, model_type: str, settings: dict[str, Any] | None = None, **values: Any) -> Any:
    config = CONFIG_MAPPING[model_type](**(settings or {}))
    amend_config(config, said(architecture, **values))
    return config


class TestRotary:
    def test_linear_scaling(self, cache: Path) -> None:
        plain = loaded(cache, "plain").model
        for keys in (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"llama.rope.scaling.factor": 4.0},  # linear is what it means alone
            {"llama.rope.scale_linear": 4.0},  # its older name
        ):
            model: Any = loaded(cache, "linear", keys=keys).model
            assert torch.allclose(model.model.rotary_emb.inv_freq * 4, plain.model.rotary_emb.inv_freq)
            assert not torch.equal(model(IDS).logits, plain(IDS).logits)
        same: Any = loaded(
            cache, "none", keys={"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
        ).model
        assert torch.equal(same(IDS).logits, plain(IDS).logits)

    def test_yarn_as_llama_cpp_has_it(self, cache: Path) -> None:
        factor, original, dims, base = 4.0, 64, HIDDEN // HEADS, 10000.0
        keys = {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": factor,
            "llama.rope.scaling.original_context_length": original,
        }
        rotary: Any = loaded(cache, "yarn", keys=keys).model.model.rotary_emb
        plain = base ** -(torch.arange(0, dims, 2).float() / dims)

        def bound(turns: float) -> float:
            return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(bound(32.0)), 0), min(math.ceil(bound(1.0)), dims - 1)
        kept = 1 - ((torch.arange(dims // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        assert torch.allclose(rotary.inv_freq, plain / factor * (1 - kept) + plain * kept)
        assert rotary.attention_scaling == pytest.approx(1 + 0.1 * math.log(factor))
        keys["llama.rope.scaling.attn_factor"] = 0.5
        rotary = loaded(cache, "attn", keys=keys).model.model.rotary_emb
        assert rotary.attention_scaling == pytest.approx(0.5 * (1 + 0.1 * math.log(factor)))

    def test_factors_are_kept_in_the_cache(self, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
        plain: Any = loaded(cache, "plain").model
        for _ in range(2):  # the second from the cache
            model: Any = loaded(cache, "freqs", tensors={"rope_freqs.weight": FACTORS}).model
            expected = plain.model.rotary_emb.inv_freq / torch.from_numpy(FACTORS)
            assert torch.allclose(model.model.rotary_emb.inv_freq, expected)
            assert not torch.equal(model(IDS).logits, plain(IDS).logits)
        assert not caplog.records

    def test_factors_of_another_size_are_refused(self, cache: Path) -> None:
        with pytest.raises(ConfigError, match="5 factors in rope_freqs|rope_freqs.weight has 5 factors"):
            loaded(cache, "freqs", tensors={"rope_freqs.weight": FACTORS[:5]})

    def test_long_factors(self) -> None:
        tensors = {
            f"rope_factors_{kind}.weight": np.full(48, value, np.float32) for kind, value in (("long", 3), ("short", 1))
        }
        values = {
            "context_length": 8192,
            "rope__scaling__original_context_length": 4096,
            "rope__scaling__attn_factor": 1.25,
        }
        config = CONFIG_MAPPING["phi3"]()
        with pytest.raises(ConfigError, match="factors are not in the file"):
            amend_config(config, said("phi3", rope__scaling__type="longrope", **values))
        file = said("phi3", **values)  # the tensors are enough

        class WithVectors(GgufFile):
            def vector(self, name: str) -> list[float]:
                return [float(each) for each in tensors[name]]

        amend_config(config, WithVectors(file.path, file.values, dict.fromkeys(tensors)))  # type: ignore[arg-type]
        assert config.rope_parameters["rope_type"] == "longrope" and config.rope_parameters["long_factor"] == [3.0] * 48
        assert config.rope_parameters["attention_factor"] == 1.25
        assert config.original_max_position_embeddings == 4096 and config.max_position_embeddings == 8192

    def test_bases_and_widths(self) -> None:
        assert amended("stablelm", "stablelm", rope__freq_base=5e5, rope__dimension_count=40).rope_parameters == {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "partial_rotary_factor": 0.5,
        }
        gemma = amended("gemma3", "gemma3_text", rope__freq_base=1e6, rope__scaling__factor=8.0).rope_parameters
        assert gemma["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
        assert gemma["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
        gemma = amended("gemma3", "gemma3_text", rope__freq_base=1e6, rope__freq_base_swa=2e4).rope_parameters
        assert gemma["sliding_attention"]["rope_theta"] == 20000.0
        # gpt-oss: without keys there is no scaling, though transformers' default has one.
        assert amended("gpt-oss", "gpt_oss", rope__freq_base=15e4).rope_parameters == {
            "rope_type": "default",
            "rope_theta": 150000.0,
        }

    @pytest.mark.parametrize(
        ("values", "key"),
        [
            ({"rope__scaling__type": "spiral", "rope__scaling__factor": 2.0}, "rope.scaling.type = spiral"),
            ({"rope__scaling__attn_factor": 1.2}, "rope.scaling.attn_factor"),
            ({"rope__freq_base": 1e4, "rope__freq_base_swa": 1e6}, "rope.freq_base_swa"),
        ],
    )
    def test_what_is_not_known_is_refused(self, values: dict[str, Any], key: str) -> None:
        with pytest.raises(ConfigError, match=f"llama.{key}"):
            amended("llama", "llama", **values)
        with pytest.raises(ConfigError, match=r"gpt2\.rope\.scaling\.type"):
            amended("gpt2", "gpt2", rope__scaling__factor=2.0)

    def test_a_width_that_the_module_does_not_rotate(self, cache: Path) -> None:
        with pytest.raises(ConfigError, match="rope.dimension_count is 8"):
            loaded(cache, "half", keys={"llama.rope.dimension_count": 8, "llama.attention.key_length": 16})


class TestConfiguration:
    def test_values_that_transformers_passes_over(self) -> None:
        assert amended("qwen3moe", "qwen3_moe", expert_feed_forward_length=512).moe_intermediate_size == 512
        assert amended("qwen3", "qwen3", attention__key_length=64).head_dim == 64
        gemma = amended("gemma2", "gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=0.5, block_count=46)
        assert (gemma.attn_logit_softcapping, gemma.final_logit_softcapping) == (20.0, 0.5)
        assert gemma.query_pre_attn_scalar == gemma.hidden_size // gemma.num_attention_heads
        for layers, scalar in ((62, 32), (26, 16)):  # no key says it
            sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 16}
            gemma = amended("gemma3", "gemma3_text", sizes, block_count=layers)
            assert (gemma.query_pre_attn_scalar, gemma.num_hidden_layers) == (scalar, layers)
        assert amended("gpt2", "gpt2", context_length=2048, feed_forward_length=512).n_positions == 2048
        assert amended("bloom", "bloom", context_length=2048).seq_length == 2048

    def test_single_precision_is_no_difference(self) -> None:
        stored = float(np.float32(1e-5))
        config = amended("llama", "llama", {"rms_norm_eps": 1e-5}, attention__layer_norm_rms_epsilon=stored)
        assert config.rms_norm_eps == 1e-5

    def test_windows(self) -> None:
        assert amended("phi3", "phi3", attention__sliding_window=2047).sliding_window == 2047
        gemma = amended("gemma3", "gemma3_text", attention__sliding_window=99)
        assert gemma.sliding_window == 99 and gemma.layer_types.count("full_attention") == 4
        gemma = amended("gemma3", "gemma3_text", attention__sliding_window=99, attention__sliding_window_pattern=2)
        assert gemma.layer_types[:4] == ["sliding_attention", "full_attention"] * 2
        pattern = [True] * 25 + [False]
        gemma = amended(
            "gemma3", "gemma3_text", attention__sliding_window=99, attention__sliding_window_pattern=pattern
        )
        assert gemma.layer_types.count("full_attention") == 1
        places: list[tuple[str, dict[str, Any]]] = [
            ("llama", {}),  # has none
            ("qwen2", {}),  # in none of its layers
            ("mistral", {"attention__sliding_window_pattern": 2}),  # in all or none
        ]
        for architecture, values in places:
            with pytest.raises(ConfigError, match=rf"{architecture}\.attention\.sliding_window"):
                amended(architecture, architecture, attention__sliding_window=99, **values)
        assert amended("llama", "mistral").sliding_window is None  # what transformers makes of some of them

    @pytest.mark.parametrize(
        ("architecture", "values", "key"),
        [
            ("llama", {"expert_count": 8}, "expert_count"),
            ("llama", {"attention__key_length": 64}, ""),
            ("qwen2", {"attention__key_length": 64}, "attention.key_length"),
            ("llama", {"attention__scale": 0.5}, "attention.scale"),
            ("llama", {"feed_forward_length": [4, 8]}, "feed_forward_length"),
            ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ],
    )
    def test_without_a_place_it_is_refused(self, architecture: str, values: dict[str, Any], key: str) -> None:
        if not key:
            assert amended(architecture, architecture, **values).head_dim == 64
            return
        with pytest.raises(ConfigError, match=rf"file\.gguf says {architecture}\.{key} = .* not supported"):
            amended(architecture, architecture, **values)

    def test_neutral_values_do_no_harm(self, cache: Path) -> None:
        keys = {"expert_count": 0, "logit_scale": 1.0, "attention.causal": True, "attention.clamp_kqv": 0.0}
        model = loaded(cache, "neutral", keys={f"llama.{key}": value for key, value in keys.items()}).model
        assert torch.equal(model(IDS).logits, loaded(cache, "plain").model(IDS).logits)


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "value", "advice"),
        [
            ("llama.logit_scale", 0.5, "Name the original model"),
            ("llama.residual_scale", 0.2, ""),
            ("llama.attention.clamp_kqv", 8.0, ""),
            ("llama.attention.causal", False, "an encoder"),
            ("llama.pooling_type", 3, "an embedding model"),
            ("llama.something_new", 1, ""),
            ("llama.rope.scaling.yarn_log_multiplier", 0.1, ""),
            ("tokenizer.ggml.something_new", 1, ""),
            ("tokenizer.ggml.suppress_tokens", [3], ""),
            ("tokenizer.ggml.remove_extra_whitespaces", True, ""),
            ("general.sampling.mirostat", 2, ""),
            ("general.sampling.xtc_probability", 0.5, ""),
            ("general.sampling.sequence", "k;p", ""),
            ("general.type", "adapter", "part for another model"),
            ("split.count", 3, "llama-gguf-split --merge"),
            ("adapter.lora.alpha", 2.0, ""),
            ("clip.has_vision_encoder", True, ""),
        ],
    )
    def test_refused_by_name_before_anything_is_built(self, key: str, value: Any, advice: str) -> None:
        file = GgufFile(Path("a.gguf"), {"general.architecture": "llama", **KEYS, key: value}, {})
        with pytest.raises(ConfigError, match=rf"a\.gguf says {key} = .*{advice}"):
            check_keys(file)

    def test_a_penalty_of_the_last_tokens_only(self) -> None:
        values = {"general.architecture": "llama", **KEYS, "general.sampling.penalty_last_n": 64}
        check_keys(GgufFile(Path("a.gguf"), values, {}))  # there is none
        with pytest.raises(ConfigError, match=r"penalty_last_n = 64"):
            check_keys(GgufFile(Path("a.gguf"), {**values, "general.sampling.penalty_repeat": 1.1}, {}))

    def test_harmless_ones_pass(self) -> None:
        keys = {
            "general.name": "x",
            "general.base_model.0.name": "y",
            "general.tags": ["a"],
            "general.file_type": 3,
            "general.sampling.mirostat": 0,
            "quantize.imatrix.file": "z",
            "split.count": 1,
            "split.no": 0,
            "tokenizer.ggml.fim_pre_token_id": 4,
            "llama.rope.scaling.finetuned": True,
            "llama.tensor_data_layout": "Meta AI original pth",
            "anybody.else": 1,
        }
        check_keys(GgufFile(Path("a.gguf"), {"general.architecture": "llama", **KEYS, **keys}, {}))

    def test_a_refusal_leaves_nothing(self, cache: Path) -> None:
        with pytest.raises(ConfigError, match=r"llama\.logit_scale = 0\.5"):
            loaded(cache, "scaled", keys={"llama.logit_scale": 0.5})
        assert not [path for path in (cache / "cache" / "gguf").iterdir() if path.is_dir()]

    @pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.ffn_gate_exps.weight", "output_extra.weight"])
    def test_tensors_without_a_place_are_named(self, cache: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=f"tensors that LlamaForCausalLM has no place for: {name}"):
            loaded(cache, "more", tensors={name: np.ones(HIDDEN, np.float32)})

    def test_missing_tensors_are_named(self, cache: Path) -> None:
        with pytest.raises(ConfigError, match="no weights for .*layers.1.mlp.up_proj"):
            loaded(cache, "less", without=["blk.1.ffn_up.weight"])


class TestGeneration:
    def test_ends_and_sampling_become_defaults(self, cache: Path) -> None:
        keys = {
            "tokenizer.ggml.eot_token_id": TURN,
            "tokenizer.ggml.padding_token_id": 0,
            "general.sampling.temp": 0.6,
            "general.sampling.top_k": 20,
            "general.sampling.top_p": 0.95,
            "general.sampling.min_p": 0.05,
            "general.sampling.penalty_repeat": 1.1,
        }
        for _ in range(2):
            defaults = model_defaults(loaded(cache, "says", keys=keys).model)
            assert defaults.eos_token_ids == (2, TURN)
            expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
            assert {key: defaults.generation[key] for key in expected} == expected and defaults.generation["do_sample"]

    def test_temperature_zero_is_greedy(self) -> None:
        file = GgufFile(
            Path("x"),
            {"general.architecture": "llama", "general.sampling.temp": 0.0, "general.sampling.top_k": 40},
            {},
        )
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        assert generation_values(file) == {"do_sample": False, **ids}

    def test_nothing_said_nothing_set(self) -> None:
        values = generation_values(GgufFile(Path("x"), {"general.architecture": "llama", **KEYS}, {}))
        assert values == {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None}

    def test_no_end_is_made_up(self, cache: Path) -> None:
        """The class of the configuration has the ids of its first model."""
        model = loaded(cache, "endless", without=["tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"]).model
        assert model_defaults(model).eos_token_ids == () and model.config.bos_token_id is None


class TestReading:
    def test_shapes_and_values(self, tmp_path: Path) -> None:
        file = read_gguf(write_gguf(tmp_path / "a", tensors={"rope_freqs.weight": FACTORS}))
        assert file.architecture == "llama" and file.said("block_count") == 2 and file.said("nothing", 7) == 7
        assert file.values["tokenizer.ggml.tokens"] == KEYS["tokenizer.ggml.tokens"]
        assert file.tensors["blk.0.ffn_up.weight"].shape == (96, 64)
        assert file.vector("rope_freqs.weight") == FACTORS.tolist()

    @pytest.mark.parametrize("size", [0, 3, 10, 30, 700, -1, -5000])
    def test_cut_short(self, tmp_path: Path, size: int) -> None:
        path = write_gguf(tmp_path / "a.gguf")
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ConfigError, match=r"a\.gguf is (damaged or )?(cut short|not a GGUF file)"):
            read_gguf(path)

    def test_garbage_behind_the_magic(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gguf"
        for version, rest in ((3, b"\xff" * 64), (1, b""), (0x03000000, b""), (3, b"\0" * 64)):
            path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + rest.ljust(16, b"\0"))
            with pytest.raises(ConfigError, match=r"a\.gguf"):
                read_gguf(path)

    def test_it_agrees_with_the_reader_of_the_format(self, tmp_path: Path) -> None:
        import gguf

        path = write_gguf(tmp_path / "a")
        ours, theirs = read_gguf(path), gguf.GGUFReader(str(path))
        assert {
            key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
        } == ours.values
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert (mine.offset, mine.kind) == (tensor.data_offset, tensor.tensor_type)
            assert mine.shape == tuple(int(each) for each in reversed(tensor.shape))


def test_a_configuration_is_as_good_after_a_round_trip(cache: Path) -> None:
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    first = loaded(cache, "trip", keys=keys).model.config
    (folder,) = (path for path in (cache / "cache" / "gguf").iterdir() if path.is_dir())
    assert AutoConfig.from_pretrained(folder).rope_parameters == first.rope_parameters
    assert first.rope_parameters["factor"] == 2.0
