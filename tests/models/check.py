"""Runs one tiny model through an engine in every way that may go wrong, and compares: `python -m tests.models.check T`.

The truth is what the model says without a cache. Where `generate` says something else (its cached path is another
computation in some models), what equals `generate` is right too, and the verdict says so.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import aiocb
from tests.models.tiny import tiny_model

__all__ = ["Verdict", "check"]

LENGTHS = 5, 19, 37
NEW = 14
SMALL_CACHES = 22, 18, 15, 14, 13, 11
"""Blocks: one of them is too few for all, and enough for each."""
NOISE = 3.0
"""How much larger than the module's own error in bfloat16 an engine's may be, both against float32."""
FLOOR = 0.02
"""Of a log-probability: errors below it count as this much."""


@dataclass
class Verdict:
    """What became of a type.

    Attributes:
        model_type: of transformers.
        outcome: `right`, `wrong`, `refused`, or `broken` (the model itself cannot be built or run).
        note: what was wrong, or why it was refused.
        is_batched: one call decodes all requests, in every layer.
        how: the choices that say how it runs.
        bfloat16: errors of log-probabilities against float32: of the engine, and of the module itself.
    """

    model_type: str
    outcome: str
    note: str = ""
    is_batched: bool = False
    how: str = ""
    bfloat16: tuple[float, float] | None = None


def check(model_type: str) -> Verdict:
    """Build a tiny model of this type and compare what an engine makes of it."""
    try:
        model = tiny_model(model_type)
        prompts = _prompts(model)
        truths = [(_recomputed(model, prompt), _generated(model, prompt)) for prompt in prompts]
    except Exception as error:
        return Verdict(model_type, "broken", f"{type(error).__name__}: {error}".splitlines()[0][:300])
    try:
        return asyncio.run(_check(model_type, model, prompts, truths))
    except (aiocb.ConfigError, aiocb.InvalidRequest) as error:
        return Verdict(model_type, "refused", str(error).splitlines()[0][:400])
    except Exception as error:
        return Verdict(model_type, "wrong", f"{type(error).__name__}: {error}"[:400])


async def _check(
    model_type: str, model: Any, prompts: list[list[int]], truths: list[tuple[list[int], list[int]]]
) -> Verdict:
    faults: list[str] = []
    remarks: list[str] = []
    uses_generate = False

    def compare(what: str, completions: Sequence[Any]) -> None:
        nonlocal uses_generate
        for prompt, completion, (recomputed, generated) in zip(prompts, completions, truths, strict=True):
            found = list(completion.token_ids)
            if found != recomputed:
                if found == generated:
                    uses_generate = True
                else:
                    same = next((i for i in range(NEW) if found[i : i + 1] != recomputed[i : i + 1]), NEW)
                    faults.append(f"{what}, {len(prompt)} tokens: differs from token {same} on")

    config = aiocb.EngineConfig(max_batch_tokens=16, num_blocks=32, debug_checks=True)
    async with aiocb.Engine(model, config=config) as engine:
        choices = {choice.name: choice for choice in engine.describe()}
        compare("mixed", await engine.generate_batch(prompts, max_new_tokens=NEW, temperature=0.0))
        before = engine.stats().prefix_cache_hits
        compare("prefix hits", await engine.generate_batch(prompts, max_new_tokens=NEW, temperature=0.0))
        num_hits = engine.stats().prefix_cache_hits - before
    if not num_hits:
        faults.append("no prefix hits in the second round")
    for num_blocks in SMALL_CACHES:
        small = aiocb.EngineConfig(
            max_batch_tokens=24, page_size=4, num_blocks=num_blocks, safety_margin=0.0, debug_checks=True
        )
        async with aiocb.Engine(model, config=small) as engine:
            compare("preempted", await engine.generate_batch(prompts, max_new_tokens=NEW, temperature=0.0))
            if engine.stats().num_preemptions:
                break
    else:
        remarks.append("never preempted")  # with windows alone, a cache that lets a request in holds it to its end
    errors = await _bfloat16(model_type, model, prompts[-1] + truths[-1][0])
    if errors is None:
        remarks.append("in bfloat16 its own forward fails")
    elif errors[0] > max(NOISE * errors[1], FLOOR):
        faults.append(f"in bfloat16 it is off by {errors[0]:.3f} where the module is by {errors[1]:.3f}")
    how = "; ".join(f"{name}: {choices[name].value}" for name in ("runner", "mixers", "attention") if name in choices)
    if uses_generate:
        remarks.append("as generate, which differs from no cache")
    note = "; ".join(faults or remarks)
    is_batched = "one by one" not in how
    return Verdict(model_type, "wrong" if faults else "right", note, is_batched, how, errors)


def _prompts(model: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def _logits(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def _recomputed(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def _generated(model: Any, prompt: list[int]) -> list[int]:
    """What `generate` gives; nothing where it cannot run this type."""
    try:
        tokens = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW, do_sample=False
        )
    except Exception:
        return []
    generated: list[int] = tokens[0, len(prompt) :].tolist()
    return generated


async def _bfloat16(model_type: str, model: Any, tokens: list[int]) -> tuple[float, float] | None:
    """Errors of the log-probabilities of a text, root of the mean square, against float32: engine and module.

    None where the module itself cannot be run.
    """
    rows, targets = torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])
    true = _logits(model, tokens).float().log_softmax(-1)[rows, targets]
    rough = tiny_model(model_type, torch.bfloat16)
    try:
        own = _logits(rough, tokens).float().log_softmax(-1)[rows, targets]
    except RuntimeError:
        return None
    async with aiocb.Engine(
        rough, config=aiocb.EngineConfig(max_batch_tokens=16, page_size=4, num_blocks=96)
    ) as engine:
        completion = await engine.generate(tokens, max_new_tokens=1, prompt_logprobs=0, temperature=0.0)
    given = torch.tensor([position.logprob for position in completion.prompt_logprobs or () if position is not None])
    return float((given - true).square().mean().sqrt()), float((own - true).square().mean().sqrt())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(asdict(check(sys.argv[1]))))
