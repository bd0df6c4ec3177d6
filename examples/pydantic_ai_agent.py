"""A pydantic-ai agent over `aiocb serve`: a tool, and an answer of a type.

aiocb serve Qwen/Qwen3-0.6B
pip install pydantic-ai-slim[openai] && python examples/pydantic_ai_agent.py http://127.0.0.1:8000/v1 Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    warm: bool


def make_agent(url: str, name: str) -> Agent[None, Colour]:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(model, output_type=Colour, model_settings={"max_tokens": 80, "parallel_tool_calls": False})


async def main(url: str, name: str) -> Colour:
    result = await make_agent(url, name).run("Is red a warm colour?")
    return result.output


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], sys.argv[2])))
