"""LangChain's OpenAI adapter pointed at `aiocb serve`.

aiocb serve smollm2
pip install langchain-openai && python examples/langchain_chat.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import asyncio
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr


class Colour(BaseModel):
    warm: bool


async def main(url: str) -> tuple[str, Colour]:
    model = ChatOpenAI(base_url=url, api_key=SecretStr("none"), model="", max_completion_tokens=40)
    model = model.model_copy(update={"model_name": await first_model(url)})
    text = ""
    async for chunk in model.astream("Is red a warm colour?"):
        text += str(chunk.content)
    colour = await model.with_structured_output(Colour, method="json_schema").ainvoke("Is red a warm colour?")
    assert isinstance(colour, Colour)
    return text, colour


async def first_model(url: str) -> str:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        return (await client.models.list()).data[0].id


if __name__ == "__main__":
    print(*asyncio.run(main(sys.argv[1])), sep="\n")
