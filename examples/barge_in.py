"""A voice assistant that can be interrupted: what was spoken stays in the history, the rest is never computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiocb


async def sentences(stream: aiocb.Stream) -> AsyncIterator[str]:
    """Cut a stream where a voice can begin to speak."""
    held = ""
    async for chunk in stream:
        held += chunk.text
        while (end := min((at for mark in ".!?" if (at := held.find(mark)) >= 0), default=-1)) >= 0:
            yield held[: end + 1]
            held = held[end + 1 :]
    if held.strip():
        yield held


async def speak(engine: aiocb.Engine, history: list[dict[str, str]], heard: asyncio.Event, say: Any) -> str:
    """Answer aloud until the user begins to talk; return what was said."""
    said = ""
    async with engine.stream(history, max_new_tokens=200) as stream:
        listener = asyncio.create_task(interrupt(stream, heard))
        try:
            async for sentence in sentences(stream):
                await say(sentence)
                said += sentence
        finally:
            listener.cancel()
    history.append({"role": "assistant", "content": said})
    return said


async def interrupt(stream: aiocb.Stream, heard: asyncio.Event) -> None:
    await heard.wait()
    stream.close()  # at once; `finish()` would deliver what was computed


async def main() -> None:
    async def say(sentence: str) -> None:
        print(sentence.strip())
        await asyncio.sleep(0.3)  # as long as a voice takes

    heard = asyncio.Event()
    asyncio.get_running_loop().call_later(1.5, heard.set)
    async with aiocb.Engine.from_pretrained("smollm2") as engine:
        await speak(engine, [{"role": "user", "content": "Tell me about the sea."}], heard, say)


if __name__ == "__main__":
    asyncio.run(main())
