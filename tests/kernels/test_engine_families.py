"""An engine run of every family in native code, as it is and in int8: mixed requests together equal each alone.

`make sanitize` runs these under the sanitizers; there is nothing in the kernels that some family here does not use.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import aiocb
from aiocb.kernels import Library
from tests.kernels.test_families import FAMILIES, make, prompts_of

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9},
    {"temperature": 1.1, "seed": 2, "top_k": 7, "logprobs": 1, "logprobs_mode": "processed"},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.0, "n": 2},
]


async def run(engine: aiocb.Engine) -> None:
    async def one(prompt: list[int], setting: dict[str, Any]) -> list[Any]:
        found = await engine.generate(prompt, max_new_tokens=20, ignore_eos=True, detokenize=False, **setting)
        return [(x.token_ids, x.logprobs) for x in (found if isinstance(found, list) else [found])]

    requests = list(zip(prompts_of(5), SETTINGS, strict=True))
    async with engine:
        assert any(choice.name == "runner" and choice.value == "native" for choice in engine.describe())
        together = await asyncio.gather(*(one(*request) for request in requests))
        assert together == [await one(*request) for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_engine(library: Library, name: str, quantization: Any, tmp_path: Path) -> None:
    """Chunks of 30 tokens, and room for about half of the requests: every kind of step comes up."""
    # Loaded again, experts are torch's grouped product, which wants rows of whole 16 bytes.
    changes = {"intermediate_size": 72} if name == "olmoe" else {}
    make(name, torch.bfloat16, **changes).save_pretrained(tmp_path)
    config = aiocb.EngineConfig(num_threads=2, native=True, num_blocks=16, max_batch_tokens=30, debug_checks=True)
    asyncio.run(run(aiocb.Engine.from_pretrained(str(tmp_path), config=config, quantization=quantization)))
