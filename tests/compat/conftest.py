from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL = "<|end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=backend, eos_token=SPECIAL)
    return tokenizer


def make_qwen3(vocab_size: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.5,
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.eval()


def make_gemma2(vocab_size: int) -> Any:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        sliding_window=8,
        initializer_range=0.5,
    )
    model: Any = Gemma2ForCausalLM(config)
    return model.eval()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def vocab_size(tokenizer: Any) -> int:
    return len(tokenizer)


@pytest.fixture
def model(vocab_size: int) -> Any:
    return make_qwen3(vocab_size)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, vocab_size: int) -> dict[str, Path]:
    """Directories that stand for the hub's models in the examples."""
    folders = {}
    for name, make in (("Qwen/Qwen3-4B", make_qwen3), ("google/gemma-2-2b", make_gemma2)):
        folder = tmp_path_factory.mktemp(name.split("/")[1])
        make(vocab_size).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[name] = folder
    return folders
