"""The whole native step against transformers: greedy tokens in fp32 on tiny random models of every family."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN, ClippedGELUActivation

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.kernels import Library, load
from aiocb.model.defaults import model_defaults
from aiocb.model.native.build import build
from aiocb.model.native.families import describe
from aiocb.model.native.plan import plan
from aiocb.model.native.runner import NativeRunner
from aiocb.model.request import Candidate, Material, ModelRequest, Refusal
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


def build_of(
    model: nn.Module, *, library: Library | None = None, num_blocks: int = 63, num_threads: int = 2, **options: Any
) -> Any:
    """A runner, or the reason why there is none."""
    description = describe(model)
    if isinstance(description, str):
        return description
    loaded = library or load()
    assert isinstance(loaded, Library), loaded
    config = EngineConfig(num_blocks=num_blocks, num_threads=num_threads)
    length = description.max_position_embeddings
    built = build(description, loaded, config, max_model_len=length, module=model, **options)
    return built.reason if isinstance(built, Refusal) else built


def runner_of(model: nn.Module, **options: Any) -> NativeRunner:
    runner = build_of(model, **options)
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
def test_every_level_passes_the_probe(library: Library, instruction_set: str, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        runner_of(make(name, dtype), library=library, instruction_set=instruction_set).close()


def test_reasons() -> None:
    def reason(model: nn.Module) -> str:
        result = build_of(model)
        assert isinstance(result, str)
        return result

    assert "no native description" in reason(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    )
    assert "float16" in reason(make("llama", torch.float16))
    assert "head dim" in reason(make("llama", head_dim=24))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rotary embedding" in reason(make("llama", rope_parameters=dynamic))
    assert "clipped" in reason(make("olmoe", clip_qkv=1.0))
    biased = make("qwen3_moe")
    biased.model.layers[2].mlp.experts.down_proj_bias = nn.Parameter(torch.zeros(9, 64))
    assert "down_proj_bias" in reason(biased)
    mine: Any = type("Mine", (transformers.LlamaForCausalLM,), {})
    assert "is not transformers'" in reason(mine(make("llama").config))


ACTIVATIONS = {
    "silu": {"silu", "swish"},
    "gelu": {"gelu", "gelu_python"},
    "gelu_tanh": {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"},
    "relu": {"relu"},
    "relu2": {"relu2"},
}


@pytest.mark.parametrize("name", ACT2CLS)
def test_activations_are_never_taken_for_another(name: str) -> None:
    wanted = next((kind for kind, names in ACTIVATIONS.items() if name in names), None)
    model = make("llama", hidden_act=name)
    for layer in model.model.layers:
        layer.mlp.act_fn = ACT2FN[name]
    described = describe(model)
    if wanted is None:
        assert isinstance(described, str)
    else:
        assert not isinstance(described, str) and described.activation == wanted


@pytest.mark.parametrize("ends", [(-1e9, 7.0), (-1e9, 50.0), (-1e9, 3e4), (-0.1, 1e30), (0.0, 1e30)])
def test_activations_with_their_ends_cut_off_are_refused(ends: tuple[float, float]) -> None:
    model = make("llama", hidden_act="gelu")
    assert not isinstance(describe(model), str)
    model.model.layers[1].mlp.act_fn = ClippedGELUActivation(*ends)
    assert "activation" in str(describe(model))


def _weigh(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)


def _subclass(model: Any) -> None:
    norm = model.model.layers[2].input_layernorm
    norm.__class__ = type("Mine", (type(norm),), {})


def _patch(path: str, name: str = "forward") -> Any:
    def change(model: Any) -> None:
        module = model.get_submodule(path)
        setattr(module, name, lambda *args, **kwargs: getattr(type(module), name)(module, *args, **kwargs))

    return change


def _hook(path: str, kind: str) -> Any:
    return lambda model: getattr(model.get_submodule(path), f"register_{kind}")(lambda *_: None)


TOUCHES: dict[str, tuple[Any, str]] = {
    "hook on the model": (_hook("", "forward_hook"), "the model has hooks"),
    "hook on a layer": (_hook("model.layers.1", "forward_hook"), "layers.1 has hooks"),
    "hook on a norm": (_hook("model.norm", "forward_hook"), "norm has hooks"),
    "hook on the embedding": (_hook("model.embed_tokens", "forward_hook"), "embed_tokens has hooks"),
    "hook on an activation": (_hook("model.layers.0.mlp.act_fn", "forward_hook"), "act_fn has hooks"),
    "pre-hook on attention": (_hook("model.layers.0.self_attn", "forward_pre_hook"), "self_attn has hooks"),
    "backward hook": (_hook("lm_head", "full_backward_hook"), "lm_head has hooks"),
    "backward pre-hook": (_hook("model.layers.1.mlp", "full_backward_pre_hook"), "mlp has hooks"),
    "patched layer": (_patch("model.layers.1"), "forward of model.layers.1 is patched"),
    "patched linear": (_patch("model.layers.1.mlp.up_proj"), "up_proj is patched"),
    "patched rotation": (_patch("model.rotary_emb"), "rotary_emb is patched"),
    "patched model": (_patch("model"), "forward of model is patched"),
    "parametrized": (_weigh, "q_proj is parametrized"),
    "subclass": (_subclass, "Mine"),
    "wrapped": (lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head)), "unexpected module structure"),
    "another norm": (lambda model: setattr(model.model, "norm", nn.LayerNorm(64)), "norms"),
    "another epsilon": (
        lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.1),
        "epsilons",
    ),
    "renormalised rows": (lambda model: setattr(model.model.embed_tokens, "max_norm", 1.0), "renormalises"),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_what_somebody_did_to_a_module_is_a_reason(name: str) -> None:
    change, reason = TOUCHES[name]
    model = make("llama")
    assert not isinstance(describe(model), str)
    change(model)
    assert reason in str(describe(model))


def test_experts_are_looked_at_too() -> None:
    for path in ("gate", "experts"):
        model = make("mixtral")
        _hook(f"model.layers.1.mlp.{path}", "forward_hook")(model)
        assert f"{path} has hooks" in str(describe(model))


def test_a_class_that_was_patched_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", functools.wraps(own)(lambda self, x: own(self, x) * 2.0))
    assert "forward of LlamaMLP is patched" in str(describe(model))


def test_hidden_states_that_were_once_asked_for_are_no_reason() -> None:
    model = make("llama")
    model(torch.tensor([[5, 6]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert not isinstance(describe(model), str)


def test_hooks_that_came_later_are_a_reason_not_to_reload(library: Library) -> None:
    model = make("llama")
    runner = runner_of(model, library=library)
    runner.reload_weights()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="layers.0 has hooks"):
        runner.reload_weights()
    runner.close()


def test_owned_model_gives_its_memory_back() -> None:
    model: Any = make("llama", tie_word_embeddings=True)
    defaults = model_defaults(model)
    material = Material(defaults, "", model, max_model_len=defaults.max_model_len)
    candidate = plan(ModelRequest(EngineConfig(num_blocks=63)), material)
    assert isinstance(candidate, Candidate)
    runner = candidate.build()
    assert isinstance(runner, NativeRunner)
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
