"""A hand-written scheduler and tiny models: the model layer is tested without the real scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from aiocb.config import EngineConfig
from aiocb.model.open import open_model
from aiocb.model.request import ModelRequest, Opened
from aiocb.records import Record
from aiocb.sampling_params import ModelDefaults, SamplingParams
from aiocb.step import NULL_BLOCK, CacheLayout, Runner, StepEntry, StepResult
from tests.steps import CallbackSampler, Work, execute

VOCAB = 128
GREEDY = SamplingParams().resolve(ModelDefaults(VOCAB, 1024))

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING_THEN_FULL = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "mixtral": MOE,
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, **SLIDING_THEN_FULL},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, **SLIDING_THEN_FULL},
    "phi3": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.25},
    "cohere2": SLIDING_THEN_FULL,
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_oss": {"head_dim": 16, **MOE, **SLIDING_THEN_FULL},
    "starcoder2": {"sliding_window": 8},
    "stablelm": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    # Wider: latents, shared keys, multi-query, learned positions, ...
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "phi": {},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {**MLA, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **MOE},
    "exaone4": {"head_dim": 16, **SLIDING_THEN_FULL},
    "olmo3": SLIDING_THEN_FULL,
    "glm4": {"head_dim": 16},
    "phimoe": {"sliding_window": 8, **MOE},
    "llama4_text": {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
    "gemma3n_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": 96,
    },
    "diffllama": {"num_key_value_heads": 4},
    "hrm_text": {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 2, "head_dim": 16},
    "got_ocr2": {
        "vision_config": {
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 16,
            "mlp_dim": 48,
            "window_size": 2,
            "global_attn_indexes": [0],
        },
        "text_config": {"model_type": "qwen2", **SMALL},
    },
    "bigbird_pegasus": {
        "d_model": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "num_hidden_layers": None,
    },
    "bart": {
        "d_model": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "num_hidden_layers": None,
    },
}


def tiny(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny random fp32 model in eval mode; weights are large enough for tokens to differ."""
    values = {**SMALL, **MODELS.get(name, {}), **overrides}
    config = CONFIG_MAPPING[name](
        **{key: value for key, value in values.items() if value is not None or key in overrides}
    )
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    model: PreTrainedModel = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.5 * parameter.shape[-1] ** -0.5 if "embed" not in parameter_name else 0.5)
            elif "sink" in parameter_name:
                parameter.normal_(0.0, 2.0)
    model.train(False)
    model.requires_grad_(False)
    return model


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Reproducible token ids without the special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def generate(model: PreTrainedModel, tokens: Sequence[int], num_new: int) -> list[int]:
    """Greedy continuation by transformers, eos cleared."""
    saved = model.generation_config
    try:
        model.generation_config = type(saved)(pad_token_id=0)
        out: Any = model.generate(  # type: ignore[operator]
            torch.tensor([list(tokens)]), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
        )
    finally:
        model.generation_config = saved
    return [int(token) for token in out[0, len(tokens) :]]


def sample_argmax(logits: Tensor, entries: Sequence[StepEntry], records: Sequence[Record]) -> StepResult:
    """The most likely token of each sampled entry."""
    ends = itertools.accumulate(entry.num_logits for entry in entries)
    best = logits.float().argmax(-1).tolist() if len(logits) else []
    return StepResult([(best[end - 1],) if entry.is_sampled else () for entry, end in zip(entries, ends)])


argmax_sampler = CallbackSampler(sample_argmax)


class ManualSequence:
    """One request of the hand-written scheduler."""

    def __init__(self, request_id: int, tokens: Sequence[int], num_new: int, start_step: int) -> None:
        self.id = request_id
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.num_computed = 0
        self.stop = len(tokens) + num_new
        self.start_step = start_step
        self.tables: list[list[int]] = []

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class ManualScheduler:
    """Blocks handed out in a scattered order, chunked prefill, dropped blocks behind sliding windows."""

    def __init__(self, runner: Runner, chunk: int = 1 << 30, budget: int = 1 << 30, scatter: bool = True) -> None:
        self.runner = runner
        self.chunk = chunk
        self.budget = budget
        self.sequences: list[ManualSequence] = []
        self.layout: CacheLayout = runner.cache_layout
        self.free = [list(range(1, group.num_blocks)) for group in self.layout.groups]
        if scatter:
            for blocks in self.free:
                blocks.sort(key=lambda block: (block * 7919) % 1009)
        self.step_number = 0

    def add(self, tokens: Sequence[int], num_new: int, start_step: int = 0) -> ManualSequence:
        sequence = ManualSequence(len(self.sequences), tokens, num_new, start_step)
        sequence.tables = [[] for _ in self.layout.groups]
        self.sequences.append(sequence)
        return sequence

    def _grow(self, sequence: ManualSequence, upto: int) -> None:
        size = self.layout.page_size
        for group, free, table in zip(self.layout.groups, self.free, sequence.tables):
            if group.reach is not None:
                for index in range(group.first_visible(sequence.num_computed) // size):
                    if index < len(table) and table[index] != NULL_BLOCK:
                        free.append(table[index])
                        table[index] = NULL_BLOCK
            while len(table) * size < upto:
                table.append(free.pop(0))

    def release(self, sequence: ManualSequence) -> None:
        for free, table in zip(self.free, sequence.tables):
            free.extend(block for block in table if block != NULL_BLOCK)
            table.clear()

    def step(self) -> bool:
        """Run one step; False when nothing is left."""
        entries = []
        budget = self.budget
        running = []
        for sequence in self.sequences:
            if len(sequence.tokens) >= sequence.stop or self.step_number < sequence.start_step:
                continue
            count = min(len(sequence.tokens) - sequence.num_computed, self.chunk, budget)
            if count <= 0:
                continue
            budget -= count
            self._grow(sequence, sequence.num_computed + count)
            is_last = sequence.num_computed + count == len(sequence.tokens)
            entries.append(
                Work(
                    sequence.id,
                    sequence.tokens,
                    sequence.num_prompt_tokens,
                    sequence.num_computed,
                    count,
                    tuple(sequence.tables),
                    int(is_last),
                    is_last,
                    GREEDY,
                    0,
                    1 + sequence.id if self.layout.states else 0,
                )
            )
            running.append((sequence, count))
        self.step_number += 1
        if not entries:
            return any(len(sequence.tokens) < sequence.stop for sequence in self.sequences)
        result = execute(self.runner, entries)
        for (sequence, count), token in zip(running, result.token_ids):
            sequence.num_computed += count
            if token is not None:
                sequence.tokens.append(token)
                if len(sequence.tokens) >= sequence.stop:
                    self.release(sequence)
        return True

    def run(self) -> list[list[int]]:
        while self.step():
            pass
        return [sequence.output for sequence in self.sequences]


def open_module(model: Any, config: EngineConfig, sampler: Any = None) -> Opened:
    """Open a module as an engine over a user's model does."""
    return open_model(ModelRequest(config, model=model, sampler=sampler))
