"""The command line over a model that computes nothing: it repeats its prompt, or says "tick " for ever.

Run as a program by the tests, in a terminal of their own. Options of the fake come from the environment:
`FAKE_LOAD_S` (seconds to load) and `FAKE_STEP_S` (seconds per step).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import aiocb
from aiocb.cli import main, terminal
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import FakeRunner

END = "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def make_tokenizer(has_template: bool) -> Any:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, eos_token=END, chat_template=TEMPLATE if has_template else None)


def make_echo(tokenizer: Any) -> FakeRunner:
    """Repeats the prompt and ends; a prompt with "forever" in it gets an endless answer."""
    tick = tokenizer.encode("tick ", add_special_tokens=False)
    forever = tokenizer.encode("forever", add_special_tokens=False)

    def reply(prompt: Sequence[int]) -> Sequence[int]:
        size = len(forever)
        is_endless = any(list(prompt[i : i + size]) == forever for i in range(len(prompt)))
        return tick * 20_000 if is_endless else list(prompt)

    return FakeRunner(
        reply,
        vocab_size=512,
        eos_token_id=tokenizer.eos_token_id,
        num_blocks=4096,
        step_time=float(os.environ.get("FAKE_STEP_S", "0.001")),
    )


def build_engine(options: terminal.ModelOptions, progress: Callable[[str, float], None] | None) -> aiocb.Engine:
    tokenizer = make_tokenizer(has_template="base" not in options.model)

    def make_runner(_config: aiocb.EngineConfig) -> FakeRunner:
        if progress is not None:
            progress("load", 0.5)
        time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
        return make_echo(tokenizer)

    defaults = ModelDefaults(512, 1 << 16, (tokenizer.eos_token_id,))
    return aiocb.Engine.from_runner(make_runner, defaults, tokenizer)


if __name__ == "__main__":
    terminal.build_engine = build_engine
    main()
