"""Modules that compute their attention themselves, ALiBi among them: tokens equal to `generate`, packed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import KernelUnavailable, load
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.runner import TorchRunner
from tests.steps import described

from .helpers import ManualScheduler, argmax_sampler, generate, prompt, tiny

pytestmark = pytest.mark.slow

BART = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "bloom-3-heads": ("bloom", {"num_attention_heads": 3, "hidden_size": 48}),
    "mpt": ("mpt", {}),
    "mpt-6-heads": ("mpt", {"num_attention_heads": 6, "hidden_size": 96, "attn_config": {"clip_qkv": 0.7}}),
    "falcon": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("falcon", {"alibi": True, "num_attention_heads": 12, "hidden_size": 192}),
    "falcon-alibi-many-keys": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt_neo": ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                            "window_size": 16}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    "xglm": ("xglm", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}),
    "git": ("git", {"vision_config": VISION}),
    "megatron-bert": ("megatron-bert", {"is_decoder": True}),
    "rembert": ("rembert", {"is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 48}),
    "roformer": ("roformer", {"is_decoder": True, "embedding_size": 64}),
    "roformer-values": ("roformer", {"is_decoder": True, "embedding_size": 64, "rotary_value": True}),
    "trocr": ("trocr", BART),
    "mvp": ("mvp", {**BART, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}),
    "big_bird": ("big_bird", {"is_decoder": True}),
    "openai-gpt": ("openai-gpt", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}  # fmt: skip
NATIVE = ("bloom-3-heads", "mpt-6-heads", "falcon", "falcon-alibi", "gpt_neo", "xglm")
ALIBI = [name for name in CASES if name.startswith(("bloom", "mpt", "falcon-alibi"))]
NUM_NEW = 10
LENGTHS = (5, 19, 70)


def model_of(case: str, **changes: Any) -> Any:
    name, values = CASES[case]
    return tiny(name, **{**values, **changes})


def build(model: Any, **config: Any) -> TorchRunner:
    values = {"num_blocks": 128, "page_size": 4, "native": False, **config}
    return TorchRunner(model, EngineConfig(**values), argmax_sampler, max_model_len=500)


def run(runner: TorchRunner, *prompts: list[int], chunk: int = 1 << 30, num_new: int = NUM_NEW) -> list[list[int]]:
    scheduler = ManualScheduler(runner, chunk=chunk)
    for index, tokens in enumerate(prompts):
        scheduler.add(tokens, num_new, start_step=index)
    return scheduler.run()


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_generate(case: str) -> None:
    model = model_of(case)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [generate(model, tokens, NUM_NEW) for tokens in prompts]
    runner = build(model)
    assert run(runner, *prompts) == expected, "in a mixed batch"
    assert run(runner, *prompts, chunk=9) == expected, "chunked"
    runner.close()


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("case", ["bloom-3-heads", "mpt-6-heads", "falcon-alibi", "gpt_neo"])
def test_backends_agree(case: str, backend: str) -> None:
    model = model_of(case)
    assert run(build(model, attention=backend), prompt(70), prompt(9), chunk=9) == [
        generate(model, prompt(length), NUM_NEW) for length in (70, 9)
    ]


@pytest.mark.parametrize("case", NATIVE)
def test_native(case: str) -> None:
    loaded = load()
    if isinstance(loaded, KernelUnavailable):
        pytest.skip(loaded.reason)
    model = model_of(case)
    runner = build(model, native=None, page_size=None)
    notes = described(runner)
    assert notes["attention"].startswith("cpu") and notes["linears"].startswith("native")
    assert run(runner, *(prompt(length) for length in (70, 9, 33)), chunk=20) == [
        generate(model, prompt(length), NUM_NEW) for length in (70, 9, 33)
    ]
    runner.close()


class TestAlibi:
    @pytest.mark.parametrize("case", ALIBI)
    def test_it_is_learned(self, case: str) -> None:
        specs = ModelAdapter(model_of(case)).specs.values()
        assert {spec.num_heads for spec in specs} == {CASES[case][1].get("num_attention_heads", 4)}
        assert {spec.alibi for spec in specs} == {"rounded" if "falcon" in case else "exact"}
        assert not any(spec.is_gathered for spec in specs)

    def test_falcon_without(self) -> None:
        assert {spec.alibi for spec in ModelAdapter(model_of("falcon")).specs.values()} == {None}

    def test_falcon_rounds_it(self) -> None:
        """Beyond 256 positions its bias is of another size than slope times distance; tokens follow."""
        model = model_of("falcon-alibi")
        assert run(build(model), prompt(400), chunk=64) == [generate(model, prompt(400), NUM_NEW)]
        logits = model(torch.tensor([prompt(400)]), use_cache=False).logits[0, -1]
        rows: list[torch.Tensor] = []

        class Kept(TorchRunner):
            def logits(self, entries: Any, records: Any) -> torch.Tensor:
                rows.append(super().logits(entries, records).clone())
                return rows[-1]

        kept = Kept(model, EngineConfig(num_blocks=128, page_size=4, native=False), argmax_sampler, max_model_len=500)
        run(kept, prompt(400), num_new=1)
        torch.testing.assert_close(rows[-1][-1], logits, atol=2e-4, rtol=0.0)


class TestTakingOver:
    def test_a_patched_module_is_left_alone(self) -> None:
        model = model_of("bloom")
        attention = model.transformer.h[1].self_attention
        own = attention.forward
        attention.forward = lambda *args, **kwargs: own(*args, **kwargs)
        with pytest.raises(ConfigError, match="own attention code"):
            build(model)

    @pytest.mark.parametrize("wraps", [functools.wraps, lambda own: lambda patch: patch])
    def test_a_patched_class_is_left_alone(self, monkeypatch: pytest.MonkeyPatch, wraps: Any) -> None:
        model = model_of("bloom")
        kind = type(model.transformer.h[1].self_attention)
        own = kind.forward

        def patched(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        monkeypatch.setattr(kind, "forward", wraps(own)(patched))
        with pytest.raises(ConfigError, match="own attention code"):
            build(model)

    def test_hooks_are_honoured(self) -> None:
        model = model_of("mpt")
        plain = generate(model, prompt(19), NUM_NEW)
        model.transformer.blocks[0].attn.register_forward_hook(lambda module, args, out: (out[0] * -1.0, out[1]))
        hooked = generate(model, prompt(19), NUM_NEW)
        assert hooked != plain
        assert run(build(model), prompt(19)) == [hooked]

    def test_the_owner_keeps_its_own(self) -> None:
        model = model_of("falcon")
        run(build(model), prompt(9))
        assert all("forward" not in vars(module) for module in model.modules())

    def test_encoders_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="not causal"):
            build(model_of("megatron-bert", is_decoder=False))

    def test_slices_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="slow_but_exact"):
            build(model_of("bloom", pretraining_tp=2, slow_but_exact=True))


@pytest.mark.parametrize("case", ["bloom", "mpt", "falcon-alibi", "gpt_neo"])
def test_bf16_within_the_noise_of_the_module(case: str) -> None:
    model = model_of(case)
    truth = model(torch.tensor([prompt(70)]), use_cache=False).logits[0, -1]
    half = model.to(torch.bfloat16)
    noise = (half(torch.tensor([prompt(70)]), use_cache=False).logits[0, -1].float() - truth).square().mean().sqrt()
    rows: list[torch.Tensor] = []

    class Kept(TorchRunner):
        def logits(self, entries: Any, records: Any) -> torch.Tensor:
            rows.append(super().logits(entries, records).float().clone())
            return rows[-1]

    kept = Kept(half, EngineConfig(num_blocks=64, native=False), argmax_sampler, max_model_len=500)
    run(kept, prompt(70), chunk=32, num_new=1)
    assert (rows[-1][-1] - truth).square().mean().sqrt() < 1.5 * noise


def test_modules_of_somebody_elses_are_left_alone() -> None:
    class Own(torch.nn.Linear):
        __module__ = "__main__"  # a name without a dot, as of any script

    model = tiny("bloom")
    layer: Any = model.get_submodule("transformer.h.0.mlp")
    layer.dense_h_to_4h.__class__ = Own
    build(model).close()
