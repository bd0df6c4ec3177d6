"""The command line over a model that computes nothing: it repeats its prompt, or says "tick " for ever.

Run as a program by the tests, in a terminal of their own. Options of the fake come from the environment:
`FAKE_LOAD_S` (seconds to load), `FAKE_STEP_S` (seconds per step) and `FAKE_CONTEXT` (tokens of the longest request).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiocb
from aiocb.cli import main, terminal
from aiocb.sampling_params import ModelDefaults
from aiocb.testing import FakeRunner, byte_tokenizer
from aiocb.testing.fake import EOS_TOKEN_ID

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def reply(prompt: Sequence[int]) -> Sequence[int]:
    return b"tick " * 20_000 if b"forever" in bytes(prompt) else prompt


def build_engine(
    options: terminal.ModelOptions, progress: Callable[[str, float], None] | None, **settings: Any
) -> aiocb.Engine:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None if "base" in options.model else TEMPLATE
    if "broken" in options.model:
        raise AssertionError("it is broken,\nand that is what a library says")
    runner = FakeRunner(
        reply,
        eos_token_id=EOS_TOKEN_ID,
        max_model_len=int(os.environ.get("FAKE_CONTEXT", "65536")),
        num_blocks=4200,
        step_time=float(os.environ.get("FAKE_STEP_S", "0.001")),
    )

    def make_runner(_config: aiocb.EngineConfig) -> FakeRunner:
        if progress is not None:
            progress("load", 0.5)
        time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
        return runner

    defaults = ModelDefaults(runner.vocab_size, runner.max_model_len, (EOS_TOKEN_ID,))
    return aiocb.Engine.from_runner(make_runner, defaults, tokenizer)


if __name__ == "__main__":
    terminal.build_engine = build_engine
    main()
