"""A background job: many prompts, each result as soon as it is there, with a progress bar; failures do not stop it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tqdm.auto import tqdm

import aiocb


async def run(engine: aiocb.Engine, prompts: list[str], path: Path) -> int:
    """Write one line of JSON per prompt; return how many failed."""
    failed = 0
    with path.open("w", encoding="utf-8") as file, tqdm(total=len(prompts), unit="prompt") as bar:
        results = engine.as_completed(prompts, max_new_tokens=48, timeout=300.0, return_exceptions=True)
        async for completion in results:
            failed += completion.error is not None
            row = {"prompt": int(completion.request_id), "text": completion.text, "end": completion.finish_reason}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            bar.update()
            bar.set_postfix(tokens=engine.stats().generation_tokens, failed=failed)
    return failed


async def main() -> None:
    prompts = [f"The number {number} is" for number in range(20)]
    async with aiocb.Engine.from_pretrained("smollm2") as engine:
        sys.exit(await run(engine, prompts, Path("results.jsonl")) > 0)


if __name__ == "__main__":
    asyncio.run(main())
