"""An agent in process: the model calls Python functions until it has an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiocb


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def lookup(city: str) -> str:
    """Look up what a city is the capital of.

    Args:
        city: Its name.
    """
    return {"Paris": "France", "Rome": "Italy"}.get(city, "unknown")


FUNCTIONS: dict[str, Callable[..., Any]] = {"add": add, "lookup": lookup}


async def run(engine: aiocb.Engine, question: str, most_turns: int = 5) -> list[dict[str, Any]]:
    """Return the whole conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(most_turns):
        completion = await engine.generate(messages, tools=list(FUNCTIONS.values()), max_new_tokens=256)
        messages.append(completion.message)
        if not completion.tool_calls:
            break
        for call in completion.tool_calls:
            try:
                result = FUNCTIONS[call.name](**json.loads(call.arguments))
            except Exception as error:  # the model may try again
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    return messages


async def main() -> None:
    async with aiocb.Engine.from_pretrained("Qwen/Qwen3-0.6B") as engine:  # a model that calls tools by itself
        for message in await run(engine, "What is 17 + 25, and what is Paris the capital of?"):
            print(message)


if __name__ == "__main__":
    asyncio.run(main())
