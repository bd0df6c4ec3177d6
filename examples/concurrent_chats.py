"""Several chats at once, each with its own sampling, in one program."""

from __future__ import annotations

import asyncio

import aiocb

QUESTIONS = {
    "What is the capital of France?": 0.0,
    "Name three colours of the rainbow.": 0.5,
    "Invent a name for a cat.": 1.0,
}


async def ask(engine: aiocb.Engine, question: str, temperature: float) -> None:
    messages = [{"role": "user", "content": question}]
    answer = await engine.generate(messages, temperature=temperature, max_new_tokens=32)
    print(f"{question}\n  {answer.text.strip()}\n  ({answer.usage.num_output_tokens} tokens)")


async def main() -> None:
    async with aiocb.Engine.from_pretrained("smollm2") as engine, asyncio.TaskGroup() as group:
        for question, temperature in QUESTIONS.items():
            group.create_task(ask(engine, question, temperature))


if __name__ == "__main__":
    asyncio.run(main())
