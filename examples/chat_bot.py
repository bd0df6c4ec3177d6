"""A bot in a chat room: every channel has its own history, answers run at once, a new message stops the old answer.

The room is one in memory; a client of Discord, Matrix or Slack has the same two ends.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import aiocb

HISTORY = 12


class Bot:
    def __init__(self, engine: aiocb.Engine, send: Any) -> None:
        self._engine = engine
        self._send = send  # async send(channel, text)
        self._history: dict[str, list[dict[str, str]]] = defaultdict(list)
        self._answers: dict[str, asyncio.Task[None]] = {}

    async def run(self, inbox: asyncio.Queue[tuple[str, str] | None]) -> None:
        async with asyncio.TaskGroup() as group:
            while (message := await inbox.get()) is not None:
                channel, text = message
                before = self._answers.get(channel)
                if before is not None:
                    before.cancel()  # frees its place at once
                    await asyncio.wait([before])
                self._history[channel].append({"role": "user", "content": text})
                self._answers[channel] = group.create_task(self._answer(channel))

    async def _answer(self, channel: str) -> None:
        history = self._history[channel]
        said = ""
        try:
            async with self._engine.stream(history[-HISTORY:], max_new_tokens=200) as stream:
                async for chunk in stream:
                    said += chunk.text
        except aiocb.RequestError as error:
            said = f"(I cannot answer: {error})"
        finally:  # what was said before a newer message came is part of the conversation
            if said:
                history.append({"role": "assistant", "content": said})
        await self._send(channel, said)


async def main() -> None:
    async def send(channel: str, text: str) -> None:
        print(f"#{channel}: {text}")

    inbox: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
    for message in (("colours", "Name three colours."), ("france", "What is its capital?"), None):
        inbox.put_nowait(message)
    async with aiocb.Engine.from_pretrained("smollm2") as engine:
        await Bot(engine, send).run(inbox)


if __name__ == "__main__":
    asyncio.run(main())
