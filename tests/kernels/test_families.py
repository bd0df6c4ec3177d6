"""The whole native step against transformers: greedy tokens in fp32 on tiny random models of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from aiocb.kernels import Library
from aiocb.model.native.runner import NativeRunner, create_native_runner
from tests.kernels.helpers import MiniScheduler, Request

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
MIXTURE = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 48}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.11,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 18}),
    "olmo2": ("Olmo2", {}),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 22,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },  # fmt: skip
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 22,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },  # fmt: skip
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 30, "use_bias": True}),
    "stablelm": ("StableLm", {}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 21}),
    "qwen2_moe": ("Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 80}),
    "qwen2_moe-mixed": ("Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 144, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", MIXTURE | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe-mixed": ("Qwen3Moe", MIXTURE | {"head_dim": 16, "mlp_only_layers": [0]}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 70}),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.11,
        },
    ),
    "gpt_neox": ("GPTNeoX", {"use_parallel_residual": True}),
    "gpt_neox-serial": ("GPTNeoX", {"use_parallel_residual": False}),
}


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    family, extra = FAMILIES[name]
    fields = BASE | extra | changes
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # default initialisation leaves biases at zero and norms at one
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3.0)
    return model


def runner_of(model: nn.Module, **options: Any) -> NativeRunner:
    runner = create_native_runner(model, sampler=None, **({"num_blocks": 64, "num_threads": 2} | options))
    assert isinstance(runner, NativeRunner), runner
    return runner


def prompts_of(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 33, 60, 1, 16][:count]
    return [torch.randint(3, 131, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(library: Library, name: str) -> None:
    """Batched and chunked in native code, one by one and whole in transformers; past every window."""
    model = make(name)
    runner = runner_of(model, library=library)
    prompts = prompts_of(3)
    requests = [Request(i, prompt, 12) for i, prompt in enumerate(prompts)]
    actual = MiniScheduler(runner).run(requests, budget=40)
    for prompt, tokens in zip(prompts, actual):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :]
        assert tokens == expected.tolist()
    runner.close()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "mixtral", "qwen2_moe-mixed", "olmoe", "granitemoe"])
def test_every_level_passes_the_probe(library: Library, level: str, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        runner_of(make(name, dtype), library=library, level=level).close()


def test_reasons() -> None:
    def reason(model: nn.Module) -> str:
        result = create_native_runner(model, sampler=None)
        assert isinstance(result, str)
        return result

    assert "no native description" in reason(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    )
    assert "float16" in reason(make("llama", torch.float16))
    assert "head dim" in reason(make("llama", head_dim=24))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rotary embedding" in reason(make("llama", rope_parameters=dynamic))
    hooked = make("llama")
    hooked.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
    assert "hooks" in reason(hooked)
    for part in ("gate", "experts"):
        hooked = make("mixtral")
        getattr(hooked.model.layers[1].mlp, part).register_forward_hook(lambda *_: None)
        assert "hooks" in reason(hooked)
    assert "clipped" in reason(make("olmoe", clip_qkv=1.0))
    biased = make("qwen3_moe")
    biased.model.layers[2].mlp.experts.down_proj_bias = nn.Parameter(torch.zeros(9, 64))
    assert "down_proj_bias" in reason(biased)
    wrapped = make("llama")
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    assert isinstance(create_native_runner(wrapped, sampler=None), str)

    mine: Any = type("Mine", (transformers.LlamaForCausalLM,), {})
    assert "is not transformers'" in reason(mine(make("llama").config))


def test_the_probe_refuses_a_model_that_computes_something_else() -> None:
    model = make("llama")
    layer = model.model.layers[1]
    original = layer.forward
    layer.forward = lambda hidden_states, *args, **kwargs: original(hidden_states * 1.5, *args, **kwargs)
    result = create_native_runner(model, sampler=None)
    assert isinstance(result, str)
    assert "differs" in result


def test_owned_model_gives_its_memory_back() -> None:
    model = make("llama", tie_word_embeddings=True)
    runner = runner_of(model, own_model=True)
    assert model.model.layers[0].mlp.down_proj.weight.numel() == 0
    MiniScheduler(runner).run([Request(0, [5, 6, 7], 3)])
    runner.close()


def test_users_model_is_left_as_it_was() -> None:
    model = make("gemma2")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    runner = runner_of(model)
    assert model.training
    assert model.config._attn_implementation == "eager"
    runner.close()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
