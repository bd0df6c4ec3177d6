"""Tiny configurations of models that keep states, one for each kind of mixer."""

from __future__ import annotations

from typing import Any

_GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
    "head_dim": 16,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 1}

STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_GDN,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 8, "chunk_size": 16, "n_groups": 1},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_groups": 1,
        "head_dim": 16,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "num_hidden_layers": 4,
    },
    "mamba": {"state_size": 8, "time_step_rank": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 8},
    "jamba": {"mamba_d_state": 8, "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "mamba_dt_rank": 8},
    "zamba": {
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 8,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "chunk_size": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_mem_blocks": 1,
        "mamba_ngroups": 1,
        "mamba_headdim": 32,
    },
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "zaya": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "head_dim": 16, "attention_window_size": 8},
    "rwkv": {"attention_hidden_size": 64, "num_hidden_layers": 7},
    "xlstm": {"num_heads": 4, "chunk_size": 8},
}
