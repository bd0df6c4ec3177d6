"""The command line over a model that computes nothing: it repeats its prompt, or says "tick " for ever.

Run as a program by the tests, in a terminal of their own. Options of the fake come from the environment:
`FAKE_LOAD_S` (seconds to load) and `FAKE_STEP_S` (seconds per step).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import aiocb
from aiocb.cli import main, terminal
from aiocb.sampling_params import ModelDefaults
from aiocb.step import CacheGroup, CacheLayout, StepEntry, StepPlan, StepResult

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


class EchoRunner:
    """Repeats the prompt and ends; a prompt with "forever" in it gets an endless answer."""

    vocab_size = 512
    max_model_len = 1 << 16
    cache_layout = CacheLayout(16, (CacheGroup(None, (0,), 4096, 1),))

    def __init__(self, tokenizer: Any) -> None:
        self._end = tokenizer.eos_token_id
        self._tick = tokenizer.encode("tick ", add_special_tokens=False)
        self._forever = tokenizer.encode("forever", add_special_tokens=False)
        self._step_s = float(os.environ.get("FAKE_STEP_S", "0.001"))

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self._step_s)
        return StepResult([self._next(entry) if entry.is_sampled else None for entry in plan.entries])

    def _next(self, entry: StepEntry) -> int:
        prompt = list(entry.tokens[: entry.num_prompt_tokens])
        position = len(entry.tokens) - entry.num_prompt_tokens
        size = len(self._forever)
        if any(prompt[i : i + size] == self._forever for i in range(len(prompt))):
            return int(self._tick[position % len(self._tick)])
        return int(prompt[position]) if position < len(prompt) else int(self._end)

    def describe(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


def build_engine(options: terminal.ModelOptions, progress: Callable[[str, float], None] | None) -> aiocb.Engine:
    tokenizer = make_tokenizer(has_template="base" not in options.model)

    def make_runner(_config: aiocb.EngineConfig) -> EchoRunner:
        if progress is not None:
            progress("load", 0.5)
        time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
        return EchoRunner(tokenizer)

    defaults = ModelDefaults(EchoRunner.vocab_size, EchoRunner.max_model_len, (tokenizer.eos_token_id,))
    return aiocb.Engine.from_runner(make_runner, defaults, tokenizer)


if __name__ == "__main__":
    terminal.build_engine = build_engine
    main()
